"""What loops, branches and calls make of a replica's own rows, by what their functions compute.

All replicas go round a loop equally often, and take the same branch: what says so must be the same on all. What goes
round a loop is taken for what the loop is given, and where a turn returns something else, for what is both.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from autodist_py.capture.batch.layouts.loops import LOOPS, Function, Functions, called
from autodist_py.capture.batch.whole_batch.held import Held, after_turn, either
from autodist_py.kernel.analysis.batch_layout.layouts import REPLICATED
from autodist_py.kernel.ir.graph import RUNS_BRANCH

Compute = Callable[[Function, Sequence[Held]], list[Held] | None]
"""What a function returns, given these arguments; None: it is not known."""


class Bodies:
    """What ops that run functions return.

    Args:
        functions: those that ops run.
        compute: what one of them returns.
    """

    def __init__(self, functions: Functions, compute: Compute):
        self._functions, self._compute = functions, compute
        self._known: dict[tuple[int, tuple[Held, ...]], list[Held] | None] = {}

    def run(self, op: tf.Operation, arguments: Sequence[Held]) -> list[Held] | None:
        """What `op`, a loop, branch or call, returns, given these arguments; None: it is not known."""
        if op.type in LOOPS:
            return self._turned(op, arguments)
        is_branch = op.type in RUNS_BRANCH
        if is_branch and arguments[0].layout is not REPLICATED:
            return None
        ways = [self._computed(op, name, arguments[is_branch:]) for name in called(op)]
        found = [way for way in ways if way is not None]
        if len(found) < len(ways):
            return None
        results, *others = found
        for other in others:
            results = [either(one, another) for one, another in zip(results, other, strict=True)]
        return results

    def _turned(self, op: tf.Operation, arguments: Sequence[Held]) -> list[Held] | None:
        """What has gone round a loop when it has ended."""
        body, condition = (op.get_attr(key).name for key in ("body", "cond"))
        taken, before = list(arguments), list[Held]()
        while taken != before:
            before, found = taken, self._computed(op, body, taken)
            if found is None:
                return None
            taken = [after_turn(one, other) for one, other in zip(taken, found, strict=True)]
            if not all(one.is_known for one in taken):
                return None
        ends = self._computed(op, condition, taken)
        return taken if ends is not None and ends[0].layout is REPLICATED else None

    def _computed(self, op: tf.Operation, name: str, arguments: Sequence[Held]) -> list[Held] | None:
        """What the library function `name`, which `op` runs, returns for these arguments."""
        function = self._functions.function(op, name)
        if function is None or self._functions.changes(function):
            return None
        key = (id(function), tuple(arguments))
        if key not in self._known:
            self._known[key] = self._compute(function, arguments)
        return self._known[key]
