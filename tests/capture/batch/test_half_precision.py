"""Gradients by float16: where a replica's share counts, which sums are rounded, and what is finite then."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.doors.graph import GraphScope
from autodist_py.kernel.ir.names import op_of
from autodist_py.proto.graph_item import GraphItem
from autodist_py.testing import assert_equivalent
from tests.support.capture_steps import capture

ROWS = 9
X = np.abs(np.random.default_rng(5).normal(size=(ROWS, 4))).astype(np.float32)
X[:, 3] = 1.0
"""The last column is how much each row counts."""

SCALES = 2.0 ** np.arange(6, 16, 1 / 3, dtype=np.float32)
"""From where all gradients below are finite to where none is."""

SIZES = (23, 43, 11, 47)
"""Of batches: numbers that are no longer whole when they are multiplied by a rounded share."""

SLOPPY = 4e-3
"""Each replica's part, and their sum, is rounded to the 11 bits of float16."""

Weights = list[tf.Variable]


def weights() -> Weights:
    """Two layers, and rows by position."""
    rng = np.random.default_rng(1)
    shapes = {"first": (3, 3), "second": (3, 1), "places": (3, 3)}
    return [tf.Variable(rng.normal(size=shape).astype(np.float32), name=name) for name, shape in shapes.items()]


def errors(x: tf.Tensor, trained: Weights, dtype: tf.DType = tf.float16) -> tf.Tensor:
    """The first layer is used twice."""
    first, second, _ = trained
    hidden = tf.tanh(tf.tanh(tf.cast(x[:, :3], dtype) @ tf.cast(first, dtype)) @ tf.cast(first, dtype))
    return tf.square(tf.cast(hidden @ tf.cast(second, dtype), tf.float32) - 5.0) * x[:, 3:]


def mean(x: tf.Tensor, trained: Weights) -> tf.Tensor:
    return tf.reduce_mean(errors(x, trained))


def total(x: tf.Tensor, trained: Weights) -> tf.Tensor:
    return tf.reduce_sum(errors(x, trained))


def regularized(x: tf.Tensor, trained: Weights) -> tf.Tensor:
    return mean(x, trained) + tf.nn.l2_loss(trained[0])


def with_places(x: tf.Tensor, trained: Weights) -> tf.Tensor:
    places = tf.cast(tf.gather(trained[2], tf.range(2)), tf.float16)
    logits = tf.cast(x[:, :3], tf.float16)[:, tf.newaxis] * places
    return tf.reduce_mean(tf.square(tf.cast(logits, tf.float32) - 5.0)) + mean(x, trained)


def in_bfloat16(x: tf.Tensor, trained: Weights) -> tf.Tensor:
    return tf.reduce_mean(errors(x, trained, tf.bfloat16))


def in_float32(x: tf.Tensor, trained: Weights) -> tf.Tensor:
    return tf.reduce_mean(errors(x, trained, tf.float32))


def of_float16(x: tf.Tensor, trained: Weights) -> tf.Tensor:
    return tf.cast(mean(x, trained), tf.float16)


Loss = Callable[[tf.Tensor, Weights], tf.Tensor]


def scaling(loss_of: Loss) -> Callable[..., Any]:
    """A step that unscales its gradients by hand, and trains by those that are finite."""
    trained = weights()

    def step(x: tf.Tensor, scale: tf.Tensor) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = loss_of(x, trained)
            scaled = loss * tf.cast(scale, loss.dtype)
        finite, used = [], []
        for weight, gradient in zip(trained, tape.gradient(scaled, trained), strict=True):
            if gradient is None:
                continue
            unscaled = tf.convert_to_tensor(gradient) / scale
            finite.append(tf.reduce_all(tf.math.is_finite(unscaled)))
            used.append(tf.where(finite[-1], unscaled, tf.zeros_like(unscaled)))
            weight.assign_sub(1e-6 * used[-1])
        return {"finite": tf.stack(finite), "gradients": used}

    return step


@pytest.mark.parametrize("first", [1.0, 40.0])
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("loss_of", [mean, total, regularized, with_places], ids=lambda one: one.__name__)
def test_what_is_finite_on_one_device_is_finite_on_replicas(loss_of: Loss, replicas: int, first: float) -> None:
    """Where replicas' parts are alike their sum overflows first; where one row counts most, the mean of its replica."""
    x = X.copy()
    x[0, 3] = first
    assert_equivalent(
        scaling(loss_of),
        [(x, scale) for scale in SCALES],
        replicas=replicas,
        tolerance=SLOPPY,
        batch_statistics="replica",
    )


def test_the_scales_are_too_large_for_some_gradients_and_not_for_all() -> None:
    step = tf.function(scaling(mean))
    found = [step(tf.constant(X), tf.constant(scale))["finite"].numpy() for scale in SCALES]
    assert np.all(found[0])
    assert not np.any(found[-1])


def item_of(loss_of: Loss) -> GraphItem:
    return capture(scaling(loss_of), tf.constant(X), tf.constant(1.0)).item


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda one: one.name)
def test_shares_of_a_loss_in_half_precision_are_not_rounded(dtype: tf.DType) -> None:
    """A third, rounded to 11 bits or fewer, would be seen where the rest of back-propagation is in float32."""
    first, second = (tf.Variable(np.zeros([3, 1], np.float32)) for _ in range(2))
    ones = np.ones([9, 3], np.float32)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            by_float16 = tf.cast(tf.cast(x @ second, tf.float16), tf.float32)
            loss = tf.cast(tf.reduce_mean(x @ first + by_float16), dtype)
        gradients = tape.gradient(loss, [first, second])
        first.assign_sub(gradients[0])
        second.assign_sub(gradients[1])
        return gradients[0]

    assert_equivalent(step, [(ones,), (2 * ones,), (3 * ones,)], replicas=3, tolerance=1e-6, batch_statistics="replica")


def parts(item: GraphItem) -> list[str]:
    return [one.tensor for one in item.statistics if one.reduction == "part"]


@pytest.mark.parametrize("loss_of", [mean, regularized, with_places], ids=lambda one: one.__name__)
def test_the_gradients_of_a_mean_by_float16_are_in_parts(loss_of: Loss) -> None:
    item = item_of(loss_of)
    assert {(one.in_parts, one.reduction) for one in item.gradients} == {(True, "mean")}
    assert len(parts(item)) == 1


@pytest.mark.parametrize("loss_of", [total, in_bfloat16, in_float32, of_float16], ids=lambda one: one.__name__)
def test_others_are_not(loss_of: Loss) -> None:
    item = item_of(loss_of)
    assert not any(one.in_parts for one in item.gradients)
    assert not parts(item)


@pytest.mark.parametrize(
    ("loss_of", "rounded"),
    [(mean, 3), (total, 3), (regularized, 3), (with_places, 4), (in_bfloat16, 0), (in_float32, 0)],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_each_sum_that_one_device_casts_from_float16_is_rounded_by_itself(loss_of: Loss, rounded: int) -> None:
    item = item_of(loss_of)
    ops = {node.name: node for node in tf.compat.v1.GraphDef.FromString(item.graph_def).node}
    narrowed = {node.input[0] for node in ops.values() if node.name.endswith("/in_float16")}
    markers = {op_of(tensor) for gradient in item.gradients for tensor in gradient.tensors}
    assert len(narrowed) == rounded
    assert narrowed <= markers


def also_of_the_input(x: tf.Tensor, trained: Weights, tape: tf.GradientTape, loss: tf.Tensor) -> tuple[Any, Any]:
    *gradients, own = tape.gradient(loss, [*trained[:2], x])
    return gradients, own


def twice(x: tf.Tensor, trained: Weights, tape: tf.GradientTape, loss: tf.Tensor) -> tuple[Any, Any]:
    return tape.gradient(loss, trained[:2]), tape.gradient(loss, x)


def by_own_seeds(x: tf.Tensor, trained: Weights, tape: tf.GradientTape, loss: tf.Tensor) -> tuple[Any, Any]:
    return tape.gradient(loss, trained[:2], output_gradients=tf.constant(2.0)), loss


@pytest.mark.parametrize(
    ("gradients_of", "in_parts"), [(also_of_the_input, False), (twice, True), (by_own_seeds, False)]
)
def test_a_seed_that_anything_else_comes_of_or_that_is_the_users_is_left_alone(
    gradients_of: Callable[..., tuple[Any, Any]], in_parts: bool
) -> None:
    trained = weights()

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss = mean(x, trained)
        gradients, other = gradients_of(x, trained, tape, loss)
        for weight, gradient in zip(trained, gradients, strict=False):
            weight.assign_sub(1e-3 * gradient)
        return tf.reduce_sum(other)

    item = capture(step, tf.constant(X)).item
    assert [one.in_parts for one in item.gradients] == [in_parts] * len(item.gradients)
    assert bool(parts(item)) == in_parts
    assert_equivalent(
        step, [(X[:rows],) for rows in (9, 5, 7)], replicas=2, tolerance=SLOPPY, batch_statistics="replica"
    )


def test_parts_are_added_as_they_are_where_nothing_is_batched() -> None:
    """Replicas differ by what they draw: here nothing comes of it but that they do."""
    trained = weights()

    def step(scale: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = mean(X + 0.0 * tf.random.normal([ROWS, 4]), trained) * scale
        for weight, gradient in zip(trained, tape.gradient(loss, trained[:2]), strict=False):
            weight.assign_sub(1e-3 * gradient / scale)

    assert all(one.in_parts for one in capture(step, tf.constant(1.0)).item.gradients)
    assert_equivalent(
        step,
        [(np.float32(scale),) for scale in (1.0, 8.0, 64.0)],
        replicas=2,
        tolerance=SLOPPY,
        batch_statistics="replica",
    )


def test_a_graph_of_tensorflow_1_begins_back_propagation_with_known_seeds_too() -> None:
    v1 = tf.compat.v1
    scope = GraphScope(tf.Graph(), CaptureOptions(batch_statistics="replica"), seed=None)
    with scope.graph.as_default(), scope.recording():
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        kernel = v1.get_variable("kernel", [4, 2], use_resource=True)
        loss = tf.reduce_mean(tf.cast(tf.cast(x, tf.float16) @ tf.cast(kernel, tf.float16), tf.float32))
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    (gradient,) = scope.item(CaptureOptions(batch_statistics="replica")).gradients
    assert gradient.in_parts


@pytest.mark.parametrize("replicas", [2, 3, 7])
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda dtype: dtype.name)
def test_a_share_of_a_normalizer_in_half_precision_is_rounded_once(dtype: tf.DType, replicas: int) -> None:
    """The shares of a number of examples are numbers of examples: exact, where products with rounded shares are not."""
    weight = tf.Variable(1.0, name="weight")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.cast(x, dtype) * tf.cast(weight, dtype)
            loss = tf.cast(tf.reduce_sum(losses) / tf.reduce_sum(tf.cast(x, dtype)), tf.float32)
        weight.assign_sub(0.0 * tape.gradient(loss, weight))
        return loss

    assert "share" in [one.reduction for one in capture(step, tf.ones([9, 1])).item.statistics]
    batches = [(np.ones([size, 1], np.float32),) for size in SIZES]
    assert_equivalent(step, batches, replicas=replicas, tolerance=1e-6, batch_statistics="replica")
