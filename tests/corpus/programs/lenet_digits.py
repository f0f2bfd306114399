"""LeNet on handwritten digits: convolutions, max pooling, label smoothing, and momentum written by hand."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import batches, digits
from tests.corpus.header import Header, Seen

HEADER = Header("convnets and residual nets", "step function", sizes=(8, 5, 1, 7))


def lenet() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Conv2D(4, 3, activation="tanh", padding="same"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(6, 3, activation="tanh"),
            keras.layers.Flatten(),
            keras.layers.Dense(12, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    model = lenet()
    model.build([None, 8, 8, 1])
    velocities = [tf.Variable(tf.zeros(weight.shape, tf.float64)) for weight in model.trainable_variables]
    correct = tf.Variable(0, dtype=tf.int64)

    @autodist.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            targets = tf.one_hot(labels, 10, on_value=0.91, off_value=0.01, dtype=tf.float64)
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(targets, logits))
        weights = model.trainable_variables
        for weight, velocity, gradient in zip(weights, velocities, tape.gradient(loss, weights), strict=True):
            velocity.assign(0.9 * velocity + gradient)
            weight.assign_sub(0.05 * velocity)
        hits = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(logits, axis=1), labels), tf.int64))
        correct.assign_add(hits)
        return {"loss": loss, "hits": hits, "logits": logits}

    for images, labels in batches(header.sizes, *digits()):
        yield Seen(step(images, labels), (model, velocities, correct))
