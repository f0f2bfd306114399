"""Workers that take their steps by themselves: asynchronous, of bounded staleness, and with backup workers."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.parameter_server import PS, PSLoadBalancing
from tests.support.cluster_pool import THREE_WORKERS, TWO_WORKERS, Cluster
from tests.support.oracle import assert_close
from tests.support.served import InShards, Spread, descending

pytestmark = [pytest.mark.alone, pytest.mark.turns(3)]

on_three = pytest.mark.parametrize(
    "cluster", [THREE_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)

CONSTANT = np.array([[1.0, -2.0], [0.5, 3.0]])
PUSHES = (7, 3, 5)


def pushed(builder: StrategyBuilder, optimizer: str) -> dict[str, np.ndarray]:
    """Each worker pushes a constant gradient, dense and sparse, another number of times."""
    keras.config.set_floatx("float64")
    with AutoDist(strategy_builder=builder) as autodist:
        dense, table = tf.Variable(np.ones([2, 2])), tf.Variable(np.ones([4, 2]))
        update = {"sgd": keras.optimizers.SGD(0.1), "adam": keras.optimizers.Adam(0.1)}[optimizer]
        update.build([dense, table])

        @autodist.function
        def step() -> tf.Tensor:
            with tf.GradientTape() as tape:
                rows = tf.nn.embedding_lookup(table, [0, 2, 2])
                loss = tf.reduce_sum(dense * CONSTANT) + tf.reduce_sum(rows)
            weights = [dense, table]
            update.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return loss

        for _ in range(PUSHES[autodist.rank]):
            step()
            time.sleep(0.01 * autodist.rank)
        autodist.sync()
        values = {"dense": dense.numpy(), "table": table.numpy()}
        slots = {f"slot {index}": np.array(slot) for index, slot in enumerate(update.variables)}
        return values | (slots if autodist.rank == 0 else {})


@on_three
@pytest.mark.parametrize(
    "builder",
    [PS(sync=False), Spread((1, 2), sync=False), InShards((0, 2), sync=False)],
    ids=["chief", "two-servers", "shards"],
)
def test_asynchronous_pushes_are_each_applied_once(cluster: Cluster, builder: StrategyBuilder) -> None:
    results = cluster.run(pushed, builder=builder, optimizer="sgd")
    rows = np.zeros([4, 2])
    rows[0], rows[2] = 1.0, 2.0
    for result in results:
        assert_close(result["dense"], 1.0 - 0.1 * sum(PUSHES) * CONSTANT, "dense")
        assert_close(result["table"], 1.0 - 0.1 * sum(PUSHES) * rows, "table")


@pytest.fixture
def float64() -> Iterator[None]:
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)


@on_three
def test_asynchronous_adam_counts_every_push(cluster: Cluster, float64: None) -> None:
    chief, *_ = cluster.run(pushed, builder=PS(sync=False), optimizer="adam")
    dense = tf.Variable(np.ones([2, 2]))
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build([dense])
    for _ in range(sum(PUSHES)):
        optimizer.apply_gradients([(tf.constant(CONSTANT), dense)])
    assert chief["slot 0"] == sum(PUSHES)
    assert_close(chief["dense"], dense.numpy(), "dense")


@on_three
def test_gradients_of_bounded_staleness_count_for_one_worker_of_all(cluster: Cluster) -> None:
    results = cluster.run(pushed, builder=PS(staleness=9), optimizer="sgd")
    for result in results:  # The loss is a mean: what it is of is not seen, as no example goes in.
        assert_close(result["dense"], 1.0 - 0.1 * sum(PUSHES) / 3 * CONSTANT, "dense")


def of_consistency(staleness: int, steps: int) -> list[tuple[float, float]]:
    """When each step was begun and ended (seconds of the machine's clock), with random pauses."""
    with AutoDist(strategy_builder=PS(staleness=staleness)) as autodist:
        step, _ = descending(autodist)
        rng = np.random.default_rng(autodist.rank)
        times = []
        for number in range(steps):
            time.sleep(rng.exponential(0.004) * (6 if number // 40 % 3 == autodist.rank else 1))
            begun = time.monotonic()
            step()
            times.append((begun, time.monotonic()))
        return times


@on_three
@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_no_worker_is_further_ahead_than_the_staleness(cluster: Cluster, staleness: int) -> None:
    everyone = cluster.run(of_consistency, staleness=staleness, steps=200)
    furthest = 0
    for worker, own in enumerate(everyone):
        others = [times for other, times in enumerate(everyone) if other != worker]
        for finished, (_, now) in enumerate(own, start=1):
            slowest_sent = min(sum(begun <= now for begun, _ in times) for times in others)
            slowest_finished = min(sum(ended <= now for _, ended in times) for times in others)
            assert finished - slowest_sent <= staleness
            furthest = max(furthest, finished - slowest_finished)
    assert furthest >= staleness


FEATURES = np.random.default_rng(2).normal(size=(9, 2))
SIZES = (2, 4, 3)
SLOW, FAST_STEPS, PAUSE = 2, 12, 0.25


def backed_up(wanted: int) -> dict[str, Any]:
    """Each worker trains on its own rows, again and again; the last one is slow."""
    with AutoDist(strategy_builder=PS(replicas_to_aggregate=wanted), batch="local") as autodist:
        weights, seen = tf.Variable(np.ones([2, 1])), tf.Variable(0, dtype=tf.int64)
        begin = sum(SIZES[: autodist.rank])
        own = FEATURES[begin : begin + SIZES[autodist.rank]]

        @autodist.function(batched=["x"])
        def step(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.matmul(x, weights) - 1.0))
            weights.assign_sub(0.1 * tape.gradient(loss, weights))
            seen.assign_add(1)

        is_slow = autodist.rank == SLOW
        step(own)
        begun = time.monotonic()
        for _ in range(3 if is_slow else FAST_STEPS):
            if is_slow:
                time.sleep(PAUSE)
            step(own)
        elapsed = time.monotonic() - begun
        autodist.sync()
        result: dict[str, Any] = {"weights": weights.numpy(), "elapsed": elapsed}
        if autodist.rank == 0:
            result |= {"accepted": autodist.accepted_gradients(), "dropped": autodist.dropped_gradients()}
        return result


@on_three
def test_backup_workers_keep_the_pace_of_the_fast_ones(cluster: Cluster) -> None:
    results = cluster.run(backed_up, wanted=2)
    chief = results[0]
    updates: dict[int, list[int]] = {}
    for step, worker in chief["accepted"]:
        updates.setdefault(step, []).append(worker)
    sent = {0: FAST_STEPS + 1, 1: FAST_STEPS + 1, 2: 4}
    assert all(len(workers) == 2 for workers in list(updates.values())[:FAST_STEPS])
    counted = Counter(worker for _, worker in chief["accepted"])
    assert {worker: counted[worker] + chief["dropped"][worker] for worker in sent} == sent
    assert chief["dropped"][SLOW] > 0
    assert chief["elapsed"] < FAST_STEPS * PAUSE / 2, "the fast ones wait for the slow one"

    weights = np.ones([2, 1])
    begins = np.cumsum((0, *SIZES))
    for step in sorted(updates):
        rows = np.concatenate([FEATURES[begins[worker] : begins[worker + 1]] for worker in updates[step]])
        weights = weights - 0.1 * 2 * rows.T @ (rows @ weights - 1.0) / len(rows)
    for result in results:
        assert_close(result["weights"], weights, "weights")


def several_batches_an_update() -> dict[str, Any]:
    with AutoDist(strategy_builder=PS(replicas_to_aggregate=4)) as autodist:
        step, weights = descending(autodist)
        for _ in range(8):
            step()
        autodist.sync()
        return {"weights": weights.numpy(), **({"dropped": autodist.dropped_gradients()} if autodist.rank == 0 else {})}


@pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
def test_an_update_may_wait_for_several_batches_of_each_worker(cluster: Cluster) -> None:
    chief, other = cluster.run(several_batches_an_update)
    assert chief["dropped"] == {0: 0, 1: 0}
    for result in (chief, other):
        assert_close(result["weights"], np.full(2, -4.0), "weights")


def fitted_apart(builder: StrategyBuilder) -> dict[str, list[float]]:
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 4))
    y = np.argmax(x @ rng.normal(size=(4, 3)), axis=1)
    with AutoDist(strategy_builder=builder) as autodist, autodist.scope():
        model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.02, global_clipnorm=1.0), loss, metrics=["accuracy"])
        stopping = keras.callbacks.EarlyStopping(monitor="loss", min_delta=0.01, patience=2)
        options = {"batch_size": 24, "verbose": 0, "validation_data": (x, y), "callbacks": [stopping]}
        history = model.fit(x, y, epochs=20, **options).history
        assert history["val_loss"][-1] < 0.9 * history["val_loss"][0]
        return {**history, "weights": [float(np.sum(weight)) for weight in model.get_weights()]}


@on_three
@pytest.mark.parametrize(
    "builder",
    [PS(sync=False), PSLoadBalancing(sync=False), PS(staleness=2), PS(replicas_to_aggregate=2)],
    ids=["asynchronous", "asynchronous-balanced", "stale", "backup"],
)
def test_fit_trains_and_all_workers_end_with_the_servers_weights(cluster: Cluster, builder: StrategyBuilder) -> None:
    first, *others = cluster.run(fitted_apart, builder=builder)
    assert all(other == first for other in others)
