"""A VQ-VAE: nearest codes with a straight-through gradient, commitment loss, counts of how often a code was used."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import batches, digits, rng
from tests.corpus.header import Header, Seen

HEADER = Header("generative models", "step function", sizes=(7, 4, 6))
CODES, WIDTH = 6, 3


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    images = digits()[0]
    encoder = keras.Sequential([keras.layers.Conv2D(4, 2, 2, activation="relu"), keras.layers.Conv2D(WIDTH, 2, 2)])
    decoder = keras.Sequential(
        [keras.layers.Conv2DTranspose(4, 2, 2, activation="relu"), keras.layers.Conv2DTranspose(1, 2, 2)]
    )
    encoder.build([None, 8, 8, 1])
    decoder.build([None, 2, 2, WIDTH])
    codebook = tf.Variable(rng(6).normal(size=(CODES, WIDTH)) * 0.3, name="codebook")
    used = tf.Variable(tf.zeros([CODES], tf.float64), trainable=False, name="used")
    weights = [*encoder.trainable_variables, *decoder.trainable_variables, codebook]
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(weights)

    @autodist.function
    def step(x: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            latent = encoder(x)
            flat = tf.reshape(latent, [-1, WIDTH])
            distances = (
                tf.reduce_sum(flat**2, axis=1, keepdims=True)
                - 2.0 * tf.matmul(flat, codebook, transpose_b=True)
                + tf.reduce_sum(codebook**2, axis=1)
            )
            nearest = tf.argmin(distances, axis=1)
            quantized = tf.reshape(tf.gather(codebook, nearest), tf.shape(latent))
            commitment = tf.reduce_mean((tf.stop_gradient(quantized) - latent) ** 2)
            codes = tf.reduce_mean((quantized - tf.stop_gradient(latent)) ** 2)
            pictures = decoder(latent + tf.stop_gradient(quantized - latent))
            error = tf.reduce_mean((pictures - x) ** 2)
            loss = error + codes + 0.25 * commitment
        optimizer.apply(tape.gradient(loss, weights), weights)
        counts = tf.reduce_sum(tf.one_hot(nearest, CODES, dtype=tf.float64), axis=0)
        used.assign(0.9 * used + 0.1 * counts)
        return {"loss": loss, "error": error, "counts": counts}

    for (x,) in batches(header.sizes, images):
        yield Seen(step(x), (encoder, decoder, codebook, used, optimizer))
