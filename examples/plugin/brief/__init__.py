"""A compressor of somebody else's: numbers travel, and are summed, as bfloat16, which has the range of float32."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist_py.kernel.compressors.codec import Dense, Slot, State, Wire, apart, flat


@dataclass(frozen=True, slots=True)
class Brief:
    """What has more than two bytes is rounded to bfloat16, rows of sparse gradients too; nothing is kept."""

    passes_through: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    sums_first: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = False
    codes_rows: ClassVar[bool] = True
    gives_up: ClassVar[str] = "gradients are rounded to bfloat16"

    def travels_as(self, dtype: str) -> str:
        """As bfloat16, if that is shorter."""
        return "bfloat16" if dtype in ("float32", "float64") else dtype

    def wire_bytes(self, shape: tuple[int, ...], item: int) -> int:
        """Two bytes a number."""
        return math.prod(shape) * min(item, 2)

    def init(self, gradients: Sequence[Dense]) -> list[dict[str, Slot]]:
        """Nothing is kept."""
        return [{} for _ in gradients]

    def compress(
        self, gradients: Sequence[tf.Tensor], states: Sequence[State], wire: Wire
    ) -> tuple[tf.Tensor, list[State]]:
        """All numbers, one after the other."""
        numbers = flat(gradients)
        return tf.cast(numbers, self.travels_as(numbers.dtype.name)), list(states)

    def decompress(
        self, travelled: tf.Tensor, gradients: Sequence[Dense], states: Sequence[State], wire: Wire
    ) -> tuple[list[tf.Tensor], Sequence[State]]:
        """Their sums, in the gradients' type."""
        return apart(tf.cast(travelled, gradients[0].dtype), [one.shape for one in gradients]), states
