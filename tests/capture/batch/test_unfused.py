"""Batch normalization that one op computes: of the whole batch only its mean and variance are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from autodist_py.capture.assemble import CaptureOptions
from autodist_py.proto.graph_item import GraphItem
from autodist_py.testing import assert_equivalent
from tests.support.capture_steps import capture_with
from tests.support.model_steps import descending

REPLICAS, SIZES = 3, (7, 2, 1, 6)
RTOL = 2e-4
"""These ops have float32 alone."""

Step = Callable[[tf.Tensor], Any]
Layers = tf_keras.layers


def item_of(step: Step, *batch: np.ndarray, replicas: int = REPLICAS) -> GraphItem:
    return capture_with(CaptureOptions(num_replicas=replicas), step, *batch).item


def types_of(item: GraphItem) -> set[str]:
    return {node.op for node in tf.compat.v1.GraphDef.FromString(item.graph_def).node}


def images(sizes: Sequence[int] = SIZES, shape: Sequence[int] = (6, 6, 3)) -> list[tuple[np.ndarray]]:
    rng = np.random.default_rng(1)
    return [(rng.normal(0.5, 2.0, size=(size, *shape)).astype(np.float32),) for size in sizes]


def net(policy: str) -> Step:
    """Two normalizations behind one another, one of which has no scale, and a sum of two."""
    tf_keras.utils.set_random_seed(3)
    before = tf_keras.mixed_precision.global_policy()
    tf_keras.mixed_precision.set_global_policy(policy)
    inputs = tf_keras.Input((6, 6, 3))
    x = Layers.ReLU()(Layers.BatchNormalization()(Layers.Conv2D(4, 3, use_bias=False)(inputs)))
    x = Layers.Add()([x, Layers.BatchNormalization(scale=False)(Layers.Conv2D(4, 1, use_bias=False)(x))])
    model = tf_keras.Model(inputs, Layers.Dense(1)(Layers.GlobalAveragePooling2D()(x)))
    tf_keras.mixed_precision.set_global_policy(before)
    return descending(model, tf_keras.optimizers.SGD(0.05))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_net_is_normalized_by_the_whole_batch(policy: str) -> None:
    """Nothing is computed of all rows, and no row travels."""
    assert_equivalent(net(policy), images(), replicas=REPLICAS, tolerance=RTOL if policy == "float32" else 5e-2)
    item = item_of(net(policy), *images()[0])
    reductions = [one.reduction for one in item.statistics]
    assert reductions.count("moments") == 2
    assert not {"rows", "own"} & set(reductions)
    assert not any(kind.startswith("FusedBatchNorm") for kind in types_of(item))


def test_one_replica_computes_it_by_the_one_op() -> None:
    assert {"FusedBatchNormV3", "FusedBatchNormGradV3"} <= types_of(item_of(net("float32"), *images()[0], replicas=1))


def raw(shape: Sequence[int] = (6, 6, 3), **attributes: Any) -> Step:
    """A step that returns all that the op says of the batch, and keeps an average of it."""
    rng = np.random.default_rng(0)
    scale = tf.Variable(rng.normal(size=shape[-1]).astype(np.float32), name="scale")
    offset = tf.Variable(rng.normal(size=shape[-1]).astype(np.float32), name="offset")
    slope = tf.Variable(np.float32(0.3), name="slope")
    averages = [tf.Variable(np.full(shape[-1], 0.5, np.float32), trainable=False, name=name) for name in ("m", "v")]

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            made = tf.raw_ops.FusedBatchNormV3(
                x=x * slope, scale=scale, offset=offset, mean=averages[0], variance=averages[1], **attributes
            )
            loss = tf.reduce_mean(tf.tanh(made.y) * tf.cumsum(tf.ones_like(x), -1))
        variables = (slope, scale, offset)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        for average, now in zip(averages, (made.batch_mean, made.batch_variance), strict=True):
            average.assign(0.5 * average + 0.5 * now)
        return made.y, made.batch_mean, made.batch_variance, made.reserve_space_1

    return step


OPS: Mapping[str, Callable[[], tuple[Step, Sequence[int]]]] = {
    "images": lambda: (raw(), (6, 6, 3)),
    "a large epsilon": lambda: (raw(epsilon=0.5), (6, 6, 3)),
    "averages of its own": lambda: (raw(exponential_avg_factor=0.25), (6, 6, 3)),
    "volumes": lambda: (raw((3, 4, 4, 2), data_format="NDHWC"), (3, 4, 4, 2)),
    "one number of each": lambda: (raw((1, 1, 3)), (1, 1, 3)),
}


@pytest.mark.parametrize("name", OPS)
def test_the_op_returns_what_one_device_has(name: str) -> None:
    """With the correction of the variance for small samples, also of one alone."""
    step, shape = OPS[name]()
    assert_equivalent(step, images(shape=shape), replicas=REPLICAS, tolerance=RTOL)


def test_in_inference_it_stays_the_one_op() -> None:
    scale = tf.Variable(np.ones(3, np.float32))

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            y, *_ = tf.compat.v1.nn.fused_batch_norm(
                x, scale, tf.zeros([3]), tf.ones([3]), tf.ones([3]), is_training=False
            )
            loss = tf.math.log(tf.reduce_mean(y**2))
        scale.assign_sub(0.1 * tape.gradient(loss, scale))

    assert_equivalent(step, images(), replicas=REPLICAS, tolerance=RTOL)
    assert "FusedBatchNormV3" in types_of(item_of(step, *images()[0]))


def branch(x: tf.Tensor, normalized: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    return tf.cond(tf.reduce_sum(x) < 1e6, lambda: normalized(x), lambda: x)


def loop(x: tf.Tensor, normalized: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, normalized(y)), [0, x])[1]


@pytest.mark.parametrize("inside", [branch, loop])
def test_within_a_branch_or_loop_it_is_of_the_whole_batch(inside: Callable[..., tf.Tensor]) -> None:
    scale, empty = tf.Variable([1.0, 2.0, 3.0]), tf.zeros([0])

    def normalized(x: tf.Tensor) -> tf.Tensor:
        made = tf.raw_ops.FusedBatchNormV3(x=x, scale=tf.ones([3]), offset=tf.zeros([3]), mean=empty, variance=empty)
        return made.y**3

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(inside(x * scale, normalized) * [0.3, -1.0, 2.0])
        scale.assign_sub(0.1 * tape.gradient(loss, scale))
        return loss

    assert_equivalent(step, images(), replicas=REPLICAS, tolerance=RTOL)
