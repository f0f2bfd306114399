"""Sentences of any length as ragged batches: an embedding, averaged over the words that there are."""

# A step takes no ragged tensor as an argument; `ragged_in_step` is the same training with the way out.

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng, sentences
from tests.corpus.header import STRATEGIES, Header, Refusal, Seen

REFUSAL = Refusal("was given a RaggedTensor, which cannot be shared out by rows; pass its components as dense tensors")
HEADER = Header("attention and embeddings", "step function", refused=dict.fromkeys(STRATEGIES, REFUSAL))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    words = sentences(sum(header.sizes), 7)
    labels = (words.max(axis=1) > 12).astype("float64")
    table = tf.Variable(rng(61).normal(size=(24, 5)), name="table")
    kernel = tf.Variable(rng(62).normal(size=(5, 1)), name="kernel")
    optimizer = keras.optimizers.Adagrad(0.05)
    optimizer.build([table, kernel])

    @autodist.function
    def step(ragged: tf.RaggedTensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            embedded = tf.reduce_mean(tf.gather(table, ragged), axis=1)
            logits = tf.squeeze(embedded @ kernel, axis=1)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=logits))
        gradients = tape.gradient(loss, [table, kernel])
        optimizer.apply_gradients(zip(gradients, [table, kernel], strict=True))
        return loss

    for x, y in batches(header.sizes, words, labels):
        ragged = tf.RaggedTensor.from_row_lengths(x[x != 0], np.count_nonzero(x, axis=1))
        yield Seen(step(ragged, y), (table, kernel, optimizer))
