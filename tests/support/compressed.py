"""Steps whose gradients are compressed, compared with a model of them in numpy as they are taken."""

from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.parameter_server import ServerOptions
from tests.support.compressor_models import halved, model_of

RNG = np.random.default_rng(5)
X = RNG.normal(size=(6, 20)) * np.logspace(-3, 3, 20)
IDS = np.array([0, 4, 4, 2, 1, 4])
SHAPES = {"matrix": (12, 10), "vector": (20,), "kernel": (2, 3, 4, 6)}


def train(builder: StrategyBuilder, dtype: str, width: int) -> dict[str, np.ndarray]:
    served = isinstance(builder, ServerOptions)
    weights = tf.Variable(np.linspace(-1, 1, 20), name="weights")
    table = tf.Variable(np.arange(5.0 * width).reshape(5, width) / 7, name="table")
    before = {"weights": weights.numpy(), "table": table.numpy()}

    def rounded(parts: list[Any]) -> np.ndarray:
        """The sum of what both workers send, of their halves of the batch."""
        first, second = (halved(part, dtype) for part in parts)
        return first.astype(np.float64) + second if served else (first + second).astype(np.float64)

    with AutoDist(strategy_builder=builder) as autodist:

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
            wanted[row] -= 0.5 * halved(gradient, dtype).astype(np.float64)
    np.testing.assert_allclose(table.numpy(), wanted, rtol=1e-12)
    assert not np.allclose(weights.numpy(), before["weights"] - 0.5 * X.mean(axis=0), rtol=1e-6), "it is not exact"
    return {"weights": weights.numpy(), "table": table.numpy()}


def batches(steps: int) -> list[dict[str, np.ndarray]]:
    """For each step and variable a gradient for each of 8 examples."""
    rng = np.random.default_rng(9)
    return [{f"of_{name}": rng.normal(size=(8, *shape)) for name, shape in SHAPES.items()} for _ in range(steps)]


def make(builder: StrategyBuilder) -> tuple[AutoDist, dict[str, tf.Variable], Any]:
    """A program whose gradients are its arguments, so that they are known whatever the weights."""
    autodist = AutoDist(strategy_builder=builder)
    weights = {name: tf.Variable(np.zeros(shape), name=name) for name, shape in SHAPES.items()}

    @autodist.function
    def step(of_matrix: tf.Tensor, of_vector: tf.Tensor, of_kernel: tf.Tensor) -> tf.Tensor:
        given = {"matrix": of_matrix, "vector": of_vector, "kernel": of_kernel}
        with tf.GradientTape() as tape:
            per_example = [
                tf.reduce_sum(tf.reshape(given[name] * weights[name], [tf.shape(of_matrix)[0], -1]), axis=1)
                for name in SHAPES
            ]
            loss = tf.reduce_mean(tf.add_n(per_example))
        for name, gradient in tape.gradient(loss, weights).items():
            weights[name].assign_sub(gradient)
        return loss

    return autodist, weights, step


def by_model(builder: StrategyBuilder, compressor: str, steps: int, replicas: tuple[int, ...]) -> dict[str, np.ndarray]:
    autodist, weights, step = make(builder)
    served = isinstance(builder, ServerOptions)
    models = {name: model_of(compressor, name, shape, served=served) for name, shape in SHAPES.items()}
    expected = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    # Examples are shared out evenly among replicas, the first ones of which have those that are left.
    rows = [len(part) for part in np.array_split(np.arange(8), sum(replicas))]
    ends = np.cumsum([sum(rows[sum(replicas[:rank]) : sum(replicas[: rank + 1])]) for rank in range(len(replicas))])
    with autodist:
        for batch in batches(steps):
            step(**batch)
            for name, model in models.items():
                own = [part.sum(axis=0) / 8 for part in np.split(batch[f"of_{name}"], ends[:-1])]
                expected[name] -= model(own)
                np.testing.assert_allclose(weights[name].numpy(), expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
    return {name: weight.numpy() for name, weight in weights.items()}
