"""A variational autoencoder in a step function: Keras's binary cross-entropy after a sigmoid layer, per image."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import batches, digits, rng
from tests.corpus.header import Header, Seen

HEADER = Header("generative models", "step function", sizes=(8, 5, 7))
LATENT = 3


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    images = digits()[0]
    noise = rng(47).normal(size=(len(images), LATENT))
    encoder = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10, "relu"), keras.layers.Dense(2 * LATENT)])
    decoder = keras.Sequential([keras.layers.Dense(64, activation="sigmoid"), keras.layers.Reshape([8, 8, 1])])
    encoder.build([None, 8, 8, 1])
    decoder.build([None, LATENT])
    weights = [*encoder.trainable_variables, *decoder.trainable_variables]
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(weights)
    total_metric, picture_metric, divergence_metric = (keras.metrics.Mean() for _ in range(3))

    @autodist.function
    def step(x: tf.Tensor, z: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            mean, log_variance = tf.split(encoder(x), 2, axis=1)
            pictures = decoder(mean + tf.exp(0.5 * log_variance) * z)
            per_image = tf.reduce_sum(keras.losses.binary_crossentropy(x, pictures), axis=(1, 2))
            reconstruction = tf.reduce_mean(per_image)
            divergence = -0.5 * tf.reduce_mean(
                tf.reduce_sum(1.0 + log_variance - tf.square(mean) - tf.exp(log_variance), axis=1)
            )
            total = reconstruction + divergence
        optimizer.apply(tape.gradient(total, weights), weights)
        total_metric.update_state(total)
        picture_metric.update_state(reconstruction)
        divergence_metric.update_state(divergence)
        return {"total": total_metric.result(), "reconstruction": picture_metric.result()}

    for batch in batches(header.sizes, images, noise):
        yield Seen(step(*batch), (encoder, decoder, optimizer, total_metric, picture_metric, divergence_metric))
