"""An exact Gaussian process: its three hyperparameters are fitted to all of the data at once, by a Cholesky factor."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import diabetes
from tests.corpus.header import Header, Seen

HEADER = Header("losses over the whole batch", "step function", sizes=(20,))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    x, y = (tf.constant(array[: header.sizes[0]]) for array in diabetes())
    weights = [
        tf.Variable(np.float64(value), name=name)
        for name, value in {"scale": 0.5, "length": 1.0, "noise": -1.0}.items()
    ]
    optimizer = keras.optimizers.Adam(0.05)
    optimizer.build(weights)

    def negative_log_likelihood() -> tf.Tensor:
        amplitude, length, noise = map(tf.math.softplus, weights)
        distances = tf.reduce_sum(tf.square(x[:, None, :] - x[None, :, :]), axis=-1)
        covariance = amplitude**2 * tf.exp(-0.5 * distances / length**2)
        factor = tf.linalg.cholesky(covariance + (noise**2 + 1e-6) * tf.eye(len(x), dtype=tf.float64))
        solved = tf.linalg.cholesky_solve(factor, y)
        log_determinant = 2.0 * tf.reduce_sum(tf.math.log(tf.linalg.diag_part(factor)))
        return 0.5 * (tf.reduce_sum(y * solved) + log_determinant + len(x) * np.log(2.0 * np.pi))

    @autodist.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = negative_log_likelihood()
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    for _ in range(4):
        yield Seen(step(), (weights, optimizer))
