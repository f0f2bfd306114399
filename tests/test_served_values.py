"""What the user sees of variables that live on other workers."""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.runtime import served_values
from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.parameter_server import PS
from tests.cluster_pool import THREE_WORKERS, TWO_WORKERS, UNEVEN_WORKERS, Cluster
from tests.fit_oracle import X, Y, compare, compiled, fitted, named
from tests.oracle import assert_close
from tests.served import InShards, Spread

shaped = pytest.mark.parametrize(
    "cluster", [TWO_WORKERS, THREE_WORKERS, UNEVEN_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)
on_two = pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")


class Trained:
    """Two weights, and Adam."""

    def __init__(self) -> None:
        keras.config.set_floatx("float64")
        self.weights = [tf.Variable(X[:6, :3]), tf.Variable(X[:3, 0])]
        self.adam = keras.optimizers.Adam(0.1)
        self.adam.build(self.weights)
        self.slots = [slot.value for slot in self.adam.variables[2:]]

    def step(self, x: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ self.weights[0]) @ self.weights[1][:, None]))
        self.adam.apply_gradients(zip(tape.gradient(loss, self.weights), self.weights, strict=True))
        return loss

    def values(self) -> dict[str, np.ndarray]:
        return named("slot", self.slots) | named("weight", self.weights)


def require_equal(trained: Trained, alone: Trained) -> None:
    values = trained.values()
    for name, wanted in alone.values().items():
        assert_close(values[name], wanted, name, 1e-9)


def looked_at(builder: StrategyBuilder) -> None:
    """Looks at the optimizer's state after some steps, others on each worker, and writes to it once."""
    alone = Trained()
    plain = tf.function(alone.step)
    with AutoDist(strategy_builder=builder) as autodist:
        trained = Trained()
        step = autodist.function(trained.step)
        for number in range(6):
            plain(X)
            step(X)
            if number % (autodist.rank + 1) == 0:
                require_equal(trained, alone)
            if number == 3:
                for one in (alone, trained):
                    one.slots[0].assign(2.0 * one.slots[0])
                    one.slots[2].scatter_add(tf.IndexedSlices([0.5], [1]))
    require_equal(trained, alone)
    assert {type(slot) for slot in trained.slots} == {tf.Variable(0.0).__class__}


@shaped
@pytest.mark.parametrize(
    "builder",
    [PS(), Spread((1,)), InShards((0, 1, 2)), InShards((1, None), axis=1)],
    ids=["chief", "worker-1", "shards", "mixed-shards"],
)
def test_state_that_lives_elsewhere_is_brought_when_it_is_looked_at(cluster: Cluster, builder: StrategyBuilder) -> None:
    cluster.run(looked_at, builder=builder)


def in_pieces(builder: StrategyBuilder) -> None:
    """Values larger than a message."""
    whole = served_values._MESSAGE_BYTES
    served_values._MESSAGE_BYTES = 40
    try:
        looked_at(builder)
    finally:
        served_values._MESSAGE_BYTES = whole


@on_two
@pytest.mark.parametrize("builder", [Spread((1,)), InShards((1, 0))], ids=["whole", "shards"])
def test_a_value_may_be_larger_than_a_message(cluster: Cluster, builder: StrategyBuilder) -> None:
    cluster.run(in_pieces, builder=builder)


def saved(folder: str, builder: StrategyBuilder) -> None:
    """The chief saves after every second step."""
    keras.config.set_floatx("float64")

    def files_of(name: str) -> list[Path]:
        model = compiled(keras.optimizers.Adam(0.05))
        pattern = Path(folder, name + "-{batch}.keras")
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=[keras.callbacks.ModelCheckpoint(pattern, save_freq=2)])
        return sorted(Path(folder).glob(f"{name}-*.keras"))

    expected = files_of(f"alone-{os.getpid()}")
    with AutoDist(strategy_builder=builder) as autodist, autodist.scope():
        written = files_of(f"worker-{autodist.rank}")
    if autodist.rank != 0:
        assert not written
        return
    assert len(written) == len(expected) == 3
    for one, wanted in zip(written, expected, strict=True):
        values, right = (named("slot", keras.models.load_model(path).optimizer.variables) for path in (one, wanted))
        for name, value in right.items():
            assert_close(values[name], value, name, 1e-9)


@on_two
@pytest.mark.parametrize("builder", [Spread((1,)), InShards((1, 0))], ids=["whole", "shards"])
def test_a_checkpoint_between_two_steps_has_the_optimizers_state(
    cluster: Cluster, builder: StrategyBuilder, tmp_path: Path
) -> None:
    cluster.run(saved, folder=str(tmp_path), builder=builder)


def written_late(builder: StrategyBuilder) -> None:
    """A function without gradients writes state from what it was, later on the chief than where the state lives."""
    alone = Trained()
    plain = tf.function(alone.step)
    with AutoDist(strategy_builder=builder) as autodist:
        trained = Trained()
        step = autodist.function(trained.step)
        halve = autodist.function(lambda: trained.slots[0].assign(0.5 * trained.slots[0]).read_value())
        for _ in range(3):
            plain(X)
            step(X)
            if autodist.rank == 0:
                time.sleep(0.5)
            halve()
            alone.slots[0].assign(0.5 * alone.slots[0])
            require_equal(trained, alone)


@on_two
@pytest.mark.parametrize("builder", [Spread((1,)), InShards((1, 0)), InShards((None, 0))])
def test_what_a_function_writes_is_written_once(cluster: Cluster, builder: StrategyBuilder) -> None:
    cluster.run(written_late, builder=builder)


def resumed(folder: str) -> dict[str, Any]:
    """Fits again, from what BackupAndRestore finds."""

    def train() -> dict[str, Any]:
        model = compiled(keras.optimizers.Adam(0.05))
        model.fit(X, Y, batch_size=8, verbose=0)
        backup = keras.callbacks.BackupAndRestore(tempfile.mkdtemp(dir=folder))
        return fitted(model, X, Y, batch_size=8, callbacks=[backup])

    keras.config.set_floatx("float64")
    return compare(train, strategy_builder=Spread((1,)))


@on_two
def test_fit_goes_on_after_it_trained(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(resumed, folder=str(tmp_path))
