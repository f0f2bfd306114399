"""Order: one total order on collectives, the same on every worker."""

from dataclasses import dataclass, replace
from typing import ClassVar

from autodist_py.kernel.program import Program, Promise
from autodist_py.kernel.rewrite import Edits


@dataclass(frozen=True, slots=True)
class Order:
    """Collectives are launched in one order, the same on every worker.

    Requires: all collectives are in the graph, among the program's launches.
    Ensures: each waits for those before it, but for one that may be under way with it (`Program.successions`). The
        order is that of their ranks, which come from the captured graph alone: the stage of the step (forward pass,
        gradients, what is computed from combined gradients, ...), and within it the order in which back-propagation is
        ready. Those that workers find by name need no order, but are ops to run: TensorFlow might leave one out on one
        worker alone, where nothing needs its result.
    """

    name: ClassVar[str] = "order"

    def __call__(self, program: Program) -> Program:
        launches = tuple(sorted(program.launches, key=lambda launch: launch.rank))
        edits = Edits()
        for earlier, later in replace(program, launches=launches).successions():
            for op in later.ops:
                for dependency in earlier.ops:
                    edits.add_control(op, dependency)
        named = (op for launch in launches if launch.by_name for op in launch.ops)
        result = replace(program, launches=launches, run_ops=(*program.run_ops, *named))
        return result.promising(Promise.ORDERED, edits.apply(program.graph))
