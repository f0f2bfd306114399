"""Place: every op has a device."""

from dataclasses import dataclass
from typing import ClassVar

from autodist_py.kernel.graph_view import TABLES
from autodist_py.kernel.names import on_replica
from autodist_py.kernel.program import Program, Promise
from autodist_py.kernel.rewrite import Edits


@dataclass(frozen=True, slots=True)
class PlaceOps:
    """Every op has a device.

    Requires: replicas' ops on their devices.
    Ensures: an update stands on the device of the variable that it writes; what uses a table, an iterator or another
        resource that stands once per worker is where that is, on the worker's CPU, as is all that has no device yet.
    """

    name: ClassVar[str] = "place"

    def __call__(self, program: Program) -> Program:
        view = program.graph
        edits = Edits()
        for writers in program.analysis.writes.values():
            for writer in writers:
                for position, replica in enumerate(program.place.local_replicas):
                    copy = on_replica(position, writer)
                    if view.nodes[copy].device != replica.device:
                        edits.set_device(copy, replica.device)
        resources = {source.name for source in program.item.inputs if source.dtype == "resource"}
        resources |= {node.name for node in view.of_type(TABLES)}
        for consumers in view.users(resources).values() if resources else ():
            for consumer in consumers:
                edits.set_device(consumer, program.place.host)
        for node in view.nodes.values():
            if not node.device:
                edits.set_device(node.name, program.place.host)
        return program.promising(Promise.PLACED, edits.apply(view))
