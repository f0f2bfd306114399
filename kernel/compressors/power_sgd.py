"""PowerSGD: matrices travel as two narrow factors (Vogels et al. 2019, algorithms 1 and 2)."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from autodist_py.kernel.compressors.codec import Dense, Slot, State, Wire, apart, chosen, flat, working
from autodist_py.proto.compressors import PowerSGDCompressor


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
    ) -> tuple[tf.Tensor, list[State]]:
        """See Codec."""
        dtype = working(gradients[0].dtype)
        matrices = {
            position: tf.reshape(tf.cast(gradient, dtype), state["error"].shape) + state["error"]
            for position, (gradient, state) in enumerate(zip(gradients, states, strict=True))
            if state
        }
        lefts = self._left_factors(matrices, states, wire)
        travels = [
            tf.matmul(matrices[position], lefts[position], transpose_a=True)
            if position in matrices
            else tf.cast(gradient, dtype)
            for position, gradient in enumerate(gradients)
        ]
        after: list[State] = [
            {**state, "left": lefts[position], "matrix": matrices[position]} if state else {}
            for position, state in enumerate(states)
        ]
        return flat(travels), after

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

    def decompress(
        self, travelled: tf.Tensor, gradients: Sequence[Dense], states: Sequence[State], wire: Wire
    ) -> tuple[list[tf.Tensor], Sequence[State]]:
        """See Codec."""
        shapes = [
            tuple(state["right"].shape) if state else gradient.shape
            for gradient, state in zip(gradients, states, strict=True)
        ]
        totals: list[tf.Tensor] = []
        after: list[State] = []
        for gradient, state, part in zip(gradients, states, apart(travelled, shapes), strict=True):
            if not state:
                totals.append(tf.cast(part, gradient.dtype))
                after.append({})
                continue
            approximation = tf.matmul(state["left"], part, transpose_b=True)
            is_finite = tf.reduce_all(tf.math.is_finite(approximation))
            error = state["matrix"] - approximation / wire.workers
            after.append(
                {
                    "error": chosen(is_finite, error, state["error"]),
                    "right": chosen(is_finite, part, state["right"]),
                }
            )
            totals.append(tf.cast(tf.reshape(approximation, gradient.shape), gradient.dtype))
        return totals, after
