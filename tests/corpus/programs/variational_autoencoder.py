"""A variational autoencoder of digits as Keras's guides write it: three trackers; its noise comes with the batch."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import digits, rng
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("generative models", "custom train_step", sizes=(8, 8, 5))
LATENT = 3


class Vae(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.layers.Dense(12, activation="relu"), keras.layers.Dense(2 * LATENT)])
        self.decoder = keras.Sequential(
            [keras.layers.Dense(12, activation="relu"), keras.layers.Dense(64, activation="sigmoid")]
        )
        self.total_tracker = keras.metrics.Mean(name="total")
        self.reconstruction_tracker = keras.metrics.Mean(name="reconstruction")
        self.divergence_tracker = keras.metrics.Mean(name="divergence")

    def call(self, data: Any) -> Any:
        images, noise = data
        mean, log_variance = tf.split(self.encoder(images), 2, axis=1)
        return self.decoder(mean + tf.exp(0.5 * log_variance) * noise), mean, log_variance

    def train_step(self, data: Any) -> dict[str, Any]:
        ((images, noise),) = data
        with tf.GradientTape() as tape:
            pictures, mean, log_variance = self((images, noise))
            errors = keras.losses.binary_crossentropy(images[:, :, None], pictures[:, :, None])
            reconstruction = tf.reduce_mean(tf.reduce_sum(errors, axis=1))
            divergence = -0.5 * (1.0 + log_variance - tf.square(mean) - tf.exp(log_variance))
            divergence = tf.reduce_mean(tf.reduce_sum(divergence, axis=1))
            total = reconstruction + divergence
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total_tracker.update_state(total)
        self.reconstruction_tracker.update_state(reconstruction)
        self.divergence_tracker.update_state(divergence)
        return {metric.name: metric.result() for metric in self.metrics}


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    count = sum(header.sizes)
    images = digits()[0][:count].reshape(count, 64)
    with autodist.scope():
        model = Vae()
        model.compile(keras.optimizers.Adam(0.01), jit_compile=False)
    yield from fitted(model, (images, rng().normal(size=(count, LATENT))), batch_size=header.sizes[0])
