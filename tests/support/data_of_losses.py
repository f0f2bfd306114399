"""Steps in which a gradient is data of another loss, behind a `tf.stop_gradient`."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tests.support.oracle import Batch, Training, Values, compare_function


def batches() -> list[Batch]:
    rng = np.random.default_rng(13)
    return [(rng.normal(size=(size, 3)), rng.normal(size=size)) for size in (6, 5, 1, 7)]


def trained(step: str, builder: str) -> Values:
    """The step of that name, trained as on one device."""

    def build(seed: int) -> Training:
        rng = np.random.default_rng(seed)
        weights = {name: tf.Variable(rng.normal(size=3), name=name) for name in ("first", "second")}
        return Training(STEPS[step](weights), lambda: weights)

    return compare_function(build, batches(), autodist={"strategy_builder": builder})


def _error(x: tf.Tensor, y: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
    return tf.square(tf.linalg.matvec(x, weight) - y)


def _by_the_size_of_a_gradient_that_trains(weights: dict[str, tf.Variable]) -> Callable[..., tf.Tensor]:
    """The second loss is scaled by the root of the first one's gradient: no mean of the replicas' own would do."""
    first, second = weights.values()

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(_error(x, y, first))
        gradient = tape.gradient(loss, first)
        with tf.GradientTape() as tape:
            scale = tf.stop_gradient(tf.sqrt(tf.norm(gradient)))
            other = scale * tf.reduce_mean(_error(x, y, second))
        first.assign_sub(0.1 * gradient)
        second.assign_sub(0.1 * tape.gradient(other, second))
        return other

    return step


def _along_a_gradient_that_trains_nothing(weights: dict[str, tf.Variable]) -> Callable[..., tf.Tensor]:
    """Sharpness: the loss at a point up the gradient, which itself trains nothing; one tape is within the other."""
    first, second = weights.values()

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean(_error(x, y, first))
            direction = tf.stop_gradient(inner.gradient(loss, first))
            moved = tf.reduce_mean(_error(x, y, first + 0.1 * direction / tf.norm(direction) + second))
        for weight, gradient in zip((first, second), outer.gradient(moved, [first, second]), strict=True):
            weight.assign_sub(0.1 * gradient)
        return moved

    return step


STEPS = {
    "by its size": _by_the_size_of_a_gradient_that_trains,
    "along it": _along_a_gradient_that_trains_nothing,
}
