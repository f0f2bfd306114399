"""Half precision: numbers are rounded, travel and are summed so (HorovodCompressor, HorovodCompressorEF)."""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist_py.kernel.compressors.codec import Dense, Slot, State, Wire, apart, flat
from autodist_py.proto.compressors import Compressor, HorovodCompressor
from autodist_py.proto.errors import StrategyError

_SPACING = {tf.float16: 2.0**-10, tf.bfloat16: 2.0**-7, tf.float32: 2.0**-23}
"""From 1 to the next number."""


def travelling(compressor: Compressor, dtype: tf.DType) -> tf.DType:
    """The type as which numbers of a type travel where they are summed, or are rows.

    Raises:
        StrategyError: the compressor names another type than its own one or a float that is rounded to.
    """
    name = compressor.travels_as(dtype.name)
    known = {kind.name: kind for kind in (dtype, *_SPACING)}
    if name not in known:
        raise StrategyError(
            f"compressor {type(compressor).__name__} says that numbers of {dtype.name} travel as {name!r}; numbers "
            f"travel as they are, or as {', '.join(kind.name for kind in _SPACING)}"
        )
    return known[name]


def rounded(value: tf.Tensor, half: tf.DType, terms: int) -> tf.Tensor:
    """In less precision: of `terms` finite numbers no sum is infinite, and what is infinite, or NaN, stays so."""
    if value.dtype == half:
        return value
    if value.dtype.max > half.max:
        rounding_up = (1 + _SPACING[half]) ** terms
        largest = tf.constant(float(half.max) / terms / rounding_up, value.dtype)
        value = tf.where(tf.math.is_finite(value), tf.clip_by_value(value, -largest, largest), value)
    return tf.cast(value, half)


@dataclass(frozen=True, slots=True)
class Rounding:
    """The codec of a HorovodCompressor."""

    compressor: HorovodCompressor

    def init(self, gradients: Sequence[Dense]) -> list[dict[str, Slot]]:
        """See Codec."""
        return [{} for _ in gradients]

    def compress(
        self, gradients: Sequence[tf.Tensor], states: Sequence[State], wire: Wire
    ) -> tuple[tf.Tensor, list[State]]:
        """See Codec."""
        numbers = flat(gradients)
        return rounded(numbers, travelling(self.compressor, numbers.dtype), wire.workers), list(states)

    def decompress(
        self, travelled: tf.Tensor, gradients: Sequence[Dense], states: Sequence[State], wire: Wire
    ) -> tuple[list[tf.Tensor], Sequence[State]]:
        """See Codec."""
        return apart(tf.cast(travelled, gradients[0].dtype), [one.shape for one in gradients]), states


@dataclass(frozen=True, slots=True)
class RoundingWithFeedback(Rounding):
    """The codec of a HorovodCompressorEF; its state is what did not travel."""

    def init(self, gradients: Sequence[Dense]) -> list[dict[str, Slot]]:
        """See Codec."""
        return [
            {"error": Slot(one.shape, one.dtype)} if travelling(self.compressor, one.dtype) != one.dtype else {}
            for one in gradients
        ]

    def compress(
        self, gradients: Sequence[tf.Tensor], states: Sequence[State], wire: Wire
    ) -> tuple[tf.Tensor, list[State]]:
        """See Codec."""
        if not all(states):
            return Rounding.compress(self, gradients, states, wire)
        wanted = flat([gradient + state["error"] for gradient, state in zip(gradients, states, strict=True)])
        sent = rounded(wanted, travelling(self.compressor, wanted.dtype), wire.workers)
        missing = wanted - tf.cast(sent, wanted.dtype)
        missing = tf.where(tf.math.is_finite(missing), missing, tf.zeros_like(missing))
        return sent, [{"error": one} for one in apart(missing, [tuple(one.shape) for one in gradients])]
