"""What numpy makes of the values that replicas reduce, and how far TensorFlow's sums may be from that."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
SHAPES = ((), (0,), (5,), (2, 3), (3, 0))
UNIT = {tf.float16: 2.0**-11, tf.bfloat16: 2.0**-8, tf.float32: 2.0**-24, tf.float64: 2.0**-53}
"""The largest relative error of one rounding."""


def devices_of(count: int) -> list[str]:
    return [f"/device:CPU:{index}" for index in range(count)]


def one_of_each(replicas: int, seed: int = 0) -> list[list[np.ndarray]]:
    """A batch, a value per replica in it: each type in each shape; the last are large enough to be cut."""
    rng = np.random.default_rng(seed)
    batch = []
    for shape in (*SHAPES, (7, 30)):
        batch += [
            [np.asarray(rng.normal(size=shape), dtype.as_numpy_dtype) for _ in range(replicas)] for dtype in FLOATS
        ]
        batch.append([rng.integers(-(10**6), 10**6, size=shape, dtype=np.int32) for _ in range(replicas)])
    return batch


def assert_summed(results: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> None:
    """Each of the results is the sum of the values: integers exactly, floats within the rounding of n terms.

    A sum of n numbers, in whatever order, is rounded n - 1 times. After k roundings the error is at most
    k * u / (1 - k * u) times the sum of the magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 2002,
    section 4.2), u being one rounding. The true sum is of extended precision, so that float64 is judged, too.
    """
    for result in results:
        assert (result.dtype, result.shape) == (values[0].dtype, values[0].shape)
        if values[0].dtype.kind == "i":
            np.testing.assert_array_equal(result, np.sum(values, axis=0, dtype=np.int32))
            continue
        exact = np.asarray([_extended(value) for value in values])
        bound = _relative_error(len(values) - 1, values[0].dtype) * np.abs(exact).sum(axis=0)
        assert np.all(np.abs(_extended(result) - exact.sum(axis=0)) <= bound), values[0].dtype


def _extended(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float64).astype(np.longdouble)


def _relative_error(roundings: int, dtype: np.dtype) -> float:
    rounding = roundings * UNIT.get(tf.as_dtype(dtype), 0.0)
    return rounding / (1 - rounding)
