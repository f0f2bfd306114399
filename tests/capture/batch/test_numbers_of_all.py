"""`AutoDist(random="global")`: replicas draw the numbers that one device draws."""

import functools
from collections.abc import Callable, Mapping

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist, AutoDistError, testing
from autodist_py.capture.assemble import CaptureOptions
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.testing import NotEquivalentError, assert_equivalent
from tests.support.precision import in_float64

REPLICAS = 3
Rows = Callable[[tf.Tensor], tf.Tensor]


def noise(rows: tf.Tensor) -> tf.Tensor:
    return tf.random.normal(tf.shape(rows), dtype=rows.dtype, seed=5)


def noisy_turns(z: tf.Tensor) -> tf.Tensor:
    def turn(i: tf.Tensor, a: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return i + 1, tf.tanh(a + noise(a))

    return tf.while_loop(lambda i, a: i < 3, turn, [0, z], parallel_iterations=1)[1]


DRAWN: Mapping[str, Rows] = {
    "dropout": lambda z: tf.nn.dropout(z, 0.4, seed=3),
    "a number for each example": lambda z: z * tf.random.uniform(tf.shape(z)[:1], dtype=z.dtype, seed=3)[:, None],
    "in a row of several": lambda z: tf.reshape(noise(tf.reshape(z, [-1, 2])) * tf.reshape(z, [-1, 2]), [-1, 4]),
    "along another axis": lambda z: tf.transpose(tf.transpose(z) * noise(tf.transpose(z))),
    "by a seed": lambda z: z + tf.random.stateless_normal(tf.shape(z), [1, 2], dtype=z.dtype),
    "as the examples say": lambda z: z * tf.random.poisson([], tf.stop_gradient(z**2), dtype=z.dtype, seed=3),
    "beside what is normalized": lambda z: tf.nn.dropout((z - tf.reduce_mean(z, 0)) ** 3, 0.4, seed=3),
    "of all pairs": lambda z: tf.nn.dropout(tf.tanh(z @ tf.transpose(z)), 0.5, seed=7) @ z,
    "in a function": lambda z: tf.function(lambda a: a * noise(a))(z),
    "in a branch": lambda z: tf.cond(tf.size(z) > 0, lambda: z * noise(z), lambda: z),
    "in a loop": noisy_turns,
    "in turns over time": lambda z: tf.scan(lambda a, b: a * b, tf.transpose(z * noise(z)), parallel_iterations=1)[-1],
}

IN_ANY_CASE = {"along another axis", "as the examples say", "of all pairs"}
"""Where it is not known that each row is an example's, numbers are one device's by default."""


@pytest.mark.parametrize("name", DRAWN)
def test_numbers_are_those_of_one_device(name: str) -> None:
    """Of all steps, which have one number of examples, or TensorFlow would trace twice on one device, and draw anew."""
    rng = np.random.default_rng(1)
    weight = tf.Variable(rng.normal(size=(3, 4)))

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            rows = DRAWN[name](x @ weight)
            loss = tf.reduce_mean(tf.tanh(rows) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return rows, loss

    assert_equivalent(step, [(rng.normal(size=(7, 3)),)] * 4, replicas=REPLICAS, random="global", tolerance=1e-9)
    weight.assign(rng.normal(size=(3, 4)))
    if name not in IN_ANY_CASE:
        with pytest.raises(NotEquivalentError):
            assert_equivalent(step, [(rng.normal(size=(7, 3)),)] * 4, replicas=REPLICAS)


def of_keras(*hidden: keras.Layer) -> keras.Model:
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((6, 4)), *hidden, keras.layers.Flatten(), dense(8, "relu"), dense(1)])


def attention() -> keras.Model:
    given = keras.Input((6, 4))
    seen = keras.layers.MultiHeadAttention(2, 4, dropout=0.3)(given, given)
    read = keras.layers.LSTM(4, dropout=0.2, recurrent_dropout=0.1)(keras.layers.SpatialDropout1D(0.2)(seen))
    return keras.Model(given, keras.layers.Dense(1)(read))


KERAS: Mapping[str, Callable[[], keras.Model]] = {
    "attention": attention,
    "dropout": lambda: of_keras(keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.3)),
    "beside normalization": lambda: of_keras(
        keras.layers.BatchNormalization(), keras.layers.AlphaDropout(0.2), keras.layers.GaussianDropout(0.2)
    ),
}


@pytest.mark.parametrize("name", KERAS)
def test_layers_of_keras_draw_what_they_draw_on_one_device(name: str) -> None:
    """They draw by seeds that the step counts, so batches may have any number of examples."""
    with in_float64(keras):
        keras.utils.set_random_seed(4)
        model, optimizer = KERAS[name](), keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(0)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True)[:, 0] - y) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    given = [(rng.normal(size=(size, 6, 4)), rng.normal(size=size)) for size in (7, 4, 8)]
    assert_equivalent(step, given, replicas=REPLICAS, random="global", tolerance=1e-9)


def test_values_of_ops_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `autodist verify` shows them, of which a sum's gradient has some that only look as if they differed."""
    monkeypatch.setattr(testing, "CaptureOptions", functools.partial(CaptureOptions, shows_ops=True))
    rng = np.random.default_rng(1)
    step = trained_by(lambda z: tf.nn.dropout((z - tf.reduce_mean(z, 0)) ** 3, 0.4, seed=3))
    assert_equivalent(step, [(rng.normal(size=(7, 3)),)] * 3, replicas=REPLICAS, random="global", tolerance=1e-9)


def test_values_that_fail_beside_a_replicas_rows_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a `tf.concat` compares shapes: those of a replica's rows, and of four that all have."""
    monkeypatch.setattr(testing, "CaptureOptions", functools.partial(CaptureOptions, shows_ops=True))
    rng = np.random.default_rng(1)
    others = rng.normal(size=(4, 3))

    def rows(z: tf.Tensor) -> tf.Tensor:
        made = tf.ensure_shape(tf.cumsum(z, 0) * others[:, :1], [4, 4])
        return tf.concat([z, made - tf.reduce_mean(made, 0)], axis=1)

    given = [(rng.normal(size=(4, 3)),) for _ in range(3)]
    assert_equivalent(trained_by(rows), given, replicas=REPLICAS, random="global", tolerance=1e-9)


def trained_by(rows: Rows) -> Callable[[tf.Tensor], tf.Tensor]:
    weight = tf.Variable(np.ones((3, 4)))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(rows(x @ weight) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    return step


def captured(rows: Rows, random: str = "global") -> GraphItem:
    with AutoDist(random=random) as autodist:
        return autodist.function(trained_by(rows)).captured(np.ones((4, 3))).item


def test_nothing_changes_where_nothing_is_drawn() -> None:
    assert captured(tf.tanh).statistics == captured(tf.tanh, "replica").statistics == ()


def test_numbers_that_cannot_be_those_of_one_device_are_refused() -> None:
    def by_python(z: tf.Tensor) -> tf.Tensor:
        return z * noise(z) + tf.ensure_shape(tf.numpy_function(np.tanh, [z], tf.float64), [None, 4])

    def in_any_order(z: tf.Tensor) -> tf.Tensor:
        def turn(i: tf.Tensor, a: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return i + 1, tf.while_loop(lambda j, b: j < 2, lambda j, b: (j + 1, tf.tanh(b + noise(b))), [0, a])[1]

        return tf.while_loop(lambda i, a: i < 2, turn, [0, z])[1]

    for rows, reason in ((by_python, "by Python"), (in_any_order, "whose turns may be in any order")):
        (mixture, *_) = captured(rows).mixtures
        assert reason in mixture
        assert "its random numbers are other ones than on one device" in mixture


SEEDLESS: Mapping[str, Rows] = {
    "rows": lambda z: z * tf.raw_ops.RandomUniform(shape=tf.shape(z), dtype=tf.float64),
    "classes": lambda z: z * tf.cast(sampled(z), tf.float64),
    "pooled": lambda z: tf.nn.fractional_max_pool(z[:, None, :, None], [1.0, 1.0, 1.4, 1.0])[0],
}


def sampled(z: tf.Tensor, seed: int = 0) -> tf.Tensor:
    """Four classes that are no example's own."""
    own = tf.cast(z[:, :1] > 0.0, tf.int64)
    return tf.raw_ops.LogUniformCandidateSampler(
        true_classes=own, num_true=1, num_sampled=4, unique=True, range_max=20, seed=seed
    )[0]


@pytest.mark.parametrize("name", SEEDLESS)
def test_a_seedless_draw_is_refused(name: str) -> None:
    given = [(np.random.default_rng(1).normal(size=(4, 3)),)] * 3
    with pytest.raises(CaptureError, match="without a seed"):
        assert_equivalent(trained_by(SEEDLESS[name]), given, random="global")


SEEDED: Mapping[str, Rows] = {
    "classes": lambda z: z * tf.cast(sampled(z, seed=3), tf.float64),
    "pooled": lambda z: tf.nn.fractional_max_pool(z[:, None, :, None], [1.0, 1.0, 1.4, 1.0], seed=3)[0],
}


@pytest.mark.parametrize("name", SEEDED)
def test_samples_for_the_whole_batch_are_those_of_one_device(name: str) -> None:
    """By default, too: they are of no example."""
    given = [(np.random.default_rng(1).normal(size=(7, 3)),)] * 4
    assert_equivalent(trained_by(SEEDED[name]), given, replicas=REPLICAS, tolerance=1e-9)


def test_replicas_that_mix_their_parts_cannot_draw_of_all() -> None:
    with pytest.raises(AutoDistError, match="Leave one of them out"):
        AutoDist(random="global", batch_statistics="replica")
    with pytest.raises(AutoDistError, match="Leave one of them out"):
        assert_equivalent(trained_by(noise), [], random="global", batch_statistics="replica")
    with pytest.raises(AutoDistError, match="random must be one of replica, global; received 'globl'"):
        assert_equivalent(trained_by(noise), [], random="globl")
