"""A compressor of somebody else's: of each number its sign travels, and of each gradient its mean absolute value.

S. P. Karimireddy et al.: Error Feedback Fixes SignSGD, ICML 2019, algorithm 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorflow as tf

from autodist_py.kernel.compressors.codec import Dense, Slot, State, Wire
from autodist_py.kernel.compressors.words import count, numbers_of, words_of

_PER_WORD = 4


@dataclass(frozen=True, slots=True)
class ScaledSign:
    """Signs as bytes, which each worker gathers from all others; what a gradient loses is added to the next one."""

    gathers: ClassVar[bool] = True
    gives_up: ClassVar[str] = "of gradients the signs travel, and the error is added to the next step's"

    def wire_bytes(self, shape: tuple[int, ...], item: int) -> int:
        """The bytes of the signs, in whole words, and of the mean."""
        return _PER_WORD * -(-math.prod(shape) // _PER_WORD) + 4

    def init(self, gradients: Sequence[Dense]) -> list[dict[str, Slot]]:
        """What of each gradient has not travelled yet."""
        return [{"error": Slot(one.shape, one.dtype)} for one in gradients]

    def compress(
        self, gradients: Sequence[tf.Tensor], states: Sequence[State], wire: Wire
    ) -> tuple[tf.Tensor, tuple[list[tuple[int, ...]], list[State]]]:
        """The words of all gradients, one after the other."""
        words: list[tf.Tensor] = []
        after: list[State] = []
        for gradient, state in zip(gradients, states, strict=True):
            wanted = gradient + state["error"]
            mean, signs = tf.reduce_mean(tf.abs(wanted)), tf.sign(wanted)
            missing = -wanted.shape.num_elements() % _PER_WORD
            flat = tf.pad(tf.reshape(tf.cast(signs, tf.int8), [-1]), [[0, missing]])
            words += [words_of(flat), words_of(tf.reshape(tf.cast(mean, tf.float32), [1]))]
            after.append({"error": wanted - tf.cast(tf.cast(mean, tf.float32), wanted.dtype) * signs})
        return tf.concat(words, axis=0), ([tuple(one.shape) for one in gradients], after)

    def decompress(
        self, travelled: tf.Tensor, kept: tuple[list[tuple[int, ...]], list[State]], wire: Wire
    ) -> tuple[list[tf.Tensor], list[State]]:
        """The sums over workers of signs times means."""
        totals: list[Any] = []
        begin = 0
        shapes, states = kept
        for shape, state in zip(shapes, states, strict=True):
            elements = math.prod(shape)
            end = begin + count(_PER_WORD * -(-elements // _PER_WORD), tf.int8)
            signs = tf.cast(numbers_of(travelled[:, begin:end], tf.int8)[:, :elements], tf.float32)
            total = tf.reduce_sum(signs * numbers_of(travelled[:, end : end + 1], tf.float32), axis=0)
            totals.append(tf.reshape(tf.cast(total, state["error"].dtype), shape))
            begin = end + 1
        return totals, states
