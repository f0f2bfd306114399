"""Recording calls of Keras's own layers that keep examples apart though their graphs do not show it.

A recurrent layer turns its batch to time-major and goes round a loop; a dense one reshapes sequences of any length to a
matrix and back. That row i of the result comes of row i of the input is known of the layer, not of its ops. So it is of
`tf.vectorized_map`, where all else that its function reads is the same for every row.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist_py.capture import tf_adapter
from autodist_py.kernel.ir.names import parse

_PACKAGES = ("keras", "tf_keras")
_LAYERS = (
    "AdditiveAttention",
    "Attention",
    "Bidirectional",
    "Conv1DTranspose",
    "Conv2DTranspose",
    "Conv3DTranspose",
    "Dense",
    "EinsumDense",
    "Embedding",
    "GroupNormalization",
    "GroupQueryAttention",
    "LayerNormalization",
    "MultiHeadAttention",
    "RNN",
    "RepeatVector",
    "TimeDistributed",
)
"""The classes in `layers` whose instances are recorded, those of Keras's own subclasses included."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer that keeps examples apart, if what it is given does: names of tensors.

    Attributes:
        reads: those of its arguments.
        outputs: those of its results whose first dimension is not known: they may be batches.
        shared: what it reads beside its arguments, for each example; it must be the same everywhere.
    """

    reads: tuple[str, ...]
    outputs: tuple[str, ...]
    shared: tuple[str, ...] = ()


class LayerRecorder:
    """Records, while active, the calls of layers in one graph."""

    def __init__(self, graph: tf.Graph):
        self._graph = graph
        self._called: list[str] = []
        self.calls: list[LayerCall] = []

    def innermost(self) -> str | None:
        """The name of the layer that is called just now; None: none is."""
        return self._called[-1] if self._called else None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record within this context."""
        with ExitStack() as stack:
            for package in _PACKAGES:
                if package in sys.modules:
                    layers = sys.modules[package].layers
                    kinds = tuple(getattr(layers, name) for name in _LAYERS if hasattr(layers, name))
                    for base in (layers.Layer, *tf_adapter.graph_layers(package)):
                        recording = self._recording(base.__call__, kinds)
                        stack.enter_context(tf_adapter.patched(base, "__call__", recording))
            stack.enter_context(tf_adapter.patched(tf, "vectorized_map", self._mapping(tf.vectorized_map)))
            yield

    def _mapping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A `tf.vectorized_map` that is recorded: the mapping takes rows, and its function reads whole tensors."""

        def call(fn: Callable[..., Any], elems: Any, *args: Any, **kwargs: Any) -> Any:
            within: set[str] = set()

            def noted(row: Any) -> Any:
                at_first = self._ops()
                result = fn(row)
                within.update(self._ops() - at_first)
                return result

            before = self._ops()
            result = original(noted, elems, *args, **kwargs)
            given = self._tensors(elems)
            if all(one.shape.rank and one.shape[0] in (None, 1) for one in given):  # Else it is no batch that is cut.
                reads = tuple(map(_name, given))
                made = [self._graph.get_operation_by_name(name) for name in self._ops() - before]
                outside = {(_name(one), op.name) for op in made for one in op.inputs if one.op.name in before}
                shared = {name for name, reader in outside if name not in reads or reader in within}
                self._note(reads, result, tuple(sorted(shared)))
            return result

        return call

    def _ops(self) -> set[str]:
        return {op.name for op in self._graph.get_operations()}

    def _note(self, reads: tuple[str, ...], result: Any, shared: tuple[str, ...] = ()) -> None:
        outputs = [tensor for tensor in self._tensors(result) if tensor.shape.rank and tensor.shape[0] is None]
        self.calls.append(LayerCall(reads, tuple(map(_name, outputs)), shared))

    def _recording(self, original: Callable[..., Any], kinds: tuple[type, ...]) -> Callable[..., Any]:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            self._called.append(layer.name)
            try:
                result = original(layer, *args, **kwargs)
            finally:
                self._called.pop()
            if isinstance(layer, kinds) and not _mixes(layer):
                self._note(tuple(map(_name, self._tensors([args, kwargs]))), result)
            return result

        return call

    def _tensors(self, structure: Any) -> list[tf.Tensor]:
        leaves = tf.nest.flatten(structure)
        return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and getattr(leaf, "graph", None) is self._graph]


def _mixes(layer: Any) -> bool:
    """Whether it may mix examples: it works along axis 0, or runs a layer or function that is not Keras's own."""
    parts = layer._flatten_layers()
    return any(_is_along_batch(part) or not all(map(_is_keras, _code(part))) for part in parts)


def _is_along_batch(layer: Any) -> bool:
    axes = (getattr(layer, name, None) for name in ("axis", "attention_axes"))
    return any(0 in tf.nest.flatten(each) for each in axes)


def _code(layer: Any) -> Iterator[Any]:
    """The layer's class, and the functions that it was given (an activation)."""
    yield type(layer)
    yield from filter(inspect.isroutine, vars(layer).values())


def _is_keras(code: Any) -> bool:
    return (getattr(code, "__module__", None) or "").partition(".")[0] in _PACKAGES


def _name(tensor: tf.Tensor) -> str:
    return str(parse(tensor.name))
