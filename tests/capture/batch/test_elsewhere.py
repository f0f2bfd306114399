"""Losses over examples whose entries do not stand along axis 0, or not in order: of two batches, or time-major."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py.capture.inexact import inexact
from autodist_py.proto.graph_item import GraphItem
from autodist_py.testing import assert_equivalent
from tests.support.capture_steps import capture
from tests.support.unseen import turned, unseen

RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(4, 3))
BATCHES = [(RNG.normal(size=(size, 4)), RNG.normal(size=(size, 4)), RNG.normal(size=size)) for size in (6, 5, 4)]

Loss = Callable[..., Any]
"""Of two batches of features, a number for each of the first ones, and the weights: the loss, and maybe a result."""


def step_of(loss_of: Loss) -> Callable[..., Any]:
    weight = tf.Variable(KERNEL, name="weight")

    def step(a: tf.Tensor, b: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            found = loss_of(a, b, y, weight)
            loss, result = found if isinstance(found, tuple) else (found, ())
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss, result

    return step


def item_of(loss_of: Loss) -> GraphItem:
    return capture(step_of(loss_of), *map(tf.constant, BATCHES[0])).item


def both(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return tf.concat([a, b], axis=0)


def each(value: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(value, axis=1)


def flat(value: tf.Tensor) -> tf.Tensor:
    return tf.reshape(value, [-1])


def convolved(images: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """The features as images of 2 × 2 pixels, and the weights as a filter."""
    filters = tf.reshape(w, [2, 2, 1, 3])
    return tf.nn.max_pool2d(tf.nn.conv2d(tf.reshape(images, [-1, 2, 2, 1]), filters, 1, "SAME"), 2, 2, "SAME")


def first_of(parts: list[tf.Tensor]) -> tf.Tensor:
    return tf.reduce_mean(parts[0] ** 2 * parts[1]) + tf.reduce_mean(tf.cos(parts[-1]))


def cut(value: tf.Tensor, *batches: tf.Tensor) -> list[tf.Tensor]:
    """The rows of two batches, by the number of the first one's."""
    size = tf.shape(batches[0])[0]
    return [value[:size], value[size:]]


def nested(a: tf.Tensor, b: tf.Tensor, y: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """Two batches of two, joined and taken apart."""
    pairs = tf.split(both(both(a, b), both(b, a)) @ w, 2)
    return tf.reduce_sum(tf.tanh(pairs[0] * pairs[1])) + tf.reduce_sum(cut(pairs[1], b)[1] * (a @ w))


SEEN = {
    "split": ("mean", lambda a, b, y, w: first_of(tf.split(both(a, b) @ w, 2))),
    "cut": ("mean", lambda a, b, y, w: first_of(cut(both(a, b) @ w, a))),
    "three, split": ("mean", lambda a, b, y, w: first_of(tf.split(tf.concat([a, b, a + b], 0) @ w, 3))),
    "the first of three": ("sum", lambda a, b, y, w: tf.reduce_sum(cut(tf.concat([a, b, a], 0) @ w, a)[0] * (b @ w))),
    "joined again": ("sum", nested),
    "a result for each, split": (
        "mean",
        lambda a, b, y, w: (lambda parts: (first_of(parts), parts[1]))(tf.split(both(a, b) @ w, 2)),
    ),
    "images of two batches": ("sum", lambda a, b, y, w: tf.reduce_sum(convolved(both(a, b), w) ** 2)),
    "a sum over two batches": ("sum", lambda a, b, y, w: tf.reduce_sum((both(a, b) @ w) ** 2)),
    "a mean over two batches": ("mean", lambda a, b, y, w: tf.reduce_mean((both(a, b) @ w) ** 2)),
    "two batches with two others": ("sum", lambda a, b, y, w: tf.reduce_sum(each(both(a, b) @ w) * both(y, 2 * y))),
    "two batches, flattened": ("sum", lambda a, b, y, w: tf.reduce_sum(tf.tanh(flat(both(a, b) @ w)))),
    "a stack": ("sum", lambda a, b, y, w: tf.reduce_sum(tf.stack([each(a @ w) ** 2, each(b @ w)]))),
    "turned round": ("sum", lambda a, b, y, w: tf.reduce_sum(tf.transpose(a @ w) ** 2)),
    "a mean, turned round": ("mean", lambda a, b, y, w: tf.reduce_mean(tf.transpose(a @ w) ** 2)),
    "a sum by the number of rows": (
        "mean",
        lambda a, b, y, w: tf.reduce_sum((both(a, b) @ w) ** 2) / tf.cast(tf.shape(a)[0], tf.float64),
    ),
    "a masked mean over two batches": (
        "mean",
        lambda a, b, y, w: tf.reduce_sum(each(both(a, b) @ w) * both(y, y) ** 2) / tf.reduce_sum(both(y, y) ** 2),
    ),
    "with a result": (
        "mean",
        lambda a, b, y, w: (tf.reduce_mean(both(a, b) @ w), tf.reduce_sum(both(a, b) @ w, axis=0)),
    ),
    "with rows that the loss does not read": (
        "mean",
        lambda a, b, y, w: (tf.reduce_mean(both(a, b) @ w), both(a, b)),
    ),
    "nothing is added": (
        "mean",
        lambda a, b, y, w: (0.0 + tf.reduce_sum(a @ w)) / tf.cast(tf.shape(a)[0], tf.float64) + tf.reduce_mean(b @ w),
    ),
}


@pytest.mark.parametrize(("reduction", "loss_of"), SEEN.values(), ids=SEEN.keys())
def test_what_is_reduced_over_examples_is_seen_wherever_they_stand(reduction: str, loss_of: Loss) -> None:
    item = item_of(loss_of)
    assert [one.reduction for one in item.gradients] == [reduction]
    assert not list(inexact(item))
    assert_equivalent(step_of(loss_of), BATCHES, replicas=3, batch_statistics="replica")


def errors(a: tf.Tensor, y: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A function of each example, which is given its place, too, so that it is not followed."""

    def of_one(row: Any) -> tf.Tensor:
        nothing = 0.0 * tf.cast(row[2], tf.float64)
        return tf.reduce_sum((tf.linalg.matvec(w, row[0], transpose_a=True) - row[1] + nothing) ** 2)

    return tf.map_fn(of_one, (a, y, tf.range(tf.shape(a)[0])), fn_output_signature=tf.float64)


TAKEN = {
    "a sum over map_fn": ("sum", lambda a, b, y, w: tf.reduce_sum(errors(a, y, w))),
    "a mean over map_fn": ("mean", lambda a, b, y, w: (tf.reduce_mean(errors(a, y, w)), errors(a, y, w))),
    "a sum over a loop": ("sum", lambda a, b, y, w: tf.reduce_sum(turned(a @ w))),
    "two batches and a batch twice": ("sum", lambda a, b, y, w: tf.reduce_sum(each(both(a, b) @ w) * tf.tile(y, [2]))),
}


@pytest.mark.parametrize(("reduction", "loss_of"), TAKEN.values(), ids=TAKEN.keys())
def test_what_may_mix_is_warned_of_and_what_it_makes_of_rows_is_reduced_as_rows_are(
    reduction: str, loss_of: Loss
) -> None:
    item = item_of(loss_of)
    assert [one.reduction for one in item.gradients] == [reduction]
    (said,) = inexact(item)
    assert "keep examples apart" in said
    assert_equivalent(step_of(loss_of), BATCHES, replicas=2, batch_statistics="replica")


def over_time(a: tf.Tensor, b: tf.Tensor, y: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A list of as many means as there are turns, no example's."""
    turns = tf.shape(a)[1]
    found = tf.TensorArray(tf.float64, size=turns)
    _, found = tf.while_loop(
        lambda i, _: i < turns, lambda i, t: (i + 1, t.write(i, unseen(tf.reduce_mean((a @ w) ** 2)))), (0, found)
    )
    return tf.reduce_sum(found.stack())


def test_a_sum_over_the_turns_of_a_loop_is_not_taken_for_one_over_examples() -> None:
    assert [one.reduction for one in item_of(over_time).gradients] == [""]
    assert_equivalent(step_of(over_time), BATCHES, replicas=2, batch_statistics="replica")


def shuffled(a: tf.Tensor, b: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
    return tf.split(tf.random.shuffle(both(a, b), seed=1) @ w, 2)


OTHER_PARTS = {
    "halves of a batch": lambda a, b, y, w: first_of(tf.split(both(a, b) @ w, 4)),
    "at another place": lambda a, b, y, w: first_of(cut(both(a, both(a, b)) @ w, both(b, b))),
    "rows of a batch twice as long": lambda a, b, y, w: tf.reduce_mean(
        cut(both(tf.reshape(a, [-1, 2]), tf.reshape(b, [-1, 2])), a)[0] @ w[:2]
    ),
    "the last half": lambda a, b, y, w: tf.reduce_mean(
        cut(tf.reverse(both(a[:, :2], tf.reshape(b, [-1, 2])), [0]), a)[0] @ w[:2]
    ),
    "half of them shuffled": lambda a, b, y, w: tf.reduce_mean(shuffled(a, b, w)[0]),
    "shuffled, beside others": lambda a, b, y, w: tf.reduce_mean(shuffled(a, b, w)[0] * (a @ w)),
    "from the end on": lambda a, b, y, w: tf.reduce_mean(tf.split(tf.reverse(both(a, b), [0]) @ w, 2)[0] * (a @ w)),
}


@pytest.mark.parametrize("loss_of", OTHER_PARTS.values(), ids=OTHER_PARTS.keys())
def test_other_parts_of_joined_batches_are_told_of(loss_of: Loss) -> None:
    assert list(inexact(item_of(loss_of)))


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_mean_iou_of_one_of_two_joined_batches_is_one_devices(replicas: int) -> None:
    overlap = keras.metrics.MeanIoU(3)
    weight = tf.Variable(KERNEL)

    def step(a: tf.Tensor, b: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            one, other = tf.split(both(a, b) @ weight, 2)
            loss = tf.reduce_mean(one**2) + tf.reduce_mean(tf.cos(other))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        overlap.update_state(tf.cast(y > 0.0, tf.int32), tf.argmax(one, axis=1))
        return [loss, overlap.result()]

    assert not list(inexact(capture(step, *map(tf.constant, BATCHES[0])).item))
    assert_equivalent(step, BATCHES, replicas=replicas, batch_statistics="replica")


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda a, b, y, w: (lambda z: (tf.reduce_mean(z**2), z))(both(a, b) @ w),
        lambda a, b, y, w: (lambda z: (tf.reduce_mean(z), tf.tanh(z)))(both(a, b) @ w),
    ],
    ids=["a result", "what is computed from it"],
)
def test_rows_of_two_batches_do_not_come_back_interleaved(loss_of: Loss) -> None:
    (mixture,) = item_of(loss_of).mixtures
    assert mixture.startswith("the result 'Identity_1:0' has rows of several inputs, one behind the other")


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda a, b, y, w: tf.reduce_sum(tf.stack([tf.reduce_mean(a @ w), tf.reduce_sum(b @ w)])),
        lambda a, b, y, w: tf.reduce_sum(
            tf.concat([[tf.reduce_mean(a @ w)], [tf.reduce_sum(b @ w)], [tf.nn.l2_loss(w)]], axis=0)
        ),
        lambda a, b, y, w: tf.reduce_mean(tf.pad(a @ w, [[0, 2], [0, 0]])),
    ],
    ids=["a stack", "beside each other", "a mean with rows beside"],
)
def test_a_mean_and_a_sum_in_one_list_are_named(loss_of: Loss) -> None:
    (mixture,) = item_of(loss_of).mixtures
    assert "adds a sum over examples to what is a mean" in mixture or "averages over examples and others" in mixture


def keras_step(loss: Any, layer: keras.layers.Layer) -> Any:
    """The step of a model with this layer, as it is captured."""
    inputs = keras.Input([4])
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer, loss)
    optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        return value

    return step


class Adds(keras.layers.Layer):
    """Adds a sum over examples to the losses."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(x)))
        return x


SUM = keras.losses.MeanSquaredError(reduction="sum")
REGULARIZERS = {"l1": keras.regularizers.L1, "l2": keras.regularizers.L2, "l1_l2": keras.regularizers.L1L2}
X, Y = (RNG.normal(size=(6, width)).astype("float32") for width in (4, 1))


@pytest.mark.parametrize(
    ("loss", "layer"),
    [
        (SUM, lambda: keras.layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.1))),
        (SUM, lambda: keras.layers.Dense(3, activity_regularizer=keras.regularizers.L1L2(0.1, 0.1))),
        ("mse", lambda: keras.Sequential([keras.layers.Dense(3), Adds()])),
    ],
    ids=["l2", "l1_l2", "add_loss"],
)
def test_keras_adds_no_sum_to_a_mean_unnamed(loss: Any, layer: Callable[[], keras.layers.Layer]) -> None:
    (mixture,) = capture(keras_step(loss, layer()), tf.constant(X), tf.constant(Y)).item.mixtures
    assert "adds a sum over examples to what is a mean" in mixture


@pytest.mark.parametrize("regularizer", REGULARIZERS.values(), ids=REGULARIZERS.keys())
def test_activity_regularizers_of_a_mean_are_seen(regularizer: Callable[[], Any]) -> None:
    layer = keras.layers.Dense(3, activity_regularizer=regularizer(), kernel_regularizer="l2")
    item = capture(keras_step("mse", layer), tf.constant(X), tf.constant(Y)).item
    assert {one.reduction for one in item.gradients} == {"mean"}
    assert not list(inexact(item))
