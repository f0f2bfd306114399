"""A graph convolution over one known graph: its nodes are the state of the net, a batch is which nodes are labelled."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng, wines
from tests.corpus.header import Header, Seen

HEADER = Header("graph networks", "step function", sizes=(8, 5, 7))
NODES = 30


def adjacency(x: np.ndarray) -> np.ndarray:
    """Each node and its four nearest, symmetric, normalized by degrees."""
    distances = np.square(x[:, None] - x[None]).sum(axis=-1)
    near = (np.argsort(np.argsort(distances, axis=1), axis=1) < 5).astype("float64")
    near = np.maximum(near, near.T)
    root = 1.0 / np.sqrt(near.sum(axis=1))
    return near * root[:, None] * root[None]


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    x_data, labels_data = (array[:NODES] for array in wines())
    x, edges = tf.constant(x_data), tf.constant(adjacency(x_data))
    initial = rng(15)
    first = tf.Variable(initial.normal(size=(13, 6)) * 0.3, name="first")
    second = tf.Variable(initial.normal(size=(6, 3)) * 0.3, name="second")
    optimizer = keras.optimizers.Adam(0.02)
    optimizer.build([first, second])

    @autodist.function
    def step(nodes: tf.Tensor, labels: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(edges @ (x @ first))
            logits = tf.gather(edges @ (hidden @ second), nodes)
            entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.reduce_mean(entropy) + 5e-3 * tf.nn.l2_loss(first)
        optimizer.apply(tape.gradient(loss, [first, second]), [first, second])
        right = tf.cast(tf.equal(tf.argmax(logits, axis=1), labels), tf.float64)
        return {"loss": loss, "accuracy": tf.reduce_mean(right)}

    for batch in batches(header.sizes, rng(16).permutation(NODES), labels_data):
        yield Seen(step(*batch), (first, second, optimizer))
