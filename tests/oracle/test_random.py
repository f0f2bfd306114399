"""Randomness: other numbers on each replica, those of one device on the first, and the same in every run.

The oracle is one device that is given the numbers which the replicas drew.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from tests.support.cluster_pool import SHAPES, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.oracle import Training, Values, assert_close, compare_function

pytestmark = pytest.mark.parametrize("cluster", SHAPES, ids=lambda shape: shape.name, indirect=True, scope="module")

SIZES = (12, 9, 7)
FEATURES = 4


class Stateless:
    """Seeds made from a counter of the user's."""

    def __init__(self) -> None:
        self.state = [tf.Variable(3, dtype=tf.int64, trainable=False)]

    def draw(self, shape: tf.Tensor) -> tf.Tensor:
        seed = tf.stack([self.state[0].read_value(), tf.constant(7, tf.int64)])
        self.state[0].assign_add(1)
        return tf.random.stateless_uniform(shape, seed, dtype=tf.float64)


class OldStateless(Stateless):
    """The first version of the op, whose seed is an input."""

    def draw(self, shape: tf.Tensor) -> tf.Tensor:
        seed = tf.stack([self.state[0].read_value(), tf.constant(7, tf.int64)])
        self.state[0].assign_add(1)
        return tf.raw_ops.StatelessRandomUniform(shape=shape, seed=seed, dtype=tf.float64)


class InBranch(Stateless):
    """Drawn inside a branch."""

    def draw(self, shape: tf.Tensor) -> tf.Tensor:
        seed = tf.stack([self.state[0].read_value(), tf.constant(7, tf.int64)])
        self.state[0].assign_add(1)
        return tf.cond(
            seed[0] >= 0,
            lambda: tf.random.stateless_uniform(shape, seed, dtype=tf.float64),
            lambda: tf.zeros(shape, tf.float64),
        )


class KerasSeed:
    """Keras 3's seed generator."""

    def __init__(self) -> None:
        self._generator = keras.random.SeedGenerator(5)
        self.state = [self._generator.state.value]

    def draw(self, shape: tf.Tensor) -> tf.Tensor:
        return keras.random.uniform(shape, dtype="float64", seed=self._generator)


class Generator:
    """tf.random.Generator, whose state says how many numbers were drawn."""

    def __init__(self) -> None:
        self._generator = tf.random.Generator.from_seed(5)
        self.state = [self._generator.state]

    def draw(self, shape: tf.Tensor) -> tf.Tensor:
        return self._generator.uniform(shape, dtype=tf.float64)


SOURCES = [Stateless, OldStateless, InBranch, KerasSeed, Generator]


def update(variable: tf.Variable, x: tf.Tensor, y: tf.Tensor, drawn: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        kept = tf.where(drawn > 0.5, x * 2.0, 0.0)
        loss = tf.reduce_mean(tf.square(tf.linalg.matvec(kept, variable) - y))
    variable.assign_sub(0.1 * tape.gradient(loss, variable))
    return loss


def train(source: Callable[[], Any]) -> Values:
    """Dropout by hand: every replica's mask is its own, and the training is that of one device with these masks."""
    rng = np.random.default_rng(3)
    with AutoDist() as autodist:
        numbers, alone = source(), source()
        weight, expected = (tf.Variable(np.linspace(-1.0, 1.0, FEATURES)) for _ in range(2))

        @autodist.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            drawn = numbers.draw(tf.shape(x))
            return update(weight, x, y, drawn), drawn

        for size in SIZES:
            x, y = rng.normal(size=(size, FEATURES)), rng.normal(size=size)
            loss, drawn = step(x, y)
            one_device = tf.function(alone.draw)(tf.constant([size, FEATURES]))
            assert_close(loss, update(expected, tf.constant(x), tf.constant(y), drawn), "loss")
            assert_close(weight, expected, "weight")
            first = -(-size // 3)  # Rows of the first replica, of three at most.
            assert_close(drawn[:first], one_device[:first], "the first replica's numbers")
            assert not np.isclose(drawn[-first:], one_device[-first:]).any()
            assert len(np.unique(drawn)) == size * FEATURES, "replicas drew the same numbers"
            for own, other in zip(numbers.state, alone.state, strict=True):
                np.testing.assert_array_equal(own, other)
        return {"weight": weight.numpy(), "drawn": drawn.numpy()}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_replicas_draw_their_own_numbers_and_runs_repeat(cluster: Cluster, source: Callable[[], Any]) -> None:
    first, second = (same(cluster.run(train, source=source)) for _ in range(2))
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value)


def train_as_one_device(source: Callable[[], Any]) -> Values:
    def build(_: int) -> Training:
        numbers, weight = source(), tf.Variable(np.linspace(-1.0, 1.0, FEATURES))

        def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            drawn = numbers.draw(tf.shape(x))
            return update(weight, x, y, drawn), drawn

        states = {f"state {position}": state for position, state in enumerate(numbers.state)}
        return Training(step, lambda: {"weight": weight, **states})

    rng = np.random.default_rng(3)
    batches = [(rng.normal(size=(size, FEATURES)), rng.normal(size=size)) for size in (*SIZES, 2, 1)]
    return compare_function(build, batches, autodist={"random": "global"})


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_replicas_can_draw_the_numbers_of_one_device(cluster: Cluster, source: Callable[[], Any]) -> None:
    same(cluster.run(train_as_one_device, source=source))


def without_a_seed() -> Values:
    """Noise on a weight is of no example, so all replicas draw it alike: by the run's seed, if the user has none."""
    with AutoDist() as autodist:
        weight = tf.Variable(np.ones(FEATURES))

        @autodist.function
        def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as tape:
                noise = tf.random.normal([FEATURES], dtype=tf.float64)
                loss = tf.reduce_mean(tf.linalg.matvec(x, weight * noise))
            gradient = tape.gradient(loss, weight)
            weight.assign_sub(0.1 * gradient)
            return gradient, noise

        for size in SIZES:
            x = np.random.default_rng(size).normal(size=(size, FEATURES))
            gradient, noise = step(x)
            assert_close(gradient, x.mean(axis=0) * noise, "the gradient")
        return {"weight": weight.numpy()}


def test_noise_of_no_example_needs_no_seed(cluster: Cluster) -> None:
    same(cluster.run(without_a_seed))


def take_the_time(builder: str) -> dict[str, Any]:
    """A step that writes and returns the time, thrice; each time lies between the clock's before and after it."""
    last, between = (tf.Variable(0.0, dtype=tf.float64, name=name) for name in ("last", "between"))
    weight = tf.Variable(np.ones((FEATURES, 1)), name="weight")
    autodist = AutoDist(strategy_builder=builder)

    @autodist.function
    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        now = tf.timestamp()
        between.assign(now - last)
        last.assign(now)
        with tf.GradientTape() as tape:
            rows = (x @ weight)[:, 0]
            loss = tf.reduce_mean(rows**2) + 0.0 * now
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return now, rows * now

    for count in SIZES:
        before, rows = tf.timestamp(), np.ones((count, FEATURES))
        now, by_rows = step(rows)
        assert before <= now <= tf.timestamp()
        np.testing.assert_allclose(last.numpy(), now.numpy(), rtol=1e-15)
        assert by_rows.shape == (count,)
    return {"now": now.numpy(), "last": last.numpy(), "between": between.numpy(), "weight": weight.numpy()}


@pytest.mark.parametrize("builder", ["AllReduce", "PS"])
def test_the_time_of_a_step_is_one(cluster: Cluster, builder: str) -> None:
    same(cluster.run(take_the_time, builder=builder))
