"""What the user sees of variables that live on other workers."""

import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.servers import values
from autodist_py.servers.lazy_variable import peek
from autodist_py.servers.sharded_variable import ShardedVariable
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.parameter_server import PS
from autodist_py.strategy_builders.partitioned import ShardedOptimizer
from tests.support.cluster_pool import THREE_WORKERS, TWO_WORKERS, UNEVEN_WORKERS, Cluster
from tests.support.fit_oracle import X, Y, compare, compiled, fitted, named
from tests.support.oracle import assert_close
from tests.support.served import InShards, Spread

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

    def gradient_norm(self, x: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ self.weights[0]) @ self.weights[1][:, None]))
        return tf.linalg.global_norm(tape.gradient(loss, self.weights))

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
    whole = values._MESSAGE_BYTES
    values._MESSAGE_BYTES = 40
    try:
        looked_at(builder)
    finally:
        values._MESSAGE_BYTES = whole


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


# -- Memory -----------------------------------------------------------------------------------------------------------


def held_bytes(variables: Sequence[tf.Variable]) -> int:
    """What this worker holds of the variables, as they are, without a look."""
    return sum(peek(variable).shape.num_elements() * variable.dtype.size for variable in variables)


def remembered(builder: StrategyBuilder, together: bool) -> dict[str, int]:
    """What of Adam's state each worker holds after some steps: the user's variables, and shards."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(7)  # Each worker trains one for itself, before an AutoDist has made seeds alike.
    alone, model = (keras.Sequential([keras.layers.Dense(30), keras.layers.Dense(7)]) for _ in range(2))
    alone(X), model(X)
    model.set_weights(alone.get_weights())
    alone.compile(keras.optimizers.Adam(0.05), "mse")
    alone.fit(X, np.zeros((len(X), 7)), batch_size=8, verbose=0, epochs=2, shuffle=False)
    with AutoDist(strategy_builder=builder) as autodist, autodist.scope():
        model.compile(keras.optimizers.Adam(0.05), "mse")
        model.fit(X, np.zeros((len(X), 7)), batch_size=8, verbose=0, epochs=2, shuffle=False)
        state = [one.value for one in model.optimizer.variables if len(one.shape)]
        known = autodist._compiler.parameter_servers.directory._records.items()
        sharded = [record.where for _, record in known if isinstance(record.where, ShardedVariable)]
        shards = [shard for one in sharded for shard in one.own.values()]
        weights = {weight.path for weight in model.trainable_variables}
        ours = [one for one in shards if one.name.rpartition("/part_")[0] not in weights]
        held = {"user": held_bytes(state), "shards": held_bytes(ours)}
        held["all"] = sum(one.shape.num_elements() * one.dtype.size for one in state)
        if not together:
            assert_same_state(model, alone)
    assert_same_state(model, alone)
    return held


def assert_same_state(model: keras.Model, alone: keras.Model) -> None:
    for one, wanted in zip(model.optimizer.variables, alone.optimizer.variables, strict=True):
        assert_close(one.numpy(), wanted.numpy(), wanted.path, 1e-8)


@pytest.mark.parametrize("cluster", [THREE_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
def test_each_worker_holds_its_part_of_the_optimizers_state(cluster: Cluster) -> None:
    held = cluster.run(remembered, builder=ShardedOptimizer(), together=False)
    everything = held[0]["all"]
    assert [one["user"] for one in held] == [0, 0, 0]
    assert sum(one["shards"] for one in held) == everything
    for one in held:
        assert abs(one["shards"] - everything / 3) <= 4 * 2 * 8 * 30, "but for the remainders of four variables"


@shaped
def test_the_optimizers_state_is_once_in_the_cluster(cluster: Cluster) -> None:
    held = cluster.run(remembered, builder=Spread((1,)), together=True)
    others = [one["user"] for rank, one in enumerate(held) if rank != 1]
    assert others == [0] * len(others)
    assert held[1]["user"] == held[1]["all"]


def read_unseen(builder: StrategyBuilder) -> None:
    """A function that is traced while the state is elsewhere, and another thread, may read it at any time."""
    alone = Trained()
    plain = tf.function(alone.step)
    with AutoDist(strategy_builder=builder) as autodist:
        trained = Trained()
        step = autodist.function(trained.step)

        def steps(count: int) -> None:
            for _ in range(count):
                plain(X)
                step(X)

        steps(2)
        assert held_bytes(trained.slots[:2]) == 0 or autodist.rank == 1
        sums = tf.function(lambda: tf.reduce_sum(trained.slots[0]))
        assert_close(sums(), tf.reduce_sum(alone.slots[0]), "when it is traced")
        steps(2)
        autodist.sync()
        assert_close(sums(), tf.reduce_sum(alone.slots[0]), "after sync()")
        steps(1)
        assert sums().shape == ()
        assert peek(trained.slots[0]).shape == trained.slots[0].shape
        shapes = []
        looking = threading.Thread(target=lambda: shapes.append(trained.slots[1].numpy().shape))
        looking.start()
        looking.join(60)
        steps(1)
        assert peek(trained.slots[1]).shape == shapes[0] == trained.slots[1].shape
        require_equal(trained, alone)


@on_two
@pytest.mark.parametrize("builder", [Spread((1,)), InShards((1, 0))], ids=["whole", "shards"])
def test_what_may_be_read_unseen_is_not_let_go(cluster: Cluster, builder: StrategyBuilder) -> None:
    cluster.run(read_unseen, builder=builder)


def read_by_a_thread(builder: StrategyBuilder) -> None:
    """Another thread reads all the time while this one trains."""
    alone = Trained()
    plain = tf.function(alone.step)
    ended = threading.Event()
    with AutoDist(strategy_builder=builder) as autodist:
        trained = Trained()
        step = autodist.function(trained.step)
        step(X), plain(X)

        def read() -> None:
            while not ended.is_set():
                trained.values()

        reading = threading.Thread(target=read)
        if autodist.rank == 1:
            reading.start()
        for _ in range(60):
            step(X), plain(X)
        ended.set()
        if autodist.rank == 1:
            reading.join(60)
        autodist.sync()
        require_equal(trained, alone)


@on_two
@pytest.mark.parametrize("builder", [Spread((1,)), InShards((0, 1))], ids=["whole", "shards"])
def test_another_thread_may_read_while_this_one_trains(cluster: Cluster, builder: StrategyBuilder) -> None:
    cluster.run(read_by_a_thread, builder=builder)


def written_beside(builder: StrategyBuilder) -> None:
    """Workers take another number of steps by themselves; one of them writes a row in between."""
    with AutoDist(strategy_builder=builder) as autodist:
        table = tf.Variable(np.zeros([4, 1]))

        @autodist.function
        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(table)
            table.assign_sub(tape.gradient(loss, table))

        step()
        if autodist.rank == 0:
            table.scatter_update(tf.IndexedSlices([[100.0]], [3]))
            time.sleep(1.0)
        for _ in range(4):
            step()
        autodist.sync()
        assert list(table.numpy()[:3, 0]) == [-10.0] * 3


@on_two
def test_a_write_between_steps_that_workers_take_by_themselves_is_of_the_row_alone(cluster: Cluster) -> None:
    cluster.run(written_beside, builder=InShards((0, 1), sync=False))


def two_at_once(builder: StrategyBuilder, other: StrategyBuilder, looks: bool) -> None:
    """Two AutoDists train the same variables in turns; another of their programs only reads the state."""
    alone = Trained()
    plain = tf.function(alone.step)
    with AutoDist(strategy_builder=builder) as first, AutoDist(strategy_builder=other) as second:
        trained = Trained()
        steps = [first.function(trained.step), second.function(trained.step)]
        norm = second.function(lambda: tf.add_n([tf.norm(slot) for slot in trained.slots]))
        norms = first.function(trained.gradient_norm)
        for number in (0, 0, 1, 0, 1, 1, 0):
            plain(X)
            steps[number](X)
            assert_close(norms(X), alone.gradient_norm(tf.constant(X)), "norm of a gradient that updates nothing")
            if looks:
                assert_close(norm(), sum(tf.norm(slot) for slot in alone.slots), "norm")
        require_equal(trained, alone)
    require_equal(trained, alone)


@on_two
@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize(
    ("builder", "other"),
    [(Spread((1,)), Spread((1,))), (InShards((1, 0)), InShards((1, 0))), (InShards((1, 0)), AllReduce())],
    ids=["whole", "shards", "shards-and-collectives"],
)
def test_two_autodists_may_train_the_same_variables_in_turns(
    cluster: Cluster, builder: StrategyBuilder, other: StrategyBuilder, looks: bool
) -> None:
    cluster.run(two_at_once, builder=builder, other=other, looks=looks)
