"""A compressor of somebody else's: of each number its sign travels, and of each gradient its mean absolute value.

S. P. Karimireddy et al.: Error Feedback Fixes SignSGD, ICML 2019, algorithm 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist_py.kernel.compressors.codec import Dense, Slot, State, Wire, chosen
from autodist_py.kernel.ir.bitcast import count, from_int32, to_int32


@dataclass(frozen=True, slots=True)
class ScaledSign:
    """Signs as bytes, which each worker gathers from all others; what a gradient loses is added to the next one."""

    passes_through: ClassVar[bool] = False
    gathers: ClassVar[bool] = True
    sums_first: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = True
    codes_rows: ClassVar[bool] = False
    gives_up: ClassVar[str] = "of gradients the signs travel, and the error is added to the next step's"

    def travels_as(self, dtype: str) -> str:
        """Nothing of it is summed as it travels."""
        return dtype

    def wire_bytes(self, shape: tuple[int, ...], item: int) -> int:
        """The bytes of the signs, in whole words, and of the mean."""
        return 4 * count(math.prod(shape), tf.int8) + 4

    def init(self, gradients: Sequence[Dense]) -> list[dict[str, Slot]]:
        """What of each gradient has not travelled yet."""
        return [{"error": Slot(one.shape, one.dtype)} for one in gradients]

    def compress(
        self, gradients: Sequence[tf.Tensor], states: Sequence[State], wire: Wire
    ) -> tuple[tf.Tensor, list[State]]:
        """The words of all gradients, one after the other."""
        words: list[tf.Tensor] = []
        after: list[State] = []
        for gradient, state in zip(gradients, states, strict=True):
            wanted = gradient + state["error"]
            mean = tf.cast(tf.reduce_mean(tf.abs(wanted)), tf.float32)
            signs = tf.reshape(tf.cast(tf.sign(wanted), tf.int8), [-1])
            words += [to_int32(signs), to_int32(tf.reshape(mean, [1]))]
            missing = wanted - tf.cast(mean, wanted.dtype) * tf.sign(wanted)
            after.append({"error": chosen(tf.math.is_finite(mean), missing, state["error"])})
        return tf.concat(words, axis=0), after

    def decompress(
        self, travelled: tf.Tensor, gradients: Sequence[Dense], states: Sequence[State], wire: Wire
    ) -> tuple[list[tf.Tensor], Sequence[State]]:
        """The sums over workers of signs times means."""
        totals: list[tf.Tensor] = []
        begin = 0
        for gradient in gradients:
            end = begin + count(gradient.elements, tf.int8)
            signs = tf.cast(from_int32(travelled[:, begin:end], tf.int8, gradient.elements), tf.float32)
            total = tf.reduce_sum(signs * from_int32(travelled[:, end : end + 1], tf.float32, 1), axis=0)
            totals.append(tf.reshape(tf.cast(total, gradient.dtype), gradient.shape))
            begin = end + 1
        return totals, states
