"""What replicas combine in a branch is combined before it, and all of them take the branch, or none does."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from autodist_py.capture import tf_adapter
from autodist_py.kernel.ir.graph import READS_VARIABLE
from autodist_py.proto.errors import CaptureError


class BeforeBranches:
    """The branches of a function's `graph`, in which values are combined that can be computed before them."""

    def __init__(self, graph: Any):
        self._graph = graph
        self._combining: list[Any] = []

    def around(self, what: str) -> list[Any]:
        """The branches in which ops are made here, the innermost first; all replicas take them, or none does.

        Raises:
            RuntimeError: they are made in a loop, or in a function inside the function, where replicas would combine
                values as `what` says.
        """
        around = tf_adapter.branches_around(self._graph)
        if around is None:
            raise RuntimeError(
                f"{what} in a loop or a function inside the function that is given to run(). Some replicas may run it "
                "and others not, so that they would wait for one another. Do it before or after, in the function itself"
            )
        self._combining += [branch for branch in around if not self._has(branch)]
        return around

    def are_around(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` is one of the function, or of a branch of it."""
        return any(graph is self._graph for graph in tf_adapter.branches_of(tensor))

    def values(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """`tensors`, which are combined here, as the function has them before the branches around.

        Raises:
            RuntimeError: ops are made here in a loop, or a tensor depends on what the branch does.
            CaptureError: the gradient of a branch is computed here, through what is combined in it.
        """
        around = self.around("values of replicas are combined")
        if any(map(tf_adapter.is_gradient_of_branch, around)):
            _refuse_gradient()
        return [self._before(tensor, around) for tensor in tensors]

    def decided(self, on_all: Callable[[tf.Tensor], tf.Tensor]) -> AbstractContextManager[None]:
        """A branch in which something is combined is taken if `on_all(predicate)`, in this context."""

        def decide(predicate: tf.Tensor, branches: Sequence[Any]) -> tf.Tensor:
            return on_all(predicate) if any(map(self._has, branches)) else predicate

        def refuse(branches: Sequence[Any]) -> None:
            if any(map(self._has, branches)):
                raise RuntimeError(
                    "values of replicas are combined in a tf.switch_case, of which replicas may take other branches. "
                    "Use tf.case, whose branches all replicas take, or none; or combine them before"
                )

        return tf_adapter.branch_decisions(decide, refuse)

    def outside(self, tensor: tf.Tensor) -> tf.Tensor:
        """What is given to branches for `tensor`, an argument of them; `tensor` itself, if it is none."""
        while tensor.graph is not self._graph and self.are_around(tensor):
            given = {id(inner): outer for outer, inner in tensor.graph.captures}
            if id(tensor) not in given or not tf.is_symbolic_tensor(given[id(tensor)]):
                break
            tensor = given[id(tensor)]
        return tensor

    def _has(self, branch: Any) -> bool:
        return any(branch is one for one in self._combining)

    def _before(self, tensor: tf.Tensor, around: Sequence[Any]) -> tf.Tensor:
        for branch in around:
            if tensor.graph is branch:
                tensor = tf_adapter.computed_before(tensor, _arguments(tensor), _refuse_gradient)
        return tensor


def _refuse_gradient() -> None:
    raise CaptureError(
        "a gradient is computed through what replicas combine in a branch. Combine it before the branch, or compute "
        "the gradient in the branch"
    )


def _arguments(tensor: tf.Tensor) -> list[tf.Tensor]:
    """The arguments of its branch that `tensor` is computed from.

    Raises:
        RuntimeError: it is also computed from what the branch does.
    """
    needed = set(_needed(tensor.op))
    written: list[tf.Tensor] = []
    for op in tensor.graph.get_operations():
        if op in needed and not _is_before(op, written):
            raise RuntimeError(
                f"what replicas combine in a branch is computed before it. '{tensor.name}' is computed from "
                f"'{op.name}' ({op.type}), which the branch does, or which reads what it has written. Compute it "
                "before the branch"
            )
        written += tf_adapter.written_by(op)
    given = tensor.graph.internal_captures
    return [argument for argument in given if argument.op in needed]


def _is_before(op: tf.Operation, written: Collection[tf.Tensor]) -> bool:
    """Whether `op` does nothing, and may as well stand before what has `written` these resources."""
    if op.type not in READS_VARIABLE:
        return op.type == "Placeholder" or not op.op_def.is_stateful
    return not any(read is one for read in op.inputs for one in written)


def _needed(op: tf.Operation) -> Iterator[tf.Operation]:
    seen, waiting = {op.name}, [op]
    while waiting:
        one = waiting.pop()
        yield one
        new = {each.name: each for each in (*(read.op for read in one.inputs), *one.control_inputs)}
        waiting += [each for name, each in new.items() if name not in seen]
        seen |= new.keys()
