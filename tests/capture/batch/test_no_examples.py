"""Batches of fewer examples than replicas: a replica that has none computes with another's, and counts for nothing."""

from collections.abc import Callable, Mapping

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py.testing import assert_equivalent
from tests.support.precision import in_float64

REPLICAS, SIZES = 3, (2, 1, 7, 4)
Layers = keras.layers

NETS: Mapping[str, Callable[[], list[keras.Layer]]] = {
    "a convolution": lambda: [Layers.Conv2D(4, 3, activation="relu"), Layers.MaxPooling2D(), Layers.Flatten()],
    "with strides": lambda: [Layers.Conv2D(4, 3, strides=2), Layers.BatchNormalization(), Layers.Flatten()],
    "depthwise": lambda: [Layers.DepthwiseConv2D(3, depth_multiplier=2), Layers.GlobalAveragePooling2D()],
    "in three dimensions": lambda: [Layers.Reshape((6, 6, 3, 1)), Layers.Conv3D(4, 2), Layers.Flatten()],
    "recurrent": lambda: [Layers.Reshape((36, 3)), Layers.Conv1D(4, 3), Layers.LSTM(4)],
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NETS)
def test_a_net_trains_on_batches_smaller_than_the_replicas(name: str, dtype: str) -> None:
    """Of no rows oneDNN's convolutions, which float32 is computed by, return another shape."""
    with in_float64(keras):
        keras.config.set_dtype_policy(dtype)
        keras.utils.set_random_seed(3)
        net = keras.Sequential([keras.Input((6, 6, 3)), *NETS[name](), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(net.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            errors = (net(x, training=True)[:, 0] - y) ** 2
            loss = tf.reduce_mean(errors)
        variables = net.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss, errors

    rng = np.random.default_rng(0)
    given = [(rng.normal(size=(n, 6, 6, 3)).astype(dtype), rng.normal(size=n).astype(dtype)) for n in SIZES]
    assert_equivalent(step, given, replicas=REPLICAS, tolerance=1e-9 if dtype == "float64" else 1e-4)


Rows = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

RESULTS: Mapping[str, Rows] = {
    "rows": lambda z, y: z,
    "chosen rows": lambda z, y: tf.boolean_mask(z, y > 0.0),
    "places": lambda z, y: tf.where(y > 0.0),
    "their number": lambda z, y: tf.shape(z)[0],
    "a sum": lambda z, y: tf.reduce_sum(z, 0),
    "the largest": lambda z, y: tf.reduce_max(z, 0),
    "a mean of a sum": lambda z, y: tf.reduce_sum(z, 0) / tf.cast(tf.shape(z)[0], z.dtype),
    "texts": lambda z, y: tf.strings.as_string(y),
    "sorted rows": lambda z, y: tf.sort(z, 0),
}


BUILT = [*((name, "AllReduce") for name in RESULTS), ("rows", "PS"), ("places", "Parallax")]


@pytest.mark.parametrize(("name", "builder"), BUILT)
def test_results_and_updates_of_rows_have_none_of_another_replicas(name: str, builder: str) -> None:
    """A momentum of rows shrinks each time that its row is updated, so a row too many would tell."""
    rng = np.random.default_rng(0)
    table, weight = tf.Variable(rng.normal(size=(9, 3))), tf.Variable(rng.normal(size=(3, 2)))
    momentum = tf.Variable(np.ones((9, 3)))

    def step(ids: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            z = tf.tanh(tf.gather(table, ids) @ weight)
            scores = tf.nn.log_softmax(z @ tf.transpose(z))
            loss = tf.reduce_mean((z[:, 0] - y) ** 2) - tf.reduce_mean(tf.linalg.diag_part(scores))
        of_table, of_weight = tape.gradient(loss, [table, weight])
        tf.raw_ops.ResourceSparseApplyMomentum(
            var=table.handle,
            accum=momentum.handle,
            lr=tf.constant(0.1, tf.float64),
            grad=of_table.values,
            indices=of_table.indices,
            momentum=tf.constant(0.5, tf.float64),
        )
        weight.assign_sub(0.1 * of_weight)
        return loss, RESULTS[name](z, y)

    given = [(rng.integers(0, 9, n), rng.normal(size=n)) for n in SIZES]
    assert_equivalent(step, given, replicas=REPLICAS, tolerance=1e-9, strategy_builder=builder)


Losses = Callable[[tf.Tensor], tf.Tensor]

OF_NONE: Mapping[str, Losses] = {
    "a sum": tf.reduce_sum,
    "a mean": tf.reduce_mean,
    "a mean, or 0": lambda errors: tf.math.divide_no_nan(tf.reduce_sum(errors), tf.cast(tf.size(errors), errors.dtype)),
    "normalized": lambda errors: tf.reduce_sum(tf.tanh(errors - tf.reduce_mean(errors))),
}


@pytest.mark.parametrize("builder", ["AllReduce", "PS", "Parallax"])
@pytest.mark.parametrize("name", OF_NONE)
def test_a_batch_of_no_examples_is_to_all_what_it_is_to_one_device(name: str, builder: str) -> None:
    """Of a mean that is no number; a regularizer's gradient counts all the same."""
    rng = np.random.default_rng(0)
    table, weight = tf.Variable(rng.normal(size=(9, 3))), tf.Variable(rng.normal(size=(3, 2)))

    def step(ids: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            errors = ((tf.gather(table, ids) @ weight)[:, 0] - y) ** 2
            loss = OF_NONE[name](errors) + 0.1 * tf.reduce_sum(weight**2)
        of_table, of_weight = tape.gradient(loss, [table, weight])
        table.scatter_sub(tf.IndexedSlices(0.1 * of_table.values, of_table.indices))
        weight.assign_sub(0.1 * of_weight)
        return loss, tf.reduce_mean(errors), tf.reduce_max(errors), errors

    given = [(rng.integers(0, 9, n), rng.normal(size=n)) for n in (4, 0, 5)]
    assert_equivalent(step, given, replicas=REPLICAS, tolerance=1e-9, strategy_builder=builder)
