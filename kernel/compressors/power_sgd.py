"""PowerSGD: matrices travel as two narrow factors (Vogels et al. 2019, algorithms 1 and 2)."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from autodist_py.kernel.compressors.codec import Dense, Slot, State, Wire, apart, chosen, flat, working
from autodist_py.proto.compressors import PowerSGDCompressor


class _Kept(NamedTuple):
    """What `compress` knows of one gradient: its type and shape; of a matrix its left factor, itself, and its state."""

    dtype: tf.DType
    shape: tuple[int, ...]
    left: tf.Tensor | None = None
    matrix: tf.Tensor | None = None
    state: State | None = None


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """The codec of a PowerSGDCompressor.

    The state of a matrix is what its approximation has missed so far, by this worker's share, and the right factor of
    the last step, with which the power iteration goes on; the first one is random, and the same on every worker. Each
    step sums left factors over workers, orthogonalizes them, and sums right factors; all else travels with those.
    """

    compressor: PowerSGDCompressor

    def init(self, gradients: Sequence[Dense]) -> list[dict[str, Slot]]:
        """See Codec."""
        return [self._slots(one) for one in gradients]

    def _slots(self, gradient: Dense) -> dict[str, Slot]:
        factors = self.compressor.factors(gradient.shape, gradient.dtype.size)
        if factors is None:
            return {}
        rows, columns, rank = factors
        dtype = working(gradient.dtype)

        def random() -> np.ndarray:
            generator = np.random.default_rng(zlib.crc32(gradient.variable.encode()))
            return generator.normal(size=(columns, rank)).astype(dtype.as_numpy_dtype)

        return {"error": Slot((rows, columns), dtype), "right": Slot((columns, rank), dtype, random)}

    def compress(
        self, gradients: Sequence[tf.Tensor], states: Sequence[State], wire: Wire
    ) -> tuple[tf.Tensor, list[_Kept]]:
        """See Codec."""
        dtype = working(gradients[0].dtype)
        matrices = {
            position: tf.reshape(tf.cast(gradient, dtype), tf.shape(state["error"])) + state["error"]
            for position, (gradient, state) in enumerate(zip(gradients, states, strict=True))
            if state
        }
        lefts = self._left_factors(matrices, states, wire)
        travels, kept = [], []
        for position, gradient in enumerate(gradients):
            if position in matrices:
                left, matrix = lefts[position], matrices[position]
                travels.append(tf.matmul(matrix, left, transpose_a=True))
                kept.append(_Kept(gradient.dtype, tuple(gradient.shape), left, matrix, states[position]))
            else:
                travels.append(tf.cast(gradient, dtype))
                kept.append(_Kept(gradient.dtype, tuple(gradient.shape)))
        return flat(travels), kept

    @staticmethod
    def _left_factors(matrices: dict[int, tf.Tensor], states: Sequence[State], wire: Wire) -> dict[int, tf.Tensor]:
        """Orthonormal columns that span what the sum of the workers' matrices makes of the right factors."""
        if not matrices:
            return {}
        products = [tf.matmul(matrix, states[position]["right"]) for position, matrix in matrices.items()]
        totals = apart(wire.total(flat(products)), [tuple(one.shape) for one in products])
        return {
            position: tf.linalg.qr(total, full_matrices=False).q
            for position, total in zip(matrices, totals, strict=True)
        }

    def decompress(self, travelled: tf.Tensor, kept: list[_Kept], wire: Wire) -> tuple[list[tf.Tensor], list[State]]:
        """See Codec."""
        shapes = [one.shape if one.state is None else tuple(one.state["right"].shape) for one in kept]
        totals: list[tf.Tensor] = []
        states: list[State] = []
        for one, part in zip(kept, apart(travelled, shapes), strict=True):
            if one.left is None or one.state is None:
                totals.append(tf.cast(part, one.dtype))
                states.append({})
                continue
            approximation = tf.matmul(one.left, part, transpose_b=True)
            is_finite = tf.math.is_finite(tf.reduce_sum(tf.abs(part)))
            error = one.matrix - approximation / wire.workers
            states.append(
                {
                    "error": chosen(is_finite, error, one.state["error"]),
                    "right": chosen(is_finite, part, one.state["right"]),
                }
            )
            totals.append(tf.cast(tf.reshape(approximation, one.shape), one.dtype))
        return totals, states
