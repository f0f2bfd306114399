"""A factorization machine: one table of all features, pairs by the sum-square trick, L2 of the looked-up rows."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, ratings, rng
from tests.corpus.header import Header, Seen

HEADER = Header("recommenders", "step function", sizes=(9, 6, 7))
USERS, ITEMS, WIDTH = 11, 9, 4


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    user, item, rating = ratings(40)
    ids = np.stack([user, USERS + item], axis=1)
    initial = rng(9)
    offset = tf.Variable(np.float64(0.0), name="offset")
    linear = tf.Variable(np.zeros(USERS + ITEMS), name="linear")
    factors = tf.Variable(0.3 * initial.normal(size=(USERS + ITEMS, WIDTH)), name="factors")
    weights = [offset, linear, factors]
    optimizer = keras.optimizers.Adam(0.05)
    optimizer.build(weights)

    @autodist.function
    def step(rows: tf.Tensor, targets: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            looked_up = tf.nn.embedding_lookup(factors, rows)
            square_of_sum = tf.square(tf.reduce_sum(looked_up, axis=1))
            sum_of_square = tf.reduce_sum(tf.square(looked_up), axis=1)
            pairs = 0.5 * tf.reduce_sum(square_of_sum - sum_of_square, axis=1)
            predicted = offset + tf.reduce_sum(tf.gather(linear, rows), axis=1) + pairs
            error = tf.reduce_mean(tf.square(predicted - targets))
            loss = error + 0.01 * tf.reduce_mean(tf.reduce_sum(tf.square(looked_up), axis=[1, 2]))
        optimizer.apply(tape.gradient(loss, weights), weights)
        return {"root": tf.sqrt(error), "predicted": predicted}

    for rows, targets in batches(header.sizes, ids, rating):
        yield Seen(step(rows, targets), (weights, optimizer))
