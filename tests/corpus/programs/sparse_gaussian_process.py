"""A sparse variational Gaussian process on minibatches: inducing points, a KL term that counts once."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, diabetes, rng
from tests.corpus.header import Header, Seen

HEADER = Header("losses over the whole batch", "step function", sizes=(9, 6, 8))
INDUCING, ALL = 5, 442


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    x_data, y_data = diabetes()
    x_data = x_data[:, :3]
    places = tf.Variable(rng(1).normal(size=(INDUCING, 3)), name="places")
    mean = tf.Variable(np.zeros((INDUCING, 1)), name="mean")
    root = tf.Variable(0.5 * np.eye(INDUCING), name="root")
    log_noise = tf.Variable(np.float64(-1.0), name="log_noise")
    weights = [places, mean, root, log_noise]
    optimizer = keras.optimizers.Adam(0.02)
    optimizer.build(weights)

    def kernel(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        return tf.exp(-0.5 * tf.reduce_sum(tf.square(a[:, None, :] - b[None, :, :]), axis=-1))

    def bound(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        factor = tf.linalg.cholesky(kernel(places, places) + 1e-4 * tf.eye(INDUCING, dtype=tf.float64))
        triangle = tf.linalg.band_part(root, -1, 0)
        projected = tf.linalg.triangular_solve(factor, kernel(places, x))
        predicted = tf.matmul(projected, mean, transpose_a=True)
        explained = tf.reduce_sum(tf.square(projected), axis=0) - tf.reduce_sum(
            tf.square(tf.matmul(triangle, projected, transpose_a=True)), axis=0
        )
        errors = tf.square(y - predicted)[:, 0] + 1.0 - explained
        likelihoods = -0.5 * (errors * tf.exp(-log_noise) + log_noise + np.log(2.0 * np.pi))
        diagonal = tf.math.log(tf.square(tf.linalg.diag_part(triangle)))
        divergence = 0.5 * (tf.reduce_sum(triangle**2) + tf.reduce_sum(mean**2) - tf.reduce_sum(diagonal) - INDUCING)
        return tf.reduce_mean(likelihoods) * ALL - divergence, predicted

    @autodist.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            evidence, predicted = bound(x, y)
            loss = -evidence / ALL
        optimizer.apply(tape.gradient(loss, weights), weights)
        return evidence, predicted

    for batch in batches(header.sizes, x_data, y_data):
        yield Seen(step(*batch), (weights, optimizer))
