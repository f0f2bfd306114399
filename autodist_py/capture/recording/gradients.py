"""Recording gradients: what the user's `tape.gradient` and `tf.gradients` return, while a step is traced.

Each recorded gradient is passed on through ops of its own (`Identity`), so that the kernel has one place per
gradient at which to combine it: all that reads a gradient reads it there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist_py.capture import tf_adapter
from autodist_py.proto.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Origin:
    """What a gradient is one of.

    Attributes:
        losses: names of the tensors whose sum it is the gradient of; none: not known.
        seeds: for each loss, the name of the ones that its back-propagation begins with; none: not known. They are
            those of one call's gradients.
    """

    losses: tuple[str, ...] = ()
    seeds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedGradient:
    """A gradient as the user's code received it.

    Attributes:
        handle: the variable's resource handle, a tensor of the traced graph.
        tensors: the gradient, or indices, values and dense shape of a sparse one.
        origin: what it is the gradient of.
    """

    handle: tf.Tensor
    tensors: tuple[tf.Tensor, ...]
    origin: Origin


class GradientRecorder:
    """Records, while active, the gradients of variables computed in one graph, in order."""

    def __init__(self, graph: tf.Graph):
        self._graph = graph
        self._depth = 0
        self._in_vectorized_loop = False
        self.gradients: list[RecordedGradient] = []
        self.of_examples: list[tf.Tensor] = []
        """Handles of variables whose gradients are computed in vectorized loops, for each example, say."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record within this context."""
        with tf_adapter.gradient_calls(self._on_gradients, self._on_vectorized_loop):
            yield

    @contextmanager
    def _on_vectorized_loop(self) -> Iterator[None]:
        """What is computed in it for one turn is made anew for all turns: no gradient there is one that is read."""
        before = self._in_vectorized_loop
        self._in_vectorized_loop = before or (not self._depth and tf_adapter.is_within(self._graph))
        try:
            yield
        finally:
            self._in_vectorized_loop = before

    def _on_gradients(self, compute: tf_adapter.Compute, sources: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
        # Only the outermost call counts: inside it, gradients of branches, loops and recomputed parts are computed too.
        if self._depth or not tf_adapter.is_within(self._graph):
            return compute(())
        if self._in_vectorized_loop:
            self.of_examples += [handle for handle in map(self._graph_handle, sources) if handle is not None]
            return compute(())
        known = all(isinstance(target, tf.Tensor) and target.graph is self._graph for target in targets)
        seeds = self._seeds(targets) if known else []
        self._depth += 1
        try:
            gradients = compute(seeds)
        finally:
            self._depth -= 1
        losses = tuple(target.name for target in targets) if known else ()
        origin = Origin(losses, tuple(seed.name for seed in seeds))
        return [self._record(source, gradient, origin) for source, gradient in zip(sources, gradients, strict=True)]

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

    def _record(self, source: Any, gradient: Any, origin: Origin) -> Any:
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
            passed = tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
        if isinstance(passed, tf.IndexedSlices):
            if passed.dense_shape is None:
                passed = tf.IndexedSlices(passed.values, passed.indices, tf.identity(tf.shape(source)))
            tensors: tuple[tf.Tensor, ...] = (passed.indices, passed.values, passed.dense_shape)
        else:
            tensors = (passed,)
        self.gradients.append(RecordedGradient(handle, tensors, origin))
        return passed

    def _graph_handle(self, source: Any) -> tf.Tensor | None:
        """The handle of a variable in the graph; None where the source is no variable."""
        if tf_adapter.is_variable(source):
            handle = source.handle
        elif isinstance(source, tf.Tensor) and source.dtype == tf.resource:
            handle = source
        else:
            return None
        capture = getattr(self._graph, "capture", None)
        return capture(handle) if capture is not None else handle
