"""Recording calls of Keras's own layers that keep examples apart though their graphs do not show it.

A recurrent layer turns its batch to time-major and goes round a loop; a dense one reshapes sequences of any length to a
matrix and back. That row i of the result comes of row i of the input is known of the layer, not of its ops.
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
    """

    reads: tuple[str, ...]
    outputs: tuple[str, ...]


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
            yield

    def _recording(self, original: Callable[..., Any], kinds: tuple[type, ...]) -> Callable[..., Any]:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            self._called.append(layer.name)
            try:
                result = original(layer, *args, **kwargs)
            finally:
                self._called.pop()
            if isinstance(layer, kinds) and not _mixes(layer):
                reads, results = self._tensors([args, kwargs]), self._tensors(result)
                outputs = [tensor for tensor in results if tensor.shape.rank and tensor.shape[0] is None]
                self.calls.append(LayerCall(tuple(map(_name, reads)), tuple(map(_name, outputs))))
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
