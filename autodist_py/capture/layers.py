"""Recording calls of Keras's own layers, which keep examples apart whatever they do inside.

A recurrent layer turns its batch to time-major and goes round a loop: its graph does not show that row i of the result
comes of row i of the input. That it is a layer of Keras does.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist_py.capture import tf_adapter
from autodist_py.kernel.names import parse

_MODULES = ("keras.src.layers.", "tf_keras.src.layers.")
_MIX_OR_UNKNOWN = ("batch_normalization", "lambda_layer", "jax_layer", "torch_module_wrapper", "tfsm_layer")
"""Modules of layers that mix examples, or run code that is not Keras's."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer that keeps examples apart: names of tensors.

    Attributes:
        inputs: those of its arguments that may be batches: their first dimension is not known.
        outputs: those of its results.
        reads: all of its arguments.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: tuple[str, ...]


class LayerRecorder:
    """Records, while active, the calls of layers in one graph."""

    def __init__(self, graph: tf.Graph):
        self._graph = graph
        self._is_trusted: list[bool] = []
        self.calls: list[LayerCall] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record within this context."""
        with ExitStack() as stack:
            for name in ("keras", "tf_keras"):
                if name in sys.modules:
                    layer = sys.modules[name].layers.Layer
                    stack.enter_context(tf_adapter.patched(layer, "__call__", self._recording(layer.__call__)))
            yield

    def _recording(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            module = type(layer).__module__
            self._is_trusted.append(module.startswith(_MODULES) and not module.endswith(_MIX_OR_UNKNOWN))
            try:
                result = original(layer, *args, **kwargs)
            finally:
                is_trusted = self._is_trusted.pop()
                if not is_trusted:  # Nor is what runs it as a part of itself.
                    self._is_trusted[:] = [False] * len(self._is_trusted)
            if is_trusted:
                reads, results = self._tensors([args, kwargs]), self._tensors(result)
                inputs, outputs = ([tensor for tensor in one if _may_be_batch(tensor)] for one in (reads, results))
                self.calls.append(LayerCall(*(tuple(map(_name, one)) for one in (inputs, outputs, reads))))
            return result

        return call

    def _tensors(self, structure: Any) -> list[tf.Tensor]:
        leaves = tf.nest.flatten(structure)
        return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and getattr(leaf, "graph", None) is self._graph]


def _may_be_batch(tensor: tf.Tensor) -> bool:
    return bool(tensor.shape.rank) and tensor.shape[0] is None


def _name(tensor: tf.Tensor) -> str:
    return str(parse(tensor.name))
