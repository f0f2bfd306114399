"""How tensors travel from process to process: as the components of one message, small ones packed together."""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist_py.kernel.ir.fragment import TensorSpec

PACKED_BYTES = 1 << 16
"""Tensors of a known shape up to this size travel packed; a larger one travels by itself, and is not copied for it."""

_ACCUMULATED = {tf.bfloat16: tf.float32, tf.float16: tf.float32}
"""The types that sums are taken in another one of."""


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """The layout of one message.

    Attributes:
        tensors: what travels, in order.
        joins: for each, how the messages of several workers become one: "sum", "rows" (one after the other, in rank
            order) or "same" (they are equal).
    """

    tensors: tuple[TensorSpec, ...]
    joins: tuple[str, ...]

    @property
    def types(self) -> tuple[tf.DType, ...]:
        """The type of each component."""
        return tuple(self.tensors[positions[0]].dtype for positions in self._components)

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The components of a message that brings `tensors`."""
        return [
            tensors[positions[0]]
            if len(positions) == 1
            else tf.concat([tf.reshape(tensors[position], [-1]) for position in positions], axis=0)
            for positions in self._components
        ]

    def join(self, messages: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """The components of one message, from those of several."""
        return [
            _joined(self.joins[positions[0]], parts)
            for positions, *parts in zip(self._components, *messages, strict=True)
        ]

    def nothing(self, message: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """A message like `message` that adds nothing to others."""
        return [
            component[:0] if self.joins[positions[0]] == "rows" else tf.zeros_like(component)
            for positions, component in zip(self._components, message, strict=True)
        ]

    def unpack(self, components: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What a message brings."""
        found: dict[int, tf.Tensor] = {}
        for positions, component in zip(self._components, components, strict=True):
            if len(positions) == 1:
                found[positions[0]] = tf.ensure_shape(component, self.tensors[positions[0]].shape)
                continue
            shapes = [tf.TensorShape(self.tensors[position].shape) for position in positions]
            parts = tf.split(component, [shape.num_elements() for shape in shapes])
            found |= {
                position: tf.reshape(part, shape)
                for position, part, shape in zip(positions, parts, shapes, strict=True)
            }
        return [found[position] for position in range(len(self.tensors))]

    @property
    def _components(self) -> tuple[tuple[int, ...], ...]:
        """Which tensors each component holds."""
        together: dict[tuple[object, ...], list[int]] = {}
        for position, (tensor, join) in enumerate(zip(self.tensors, self.joins, strict=True)):
            key = (tensor.dtype, join) if _is_small(tensor) and join != "rows" else (position,)
            together.setdefault(key, []).append(position)
        return tuple(map(tuple, together.values()))


def _is_small(tensor: TensorSpec) -> bool:
    shape = tf.TensorShape(tensor.shape)
    return shape.is_fully_defined() and shape.num_elements() * tensor.dtype.size <= PACKED_BYTES


def _joined(join: str, parts: Sequence[tf.Tensor]) -> tf.Tensor:
    if len(parts) == 1 or join == "same":
        return parts[0]
    if join == "rows":
        return tf.concat(parts, axis=0)
    dtype = parts[0].dtype
    return tf.cast(tf.add_n([tf.cast(part, _ACCUMULATED.get(dtype, dtype)) for part in parts]), dtype)
