"""A normalizing flow (RealNVP) of affine couplings with alternating masks, trained by its negative log-likelihood."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, wines
from tests.corpus.header import Header, Seen

HEADER = Header("flows and physics", "step function", sizes=(8, 5, 7))
FEATURES, LAYERS = 4, 4


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    data = wines()[0][:, :FEATURES]
    masks = [np.arange(FEATURES) % 2 == number % 2 for number in range(LAYERS)]
    nets = [
        keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2 * FEATURES)]) for _ in masks
    ]
    for net in nets:
        net.build([None, FEATURES])
    weights = [weight for net in nets for weight in net.trainable_variables]
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(weights)

    def log_likelihood(x: tf.Tensor) -> tf.Tensor:
        log_determinant = tf.zeros(tf.shape(x)[:1], x.dtype)
        for mask, net in zip(masks, nets, strict=True):
            kept = x * mask.astype("float64")
            scale, shift = tf.split(net(kept), 2, axis=1)
            scale = tf.tanh(scale) * (~mask).astype("float64")
            x = kept + (x * tf.exp(scale) + shift) * (~mask).astype("float64")
            log_determinant += tf.reduce_sum(scale, axis=1)
        normal = -0.5 * tf.reduce_sum(tf.square(x) + np.log(2.0 * np.pi), axis=1)
        return normal + log_determinant

    @autodist.function
    def step(x: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            likelihoods = log_likelihood(x)
            loss = -tf.reduce_mean(likelihoods)
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 5.0)
        optimizer.apply(gradients, weights)
        return {"loss": loss, "norm": norm, "likelihoods": likelihoods}

    for (x,) in batches(header.sizes, data):
        yield Seen(step(x), (nets, optimizer))
