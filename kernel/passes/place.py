"""Place: every op has a device."""

from dataclasses import dataclass
from typing import ClassVar

from autodist_py.kernel.graph_view import TABLES
from autodist_py.kernel.program import Program, Promise
from autodist_py.kernel.rewrite import Edits


@dataclass(frozen=True, slots=True)
class PlaceOps:
    """Every op has a device.

    Requires: replicas' ops on their devices; what reads or writes a variable is where the variable is.
    Ensures: what uses a table, an iterator or another
        resource that stands once per worker is where that is, on the worker's CPU, as is all that has no device yet.
    """

    name: ClassVar[str] = "place"

    def __call__(self, program: Program) -> Program:
        view = program.graph
        edits = Edits()
        resources = {source.name for source in program.item.inputs if source.dtype == "resource"}
        resources |= {node.name for node in view.of_type(TABLES)}
        for consumers in view.users(resources).values() if resources else ():
            for consumer in consumers:
                edits.set_device(consumer, program.place.host)
        for node in view.nodes.values():
            if not node.device:
                edits.set_device(node.name, program.place.host)
        return program.promising(Promise.PLACED, edits.apply(view))
