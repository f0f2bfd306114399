"""A mean of all examples and the variance about it, of which workers are told together."""

from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.proto.graph_item import Statistic
from autodist_py.testing import assert_equivalent
from tests.support.model_steps import descending
from tests.support.precision import in_float64

REPLICAS, SIZES = 3, (7, 2, 1, 6)
Normalized = Callable[[tf.Tensor], tf.Tensor]
Step = Callable[[tf.Tensor], tf.Tensor]


def of_moments(z: tf.Tensor, *axes: int, keepdims: bool = False) -> tf.Tensor:
    mean, variance = tf.nn.moments(z, axes, keepdims=keepdims)
    return (z - mean) * tf.math.rsqrt(variance + 1e-2)


def by_centred(z: tf.Tensor) -> tf.Tensor:
    """As many write it: what is squared is what is divided, too."""
    centred = z - tf.reduce_mean(z, 0, keepdims=True)
    return centred * tf.math.rsqrt(tf.reduce_mean(tf.square(centred), 0, keepdims=True) + 1e-2)


def by_product(z: tf.Tensor) -> tf.Tensor:
    mean = tf.reduce_mean(z, 0)
    centred = mean - z
    return (z - mean) / tf.sqrt(tf.reduce_mean(centred * centred, 0) + 1e-2)


def of_library(z: tf.Tensor) -> tf.Tensor:
    return z / (tf.math.reduce_std(z, 0) + 1e-2)


def through_its_mean(z: tf.Tensor) -> tf.Tensor:
    """Back-propagation passes through the mean that is squared about."""
    mean = tf.reduce_mean(z, 0)
    return tf.math.log(tf.reduce_mean(tf.math.squared_difference(z, mean), 0) + 1e-2) * tf.tanh(mean) * z


TOGETHER: Mapping[str, Normalized] = {
    "tf.nn.moments": lambda z: of_moments(z, 0),
    "with all dimensions": lambda z: of_moments(z, 0, keepdims=True),
    "of all": lambda z: of_moments(z, 0, 1),
    "axes counted from the end": lambda z: of_moments(z, -2),
    "of images": lambda z: tf.reshape(of_moments(tf.reshape(z, [-1, 2, 2]), 0, 1), [-1, 4]),
    "squares": by_centred,
    "products": by_product,
    "tf.math.reduce_std": of_library,
    "through its mean": through_its_mean,
}


def about_another(z: tf.Tensor) -> tf.Tensor:
    """Squared differences from the mean of other values."""
    mean = tf.reduce_mean(tf.tanh(z), 0)
    return (z - mean) * tf.math.rsqrt(tf.reduce_mean(tf.math.squared_difference(z, mean), 0) + 1e-2)


def over_others(z: tf.Tensor) -> tf.Tensor:
    """A mean over examples and features of squares about that over examples alone."""
    mean = tf.reduce_mean(z, 0, keepdims=True)
    return (z - mean) * tf.math.rsqrt(tf.reduce_mean(tf.square(z - mean), [0, 1], keepdims=True) + 1e-2)


def absolute(z: tf.Tensor) -> tf.Tensor:
    mean = tf.reduce_mean(z, 0)
    return (z - mean) / (tf.reduce_mean(tf.abs(z - mean), 0) + 1e-2)


def along_another(z: tf.Tensor) -> tf.Tensor:
    """A mean for each entry of axis 1 is paired with those of axis 2, of which there are as many."""
    several = tf.stack([z, z * 2.0, z - 1.0, tf.tanh(z)], 1)
    mean = tf.reduce_mean(several, [0, 2])
    return z * tf.math.rsqrt(tf.reduce_mean(tf.math.squared_difference(several, mean), [0, 2]) + 0.1) + mean


APART: Mapping[str, Normalized] = {
    "another mean": about_another,
    "other axes": over_others,
    "paired with another axis": along_another,
    "no squares": absolute,
}


def step_of(normalized: Normalized) -> Step:
    weight = tf.Variable(np.random.default_rng(0).normal(size=(3, 4)), name="weight")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(normalized(x @ weight)) ** 2)
        weight.assign_sub(0.3 * tape.gradient(loss, weight))
        return loss

    return step


def batches(sizes: Sequence[int] = SIZES) -> list[tuple[np.ndarray]]:
    rng = np.random.default_rng(1)
    return [(rng.normal(0.5, 2.0, size=(size, 3)),) for size in sizes]


def statistics(step: Step, *batch: np.ndarray) -> list[Statistic]:
    with AutoDist() as autodist:
        return list(autodist.function(step).captured(*batch).item.statistics)


@pytest.mark.parametrize("name", TOGETHER)
def test_one_message_tells_of_mean_and_variance(name: str) -> None:
    assert_equivalent(step_of(TOGETHER[name]), batches(), replicas=REPLICAS, tolerance=1e-10)
    found = [one.reduction for one in statistics(step_of(TOGETHER[name]), *batches()[0])]
    assert found.count("moments") == 1
    assert "mean" not in found


@pytest.mark.parametrize("name", APART)
def test_what_is_no_variance_about_that_mean_goes_apart(name: str) -> None:
    assert_equivalent(step_of(APART[name]), batches(), replicas=REPLICAS, tolerance=1e-10)
    found = [one.reduction for one in statistics(step_of(APART[name]), *batches()[0])]
    assert "moments" not in found


def test_a_result_is_what_one_device_has() -> None:
    """Of the mean and the variance, and of what is computed of them and read by nothing else."""
    weight = tf.Variable(np.random.default_rng(0).normal(size=(3, 4)), name="weight")

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            mean, variance = tf.nn.moments(x @ weight, [0])
            loss = tf.reduce_sum(mean / tf.sqrt(variance + 0.1))
        weight.assign_sub(0.3 * tape.gradient(loss, weight))
        return mean, variance, 2.0 * variance + 1.0

    assert_equivalent(step, batches(), replicas=REPLICAS, tolerance=1e-10)


def test_two_variances_about_one_mean_are_both_of_all() -> None:
    def normalized(z: tf.Tensor) -> tf.Tensor:
        mean = tf.reduce_mean(z, 0)
        first = tf.reduce_mean(tf.math.squared_difference(z, mean), 0)
        second = tf.reduce_mean(tf.math.squared_difference(z, tf.stop_gradient(mean)), 0)
        return (z - mean) * tf.math.rsqrt(first + 0.1) * tf.math.rsqrt(second + 0.2)

    assert_equivalent(step_of(normalized), batches(), replicas=REPLICAS, tolerance=1e-10)


def test_a_variance_is_not_lost_beside_its_mean() -> None:
    """A sum of squares in float32 would keep none of it."""

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        mean, variance = tf.nn.moments(x, [0])
        scale.assign(tf.math.rsqrt(variance))
        return mean, variance

    scale = tf.Variable(np.zeros(4, np.float32), trainable=False)
    rng = np.random.default_rng(5)
    given = [(rng.normal(30_000.0, 1.0, size=(size, 4)).astype(np.float32),) for size in (60, 61)]
    assert_equivalent(step, given, replicas=REPLICAS, tolerance=1e-3)


@pytest.mark.parametrize("policy", ["float64", "mixed_bfloat16", "mixed_float16"])
def test_a_layer_of_keras_takes_one_message_forward(policy: str) -> None:
    with in_float64(keras):
        keras.config.set_dtype_policy(policy)
        keras.utils.set_random_seed(3)
        inputs = keras.Input((5,))
        x = keras.layers.Dense(4, activation="tanh")(inputs)
        x = keras.layers.Add()([keras.layers.BatchNormalization()(x), keras.layers.BatchNormalization(axis=1)(-x)])
        outputs = keras.layers.Dense(1)(keras.layers.BatchNormalization()(x))
        model = keras.Model(inputs, outputs)
        step = descending(model, keras.optimizers.SGD(0.1))
    rng = np.random.default_rng(1)
    given = [(rng.normal(size=(size, 5)),) for size in SIZES]
    assert_equivalent(step, given, replicas=REPLICAS, tolerance=1e-10 if policy == "float64" else 5e-2)
    found = [one.reduction for one in statistics(step, *given[0])]
    assert found.count("moments") == 3
    assert "mean" not in found


def test_numbers_of_examples_may_wrap() -> None:
    """As those that are made to a seed do: a replica's own is no part of one device's then."""

    def normalized(z: tf.Tensor) -> tf.Tensor:
        count = tf.shape(z)[0]
        scale = tf.random.stateless_uniform([4], [count * 1_000_003 * 2_654 % 2_147_483_647, 0], dtype=z.dtype)
        is_large = tf.where(count * 1_000_000_000 > 5, 1.0, 2.0)
        return (z - tf.reduce_mean(z, 0)) * scale * tf.cast(is_large, z.dtype)

    assert_equivalent(step_of(normalized), batches(), replicas=REPLICAS, tolerance=1e-10)
