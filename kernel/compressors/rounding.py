"""Half precision: numbers are rounded, travel and are summed so (HorovodCompressor, HorovodCompressorEF)."""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist_py.kernel.compressors.codec import Dense, Slot, State, Wire, apart, flat
from autodist_py.proto.compressors import HorovodCompressor

_SPACING = {tf.float16: 2.0**-10, tf.bfloat16: 2.0**-7}
"""From 1 to the next number."""


def travelling(compressor: HorovodCompressor, dtype: tf.DType) -> tf.DType:
    """The type as which numbers of a type travel: as they are, if they have no more bytes."""
    half = tf.as_dtype(compressor.dtype)
    return dtype if dtype.size <= half.size else half


def rounded(value: tf.Tensor, half: tf.DType, terms: int) -> tf.Tensor:
    """In half precision: of `terms` finite numbers no sum is infinite, and what is infinite, or NaN, stays so."""
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
    ) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
        """See Codec."""
        numbers = flat(gradients)
        return rounded(numbers, travelling(self.compressor, numbers.dtype), wire.workers), gradients

    def decompress(
        self, travelled: tf.Tensor, kept: Sequence[tf.Tensor], wire: Wire
    ) -> tuple[list[tf.Tensor], list[State]]:
        """See Codec."""
        total = tf.cast(travelled, kept[0].dtype)
        return apart(total, [tuple(one.shape) for one in kept]), [{} for _ in kept]


@dataclass(frozen=True, slots=True)
class RoundingWithFeedback:
    """The codec of a HorovodCompressorEF; its state is what did not travel."""

    compressor: HorovodCompressor

    def init(self, gradients: Sequence[Dense]) -> list[dict[str, Slot]]:
        """See Codec."""
        return [{"error": Slot(one.shape, one.dtype)} if self._rounds(one.dtype) else {} for one in gradients]

    def _rounds(self, dtype: tf.DType) -> bool:
        return travelling(self.compressor, dtype) != dtype

    def compress(
        self, gradients: Sequence[tf.Tensor], states: Sequence[State], wire: Wire
    ) -> tuple[tf.Tensor, list[State]]:
        """See Codec."""
        shapes = [tuple(one.shape) for one in gradients]
        wanted = flat([gradient + state.get("error", 0) for gradient, state in zip(gradients, states, strict=True)])
        sent = rounded(wanted, travelling(self.compressor, wanted.dtype), wire.workers)
        missing = wanted - tf.cast(sent, wanted.dtype)
        missing = tf.where(tf.math.is_finite(missing), missing, tf.zeros_like(missing))
        return sent, [{"error": one} for one in apart(missing, shapes)]

    def decompress(self, travelled: tf.Tensor, kept: list[State], wire: Wire) -> tuple[list[tf.Tensor], list[State]]:
        """See Codec."""
        errors = [one["error"] for one in kept]
        totals = apart(tf.cast(travelled, errors[0].dtype), [tuple(one.shape) for one in errors])
        return totals, kept if self._rounds(errors[0].dtype) else [{} for _ in kept]
