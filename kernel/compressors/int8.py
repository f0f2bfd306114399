"""Eight bits a number and a scale a block, rounded up or down at random (Alistarh et al. 2017)."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from autodist_py.kernel.compressors.codec import Dense, Slot, State, Wire, apart, flat, working
from autodist_py.kernel.ir.bitcast import count, from_int32, to_int32
from autodist_py.proto.compressors import Int8Compressor

_LARGEST = 127


@dataclass(frozen=True, slots=True)
class Int8:
    """The codec of an Int8Compressor.

    The state of a group, kept with its first gradient, counts the steps: random numbers are those of the count and the
    worker, so that they are others in each step and on each worker, and the same ones in a run that is repeated.
    """

    compressor: Int8Compressor

    def init(self, gradients: Sequence[Dense]) -> list[dict[str, Slot]]:
        """See Codec."""
        first = gradients[0].variable
        count_of_steps = Slot((), tf.int64, lambda: np.asarray(zlib.crc32(first.encode()), np.int64))
        return [{"steps": count_of_steps}, *({} for _ in gradients[1:])]

    def compress(
        self, gradients: Sequence[tf.Tensor], states: Sequence[State], wire: Wire
    ) -> tuple[tf.Tensor, list[State]]:
        """See Codec."""
        dtype, block = gradients[0].dtype, self.compressor.block
        numbers = tf.cast(flat(gradients), working(dtype))
        elements = numbers.shape.num_elements()
        blocks = -(-elements // block)
        numbers = tf.reshape(tf.pad(numbers, [[0, blocks * block - elements]]), [blocks, block])
        scales = tf.cast(tf.reduce_max(tf.abs(numbers), axis=1, keepdims=True) / _LARGEST, tf.float32)
        is_finite = tf.reduce_all(tf.math.is_finite(numbers), axis=1, keepdims=True)
        scales = tf.where(is_finite, scales, tf.constant(float("nan")))
        steps = states[0]["steps"]
        seed = tf.stack([tf.constant(wire.rank, tf.int64), steps])
        up = tf.random.stateless_uniform([blocks, block], seed, dtype=numbers.dtype)
        in_scale = tf.math.divide_no_nan(numbers, tf.cast(scales, numbers.dtype))
        in_scale = tf.where(is_finite, in_scale, tf.zeros_like(in_scale))
        small = tf.cast(tf.clip_by_value(tf.floor(in_scale + up), -_LARGEST, _LARGEST), tf.int8)
        after: list[State] = [{"steps": steps + 1}, *({} for _ in states[1:])]
        sent = [tf.reshape(small, [-1])[:elements], tf.reshape(scales, [-1])]
        return tf.concat([to_int32(one) for one in sent], axis=0), after

    def decompress(
        self, travelled: tf.Tensor, gradients: Sequence[Dense], states: Sequence[State], wire: Wire
    ) -> tuple[list[tf.Tensor], Sequence[State]]:
        """See Codec."""
        dtype, block = working(gradients[0].dtype), self.compressor.block
        elements = sum(one.elements for one in gradients)
        blocks = -(-elements // block)
        of_numbers = count(elements, tf.int8)
        small = from_int32(travelled[:, :of_numbers], tf.int8, elements)
        small = tf.reshape(tf.pad(small, [[0, 0], [0, blocks * block - elements]]), [-1, blocks, block])
        scales = tf.reshape(from_int32(travelled[:, of_numbers:], tf.float32, blocks), [-1, blocks, 1])
        total = tf.reshape(tf.reduce_sum(tf.cast(small, dtype) * tf.cast(scales, dtype), axis=0), [-1])[:elements]
        return apart(tf.cast(total, gradients[0].dtype), [one.shape for one in gradients]), states
