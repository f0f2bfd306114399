"""Gradients that are compressed while they travel: one step equals a model of it in numpy."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

from autodist_py import AutoDist
from autodist_py.strategy_builders.all_reduce import AllReduce
from tests.cluster_pool import TWO_WORKERS, Cluster
from tests.cluster_pool import same_on_all_workers as same

RNG = np.random.default_rng(5)
X = RNG.normal(size=(6, 20)) * np.logspace(-3, 3, 20)
IDS = np.array([0, 4, 4, 2, 1, 4])
HALVES = {"float16": tf.float16, "bfloat16": tf.bfloat16}


def train(dtype: str, spec: str, width: int) -> dict[str, np.ndarray]:
    compressor = f"HorovodCompressor(dtype='{dtype}')"
    weights = tf.Variable(np.linspace(-1, 1, 20), name="weights")
    table = tf.Variable(np.arange(5.0 * width).reshape(5, width) / 7, name="table")
    before = {"weights": weights.numpy(), "table": table.numpy()}
    half = HALVES[dtype].as_numpy_dtype

    def rounded(parts: list[Any]) -> np.ndarray:
        """The sum of what both workers send, of their halves of the batch."""
        return (np.asarray(parts[0]).astype(half) + np.asarray(parts[1]).astype(half)).astype(np.float64)

    with AutoDist(strategy_builder=AllReduce(all_reduce_spec=spec, compressor=compressor)) as autodist:

        @autodist.function
        def step(x: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                rows = tf.nn.embedding_lookup(table, ids)
                loss = tf.reduce_mean(tf.linalg.matvec(x, weights)) + tf.reduce_mean(tf.reduce_sum(rows**2, axis=1))
            dense, sparse = tape.gradient(loss, [weights, table])
            weights.assign_sub(0.5 * dense)
            table.scatter_sub(tf.IndexedSlices(0.5 * sparse.values, sparse.indices))
            return loss

        step(X, IDS)
    # Each worker has half of the examples, and sends half of the mean over those.
    sent = rounded([part.mean(axis=0) / 2 for part in np.split(X, 2)])
    np.testing.assert_array_equal(weights.numpy(), before["weights"] - 0.5 * sent)
    wanted = before["table"].copy()
    for part in np.split(IDS, 2):
        for row in dict.fromkeys(part):  # Rows of one index are added up first, as the update adds them up itself.
            gradient = np.sum(part == row) * 2 * before["table"][row] / 3 / 2
            wanted[row] -= 0.5 * gradient.astype(half).astype(np.float64)
    np.testing.assert_allclose(table.numpy(), wanted, rtol=1e-12)
    assert not np.allclose(weights.numpy(), before["weights"] - 0.5 * X.mean(axis=0), rtol=1e-6), "it is not exact"
    return {"weights": weights.numpy(), "table": table.numpy()}


@pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("spec", ["AUTO", "RING"])
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_that_of_numpy(cluster: Cluster, dtype: str, spec: str, width: int) -> None:
    same(cluster.run(train, dtype=dtype, spec=spec, width=width))


def digits(compressor: str, seed: int) -> float:
    """How many of the digits that it has not seen a convolutional network knows after 150 steps."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    images, labels = images[order].astype(np.float32).reshape(-1, 8, 8, 1) / 16, labels[order]
    rng = np.random.default_rng(seed + 1)
    shapes = [(3, 3, 1, 16), (3, 3, 16, 32), (8 * 8 * 32, 10)]
    scales = [0.3, 0.08, 0.02]
    weights = [
        tf.Variable(rng.normal(size=shape).astype(np.float32) * scale)
        for shape, scale in zip(shapes, scales, strict=True)
    ]

    def predicted(x: Any) -> tf.Tensor:
        for kernel in weights[:2]:
            x = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
        return tf.matmul(tf.reshape(x, [-1, 8 * 8 * 32]), weights[2])

    with AutoDist(strategy_builder=AllReduce(all_reduce_spec="RING", compressor=compressor)) as autodist:

        @autodist.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=predicted(x))
                loss = tf.reduce_mean(losses)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        for number in range(150):
            batch = slice(number * 64 % 1280, number * 64 % 1280 + 64)
            step(images[batch], labels[batch])
    return float(np.mean(np.argmax(predicted(images[1344:]), axis=1) == labels[1344:]))


@pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
def test_digits_are_learnt_as_well_as_without_compression(cluster: Cluster) -> None:
    compressors = ["NoneCompressor", "HorovodCompressor", "HorovodCompressor(dtype='bfloat16')"]
    accuracy = {
        compressor: np.mean([cluster.run(digits, compressor=compressor, seed=seed)[0] for seed in range(3)])
        for compressor in compressors
    }
    assert accuracy["NoneCompressor"] > 0.9
    assert min(accuracy.values()) > accuracy["NoneCompressor"] - 0.01, accuracy
