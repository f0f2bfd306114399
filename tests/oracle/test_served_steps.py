"""Steps that are hard to divide between workers and servers: equal to one device.

One module, though long: its cluster starts once.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy
from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.parameter_server import PS, PSLoadBalancing
from tests.support.cluster_pool import TWO_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.oracle import Training, Values, assert_close, compare_function
from tests.support.served import InShards, Spread

pytestmark = pytest.mark.parametrize(
    "cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)

ONE, TWO, SHARDS = PS(), Spread((0, 1)), InShards((0, 1), or_whole=True)
SIZES = (6, 5, 1, 4)


class Shrinking:
    """Two shards, of a variable that is trained by itself another axis'."""

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        return InShards((0, 1), axis=int(len(item.trainable_variables) == 1)).build(item, resources)


class Cutting:
    """Whole, and in shards where it is trained by itself."""

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        return (SHARDS if len(item.trainable_variables) == 1 else ONE).build(item, resources)


class State:
    """A table, two weights, and state for updates."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self.all = {
            "a": tf.Variable(rng.normal(size=(3, 2)), name="a"),
            "b": tf.Variable(rng.normal(size=(2, 2)), name="b"),
            "table": tf.Variable(rng.normal(size=(5, 2)), name="table"),
            "sums": tf.Variable(np.zeros((5, 2)), trainable=False, name="sums"),
            "seen": tf.Variable(np.zeros(5), trainable=False, name="seen"),
            "count": tf.Variable(0.0, dtype=tf.float64, trainable=False, name="count"),
        }

    def __getattr__(self, name: str) -> tf.Variable:
        return vars(self)["all"][name]

    def rows(self, ids: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.IndexedSlices]:
        """A loss of looked-up rows, and its gradient."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.gather(self.table, ids) - y))
        return loss, tape.gradient(loss, self.table)

    def layers(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """A loss of two layers, and its gradients."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ self.a) @ self.b - y))
        return loss, tape.gradient(loss, [self.a, self.b])


def descend(table: tf.Variable, gradient: tf.IndexedSlices, rate: Any = 0.1) -> None:
    table.scatter_sub(tf.IndexedSlices(rate * gradient.values, gradient.indices))


def squares_of_rows(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    loss, gradient = s.rows(ids, y)
    s.sums.scatter_add(tf.IndexedSlices(gradient.values * gradient.values, gradient.indices))
    descend(s.table, gradient)
    return loss


def counts_of_rows(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    loss, gradient = s.rows(ids, y)
    s.seen.scatter_add(tf.IndexedSlices(tf.ones_like(gradient.indices, dtype=tf.float64), gradient.indices))
    descend(s.table, gradient)
    return loss


def a_rate_by_the_number_of_rows(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    loss, gradient = s.rows(ids, y)
    descend(s.table, gradient, 0.5 / tf.cast(tf.size(gradient.indices), tf.float64))
    return loss


def rows_and_their_regularizer(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.gather(s.table, ids) - y))
        loss += 0.1 * tf.reduce_sum(tf.square(tf.gather(s.table, [0, 3])))
    gradient = tape.gradient(loss, s.table)
    descend(s.table, gradient)
    return loss


def rows_beside_layers(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    first, gradient = s.rows(ids, y)
    second, (da, db) = s.layers(x, y)
    descend(s.table, gradient, 0.1 / tf.cast(tf.shape(x)[0], tf.float64))
    s.a.assign_sub(0.1 * da)
    s.b.assign_sub(0.1 * db)
    return first + second


def a_norm_of_another(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    loss, (da, db) = s.layers(x, y)
    s.a.assign_sub(0.1 * da)
    s.b.assign_sub(0.1 * tf.norm(da) * db)
    return loss


def late_gradients(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    """The first server's norm is ready long before the second one's own gradient."""
    loss, (da, _) = s.layers(x, y)
    with tf.GradientTape() as tape:
        slow = tf.eye(2, dtype=tf.float64) * 1.0
        for _ in range(60):
            slow = tf.linalg.inv(tf.linalg.inv(slow + 0.0 * tf.reduce_sum(x)))
        late = tf.reduce_mean(tf.square(tf.tanh(x @ tf.stop_gradient(s.a)) @ s.b @ slow - y))
    db = tape.gradient(late, s.b)
    s.a.assign_sub(0.1 * da)
    s.b.assign_sub(0.1 * tf.norm(da) * db)
    return loss + late


def a_count_that_is_used_at_once(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    s.count.assign_add(1.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.tanh(x @ s.a) @ s.b * tf.exp(-0.1 * s.count) - y))
    da, db = tape.gradient(loss, [s.a, s.b])
    s.a.assign_sub(0.3 / s.count * da)
    s.b.assign_sub(0.3 / s.count * db)
    return loss


def a_count_that_is_read_late(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    loss, (da, db) = s.layers(x, y)
    slow = tf.eye(300, dtype=tf.float64)
    for _ in range(12):
        slow = slow @ slow
    with tf.control_dependencies([slow]):
        before = s.count.read_value()
    s.a.assign_sub(0.3 / (1.0 + s.count) * da)
    s.b.assign_sub(0.3 / (1.0 + s.count) * db)
    s.count.assign_add(1.0)
    return loss, before


def a_count_beside_new_weights(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    """One op reads the number before it is counted on, and weights after their update."""
    loss, (da, db) = s.layers(x, y)
    s.a.assign_sub(0.3 / (1.0 + s.count) * da)
    s.b.assign_sub(0.3 / (1.0 + s.count) * db)
    shown = tf.cond(s.count < 2.0, lambda: s.count * tf.reduce_sum(s.a), lambda: s.count + tf.reduce_sum(s.b))
    s.count.assign_add(1.0)
    return loss, shown


def rows_that_are_returned(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    loss, gradient = s.rows(ids, y)
    descend(s.table, gradient)
    return loss, tf.reduce_sum(tf.square(gradient.values)), tf.size(gradient.indices)


def a_target_that_follows_in_a_branch(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    """As a DQN's: one op reads what several servers have updated, and writes what none of them holds."""
    loss, (da, db) = s.layers(x, y)
    followed = tf.reduce_sum(tf.square(s.sums))
    s.a.assign_sub(0.1 * da)
    s.b.assign_sub(0.1 * db)
    s.count.assign_add(1.0)

    def follow() -> tf.Tensor:
        s.sums.assign(tf.concat([s.a, s.b], axis=0))
        return tf.constant(True)

    tf.cond(tf.equal(tf.math.floormod(s.count, 2.0), 0.0), follow, lambda: tf.constant(False))
    return loss, followed


def averages_in_a_branch(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    """As stochastic weight averaging: one op reads weights that live apart, and writes what is none's state."""
    loss, (da, db) = s.layers(x, y)
    s.a.assign_sub(0.1 * da)
    s.b.assign_sub(0.1 * db)
    s.count.assign_add(1.0)
    if s.count % 2.0 == 0.0:
        s.seen.assign_add((tf.reduce_sum(s.b) - s.seen) / s.count)
        s.sums.assign_add((tf.concat([s.a, s.b], axis=0) - s.sums) / s.count)
    return loss


def a_climb_and_back(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    """Sharpness-aware: each weight is written, read by a second forward pass, and written twice more."""
    first, gradients = s.layers(x, y)
    norm = tf.linalg.global_norm(gradients)
    moves = [0.05 * gradient / (norm + 1e-12) for gradient in gradients]
    for weight, move in zip((s.a, s.b), moves, strict=True):
        weight.assign_add(move)
    sharp, gradients = s.layers(x, y)
    for weight, move, gradient in zip((s.a, s.b), moves, gradients, strict=True):
        weight.assign_sub(move)
        weight.assign_sub(0.1 * gradient)
    return first, sharp


def two_epochs(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    """Each trains on the same batch, at a rate of the steps so far, which is returned between."""
    seen = []
    for _ in range(2):
        loss, (da, db) = s.layers(x, y)
        s.a.assign_sub(0.1 / (1.0 + s.count) * da)
        s.b.assign_sub(0.1 / (1.0 + s.count) * db)
        s.count.assign_add(1.0)
        seen += [loss, tf.reduce_mean(tf.matmul(x, s.a)), 2.0 * s.count]
    return seen


def a_look_between_two_writes(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    """Nothing that is sent depends on what is read between."""
    loss, (da, db) = s.layers(x, y)
    s.a.assign_sub(0.1 * da)
    seen = tf.reduce_mean(tf.matmul(x, s.a))
    s.a.assign(0.9 * s.a)
    s.b.assign_sub(0.1 * db)
    return loss, seen


def a_decay_before_all(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    """Weights are written before the step reads them."""
    s.a.assign(0.9 * s.a)
    s.b.assign(tf.clip_by_value(s.b, -1.0, 1.0))
    loss, (da, db) = s.layers(x, y)
    s.a.assign_sub(0.1 * da)
    s.b.assign_sub(0.1 * db)
    return loss


def projected_gradients(s: State, x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
    """Each loses its part along another one's, of all weights together, laid out flat."""
    first, one = s.layers(x, y)
    second, other = s.layers(tf.sin(x), y)
    flat, along = (tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0) for parts in (one, other))
    share = tf.minimum(tf.tensordot(flat, along, 1), 0.5) / (tf.tensordot(along, along, 1) + 1e-12)
    da, db = tf.split(flat - share * along, [6, 4])
    s.a.assign_sub(0.1 * tf.reshape(da, [3, 2]))
    s.b.assign_sub(0.1 * (tf.reshape(db, [2, 2]) + other[1]))
    return first, second


CASES: dict[Callable[..., Any], tuple[str, ...]] = {
    squares_of_rows: ("table", "sums"),
    counts_of_rows: ("table", "seen"),
    a_rate_by_the_number_of_rows: ("table",),
    rows_and_their_regularizer: ("table",),
    rows_beside_layers: ("table", "a", "b"),
    a_norm_of_another: ("a", "b"),
    late_gradients: ("a", "b"),
    a_count_that_is_used_at_once: ("a", "b", "count"),
    a_count_that_is_read_late: ("a", "b", "count"),
    a_count_beside_new_weights: ("a", "b", "count"),
    rows_that_are_returned: ("table",),
    a_target_that_follows_in_a_branch: ("a", "b", "sums", "count"),
    averages_in_a_branch: ("a", "b", "sums", "seen", "count"),
    a_climb_and_back: ("a", "b"),
    two_epochs: ("a", "b", "count"),
    a_look_between_two_writes: ("a", "b"),
    a_decay_before_all: ("a", "b"),
    projected_gradients: ("a", "b"),
}
"""The steps, and the variables that they touch."""


def batches() -> list[tuple[np.ndarray, ...]]:
    rng = np.random.default_rng(7)
    return [(rng.normal(size=(n, 3)), rng.integers(0, 4, n), rng.normal(size=(n, 2))) for n in SIZES]


def train(steps: Callable[..., Any], builder: StrategyBuilder) -> Values:
    def build(seed: int) -> Training:
        state = State(seed)

        def step(x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> Any:
            return steps(state, x, ids, y)

        return Training(step, lambda: {name: state.all[name] for name in CASES[steps]})

    return compare_function(build, batches(), autodist={"strategy_builder": builder})


@pytest.mark.parametrize("builder", [ONE, TWO, SHARDS], ids=["one", "two", "shards"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.replace("_", "-"))
def test_a_step_is_that_of_one_device(cluster: Cluster, case: Callable[..., Any], builder: StrategyBuilder) -> None:
    same(cluster.run(train, steps=case, builder=builder))


def test_what_a_branch_makes_of_variables_that_live_apart_lives_on_the_workers(cluster: Cluster) -> None:
    same(cluster.run(train, steps=averages_in_a_branch, builder=Spread((0, None))))


def asserted(builder: StrategyBuilder) -> None:
    with AutoDist(strategy_builder=builder) as autodist:
        state = State(1)

        @autodist.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            loss, (da, _) = state.layers(x, y)
            tf.debugging.assert_less(tf.norm(da), tf.constant(1e-9, tf.float64), message="too large")
            state.a.assign_sub(0.1 * da)
            return loss

        x, _, y = batches()[0]
        with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
            step(x, y)


def test_what_is_asserted_of_a_gradient_on_a_server_is_seen(cluster: Cluster) -> None:
    cluster.run(asserted, builder=ONE)


def two_programs(builder: StrategyBuilder) -> Values:
    """All weights, then one of them alone: its home is that of the first program."""
    with AutoDist(strategy_builder=builder) as autodist:
        both = [State(1), State(1)]

        def steps(state: State) -> tuple[Callable[..., Any], Callable[..., Any]]:
            def everything(x: tf.Tensor, y: tf.Tensor) -> None:
                _, (da, db) = state.layers(x, y)
                state.a.assign_sub(0.1 * da)
                state.b.assign_sub(0.1 * db)

            def head(x: tf.Tensor, y: tf.Tensor) -> None:
                _, (_, db) = state.layers(x, y)
                state.b.assign_sub(0.1 * db)

            return everything, head

        plain = [tf.function(step, reduce_retracing=True) for step in steps(both[0])]
        compiled = [autodist.function(step) for step in steps(both[1])]
        x, _, y = batches()[0]
        for number in (0, 1, 1, 0, 1):
            plain[number](x, y)
            compiled[number](x, y)
            for name in ("a", "b"):
                assert_close(getattr(both[1], name), getattr(both[0], name).numpy(), name)
        return {name: getattr(both[1], name).numpy() for name in ("a", "b")}


@pytest.mark.parametrize(
    "builder", [PSLoadBalancing(), SHARDS, Shrinking(), Cutting()], ids=["whole", "shards", "other-shards", "cut-later"]
)
def test_a_variable_stays_on_the_server_that_it_has(cluster: Cluster, builder: StrategyBuilder) -> None:
    same(cluster.run(two_programs, builder=builder))


def assigned_between_steps(builder: StrategyBuilder) -> list[float]:
    """The server's worker writes late; the other one's next step sees it all the same."""
    with AutoDist(strategy_builder=builder) as autodist:
        table = tf.Variable(np.ones([4, 2]))

        @autodist.function
        def step(ids: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.gather(table, ids))
            descend(table, tape.gradient(loss, table), 0.0)
            return loss

        losses = []
        for number in range(14):
            if autodist.is_chief:
                time.sleep(0.1)
            table.assign(np.full([4, 2], float(number)))
            losses.append(float(step(np.arange(4))))
        if autodist.is_chief:
            time.sleep(0.3)
        table.assign(np.full([4, 2], 99.0))
        autodist.sync()
        return [*losses, float(table.numpy()[0, 0])]


@pytest.mark.parametrize("builder", [ONE, SHARDS], ids=["whole", "shards"])
def test_what_all_workers_assign_between_steps_counts_for_all(cluster: Cluster, builder: StrategyBuilder) -> None:
    assert same(cluster.run(assigned_between_steps, builder=builder)) == [*map(float, range(14)), 99.0]


def without_examples(builder: StrategyBuilder) -> list[float]:
    with AutoDist(strategy_builder=builder) as autodist:
        weights = tf.Variable(np.ones(2))

        @autodist.function
        def step(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.reduce_sum(x * weights, axis=1))
            weights.assign_sub(0.1 * tape.gradient(loss, weights))

        for rows in (4, 1):
            step(np.ones([rows, 2]))
        autodist.sync()
        return list(weights.numpy())


@pytest.mark.parametrize("builder", [PS(sync=False), PS(staleness=1), PS(replicas_to_aggregate=2)])
def test_a_worker_without_examples_adds_nothing(cluster: Cluster, builder: StrategyBuilder) -> None:
    (weight, _) = same(cluster.run(without_examples, builder=builder))
    gradients = {"False": 3.0, "True": 1.5 if builder.staleness else 2.0}[str(builder.sync)]  # type: ignore[attr-defined]
    assert_close(np.float64(weight), np.float64(1.0 - 0.1 * gradients), "weight")
