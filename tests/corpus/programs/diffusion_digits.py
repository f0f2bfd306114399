"""Denoising diffusion of digits: sinusoidal time embeddings, noise that comes with the batch, an EMA of the net."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import digits, rng
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("generative models", "custom train_step", sizes=(8, 8, 3))
STEPS = 20
KEPT = np.cumprod(1.0 - np.linspace(1e-3, 0.3, STEPS))


def denoiser() -> keras.Model:
    noisy, times = keras.Input([8, 8, 1]), keras.Input([1])
    angles = times * keras.ops.convert_to_tensor(np.geomspace(1.0, 0.01, 4))
    embedded = keras.layers.Dense(4, activation="swish")(
        keras.ops.concatenate([keras.ops.sin(angles), keras.ops.cos(angles)], axis=1)
    )
    x = keras.layers.Conv2D(4, 3, padding="same", activation="swish")(noisy)
    x = x + embedded[:, None, None, :]
    x = keras.layers.Conv2D(4, 3, padding="same", activation="swish")(x)
    return keras.Model([noisy, times], keras.layers.Conv2D(1, 3, padding="same")(x))


class Diffusion(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.network, self.average = denoiser(), denoiser()
        self.average.trainable = False
        self.average.set_weights(self.network.get_weights())
        self.tracker = keras.metrics.Mean(name="noise_loss")

    def call(self, data: Any) -> Any:
        return self.network(data)

    def train_step(self, data: Any) -> dict[str, Any]:
        ((images, noise, times),) = data
        kept = tf.gather(tf.constant(KEPT), times)[:, :, None, None]
        noisy = tf.sqrt(kept) * images + tf.sqrt(1.0 - kept) * noise
        with tf.GradientTape() as tape:
            predicted = self.network([noisy, tf.cast(times, noisy.dtype)], training=True)
            loss = keras.ops.mean(keras.losses.mean_absolute_error(noise, predicted))
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tracker.update_state(loss)
        for weight, average in zip(self.network.weights, self.average.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {"noise_loss": self.tracker.result()}


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    count = sum(header.sizes)
    images = 2.0 * digits()[0][:count] - 1.0
    noise, times = rng(1).normal(size=images.shape), rng(2).integers(0, STEPS, (count, 1))
    with autodist.scope():
        model = Diffusion()
        model.compile(keras.optimizers.AdamW(0.01), jit_compile=False)
    yield from fitted(model, (images, noise, times), batch_size=header.sizes[0])
