"""What travels instead of a gradient, and is summed, and what is made of the sum: functions called while tracing."""

from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from autodist_py.proto.compressors import HorovodCompressor, NoneCompressor, compressor_of
from autodist_py.proto.errors import StrategyError

_SPACING = {tf.float16: 2.0**-10, tf.bfloat16: 2.0**-7}
"""From 1 to the next number."""


@dataclass(frozen=True, slots=True)
class Coding:
    """A compressor, for what is summed as it travels.

    Attributes:
        dtype: of what travels.
        compress: what travels instead of a tensor, given how many such are summed.
        decompress: what the sum of those stands for, of the type that is given.
    """

    dtype: tf.DType
    compress: Callable[[tf.Tensor, int], tf.Tensor]
    decompress: Callable[[tf.Tensor, tf.DType], tf.Tensor]


def coding_of(compressor: str, dtype: tf.DType) -> Coding:
    """How the compressor codes tensors of a type.

    Raises:
        StrategyError: this version does not have it, or it cannot code such tensors.
    """
    plain = Coding(dtype, lambda value, terms: value, lambda value, dtype: value)
    match compressor_of(compressor, "compressor"):
        case NoneCompressor():
            return plain
        case HorovodCompressor(dtype=name):
            if not dtype.is_floating:
                raise StrategyError(f"{compressor} rounds floats, and cannot code {dtype.name}; use NoneCompressor")
            half = tf.as_dtype(name)
            if dtype.size <= half.size:
                return plain
            return Coding(half, lambda value, terms: _rounded(value, half, terms), tf.cast)
    raise StrategyError(f"compressor '{compressor}' is not available yet; use HorovodCompressor or NoneCompressor")


def _rounded(value: tf.Tensor, half: tf.DType, terms: int) -> tf.Tensor:
    """In half precision: of `terms` finite numbers no sum is infinite, and what is infinite, or NaN, stays so."""
    if value.dtype.max > half.max:
        rounding_up = (1 + _SPACING[half]) ** terms
        largest = tf.constant(float(half.max) / terms / rounding_up, value.dtype)
        value = tf.where(tf.math.is_finite(value), tf.clip_by_value(value, -largest, largest), value)
    return tf.cast(value, half)
