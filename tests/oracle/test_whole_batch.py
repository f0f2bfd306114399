"""Steps that mix the examples of a batch, each as on one device: `AutoDist(batch_statistics="global")`, the default."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from tests.corpus.header import STRATEGIES
from tests.support.cluster_pool import THREE_WORKERS, UNEVEN_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.fit_oracle import OPTIMIZERS, TOLERANCE, VALIDATION, X, Y, compiled, fitted
from tests.support.mixing_losses import LOSSES, Weights, batch_of, step_of, used_by
from tests.support.oracle import EXACT, Parts, Training, Values, assert_close, compare_function
from tests.support.random_parts import FACTORED

SIZES = (6, 5, 7, 2, 1, 8)
"""Of the batches: some have fewer examples than there are replicas."""

OWN_SIZES = [(3, 2, 4), (4, 1, 2), (0, 3, 1), (2, 0, 2)]
"""For each step the rows of each worker; some of them have none."""

on_some = pytest.mark.parametrize(
    "cluster", [UNEVEN_WORKERS, THREE_WORKERS], ids=lambda s: s.name, indirect=True, scope="module"
)


def train(
    losses: Sequence[str], builder: str = "AllReduce", own_sizes: Sequence[Sequence[int]] | None = None
) -> list[Values]:
    """The variables after each loss was trained by."""
    sizes = SIZES if own_sizes is None else [sum(step) for step in own_sizes]
    parts = None if own_sizes is None else Parts(own_sizes)

    def train_by(name: str) -> Values:
        used = used_by(name)

        def build(seed: int) -> Training:
            weights = Weights(seed)
            return Training(step_of(name, weights), lambda: {one: weights.all[one] for one in used})

        batches = [batch_of(size, seed) for seed, size in enumerate(sizes)]
        return compare_function(build, batches, parts=parts, autodist={"strategy_builder": builder})

    return [train_by(name) for name in losses]


@on_some
def test_what_mixes_a_batch_is_as_on_one_device(cluster: Cluster) -> None:
    assert len(same(cluster.run(train, losses=list(LOSSES)))) == len(LOSSES)


@on_some
def test_workers_may_have_other_numbers_of_examples_and_none(cluster: Cluster) -> None:
    own = [step[: cluster.shape.num_workers] for step in OWN_SIZES]
    assert same(cluster.run(train, losses=list(LOSSES)[::2], own_sizes=own))


def by_one_op(own_sizes: Sequence[Sequence[int]] | None = None) -> Values:
    """TensorFlow's one op for batch normalization has float32 alone."""
    rng = np.random.default_rng(2)
    sizes = SIZES if own_sizes is None else [sum(step) for step in own_sizes]
    batches = [(rng.normal(1.0, 2.0, size=(size, 4, 4, 3)).astype(np.float32),) for size in sizes]

    def build(seed: int) -> Training:
        start = np.random.default_rng(seed)
        weight, scale, offset = (
            tf.Variable(start.normal(size=shape).astype(np.float32), name=name)
            for name, shape in (("weight", (3, 4)), ("scale", (4,)), ("offset", (4,)))
        )
        average = tf.Variable(np.zeros(4, np.float32), trainable=False, name="average")

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                z = tf.einsum("nhwc,cd->nhwd", x, weight)
                y, _, variance = tf.compat.v1.nn.fused_batch_norm(z, scale, offset)
                loss = tf.reduce_mean(tf.tanh(y) * [1.0, 2.0, 3.0, 4.0])
            trained = (weight, scale, offset)
            for variable, gradient in zip(trained, tape.gradient(loss, trained), strict=True):
                variable.assign_sub(0.05 * gradient)
            average.assign(0.5 * average + 0.5 * variance)
            return loss

        return Training(step, lambda: {one.name: one for one in (weight, scale, offset, average)})

    parts = None if own_sizes is None else Parts(own_sizes)
    return compare_function(build, batches, parts=parts, tolerance=2e-4)


@on_some
@pytest.mark.parametrize("own_sizes", [None, OWN_SIZES], ids=["one batch", "batches of their own"])
def test_one_op_normalizes_the_whole_batch(cluster: Cluster, own_sizes: Sequence[Sequence[int]] | None) -> None:
    own = None if own_sizes is None else [step[: cluster.shape.num_workers] for step in own_sizes]
    same(cluster.run(by_one_op, own_sizes=own))


@on_some
@pytest.mark.parametrize("builder", [FACTORED, *(name for name in STRATEGIES.values() if name != "AllReduce")])
def test_every_strategy_trains_by_what_mixes_a_batch(cluster: Cluster, builder: str) -> None:
    assert same(cluster.run(train, losses=["clip", "two_towers", "center_loss", "normalized"], builder=builder))


def of_several_lengths() -> np.ndarray:
    """An iterator gives three rows of one kind for each of another; their scores are of all pairs."""
    rng = np.random.default_rng(1)
    labelled, others, start = rng.normal(size=(28, 3)), rng.normal(size=(84, 3)), rng.normal(size=(3, 4))

    def data() -> Iterator[Any]:
        both = (tf.data.Dataset.from_tensor_slices(one) for one in (labelled, others))
        return iter(tf.data.Dataset.zip(tuple(one.batch(size) for one, size in zip(both, (7, 21), strict=True))))

    def training() -> tuple[Callable[[Iterator[Any]], tf.Tensor], tf.Variable]:
        weight = tf.Variable(start)

        def step(iterator: Iterator[Any]) -> tf.Tensor:
            x, u = next(iterator)
            with tf.GradientTape() as tape:
                z, v = x @ weight, tf.sin(u @ weight)
                loss = tf.reduce_mean(tf.nn.softmax(z, axis=0) * z) + tf.reduce_logsumexp(z @ tf.transpose(v))
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

        return step, weight

    with AutoDist(batch_statistics="global") as autodist:
        (single, expected), (compiled, weight) = training(), training()
        results = [[run(given).numpy() for _ in range(4)] for run, given in _runs(autodist, single, compiled, data)]
        assert_close(np.array(results[1]), np.array(results[0]), "losses", EXACT)
        assert_close(weight.numpy(), expected.numpy(), "the weight", EXACT)
        return np.array(weight)


def _runs(autodist: AutoDist, single: Any, compiled: Any, data: Callable[[], Any]) -> Iterator[tuple[Any, Any]]:
    yield tf.function(single), data()
    yield autodist.function(compiled), data()


@on_some
def test_iterators_may_give_several_numbers_of_rows(cluster: Cluster) -> None:
    same(cluster.run(of_several_lengths))


def normalizing() -> keras.Model:
    """A bias before a normalization has no gradient: Adam would make something of its rounding."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Dense(5, use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("tanh"),
            layers.Dense(4, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(3),
        ]
    )


def fit_normalizing(builder: str) -> dict[str, Any]:
    """Keras's own loop, with batches that do not divide; its last one has two examples."""

    def train() -> dict[str, Any]:
        return fitted(compiled(OPTIMIZERS["adamw"](), normalizing), X, Y, batch_size=5, validation_data=VALIDATION)

    keras.config.set_floatx("float64")
    with AutoDist(strategy_builder=builder, batch_statistics="global") as autodist:
        expected = train()
        with autodist.scope():
            values = train()
    for name, wanted in expected.items():
        assert_close(values[name], wanted, name, TOLERANCE)
    return values


@on_some
@pytest.mark.parametrize("builder", ["AllReduce", "PSLoadBalancing"])
def test_fit_normalizes_the_whole_batch(cluster: Cluster, builder: str) -> None:
    same(cluster.run(fit_normalizing, builder=builder))
