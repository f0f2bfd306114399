"""Data and models of the programs of the tower API, which know of no strategy."""

from typing import Any

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
NETWORK = {"filter": (3, 3, 1, 4), "kernel": (4, 10), "bias": (10,)}


def dataset() -> tf.data.Dataset:
    """Batches of three rows, of which each is one tower's."""
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(60, 3)).astype(np.float32), rng.normal(size=(60, 1)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(3)


def numbered() -> tf.data.Dataset:
    """Batches of three numbers, and the same as integers."""
    return tf.data.Dataset.range(90).map(lambda number: (tf.cast(number, tf.float32), number * 7)).batch(3)


def regression() -> tuple[Any, Any]:
    """The variables of a linear model."""
    return tf.Variable([[0.5], [-1.0], [2.0]], name="weights"), tf.Variable([0.25], name="bias")


def gradients_of(batch: Any, weights: Any, bias: Any) -> Any:
    """The loss of a linear model on one tower's batch, and its gradients."""
    x, y = batch
    with tf.GradientTape() as tape:
        tape.watch([weights, bias])
        loss = tf.reduce_mean((x @ weights + bias - y) ** 2)
    return loss, tape.gradient(loss, [weights, bias])


def images() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.uniform(size=(40, 64)).astype(np.float32), rng.integers(0, 10, 40).astype(np.int32)


def logits_of(features: tf.Tensor) -> tf.Tensor:
    """A small convolutional network, whose variables are made by `tf.compat.v1.get_variable`."""
    made = {}
    for name, shape in NETWORK.items():
        start = np.random.default_rng(len(name)).normal(scale=0.3, size=shape).astype(np.float32)
        made[name] = v1.get_variable(name, shape, initializer=v1.constant_initializer(start))
    hidden = tf.nn.relu(tf.nn.conv2d(tf.reshape(features, [-1, 8, 8, 1]), made["filter"], 2, "SAME"))
    return tf.reduce_mean(hidden, axis=[1, 2]) @ made["kernel"] + made["bias"]
