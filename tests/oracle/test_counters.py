"""Counters that each worker keeps, and a server of one of them too: read, counted and read again as on one device."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.parameter_server import PS
from tests.support.cluster_pool import UNEVEN_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.loop_programs import control_flow_of_tensorflow_1
from tests.support.oracle import GraphTraining, Training, Values, compare_function, compare_graph
from tests.support.served import InShards, Spread

pytestmark = pytest.mark.parametrize(
    "cluster", [UNEVEN_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)

BUILDERS: dict[str, StrategyBuilder] = {
    "server": PS(),
    "server-and-mirrored": Spread((0, None)),
    "shards": InShards((0, None, 1)),
    "two-servers": Spread((0, 1)),
}


def batches() -> list[tuple[np.ndarray, ...]]:
    rng = np.random.default_rng(7)
    return [(rng.normal(size=(size, 3)), rng.normal(size=(size, 2))) for size in (6, 5, 1, 7)]


def rate_of_a_branch(gradients: Any, weights: Any, count: tf.Variable, x: tf.Tensor) -> Any:
    """Every other step trains, at a rate that the branch reads of the counter."""
    if count % 2 == 0:
        for gradient, weight in zip(gradients, weights[:2], strict=True):
            weight.assign_sub(0.1 / tf.cast(count + 1, tf.float64) * gradient)
    count.assign_add(1)
    return tf.reduce_mean(x)


def counted_before_it_is_read(gradients: Any, weights: Any, count: tf.Variable, x: tf.Tensor) -> Any:
    """Each example's result is made of the counter as this step leaves it."""
    for gradient, weight in zip(gradients, weights[:2], strict=True):
        weight.assign_sub(0.1 / tf.cast(count + 1, tf.float64) * gradient)
    count.assign_add(1)
    return tf.reduce_sum(x, axis=1) * tf.cast(count, tf.float64)


def added_up_in_a_loop(gradients: Any, weights: Any, count: tf.Variable, x: tf.Tensor) -> Any:
    """A loop adds the counter to another variable, which makes the rate; a second update is made by the next count."""
    total = weights[2]
    for _ in tf.range(2):
        total.assign_add(count + 1)
    for gradient, weight in zip(gradients, weights[:2], strict=True):
        weight.assign_sub(0.1 / tf.cast(total, tf.float64) * gradient)
    count.assign_add(1)
    for gradient, weight in zip(gradients, weights[:2], strict=True):
        weight.assign_sub(0.01 * tf.cast(count, tf.float64) * gradient)
    return tf.reduce_mean(x)


CASES = {one.__name__: one for one in (rate_of_a_branch, counted_before_it_is_read, added_up_in_a_loop)}


def train(program: str, builder: str) -> Values:
    def build(seed: int) -> Training:
        rng = np.random.default_rng(seed)
        first, second = (tf.Variable(rng.normal(size=shape), name=name) for name, shape in SHAPES.items())
        count, total = (tf.Variable(0, dtype=tf.int64, trainable=False, name=name) for name in ("count", "total"))

        def step(x: tf.Tensor, y: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.tanh(x @ first) @ second - y))
            gradients = tape.gradient(loss, [first, second])
            return loss, CASES[program](gradients, [first, second, total], count, x)

        return Training(step, lambda: {"first": first, "second": second, "count": count, "total": total})

    return compare_function(build, batches(), autodist={"strategy_builder": BUILDERS[builder]})


SHAPES = {"first": (3, 4), "second": (4, 2)}


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("case", CASES)
def test_a_counter_is_that_of_one_device(cluster: Cluster, case: str, builder: str) -> None:
    same(cluster.run(train, program=case, builder=builder))


def network() -> tuple[tuple[tf.Tensor, ...], tuple[tf.Variable, ...], tf.Tensor]:
    """What a graph is fed, its weights, and their loss."""
    x, y = (tf.compat.v1.placeholder(tf.float64, (None, columns)) for columns in (3, 2))
    first, second = (
        tf.compat.v1.get_variable(name, shape, tf.float64, use_resource=True) for name, shape in SHAPES.items()
    )
    return (x, y), (first, second), tf.reduce_mean(tf.square(tf.tanh(x @ first) @ second - y))


def counter(name: str) -> tf.Variable:
    return tf.compat.v1.get_variable(name, (), tf.int64, tf.zeros_initializer(), trainable=False, use_resource=True)


def guarded_graph() -> GraphTraining:
    """A check of a weight, and rates that are made of the counter: each stands in branches of TensorFlow 1."""
    with control_flow_of_tensorflow_1():
        feeds, (first, second), loss = network()
        count = counter("count")
        with tf.control_dependencies([tf.compat.v1.Assert(tf.reduce_all(first < 9.0), [first])]):
            loss = tf.identity(loss)
        rate = tf.cond(
            tf.equal(count.read_value() % 2, 0),
            lambda: 0.1 / tf.cast(count.read_value() + 1, tf.float64),
            lambda: tf.constant(0.05, tf.float64),
        )
        rate *= tf.compat.v1.train.piecewise_constant(
            count, [0, 2], [tf.constant(a, tf.float64) for a in (1.0, 0.5, 0.2)]
        )
        gradients = tf.gradients(loss, [first, second])
        updates = [weight.assign_sub(rate * one) for weight, one in zip((first, second), gradients, strict=True)]
        with tf.control_dependencies(updates):
            counted = count.assign_add(1)
    return GraphTraining(feeds, tf.group(*updates, counted), loss)


def overwritten_graph() -> GraphTraining:
    """The weights are updated; every other step, a branch of TensorFlow 1 halves one and counts by itself."""
    with control_flow_of_tensorflow_1():
        feeds, (first, second), loss = network()
        count, halved = counter("count"), counter("halved")
        counting = tf.cond(
            tf.equal(count.read_value() % 2, 0), lambda: tf.group(halved.assign_add(1)), lambda: tf.no_op()
        )
        with tf.control_dependencies([counting]):
            rate = 0.1 / tf.cast(halved.read_value(), tf.float64)
        gradients = tf.gradients(loss, [first, second])
        updates = [weight.assign_sub(rate * one) for weight, one in zip((first, second), gradients, strict=True)]
        with tf.control_dependencies(updates):
            halving = tf.cond(
                tf.equal(count.read_value() % 2, 0),
                lambda: tf.group(first.assign(0.5 * first.read_value())),
                lambda: tf.no_op(),
            )
        with tf.control_dependencies([halving]):
            counted = count.assign_add(1)
    return GraphTraining(feeds, tf.group(*updates, counted), loss)


def clipped_graph() -> GraphTraining:
    """A norm over all gradients clips them; of it each is scaled in a branch, by a constant or the counter."""
    with control_flow_of_tensorflow_1():
        feeds, (first, second), loss = network()
        count = counter("count")
        clipped, norm = tf.clip_by_global_norm(tf.gradients(loss, [first, second]), 0.5)
        even = tf.equal(count.read_value() % 2, 0)

        def step(gradient: tf.Tensor) -> tf.Tensor:
            return tf.cond(
                even,
                lambda: gradient * tf.constant(0.1, tf.float64),
                lambda: gradient / tf.cast(count.read_value() + 4, tf.float64),
            )

        updates = [weight.assign_sub(step(one)) for weight, one in zip((first, second), clipped, strict=True)]
        with tf.control_dependencies(updates):
            counted = count.assign_add(1)
    return GraphTraining(feeds, tf.group(*updates, counted), loss * norm)


GRAPHS = {one.__name__: one for one in (guarded_graph, overwritten_graph, clipped_graph)}


def train_a_graph(program: str, builder: str) -> Values:
    return compare_graph(GRAPHS[program], batches(), autodist={"strategy_builder": BUILDERS[builder]})


WHOLE = {
    "guarded_graph": BUILDERS,
    "overwritten_graph": ("server", "server-and-mirrored"),
    "clipped_graph": ("server", "shards", "two-servers"),
}
"""By which builders each graph is trained; others are refused: what a branch writes cannot be cut into shards."""


@pytest.mark.parametrize(("program", "builder"), [(one, builder) for one in GRAPHS for builder in WHOLE[one]])
def test_a_counter_in_a_branch_of_tensorflow_1_is_that_of_one_device(
    cluster: Cluster, program: str, builder: str
) -> None:
    same(cluster.run(train_a_graph, program=program, builder=builder))
