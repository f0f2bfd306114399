"""A gradient that trains, or is fetched, and through which another loss is differentiated, is refused."""

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.proto.errors import CaptureError
from autodist_py.testing import assert_equivalent

X = np.random.default_rng(5).normal(size=(7, 3))
Outer = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]

OUTER: dict[str, Outer] = {
    "linear": lambda gradient, x, w: tf.reduce_sum(gradient * [1.0, 2.0, 3.0]),
    "linear, beside a loss": lambda gradient, x, w: tf.reduce_mean((x * w) ** 2) + tf.reduce_sum(gradient),
    "a square": lambda gradient, x, w: tf.reduce_sum(gradient**2),
    "the loss after a step": lambda gradient, x, w: tf.reduce_sum((x * (w - 0.1 * gradient)) ** 2),
}


def stepped(outer_loss: Outer, *, returns_loss: bool, stops: bool = False) -> Callable[[tf.Tensor], tf.Tensor]:
    w = tf.Variable([1.0, 2.0, 3.0], dtype=tf.float64, name="w")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum((x * w) ** 2) + tf.reduce_sum(w**2)
            gradient = inner.gradient(loss, w)
            of_gradient = outer_loss(tf.stop_gradient(gradient) if stops else gradient, x, w)
        w.assign_sub(0.1 * outer.gradient(of_gradient, w))
        return of_gradient if returns_loss else gradient

    return step


@pytest.mark.parametrize("returns_loss", [True, False], ids=["the loss", "the gradient"])
@pytest.mark.parametrize("outer_loss", OUTER.values(), ids=OUTER.keys())
def test_a_loss_made_of_a_gradient_that_is_combined_is_refused(outer_loss: Outer, *, returns_loss: bool) -> None:
    with (
        AutoDist() as autodist,
        pytest.raises(CaptureError, match=r"the loss by which 'w' is trained is computed through it"),
    ):
        autodist.function(stepped(outer_loss, returns_loss=returns_loss)).captured(X)


def test_a_loss_that_is_linear_in_a_gradient_by_tf_gradients_is_refused() -> None:
    """It always passes through what the loss is made of, and does not read the gradient."""
    w = tf.Variable([1.0, 2.0, 3.0], dtype=tf.float64, name="w")

    def step(x: tf.Tensor) -> tf.Tensor:
        (gradient,) = tf.gradients(tf.reduce_sum((x * w) ** 2), w)
        (of_gradient,) = tf.gradients(tf.reduce_sum(gradient * [1.0, 2.0, 3.0]), w)
        w.assign_sub(0.1 * of_gradient)
        return gradient

    with (
        AutoDist() as autodist,
        pytest.raises(CaptureError, match=r"the loss by which 'w' is trained is computed through it"),
    ):
        autodist.function(step).captured(X)


def test_a_gradient_that_is_only_data_to_the_loss_is_combined() -> None:
    with AutoDist() as autodist:
        step = stepped(OUTER["linear, beside a loss"], returns_loss=True, stops=True)
        gradients = autodist.function(step).captured(X).item.gradients
    assert [one.reduction for one in gradients] == ["sum", "mean"]
    assert_equivalent(stepped(OUTER["linear, beside a loss"], returns_loss=True, stops=True), [(X,)] * 3, replicas=2)


def test_the_gradient_of_what_the_other_loss_does_not_depend_on_is_combined() -> None:
    w, other = (tf.Variable([1.0, 2.0, 3.0], dtype=tf.float64, name=name) for name in ("w", "other"))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum((x * w) ** 2)
            gradient = inner.gradient(loss, w)
            both = tf.reduce_sum((x * other) ** 2) + tf.reduce_sum(gradient)
        w.assign_sub(0.1 * gradient)
        other.assign_sub(0.1 * outer.gradient(both, other))
        return loss

    with AutoDist() as autodist:
        assert len(autodist.function(step).captured(X).item.gradients) == 2
    assert_equivalent(step, [(X,)] * 3, replicas=2)


def test_a_gradient_taken_before_the_outer_tape_is_data_to_it() -> None:
    """The tape does not pass through it; `tf.stop_gradient` is not needed."""
    for name in OUTER.keys() - {"linear, beside a loss"}:
        assert_equivalent(taken_before(OUTER[name]), [(X,)] * 3, replicas=2)


def taken_before(outer_loss: Outer) -> Callable[[tf.Tensor], tf.Tensor]:
    w = tf.Variable([1.0, 2.0, 3.0], dtype=tf.float64, name="w")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as inner:
            loss = tf.reduce_sum((x * w) ** 2)
        gradient = inner.gradient(loss, w)
        with tf.GradientTape() as outer:
            both = outer_loss(gradient, x, w) + tf.reduce_sum(gradient * w)
        w.assign_sub(0.01 * gradient + 0.01 * outer.gradient(both, w))
        return loss

    return step
