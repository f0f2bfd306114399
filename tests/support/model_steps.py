"""Steps that train a Keras model, of Keras 3 or tf_keras."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def descending(model: Any, optimizer: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    """A step by which `optimizer`, built here, trains the model to return 0; it returns the mean of the squares."""
    optimizer.build(model.trainable_variables)
    dtype = model.trainable_variables[0].dtype

    def step(x: tf.Tensor) -> tf.Tensor:
        variables = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(model(x, training=True), dtype) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step
