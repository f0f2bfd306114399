"""Place: every op has a device."""

from dataclasses import dataclass, replace
from typing import ClassVar

from autodist_py.kernel.ir.edits import Edits
from autodist_py.kernel.ir.graph import SHARED_BY_NAME, TABLES
from autodist_py.kernel.program import Invariant, Program
from autodist_py.kernel.runner import Contract


@dataclass(frozen=True, slots=True)
class PlaceOps:
    """Every op has a device.

    Ensures: an iterator or a queue, which several programs may use, is on the worker's CPU. What uses it, a table or
        another resource that stands once per worker is where that is, on the worker's CPU, as is all that has no
        device yet.

    Example, on one GPU: keys are looked up in a table, which stands on the CPU.

        - 0/found = LookupTableFindV2(table, keys, 0/default) @GPU:0
        + 0/found = LookupTableFindV2(table, keys, 0/default) @CPU:0
    """

    name: ClassVar[str] = "place"
    contract: ClassVar[Contract] = Contract(
        requires={Invariant.REPLICATED, Invariant.COMBINED}, ensures={Invariant.PLACED}
    )

    def __call__(self, program: Program) -> Program:
        view = program.graph
        edits = Edits()
        resources = {source.name for source in program.item.inputs if source.dtype == "resource"}
        resources |= {node.name for node in view.of_type(TABLES | SHARED_BY_NAME)}
        for named in view.of_type(SHARED_BY_NAME):
            edits.set_device(named.name, program.topology.host)
        for consumers in view.users(resources).values() if resources else ():
            for consumer in consumers:
                edits.set_device(consumer, program.topology.host)
        for node in view.nodes.values():
            if not node.device:
                edits.set_device(node.name, program.topology.host)
        return replace(program, graph=edits.apply(view))
