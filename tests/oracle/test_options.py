"""What a user may choose, and the shapes a step may have: each equal to one device."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

from autodist_py import AutoDist
from tests.support.cluster_pool import (
    SHAPES,
    THREE_WORKERS,
    TWO_REPLICAS,
    TWO_WORKERS,
    UNEVEN_WORKERS,
    CaseFailedError,
    Cluster,
)
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.oracle import SINGLE, Parts, Training, Values, assert_close, compare_function, compare_graph
from tests.support.oracle_programs import (
    FEATURES,
    FUNCTION_FAMILIES,
    SIZES,
    HandWritten,
    batches,
    graph_program,
    initial_values,
    keras_3,
    predict,
    squared_error,
)

OWN_SIZES = [(3, 2, 4), (4, 1, 2), (0, 3, 1), (2, 2, 2), (1, 0, 2)]
"""For each step the rows of each worker; some of them have none."""

on_many_workers = pytest.mark.parametrize(
    "cluster", [TWO_WORKERS, UNEVEN_WORKERS, THREE_WORKERS], ids=lambda s: s.name, indirect=True, scope="module"
)
on_two_kinds = pytest.mark.parametrize(
    "cluster", [TWO_REPLICAS, UNEVEN_WORKERS], ids=lambda s: s.name, indirect=True, scope="module"
)
on_all = pytest.mark.parametrize("cluster", SHAPES, ids=lambda s: s.name, indirect=True, scope="module")


def train(
    door: str,
    model: str = "both",
    optimizer: str = "sgd",
    *,
    clip: bool = True,
    reduction: str = "mean",
    dtype: str = "float64",
    own_sizes: list[tuple[int, ...]] | None = None,
    **options: Any,
) -> Values:
    parts = None if own_sizes is None else Parts(own_sizes)
    sizes = SIZES if own_sizes is None else [sum(step) for step in own_sizes]
    tolerance = SINGLE if dtype == "float32" else 1e-9
    given: dict[str, Any] = {"tolerance": tolerance, "parts": parts, "autodist": options}
    data = batches(model, sizes, dtype=dtype)
    if door == "graph":
        return compare_graph(
            graph_program(model, optimizer, clip=clip, reduction=reduction, dtype=dtype), data, **given
        )
    extra = {"dtype": dtype} if door == "hand-written" else {}
    build = FUNCTION_FAMILIES[door](model, optimizer, clip=clip, reduction=reduction, **extra)
    return compare_function(build, data, **given)


@on_many_workers
@pytest.mark.parametrize(("door", "optimizer"), [("hand-written", "adam"), ("keras-3", "sgd"), ("graph", "adagrad")])
def test_each_worker_may_feed_its_own_part_of_the_batch(cluster: Cluster, door: str, optimizer: str):
    own_sizes = [step[: cluster.shape.num_workers] for step in OWN_SIZES]
    same(cluster.run(train, door=door, optimizer=optimizer, own_sizes=own_sizes))


@on_many_workers
def test_a_sum_over_the_workers_own_parts_is_a_sum_over_all(cluster: Cluster):
    own_sizes = [step[: cluster.shape.num_workers] for step in OWN_SIZES]
    sums: dict[str, Any] = {"reduction": "sum", "loss_reduction": "sum", "fetch_reduction": "sum"}
    same(cluster.run(train, door="hand-written", optimizer="momentum", own_sizes=own_sizes, **sums))


@on_two_kinds
@pytest.mark.parametrize("door", ["hand-written", "keras-3", "graph"])
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_a_loss_that_sums_is_summed(cluster: Cluster, door: str, clip: bool):
    same(cluster.run(train, door=door, clip=clip, reduction="sum", loss_reduction="sum", fetch_reduction="sum"))


@on_two_kinds
@pytest.mark.parametrize("spec", ["AUTO", "RING"])
@pytest.mark.parametrize(("chunk_size", "bytes_per_pack"), [(1, 0), (2, 0), (128, 0), (128, 1), (128, 150)])
def test_how_gradients_are_grouped_and_reduced_changes_no_number(
    cluster: Cluster, spec: str, chunk_size: int, bytes_per_pack: int
):
    builder = f"AllReduce(chunk_size={chunk_size}, all_reduce_spec='{spec}', bytes_per_pack={bytes_per_pack})"
    same(cluster.run(train, door="hand-written", optimizer="momentum", strategy_builder=builder))


@on_two_kinds
@pytest.mark.parametrize("local", ["one_device", "hierarchical"])
def test_how_a_workers_replicas_are_added_up_changes_no_number(cluster: Cluster, local: str):
    builder = f"AllReduce(local='{local}')"
    same(cluster.run(train, door="hand-written", optimizer="momentum", strategy_builder=builder))


@on_two_kinds
def test_without_gpus_replicas_are_copied_where_nccl_would_add_them_up_if_that_is_allowed(cluster: Cluster):
    builder = "AllReduce(local='nccl')"
    same(cluster.run(train, door="hand-written", optimizer="momentum", strategy_builder=builder, strict=False))
    with pytest.raises(CaseFailedError, match=r"needs NCCL, which runs on GPUs only.*or AutoDist\(strict=False\)"):
        cluster.run(train, door="hand-written", optimizer="momentum", strategy_builder=builder)


@on_two_kinds
def test_without_gpus_rings_do_what_nccl_would_where_that_is_allowed(cluster: Cluster):
    builder = "AllReduce(all_reduce_spec='NCCL')"
    same(cluster.run(train, door="hand-written", optimizer="momentum", strategy_builder=builder, strict=False))
    with pytest.raises(CaseFailedError, match=r"needs NCCL, which runs on GPUs only.*or AutoDist\(strict=False\)"):
        cluster.run(train, door="hand-written", optimizer="momentum", strategy_builder=builder)


@on_two_kinds
@pytest.mark.parametrize("door", ["hand-written", "keras-3", "graph"])
def test_summing_duplicate_rows_changes_nothing_for_sgd(cluster: Cluster, door: str):
    # Unclipped: a global norm adds up the squares of the rows as they are.
    same(cluster.run(train, door=door, model="sparse", clip=False, sum_duplicates=True))


@on_two_kinds
@pytest.mark.parametrize("door", ["hand-written", "graph"])
@pytest.mark.parametrize("model", ["dense", "sparse", "both"])
def test_float32_differs_by_rounding_alone(cluster: Cluster, door: str, model: str):
    same(cluster.run(train, door=door, model=model, dtype="float32"))


# -- Other steps than gradient, clip, update --------------------------------------------------------------------------


def weights_of(seed: int, model: str = "dense") -> dict[str, tf.Variable]:
    return {name: tf.Variable(value, name=name) for name, value in initial_values(model, seed).items()}


def control_flow(seed: int) -> Training:
    """A loop over layers, branches on combined values, and nested tf.functions, one with a loop of autograph's."""
    weights = weights_of(seed)
    square = tf.Variable(np.random.default_rng(seed + 100).normal(size=(FEATURES, FEATURES)), name="square")
    steps = tf.Variable(0, dtype=tf.int64, name="steps")
    variables = [*weights.values(), square]

    @tf.function
    def layers(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            x = tf.tanh(tf.matmul(x, square))
        return x

    @tf.function
    def loss_of(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return squared_error(predict(weights, [layers(x)]), y)

    def step(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = loss_of(x, y)
        gradients = tape.gradient(loss, variables)
        norm = tf.linalg.global_norm(gradients)
        for variable, gradient in zip(variables, gradients, strict=True):
            if norm > 0.5:
                gradient = gradient * 0.5 / norm
            variable.assign_sub(0.1 * gradient)
        steps.assign_add(1)
        if steps % 2 == 0:
            square.assign(square * 0.9)
        return {"loss": loss, "norm": norm}

    return Training(step, lambda: {**weights, "square": square, "steps": steps})


def adversaries(seed: int) -> Training:
    """Two losses and two optimizers: the second forward pass reads what the first update wrote."""
    judge, maker = weights_of(seed), weights_of(seed + 10)
    judges, makers = HandWritten.make("adam", [*judge.values()]), HandWritten.make("momentum", [*maker.values()])

    def step(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            made = predict(maker, [x]) * tf.ones([1, FEATURES], tf.float64)
            judge_loss = squared_error(predict(judge, [x]), y) - tf.reduce_mean(tf.tanh(predict(judge, [made])))
        judges.apply(tape.gradient(judge_loss, judges.weights))
        with tf.GradientTape() as tape:
            made = predict(maker, [x]) * tf.ones([1, FEATURES], tf.float64)
            maker_loss = tf.reduce_mean(tf.square(predict(judge, [made]) - 1.0))
        gradients, norm = tf.clip_by_global_norm(tape.gradient(maker_loss, makers.weights), 0.3)
        makers.apply(gradients)
        return {"judge": judge_loss, "maker": maker_loss, "norm": norm}

    def variables() -> dict[str, tf.Variable]:
        both = {"judge": (judge, judges), "maker": (maker, makers)}
        return {f"{who}/{name}": v for who, (w, o) in both.items() for name, v in {**w, **o.slots}.items()}

    return Training(step, variables)


def several_gradients(seed: int) -> Training:
    """A tape asked twice; a variable whose gradient is None; one that is never trained; a penalty on inputs."""
    weights = weights_of(seed, "both")
    frozen = tf.Variable(np.full([1], 0.7), trainable=False, name="frozen")
    idle = tf.Variable(np.ones([2]), name="idle")

    def step(x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape(persistent=True) as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                predictions = predict(weights, [x, ids]) * frozen
            slopes = inner.gradient(predictions, x)
            loss = squared_error(predictions, y)
            penalty = tf.reduce_mean(tf.reduce_sum(tf.square(slopes), axis=1))
            both = loss + 0.1 * penalty
        first = tape.gradient(both, [weights["kernel"], idle])
        second = tape.gradient(both, {name: weights[name] for name in ("bias", "out", "table")})
        assert first[1] is None
        weights["kernel"].assign_sub(0.1 * first[0])
        for name, gradient in second.items():
            weights[name].assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss, [penalty, predictions]

    return Training(step, lambda: {**weights, "frozen": frozen, "idle": idle})


def digits_network(seed: int) -> Training:
    """Scikit-learn's digits in a Keras 3 network, with Keras's own loss, clipping and weight decay."""
    keras.config.set_floatx("float64")
    uniform = keras.initializers.GlorotUniform(seed=seed)
    network = keras.Sequential(
        [
            keras.Input([64]),
            keras.layers.Dense(32, activation="relu", kernel_initializer=uniform),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(10, kernel_initializer=uniform),
        ]
    )
    optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=0.1)
    optimizer.build(network.trainable_variables)
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = network(images, training=True)
            loss = crossentropy(labels, logits)
        gradients = tape.gradient(loss, network.trainable_variables)
        optimizer.apply(gradients, network.trainable_variables)
        return loss, logits

    return Training(step, lambda: {str(i): v.value for i, v in enumerate((*network.variables, *optimizer.variables))})


def digits_batches(sizes: tuple[int, ...] = (32, 32, 32, 17, 1)) -> list[tuple[np.ndarray, ...]]:
    images, labels = load_digits(return_X_y=True)
    begins = np.cumsum((0, *sizes))[:-1]
    return [(images[b : b + n] / 16.0, labels[b : b + n]) for b, n in zip(begins, sizes, strict=True)]


STEPS: dict[str, tuple[Callable[[int], Training], Callable[[], list[tuple[np.ndarray, ...]]]]] = {
    "control-flow": (control_flow, lambda: batches("dense")),
    "adversaries": (adversaries, lambda: batches("dense")),
    "several-gradients": (several_gradients, lambda: batches("both")),
    "digits": (digits_network, digits_batches),
}


def train_step(name: str) -> Values:
    build, data = STEPS[name]
    return compare_function(build, data())


@on_all
@pytest.mark.on(2)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_another_shape_trains_as_on_one_device(cluster: Cluster, name: str):
    same(cluster.run(train_step, name=name))


# -- More than one thing under one AutoDist, more than one AutoDist ---------------------------------------------------


def alternate_functions() -> Values:
    """Two training steps and an evaluation share their variables under one AutoDist object."""

    def build(seed: int) -> tuple[dict[str, tf.Variable], list[Callable[..., Any]]]:
        weights = weights_of(seed)
        slow, fast = HandWritten.make("momentum", [*weights.values()]), HandWritten.make("sgd", [*weights.values()])

        def step(updates: HandWritten, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = squared_error(predict(weights, [x]), y)
            updates.apply(tape.gradient(loss, updates.weights))
            return loss

        return {**weights, **slow.slots}, [
            lambda x, y: step(slow, x, y),
            lambda x, y: step(fast, x, y),
            lambda x, y: squared_error(predict(weights, [x]), y),
        ]

    with AutoDist() as distributed:
        expected, plain = build(1)
        actual, compiled = build(1 + distributed.rank)
        plain = [tf.function(function, reduce_retracing=True) for function in plain]
        compiled = [distributed.function(function) for function in compiled]
        for number, batch in enumerate(batches("dense", (6, 6, 5, 4, 6, 3, 6, 7, 1, 6))):
            which = (0, 1, 2, 1, 0, 2, 0, 1, 0, 2)[number]
            assert_close(compiled[which](*batch), plain[which](*batch), f"loss {number} of function {which}")
            for name in expected:
                assert_close(actual[name], expected[name], f"'{name}' after call {number}")
        return {name: variable.numpy() for name, variable in actual.items()}


def one_after_another() -> Values:
    """The same variables, trained under three AutoDist objects, one after another."""
    from tests.support.oracle_programs import hand_written

    with AutoDist() as first:
        rank = first.rank
        single, compiled = hand_written("both", "adam")(1), hand_written("both", "adam")(1 + rank)
    plain = tf.function(single.step, reduce_retracing=True)
    for builder in ("AllReduce", "AllReduce(chunk_size=1)", "AllReduce(all_reduce_spec='RING')"):
        with AutoDist(strategy_builder=builder) as distributed:
            step = distributed.function(compiled.step)
            for batch in batches("both", (6, 5)):
                assert_close(step(*batch)["loss"], plain(*batch)["loss"], "loss")
        expected, actual = single.values(), compiled.values()
        for name in expected:
            assert_close(actual[name], expected[name], f"'{name}' under {builder}")
        for variable in compiled.variables().values():
            assert "Mirrored" not in type(variable).__name__
    return actual


@on_all
def test_several_functions_share_variables_under_one_autodist(cluster: Cluster):
    same(cluster.run(alternate_functions))


@on_all
def test_autodist_objects_follow_one_another(cluster: Cluster):
    same(cluster.run(one_after_another))


@on_all
def test_keras_adam_sees_duplicate_rows_one_by_one_as_on_one_device(cluster: Cluster):
    same(cluster.run(keras_adam_on_rows))


def keras_adam_on_rows() -> Values:
    return compare_function(keras_3("sparse", "adam", clip=False), batches("sparse"))
