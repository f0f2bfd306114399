"""A small model with a custom gradient in one of its places, and steps that train it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py.proto.graph_item import GraphItem
from tests.support.capture_steps import capture

SIZES = (6, 5, 4)
RNG = np.random.default_rng(12)
BATCHES = [(RNG.normal(size=(size, 4)), RNG.normal(size=size)) for size in SIZES]
KERNEL, BIAS = RNG.normal(size=(4, 3)) * 0.5, RNG.normal(size=3)

Backward = Callable[[tf.Tensor], tf.Tensor]
Loss = Callable[[tf.Tensor, tf.Tensor, list[tf.Variable]], tf.Tensor]


def passing(back: Backward) -> Callable[[tf.Tensor], tf.Tensor]:
    """What it is given; what it passes back goes through `back`."""

    @tf.custom_gradient
    def passed(value: tf.Tensor) -> Any:
        return tf.identity(value), back

    return passed


def at(place: str, back: Backward, reduce: Callable[..., tf.Tensor] = tf.reduce_mean) -> Loss:
    """A loss with a custom gradient in one of its places."""

    def through(here: str, value: tf.Tensor) -> tf.Tensor:
        return passing(back)(value) if here == place else value

    def loss(x: tf.Tensor, y: tf.Tensor, trained: list[tf.Variable]) -> tf.Tensor:
        kernel, bias = (tf.convert_to_tensor(one) for one in trained)
        logits = through("logits", tf.tanh(x @ through("weight", kernel)) + bias)
        errors = through("errors", tf.reduce_sum(logits, 1) - y)
        mean = through("loss", reduce(errors**2))
        return mean + through("regularizer", tf.nn.l2_loss(kernel))

    return loss


def step_of(loss_of: Loss) -> Callable[..., Any]:
    trained = [tf.Variable(KERNEL, name="kernel"), tf.Variable(BIAS, name="bias")]

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(x, y, trained)
        for weight, gradient in zip(trained, tape.gradient(loss, trained), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return step


def item_of(loss_of: Loss) -> GraphItem:
    return capture(step_of(loss_of), *map(tf.constant, BATCHES[0])).item


def small_sum(values: tf.Tensor) -> tf.Tensor:
    return 0.1 * tf.reduce_sum(values)
