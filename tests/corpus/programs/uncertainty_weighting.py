"""Two tasks weighted by learnt uncertainties: regression and classification from one trunk, a log-variance for each."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, tumours
from tests.corpus.header import Header, Seen

HEADER = Header("training recipes", "step function", sizes=(8, 5, 7))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    x_data, kind = tumours()
    inputs = keras.Input([29])
    trunk = keras.layers.Dense(8, activation="relu")(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(2)(trunk), keras.layers.Dense(1)(trunk)])
    log_variances = tf.Variable(np.zeros(2), name="log_variances")
    weights = [*model.trainable_variables, log_variances]
    optimizer = keras.optimizers.Lion(0.005)
    optimizer.build(weights)

    @autodist.function
    def step(x: tf.Tensor, labels: tf.Tensor, sizes: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits, predicted = model(x)
            entropy = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
            error = tf.reduce_mean(tf.square(predicted - sizes))
            precision = tf.exp(-log_variances)
            loss = tf.reduce_sum(precision * tf.stack([entropy, 0.5 * error]) + 0.5 * log_variances)
        optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss, "entropy": entropy, "error": error}

    for batch in batches(header.sizes, x_data[:, 1:], kind, x_data[:, :1]):
        yield Seen(step(*batch), (model, log_variances, optimizer))
