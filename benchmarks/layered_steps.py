"""Steps of many small layers, whose ops cost more to trace and to compile than to run."""

from collections.abc import Callable

import tensorflow as tf

WIDTH = 4
_OPS_PER_LAYER = 72
"""Forward, backward, clipping and Adam of one layer of `deep_mlp`, about."""


def layers_of(ops: int) -> int:
    """How many layers of `deep_mlp` have about so many ops."""
    return -(-ops // _OPS_PER_LAYER)


def deep_mlp(layers: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """A step of an MLP of so many layers of `WIDTH` units: Adam written out, over a clipped global norm."""
    with tf.device("/device:CPU:0"):
        weights = [
            tf.Variable(tf.eye(WIDTH) * 0.9 if axis else tf.zeros([WIDTH]), name=f"layer_{index}/{kind}")
            for index in range(layers)
            for axis, kind in ((1, "kernel"), (0, "bias"))
        ]
        slots = [
            [tf.Variable(tf.zeros_like(weight), name=f"{weight.name[:-2]}/{kind}", trainable=False) for kind in "mv"]
            for weight in weights
        ]
        steps = tf.Variable(0.0, name="steps", trainable=False)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = x
            for kernel, bias in zip(weights[::2], weights[1::2], strict=True):
                value = tf.nn.relu(tf.matmul(value, kernel) + bias)
            loss = tf.reduce_mean(tf.square(value))
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, weights), 1.0)
        rate = 0.001 * tf.sqrt(1.0 - tf.pow(0.999, steps.assign_add(1.0)))
        for weight, gradient, (m, v) in zip(weights, gradients, slots, strict=True):
            mean = m.assign(0.9 * m + 0.1 * gradient)
            square = v.assign(0.999 * v + 0.001 * tf.square(gradient))
            weight.assign_sub(rate * mean / (tf.sqrt(square) + 1e-7))
        return loss

    return step


def many_variables(variables: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """A step of an MLP of so many variables, kernels and biases of `WIDTH` units in turns: plain SGD."""
    with tf.device("/device:CPU:0"):
        weights = [
            tf.Variable(tf.zeros([WIDTH]) if index % 2 else tf.eye(WIDTH) * 0.9, name=f"variable_{index}")
            for index in range(variables)
        ]

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = x
            for index, weight in enumerate(weights):
                value = tf.nn.relu(value + weight) if index % 2 else tf.matmul(value, weight)
            loss = tf.reduce_mean(tf.square(value))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.001 * gradient)
        return loss

    return step
