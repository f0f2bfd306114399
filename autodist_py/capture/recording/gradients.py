"""Recording gradients: what the user's `tape.gradient` and `tf.gradients` return, while a step is traced.

Each recorded gradient is passed on through ops of its own (`Identity`), so that the kernel has one place per
gradient at which to combine it: all that reads a gradient reads it there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist_py.capture import tf_adapter
from autodist_py.capture.recording.user_code import is_users
from autodist_py.proto.errors import CaptureError


@dataclass(frozen=True, slots=True)
class CustomGradient:
    """What a custom gradient of the user's has computed, of one call of its function; tensors by their names.

    Attributes:
        results: of the function.
        given: the gradients of the results.
        arguments: of the function, and "" for each variable that it reads besides.
        returned: the gradients of the arguments; "": None, or no tensor.
        sparse: those of the returned that are the values of a sparse gradient.
        in_body: whether it was computed in a loop's body, or a branch, where ops have other names.
        reads_others: whether it read there anything but what it was given, or returned what is not made of that.
        ops: the types of the ops that it made there; none where it was computed in the step itself.
    """

    results: tuple[str, ...]
    given: tuple[str, ...]
    arguments: tuple[str, ...]
    returned: tuple[str, ...]
    sparse: frozenset[str] = frozenset()
    in_body: bool = False
    reads_others: bool = False
    ops: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Origin:
    """What a gradient is one of.

    Attributes:
        losses: names of the tensors whose sum it is the gradient of; none: not known.
        seeds: for each loss, the name of the ones that its back-propagation begins with; none: not known. They are
            those of one call's gradients.
        custom: the custom gradients that its back-propagation has called.
        through: names of the tensors of other recorded gradients that its back-propagation passed through; None: not
            known, as it is no tape's.
    """

    losses: tuple[str, ...] = ()
    seeds: tuple[str, ...] = ()
    custom: tuple[CustomGradient, ...] = ()
    through: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class RecordedGradient:
    """A gradient as the user's code received it.

    Attributes:
        handle: the variable's resource handle, a tensor of the traced graph.
        tensors: the gradient, or indices, values and dense shape of a sparse one.
        origin: what it is the gradient of.
        reduction: how it is combined, as a GraphItem's gradient says; "": as its loss is.
    """

    handle: tf.Tensor
    tensors: tuple[tf.Tensor, ...]
    origin: Origin
    reduction: str = ""


class GradientRecorder:
    """Records, while active, the gradients of variables computed in one graph, in order."""

    def __init__(self, graph: tf.Graph):
        self._graph = graph
        self._depth = 0
        self._in_vectorized_loop = False
        self._custom: list[CustomGradient] = []
        self._through: list[str] = []
        self.gradients: list[RecordedGradient] = []
        self.of_examples: list[tf.Tensor] = []
        """Handles of variables whose gradients are computed in vectorized loops, for each example, say."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record within this context."""
        calls = tf_adapter.gradient_calls(self._on_gradients, self._on_vectorized_loop)
        with calls, tf_adapter.custom_gradients(self._on_custom_gradient):
            yield

    def averaged(self, variable: Any, gradient: tf.Tensor) -> tf.Tensor:
        """The average over replicas of `gradient`, of which each has its own, by which `variable` is trained."""
        passed: tf.Tensor = self._record(variable, gradient, Origin(), "average")
        return passed

    @contextmanager
    def _on_vectorized_loop(self) -> Iterator[None]:
        """What is computed in it for one turn is made anew for all turns: no gradient there is one that is read."""
        before = self._in_vectorized_loop
        self._in_vectorized_loop = before or (not self._depth and tf_adapter.is_within(self._graph))
        try:
            yield
        finally:
            self._in_vectorized_loop = before

    def _on_gradients(
        self, compute: tf_adapter.Compute, sources: Sequence[Any], targets: Sequence[Any], *, is_taped: bool
    ) -> list[Any]:
        # Only the outermost call counts: inside it, gradients of branches, loops and recomputed parts are computed too.
        if self._depth or not tf_adapter.is_within(self._graph):
            return compute(())
        if self._in_vectorized_loop:
            self.of_examples += [handle for handle in map(self._graph_handle, sources) if handle is not None]
            return compute(())
        known = all(isinstance(target, tf.Tensor) and target.graph is self._graph for target in targets)
        seeds = self._seeds(targets) if known else []
        self._depth += 1
        self._custom, self._through = [], []
        try:
            gradients = compute(seeds)
        finally:
            self._depth -= 1
        losses = tuple(target.name for target in targets) if known else ()
        through = tuple(self._through) if is_taped else None
        origin = Origin(losses, tuple(seed.name for seed in seeds), tuple(self._custom), through)
        return [self._record(source, gradient, origin) for source, gradient in zip(sources, gradients, strict=True)]

    def _on_custom_gradient(
        self, arguments: Sequence[Any], results: Sequence[Any], back: Callable[..., Any]
    ) -> Callable[..., Any]:
        """`back`, whose calls are recorded if it is the user's own: a library's is the gradient of what it returns."""
        if not is_users(back) or not tf_adapter.is_within(self._graph):
            return back

        def recorded(*given: Any, **kwargs: Any) -> Any:
            graph = tf.compat.v1.get_default_graph()
            num_before = len(graph.get_operations())
            returned = back(*given, **kwargs)
            made = graph.get_operations()[num_before:] if graph is not self._graph else []
            of_arguments, of_variables = returned if kwargs.get("variables") else (returned, [])
            own = [*tf.nest.flatten(of_arguments), *tf.nest.flatten(of_variables)]
            read = [*arguments, *("" for _ in tf.nest.flatten(of_variables))]
            gradients = [one for one in own if one is not None]
            self._custom.append(
                CustomGradient(
                    results=tuple(map(_name, results)),
                    given=tuple(map(_name, tf.nest.flatten(given))),
                    arguments=tuple(map(_name, read)),
                    returned=tuple(map(_name, own)),
                    sparse=frozenset(_name(one) for one in own if isinstance(one, tf.IndexedSlices)),
                    in_body=graph is not self._graph,
                    reads_others=not _are_made_of(gradients, tf.nest.flatten(given), made),
                    ops=frozenset(op.type for op in made),
                )
            )
            return returned

        return recorded

    def _seeds(self, targets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Ones, which back-propagation of the targets begins with anyway: here they are known; none: leave it alone."""
        is_plain = all(target.dtype.is_floating for target in targets)
        if not is_plain or tf.compat.v1.get_default_graph() is not self._graph:
            return []
        with tf.name_scope("gradient"):
            return [
                tf.ones(target.shape, target.dtype, name="seed")
                if target.shape.is_fully_defined()
                else tf.ones_like(target, name="seed")
                for target in targets
            ]

    def _record(self, source: Any, gradient: Any, origin: Origin, reduction: str = "") -> Any:
        handle = self._graph_handle(source)
        if handle is None or gradient is None:
            return gradient
        current = tf.compat.v1.get_default_graph()
        within = current.name if current is not self._graph else tf_adapter.loop_or_branch(current)
        if within:
            raise CaptureError(
                f"the gradient of variable '{getattr(source, 'path', None) or getattr(source, 'name', source)}' is "
                f"computed inside a loop body, branch or function ('{within}'), where it cannot be combined over "
                "replicas; compute it in the step itself"
            )
        with tf.name_scope("gradient"), tf.control_dependencies(None):
            passed = tf.nest.map_structure(self._passed_on, gradient, expand_composites=True)
        if isinstance(passed, tf.IndexedSlices):
            if passed.dense_shape is None:
                passed = tf.IndexedSlices(passed.values, passed.indices, tf.identity(tf.shape(source)))
            tensors: tuple[tf.Tensor, ...] = (passed.indices, passed.values, passed.dense_shape)
        else:
            tensors = (passed,)
        self.gradients.append(RecordedGradient(handle, tensors, origin, reduction))
        return passed

    def _passed_on(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf_adapter.identity(tensor, lambda passed: self._through.append(passed.name))

    def _graph_handle(self, source: Any) -> tf.Tensor | None:
        """The handle of a variable in the graph; None where the source is no variable."""
        if tf_adapter.is_variable(source):
            handle = source.handle
        elif isinstance(source, tf.Tensor) and source.dtype == tf.resource:
            if tf.is_symbolic_tensor(source) and source.graph is not self._graph:
                return None  # Of a function that TensorFlow makes of a loop for nested tapes: its caller's is recorded.
            handle = source
        else:
            return None
        capture = getattr(self._graph, "capture", None)
        return capture(handle) if capture is not None else handle


def _name(value: Any) -> str:
    """The name of a tensor, or of a sparse gradient's values; "": it is neither."""
    tensor = value.values if isinstance(value, tf.IndexedSlices) else value
    return str(tensor.name) if isinstance(tensor, tf.Tensor) else ""


def _are_made_of(returned: Sequence[Any], given: Sequence[Any], made: Sequence[tf.Operation]) -> bool:
    """Whether these are made by the ops `made` of what was given, and of nothing else but constants."""
    begins = {tensor.name for tensor in given if isinstance(tensor, tf.Tensor)}
    reached = set(begins)
    constants = set[str]()
    for op in made:
        reads = {tensor.name for tensor in op.inputs}
        if not reads <= reached | constants or (not reads and op.type != "Const"):
            return False
        (reached if reads & reached else constants).update(tensor.name for tensor in op.outputs)
    return all(_name(one) in reached for one in returned)
