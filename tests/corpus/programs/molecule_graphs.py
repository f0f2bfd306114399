"""A message-passing network on a batch of padded molecules: per-graph adjacency, masked mean over atoms, two rounds."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng
from tests.corpus.header import Header, Seen

HEADER = Header("graph networks", "step function", sizes=(7, 4, 6))
ATOMS, KINDS, WIDTH = 6, 5, 5


def molecules(count: int) -> tuple[np.ndarray, ...]:
    drawn = rng(17)
    sizes = drawn.integers(2, ATOMS + 1, (count, 1))
    kinds = np.where(np.arange(ATOMS) < sizes, drawn.integers(1, KINDS, (count, ATOMS)), 0)
    bonds = drawn.uniform(size=(count, ATOMS, ATOMS)) < 0.4
    bonds = (bonds | bonds.transpose(0, 2, 1)) & (kinds > 0)[:, :, None] & (kinds > 0)[:, None, :]
    return kinds, bonds.astype("float64"), bonds.sum(axis=(1, 2)) / 10.0


class MessagePassing(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.message = keras.layers.Dense(WIDTH, activation="relu")
        self.update = keras.layers.GRUCell(WIDTH)

    def call(self, states: Any, bonds: Any) -> Any:
        messages = tf.matmul(bonds, self.message(states))
        flat, _ = self.update(tf.reshape(messages, [-1, WIDTH]), [tf.reshape(states, [-1, WIDTH])])
        return tf.reshape(flat, tf.shape(states))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    data = molecules(20)
    table = keras.layers.Embedding(KINDS, WIDTH)
    passing, head = MessagePassing(), keras.layers.Dense(1)
    head(passing(table(data[0][:1]), data[1][:1]))
    weights = [*table.trainable_variables, *passing.trainable_variables, *head.trainable_variables]
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(weights)

    @autodist.function
    def step(kinds: tf.Tensor, bonds: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            states = table(kinds)
            for _ in range(2):
                states = passing(states, bonds)
            present = tf.cast(kinds > 0, tf.float64)[:, :, None]
            pooled = tf.reduce_sum(states * present, axis=1) / tf.reduce_sum(present, axis=1)
            loss = tf.reduce_mean(tf.square(head(pooled)[:, 0] - targets))
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    for batch in batches(header.sizes, *data):
        yield Seen(step(*batch), (table, passing, head, optimizer))
