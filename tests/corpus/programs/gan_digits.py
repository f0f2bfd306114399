"""A GAN of digits with a `compile` of its own: two optimizers, real and made images in one batch, noisy labels."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import digits, rng
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("generative models", "custom train_step", sizes=(6, 6, 4))
NOISE = 4


class Gan(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential(
            [
                keras.layers.Dense(16),
                keras.layers.LeakyReLU(negative_slope=0.2),
                keras.layers.Reshape([2, 2, 4]),
                keras.layers.Conv2DTranspose(4, 4, 2, padding="same"),
                keras.layers.LeakyReLU(negative_slope=0.2),
                keras.layers.Conv2DTranspose(1, 4, 2, padding="same", activation="sigmoid"),
            ]
        )
        self.discriminator = keras.Sequential(
            [
                keras.layers.Conv2D(4, 3, 2, padding="same"),
                keras.layers.LeakyReLU(negative_slope=0.2),
                keras.layers.GlobalMaxPooling2D(),
                keras.layers.Dense(1),
            ]
        )
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.d_tracker, self.g_tracker = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer: Any, g_optimizer: Any, **options: Any) -> None:
        super().compile(**options)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def call(self, noise: Any) -> Any:
        return self.discriminator(self.generator(noise))

    def train_step(self, data: Any) -> dict[str, Any]:
        ((real, noise, wobble),) = data
        images = tf.concat([self.generator(noise), real], axis=0)
        labels = tf.concat([tf.ones_like(wobble), tf.zeros_like(wobble)], axis=0)
        labels += 0.05 * tf.concat([wobble, wobble], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(images))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(tf.zeros_like(wobble), self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    count = sum(header.sizes)
    real, noise, wobble = digits()[0][:count], rng(1).normal(size=(count, NOISE)), rng(2).uniform(size=(count, 1))
    with autodist.scope():
        model = Gan()
        model(noise[:1])
        optimizers = [keras.optimizers.Adam(0.005, beta_1=0.5) for _ in range(2)]
        optimizers[0].build(model.discriminator.trainable_variables)
        optimizers[1].build(model.generator.trainable_variables)
        model.compile(*optimizers, jit_compile=False)
    for seen in fitted(model, (real, noise, wobble), batch_size=header.sizes[0]):
        yield Seen(seen.results, (*seen.owners, *optimizers))
