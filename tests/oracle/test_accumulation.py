"""Gradients that are added up over several steps, in all usual forms: under every strategy as on one device."""

from collections.abc import Callable, Collection, Mapping
from itertools import product
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from tests.support.cluster_pool import THREE_WORKERS, TWO_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.oracle import Training, Values, assert_close, compare_function, session_values
from tests.support.served import InShards, Spread

STEPS = 7
ROWS = 9
BUILDERS: dict[str, Any] = {
    "PartitionedPS": "PartitionedPS(min_shard_bytes=1)",
    "ShardedOptimizer": "ShardedOptimizer",
    "PartitionedAR": "PartitionedAR(min_shard_bytes=1)",
    "PSLoadBalancing": "PSLoadBalancing",
    "two-servers": Spread((1, 0)),
    "mixed": Spread((1, None, 0)),
    "shards": InShards((0, 1, None)),
    "columns": InShards((1, 0), axis=1),
}


def batches() -> list[tuple[np.ndarray, ...]]:
    rng = np.random.default_rng(5)
    sizes = [4, 6, 5, 4, 3, 6, 4][:STEPS]
    return [(rng.normal(size=(n, 3)), rng.integers(0, ROWS, size=(n, 2)), rng.normal(size=(n, 2))) for n in sizes]


def weights(seed: int) -> dict[str, tf.Variable]:
    rng = np.random.default_rng(seed)
    shapes = {"table": (ROWS, 3), "first": (3, 4), "bias": (4,), "second": (4, 2)}
    return {name: tf.Variable(rng.normal(size=shape), name=name) for name, shape in shapes.items()}


def loss_of(w: Mapping[str, Any], x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    embedded = x + tf.reduce_mean(tf.gather(w["table"], ids), axis=1)
    hidden = tf.tanh(tf.matmul(embedded, w["first"]) + w["bias"])
    return tf.reduce_mean(tf.square(tf.matmul(hidden, w["second"]) - y))


def accumulators(w: Mapping[str, tf.Variable]) -> dict[str, tf.Variable]:
    return {name: tf.Variable(tf.zeros_like(one), trainable=False, name=f"{name}_sum") for name, one in w.items()}


def by_hand(seed: int, update: Callable[..., None]) -> Training:
    """`update` is given the weights, their sums and the number of the step."""
    w = weights(seed)
    sums, count = accumulators(w), tf.Variable(0, trainable=False, name="count")

    def step(x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(w, x, ids, y)
        for total, gradient in zip(sums.values(), tape.gradient(loss, list(w.values())), strict=True):
            total.assign_add(tf.convert_to_tensor(gradient))
        count.assign_add(1)
        update(w, sums, count)
        return loss

    sum_values = {f"{name}_sum": one for name, one in sums.items()}
    return Training(step, lambda: {**w, **sum_values, "count": count})


def in_a_branch(w: Any, sums: Any, count: tf.Variable) -> None:
    def apply() -> tf.Tensor:
        for name, weight in w.items():
            weight.assign_sub(0.1 * sums[name] / 2.0)
            sums[name].assign(tf.zeros_like(sums[name]))
        return tf.constant(True)

    tf.cond(tf.equal(count % 2, 0), apply, lambda: tf.constant(False))


def clipped_in_a_branch(w: Any, sums: Any, count: tf.Variable) -> None:
    def apply() -> None:
        clipped, _ = tf.clip_by_global_norm([one / 2.0 for one in sums.values()], 0.3)
        for weight, total, gradient in zip(w.values(), sums.values(), clipped, strict=True):
            weight.assign_sub(0.1 * gradient)
            total.assign(tf.zeros_like(total))

    if count % 2 == 0:
        apply()


def without_a_branch(w: Any, sums: Any, count: tf.Variable) -> None:
    is_update = tf.equal(count % 2, 0)
    for name, weight in w.items():
        weight.assign_sub(tf.where(is_update, 0.1 * sums[name] / 2.0, tf.zeros_like(sums[name])))
        sums[name].assign(tf.where(is_update, tf.zeros_like(sums[name]), sums[name]))


def cleared_in_a_branch(w: Any, sums: Any, count: tf.Variable) -> None:
    """Each weight is updated by itself, and one branch clears all sums."""
    for name, weight in w.items():
        weight.assign_sub(tf.where(count % 2 == 0, 0.1 * sums[name], 0.0))
    if count % 2 == 0:
        for one in sums.values():
            one.assign(tf.zeros_like(one))


BY_HAND = {one.__name__: one for one in (in_a_branch, clipped_in_a_branch, without_a_branch, cleared_in_a_branch)}


def accumulate_by_hand(builder: str, how: str) -> Values:
    return compare_function(
        lambda seed: by_hand(seed, BY_HAND[how]), batches(), autodist={"strategy_builder": BUILDERS[builder]}
    )


OPTIMIZERS: dict[str, Callable[[], keras.Optimizer]] = {
    "adam": lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2, global_clipnorm=0.5),
    "adamw-ema": lambda: keras.optimizers.AdamW(
        0.05, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=3
    ),
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, gradient_accumulation_steps=2),
    "loss-scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.05), initial_scale=8.0, dynamic_growth_steps=2
    ),
}


def accumulate_by_keras(builder: str, optimizer: str, *, sparse: bool) -> Values:
    def build(seed: int) -> Training:
        keras.config.set_floatx("float64")
        w, own = weights(seed), OPTIMIZERS[optimizer]()
        if not sparse:
            del w["table"]
        trained = list(w.values())
        own.build(trained)

        def step(x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = loss_of({"table": np.ones((ROWS, 3)), **w}, x, ids, y)
                scaled = own.scale_loss(loss)
            own.apply_gradients(zip(tape.gradient(scaled, trained), trained, strict=True))
            return loss

        slots = {f"slot_{index}": variable.value for index, variable in enumerate(own.variables)}
        return Training(step, lambda: {**w, **slots})

    return compare_function(build, batches(), autodist={"strategy_builder": BUILDERS[builder]})


# -- TensorFlow 1 -----------------------------------------------------------------------------------------------------


def graph_of(how: str, seed: int) -> tuple[list[Any], Any, Any, Any]:
    """What is fed; the loss; what is run in each step, and what in every second one beside."""
    feeds = [
        tf.compat.v1.placeholder(dtype, shape)
        for dtype, shape in ((tf.float64, (None, 3)), (tf.int64, (None, 2)), (tf.float64, (None, 2)))
    ]
    w = {
        name: tf.compat.v1.get_variable(name, initializer=tf.constant(np.asarray(value)))
        for name, value in initial(seed).items()
    }
    loss = loss_of(w, *feeds)
    optimizer = tf.compat.v1.train.AdamOptimizer(0.05)
    gradients = [tf.convert_to_tensor(one) for one in tf.gradients(loss, list(w.values()))]
    sums = [tf.Variable(tf.zeros_like(one.read_value()), trainable=False) for one in w.values()]
    adding = [total.assign_add(gradient) for total, gradient in zip(sums, gradients, strict=True)]

    def apply() -> tf.Operation:
        if how == "runs-by-hand":
            averages = [total.read_value() / 2.0 for total in sums]
            with tf.control_dependencies(averages):
                update = [one.assign_sub(0.1 * mean) for one, mean in zip(w.values(), averages, strict=True)]
                return tf.group(*update, *[total.assign(tf.zeros_like(total)) for total in sums])
        update = optimizer.apply_gradients(
            [(total.read_value() / 2.0, one) for total, one in zip(sums, w.values(), strict=True)]
        )
        with tf.control_dependencies([update]):
            return tf.group(*[total.assign(tf.zeros_like(total)) for total in sums])

    if how != "branch":
        return feeds, loss, tf.group(*adding), apply()
    count = tf.Variable(0, trainable=False)
    with tf.control_dependencies([*adding, count.assign_add(1)]):
        return feeds, loss, tf.cond(tf.equal(count.read_value() % 2, 0), apply, tf.no_op), None


def initial(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"table": (ROWS, 3), "first": (3, 4), "bias": (4,), "second": (4, 2)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def accumulate_in_a_graph(builder: str, how: str) -> Values:
    with AutoDist(strategy_builder=BUILDERS[builder]) as distributed:
        with tf.Graph().as_default() as plain_graph:
            plain_feeds, plain_loss, plain_train, plain_apply = graph_of(how, 1)
            plain = tf.compat.v1.Session(graph=plain_graph)
            plain.run(tf.compat.v1.global_variables_initializer())
        with tf.Graph().as_default() as graph, distributed.scope():
            feeds, loss, train, apply = graph_of(how, 1)
            session = distributed.create_distributed_session()
        before = session_values(plain_graph, plain)
        for number, batch in enumerate(batches()):
            wanted, _ = plain.run([plain_loss, plain_train], dict(zip(plain_feeds, batch, strict=True)))
            got, _ = session.run([loss, train], dict(zip(feeds, batch, strict=True)))
            assert_close(got, wanted, f"the loss of step {number + 1}")
            if apply is not None and number % 2:
                plain.run(plain_apply)
                session.run(apply)
            distributed.sync()
            values = session_values(graph, session)
            for name, value in session_values(plain_graph, plain).items():
                assert_close(values[name], value, f"variable '{name}' after step {number + 1}")
        assert not np.array_equal(before["first"], values["first"])
        return values


def cells(*forms: Any, without: Collection[tuple[Any, str]] = ()) -> list[Any]:
    """Each form under each strategy, but for some; all but every fourth are slow, some of them on three workers."""
    found = []
    for i, form in enumerate(forms):
        for j, builder in enumerate(BUILDERS):
            if (form, builder) in without:
                continue
            is_slow = (i + j) % 4 != 0
            shape = THREE_WORKERS if is_slow and (i + j) % 2 else TWO_WORKERS
            marks = pytest.mark.slow if is_slow else ()
            name = "-".join([shape.name, builder, *map(str, form if isinstance(form, tuple) else [form])])
            found.append(pytest.param(shape, builder, form, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("cluster", "builder", "how"), cells(*BY_HAND), indirect=["cluster"], scope="module")
def test_gradients_are_added_up_by_hand(cluster: Cluster, builder: str, how: str) -> None:
    same(cluster.run(accumulate_by_hand, builder=builder, how=how))


ROWS_OVER = {(("loss-scale", "sparse"), builder) for builder in ("PartitionedPS", "shards", "columns")}
"""A loss scale looks whether rows are finite in a table of them, which shards do not have: refused by name."""


@pytest.mark.parametrize(
    ("cluster", "builder", "form"),
    cells(*product(OPTIMIZERS, ("dense", "sparse")), without=ROWS_OVER),
    indirect=["cluster"],
    scope="module",
)
def test_a_keras_optimizer_adds_gradients_up_or_scales_the_loss(
    cluster: Cluster, builder: str, form: tuple[str, str]
) -> None:
    same(cluster.run(accumulate_by_keras, builder=builder, optimizer=form[0], sparse=form[1] == "sparse"))


@pytest.mark.parametrize(
    ("cluster", "builder", "how"), cells("runs", "runs-by-hand", "branch"), indirect=["cluster"], scope="module"
)
def test_a_graph_adds_gradients_up(cluster: Cluster, builder: str, how: str) -> None:
    same(cluster.run(accumulate_in_a_graph, builder=builder, how=how))
