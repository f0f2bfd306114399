"""Reductions as tests run them: on devices of one process, and on workers; what numpy makes of the same values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py.kernel.collectives.base import CrossDeviceOps
from autodist_py.kernel.collectives.collective_all_reduce import CollectiveAllReduce
from autodist_py.kernel.collectives.collectives import Collectives
from autodist_py.kernel.collectives.hierarchical_copy import HierarchicalCopyAllReduce
from autodist_py.kernel.collectives.to_one_device import ReductionToOneDevice
from tests.support import kernel_programs

FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
SHAPES = ((), (0,), (5,), (2, 3), (3, 0))
UNIT = {tf.float16: 2.0**-11, tf.bfloat16: 2.0**-8, tf.float32: 2.0**-24, tf.float64: 2.0**-53}
"""The largest relative error of one rounding."""

WITHIN_WORKER: Mapping[str, Callable[[Collectives], CrossDeviceOps]] = {
    "one-device": lambda collectives: ReductionToOneDevice(),
    "hierarchical": lambda collectives: HierarchicalCopyAllReduce(),
    "hierarchical-3-packs": lambda collectives: HierarchicalCopyAllReduce(3),
    "hierarchical-unpacked": lambda collectives: HierarchicalCopyAllReduce(0),
}
OVER_WORKERS: Mapping[str, Callable[[Collectives], CrossDeviceOps]] = {
    "ring": CollectiveAllReduce,
    "ring-in-pieces": lambda collectives: CollectiveAllReduce(collectives, bytes_per_pack=256),
    "local-first": lambda collectives: CollectiveAllReduce(
        collectives, local=HierarchicalCopyAllReduce(), bytes_per_pack=256
    ),
}
OPS = {**WITHIN_WORKER, **OVER_WORKERS}


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


def rows_of_each(counts: Sequence[int], dtype: tf.DType, width: int = 2, seed: int = 0) -> list[tuple]:
    """For each replica indices and rows of a sparse value of so many rows: some indices occur several times."""
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, 4, size=count), np.asarray(rng.integers(-8, 9, size=(count, width)), dtype.as_numpy_dtype))
        for count in counts
    ]


def flat(values: Sequence[Sequence[Any]]) -> list[Any]:
    return [one for copies in values for one in copies]


def grouped(values: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(values[begin : begin + size]) for begin in range(0, len(values), size)]


def is_float(value: np.ndarray) -> bool:
    return value.dtype.kind != "i"


def run_locally(replicas: int, inputs: Sequence[np.ndarray], body: Callable[[Collectives, list], Any]) -> Any:
    """What `body` makes of the inputs, which are fed, on the devices of one process."""
    with tf.Graph().as_default() as graph:
        fed = [tf.compat.v1.placeholder(value.dtype, value.shape) for value in inputs]
        results = body(Collectives(kernel_programs.topology(replicas), 1), fed)
    with kernel_programs.session(graph) as running:
        return running.run(results, dict(zip(fed, inputs, strict=True)))


def assert_reduced(results: Sequence[np.ndarray], values: Sequence[np.ndarray], reduction: str) -> None:
    """Each of the results is the sum or mean of the values: integers exactly, floats within the rounding of n terms.

    A sum of n numbers, in whatever order, is rounded n - 1 times; a mean twice more, as TensorFlow's optimizer makes
    of a division by n a product with 1 / n. After k roundings the error is at most k * u / (1 - k * u) times the sum of
    the magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2), u being one rounding.
    The true sum is of extended precision, so that float64 is judged, too.
    """
    for result in results:
        assert (result.dtype, result.shape) == (values[0].dtype, values[0].shape)
        if not is_float(values[0]):
            np.testing.assert_array_equal(result, np.sum(values, axis=0, dtype=np.int32))
            continue
        exact = np.asarray([extended(value) for value in values])
        parts, more = (len(values), 2) if reduction == "mean" else (1, 0)
        bound = relative_error(len(values) - 1 + more, values[0].dtype) * np.abs(exact).sum(axis=0) / parts
        assert np.all(np.abs(extended(result) - exact.sum(axis=0) / parts) <= bound), (values[0].dtype, reduction)


def assert_rows(results: Sequence[tuple], rows: Sequence[tuple], reduction: str) -> None:
    """Each of the results has all rows, in replica order; a mean's are divided by the number of replicas, zeros too."""
    indices = np.concatenate([indices for indices, _ in rows])
    values = np.concatenate([values for _, values in rows])
    expected = extended(values) / (len(rows) if reduction == "mean" else 1)
    allowed = relative_error(2, values.dtype) if reduction == "mean" else 0.0
    for result in results:
        np.testing.assert_array_equal(result[0], indices)
        assert (result[1].dtype, result[1].shape) == (values.dtype, values.shape)
        assert np.all(np.abs(extended(result[1]) - expected) <= allowed * np.abs(expected)), reduction


def extended(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float64).astype(np.longdouble)


def relative_error(roundings: int, dtype: np.dtype) -> float:
    rounding = roundings * UNIT.get(tf.as_dtype(dtype), 0.0)
    return rounding / (1 - rounding)
