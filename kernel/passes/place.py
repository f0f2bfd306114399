"""Place: every op has a device."""

from dataclasses import dataclass, replace
from typing import ClassVar

from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.program import Program
from autodist_py.kernel.rewrite import Edits


@dataclass(frozen=True, slots=True)
class PlaceOps:
    """Every op has a device.

    Requires: replicas' ops on their devices.
    Ensures: an update stands on the device of the variable that it writes; what stands once per worker and was given
        no device is on the worker's CPU.
    """

    name: ClassVar[str] = "place"

    def __call__(self, program: Program) -> Program:
        view = GraphView(program.graph)
        edits = Edits()
        for handle, writers in view.writes.items():
            for writer in writers:
                edits.set_device(writer, view.nodes[handle].device)
        for node in program.graph.node:
            if not node.device:
                edits.set_device(node.name, program.place.host)
        return replace(program, graph=edits.apply(program.graph))
