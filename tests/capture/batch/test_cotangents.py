"""Back-propagation that is not linear in what it passes back: equal to one device's, or refused by name."""

import re
from collections.abc import Callable

import keras
import pytest
import tensorflow as tf

from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.doors.graph import GraphScope
from autodist_py.capture.inexact import inexact
from autodist_py.proto.graph_item import GraphItem
from autodist_py.testing import assert_equivalent
from tests.support.capture_steps import capture
from tests.support.custom_gradients import (
    BATCHES,
    BIAS,
    KERNEL,
    Backward,
    Loss,
    at,
    item_of,
    passing,
    small_sum,
    step_of,
)
from tests.support.loop_programs import control_flow_of_tensorflow_1

v1 = tf.compat.v1


def clipped(gradient: tf.Tensor) -> tf.Tensor:
    return tf.clip_by_value(gradient, -0.02, 0.02)


def clipped_rows(gradient: tf.Tensor) -> tf.Tensor:
    return tf.clip_by_norm(gradient, 0.03, axes=[1])


def clipped_whole(gradient: tf.Tensor) -> tf.Tensor:
    return tf.clip_by_norm(gradient, 0.03)


def signs(gradient: tf.Tensor) -> tf.Tensor:
    return 0.1 * tf.sign(gradient)


def moved(gradient: tf.Tensor) -> tf.Tensor:
    return gradient + 0.01


def squared(gradient: tf.Tensor) -> tf.Tensor:
    return gradient * tf.abs(gradient)


def reversed_(gradient: tf.Tensor) -> tf.Tensor:
    return -0.5 * gradient


NONLINEAR = [clipped, clipped_rows, signs, moved, squared]


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("back", NONLINEAR, ids=lambda one: one.__name__)
def test_gradients_of_each_example_are_one_devices_where_they_are_clipped(back: Backward, replicas: int) -> None:
    loss_of = at("logits", back)
    item = item_of(loss_of)
    assert all(one.in_parts for one in item.gradients)
    assert not list(inexact(item))
    assert_equivalent(step_of(loss_of), BATCHES, replicas=replicas, batch_statistics="replica")


@pytest.mark.parametrize("place", ["logits", "errors", "loss", "regularizer", "weight"])
def test_a_linear_custom_gradient_changes_nothing(place: str) -> None:
    item = item_of(at(place, reversed_))
    assert not any(one.in_parts for one in item.gradients)
    assert not list(inexact(item))


@pytest.mark.parametrize("place", ["loss", "regularizer"])
@pytest.mark.parametrize("back", [clipped, moved, signs], ids=lambda one: one.__name__)
def test_before_there_is_a_gradient_of_each_example_the_share_counts_later(place: str, back: Backward) -> None:
    loss_of = at(place, back)
    item = item_of(loss_of)
    assert not any(one.in_parts for one in item.gradients)
    assert not list(inexact(item))
    assert_equivalent(step_of(loss_of), BATCHES, replicas=3, batch_statistics="replica")


def test_of_a_sum_nothing_is_changed() -> None:
    loss_of = at("errors", clipped, small_sum)
    assert not any(one.in_parts for one in item_of(loss_of).gradients)
    assert_equivalent(step_of(loss_of), BATCHES, replicas=3, batch_statistics="replica")


@pytest.mark.parametrize(
    ("loss_of", "reason"),
    [
        (at("weight", clipped), r"'clip_by_value/Minimum' .*is computed from one"),
        (at("weight", clipped, small_sum), r"'clip_by_value/Minimum' .*is computed from one"),
        (at("weight", clipped, lambda values: 0.1 * values), r"'clip_by_value/Minimum' .*is computed from one"),
        (at("logits", clipped_whole), r"'clip_by_norm/\w+' .*is computed from one"),
    ],
)
def test_what_needs_a_sum_over_all_examples_is_refused_by_name(loss_of: Loss, reason: str) -> None:
    (mixture,) = item_of(loss_of).mixtures
    assert mixture.startswith("back-propagation for 'kernel'")
    assert re.search(reason, mixture), mixture
    assert __file__ in mixture


def of_each(values: tf.Tensor) -> tf.Tensor:
    return 0.1 * values


@pytest.mark.parametrize("place", ["logits", "errors"])
def test_a_loss_for_each_example_needs_no_share(place: str) -> None:
    loss_of = at(place, clipped, of_each)
    assert not any(one.in_parts for one in item_of(loss_of).gradients)
    assert_equivalent(
        step_of(lambda x, y, trained: loss_of(x, y, trained) + 0.0), BATCHES, replicas=2, batch_statistics="replica"
    )


def test_two_places_that_need_the_share_before_and_after_are_refused() -> None:
    inner = at("logits", clipped)
    (mixture,) = item_of(lambda x, y, trained: passing(clipped)(inner(x, y, trained))).mixtures
    assert "is not linear in the gradient of a mean" in mixture


def test_a_share_that_cannot_count_before_is_refused() -> None:
    """Another result comes of the same seeds: what the loss makes of the inputs."""
    trained = [tf.Variable(KERNEL, name="kernel"), tf.Variable(BIAS, name="bias")]

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = at("logits", clipped)(x, y, trained)
        *gradients, own = tape.gradient(loss, [*trained, x])
        for weight, gradient in zip(trained, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        return own

    (mixture,) = capture(step, *map(tf.constant, BATCHES[0])).item.mixtures
    assert "is not linear in the gradients of examples" in mixture


def in_a_loop(back: Backward) -> Loss:
    def loss(x: tf.Tensor, y: tf.Tensor, trained: list[tf.Variable]) -> tf.Tensor:
        kernel = tf.convert_to_tensor(trained[0])

        def turn(i: tf.Tensor, h: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return i + 1, passing(back)(tf.tanh(h @ kernel[:3] + trained[1]))

        _, hidden = tf.while_loop(lambda i, h: i < 3, turn, (0, x[:, :3]))
        return tf.reduce_mean((tf.reduce_sum(hidden, 1) - y) ** 2)

    return loss


def test_what_is_not_linear_in_a_loop_is_found() -> None:
    loss_of = in_a_loop(clipped)
    item = item_of(loss_of)
    assert all(one.in_parts for one in item.gradients)
    assert any("pass gradients on linearly" in one for one in inexact(item))
    assert_equivalent(step_of(loss_of), BATCHES, replicas=2, batch_statistics="replica")


def test_a_loop_that_is_linear_in_what_it_passes_back_is_seen_to_be() -> None:
    item = item_of(in_a_loop(reversed_))
    assert not any(one.in_parts for one in item.gradients)
    assert not item.inseparable_ops


def summed_in_a_loop(back: Backward) -> GraphItem:
    """A sum over examples that a loop of TensorFlow 1 adds up: so does its back-propagation."""
    graph = tf.Graph()
    scope = GraphScope(graph, CaptureOptions(batch_statistics="replica"), seed=None)
    with control_flow_of_tensorflow_1(), graph.as_default(), scope.recording():
        x = v1.placeholder(tf.float64, [None, 3, 4])
        kernel = v1.get_variable("kernel", [4, 2], tf.float64, use_resource=True)

        def turn(time: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return time + 1, total + tf.reduce_sum(passing(back)(tf.tanh(x[:, time] @ kernel)))

        _, total = tf.while_loop(lambda time, _: time < 3, turn, (0, tf.zeros([], tf.float64)))
        v1.train.GradientDescentOptimizer(0.1).minimize(total, name="train")
    return scope.item(CaptureOptions(batch_statistics="replica"))


def test_what_a_loop_of_tensorflow_1_adds_up_is_linear_if_its_turns_are() -> None:
    assert not summed_in_a_loop(reversed_).inseparable_ops
    assert any("clip_by_value" in op for op in summed_in_a_loop(clipped).inseparable_ops)
    assert any("Merge" in op for op in summed_in_a_loop(begun_with_ones).inseparable_ops)


def begun_with_ones(gradient: tf.Tensor) -> tf.Tensor:
    """The gradient twice, and what is added is not of it: a loop in back-propagation."""
    return tf.while_loop(lambda i, _: i < 2, lambda i, total: (i + 1, total + gradient), (0, tf.ones_like(gradient)))[1]


def convolutional() -> tuple[keras.Model, tuple[int, ...]]:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input([8, 8, 2]),
            layers.Conv2D(4, 3, padding="same"),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.DepthwiseConv2D(3),
            layers.UpSampling2D(interpolation="bilinear"),
            layers.Conv2DTranspose(2, 3),
            layers.GlobalAveragePooling2D(),
            layers.Dense(1),
        ]
    ), (8, 8, 2)


def normalized() -> tuple[keras.Model, tuple[int, ...]]:
    layers = keras.layers
    return keras.Sequential([layers.Input([4]), layers.Dense(3), layers.BatchNormalization(), layers.Dense(1)]), (4,)


def attentive() -> tuple[keras.Model, tuple[int, ...]]:
    layers = keras.layers
    x = layers.Input([5, 4])
    y = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 2)(x, x))
    y = layers.Dropout(0.1)(layers.Dense(6, activation="gelu")(y))
    return keras.Model(x, layers.Dense(1)(layers.Flatten()(y))), (5, 4)


def recurrent() -> tuple[keras.Model, tuple[int, ...]]:
    layers = keras.layers
    return keras.Sequential([layers.Input([5, 4]), layers.LSTM(3), layers.Dense(1)]), (5, 4)


@pytest.mark.parametrize("model_of", [convolutional, normalized, attentive, recurrent], ids=lambda one: one.__name__)
def test_ordinary_models_are_linear(model_of: Callable[[], tuple[keras.Model, tuple[int, ...]]]) -> None:
    model, shape = model_of()
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    item = capture(step, tf.zeros([6, *shape])).item
    assert not item.inseparable_ops
    assert not any(one.in_parts for one in item.gradients)
    assert not item.mixtures


@pytest.mark.parametrize("model_of", [convolutional, attentive], ids=lambda one: one.__name__)
def test_clipped_gradients_of_an_ordinary_models_results_are_in_parts_and_not_warned_of(
    model_of: Callable[[], tuple[keras.Model, tuple[int, ...]]],
) -> None:
    """Ops in front of the model see gradients that have come through all of it."""
    model, shape = model_of()
    scale = tf.Variable(tf.ones(shape[-1:]), name="scale")

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(passing(clipped)(x * scale), training=True) ** 2)
        scale.assign_sub(tape.gradient(loss, scale))

    item = capture(step, tf.zeros([6, *shape])).item
    assert [one.in_parts for one in item.gradients] == [True]
    assert not item.inseparable_ops
    assert not item.mixtures
