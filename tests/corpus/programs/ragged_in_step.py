"""Sentences of any length, padded, and ragged within the step: an embedding, averaged over the words that there are."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import batches, rng, sentences
from tests.corpus.header import Header, Refusal, Seen

HEADER = Header(
    "attention and embeddings",
    "step function",
    refused={"PartitionedPS": Refusal(r"its update uses 'adagrad/Any.*' \(Any\)", ("2-workers", "3-workers"))},
)


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    words = sentences(sum(header.sizes), 7)
    labels = (words.max(axis=1) > 12).astype("float64")
    table = tf.Variable(rng(61).normal(size=(24, 5)), name="table")
    kernel = tf.Variable(rng(62).normal(size=(5, 1)), name="kernel")
    optimizer = keras.optimizers.Adagrad(0.05)
    optimizer.build([table, kernel])

    @autodist.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        ragged = tf.RaggedTensor.from_tensor(x, padding=0)
        with tf.GradientTape() as tape:
            embedded = tf.reduce_mean(tf.gather(table, ragged), axis=1)
            logits = tf.squeeze(embedded @ kernel, axis=1)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=logits))
        gradients = tape.gradient(loss, [table, kernel])
        optimizer.apply_gradients(zip(gradients, [table, kernel], strict=True))
        return loss

    for x, y in batches(header.sizes, words, labels):
        yield Seen(step(x, y), (table, kernel, optimizer))
