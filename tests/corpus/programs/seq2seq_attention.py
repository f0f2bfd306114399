"""Characters to reversed characters: a GRU encoder, a decoder with additive attention, teacher forcing, padding."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, characters, rng
from tests.corpus.header import Header, Seen

HEADER = Header("attention and embeddings", "step function", sizes=(7, 4, 6))
LETTERS, LENGTH, WIDTH, START = 16, 6, 6, 15


class Translator(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(LETTERS, WIDTH)
        self.encoder = keras.layers.GRU(WIDTH, return_sequences=True, return_state=True)
        self.decoder = keras.layers.GRU(WIDTH, return_sequences=True)
        self.attention = keras.layers.AdditiveAttention()
        self.head = keras.layers.Dense(LETTERS)

    def call(self, sources: Any, targets: Any) -> Any:
        memory, state = self.encoder(self.embedding(sources))
        decoded = self.decoder(self.embedding(targets), initial_state=state)
        seen = self.attention([decoded, memory], mask=[None, tf.not_equal(sources, 0)])
        return self.head(tf.concat([decoded, seen], axis=-1))


def pairs() -> tuple[np.ndarray, ...]:
    words = characters(40, LENGTH, LETTERS - 1) % (LETTERS - 2) + 1
    lengths = rng().integers(2, LENGTH + 1, (len(words), 1))
    sources = np.where(np.arange(LENGTH) < lengths, words, 0)
    targets = np.array(
        [np.concatenate([row[:n][::-1], row[n:]]) for row, n in zip(sources, lengths[:, 0], strict=True)]
    )
    return sources, np.concatenate([np.full((len(words), 1), START), targets[:, :-1]], axis=1), targets


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    data = pairs()
    model, optimizer = Translator(), keras.optimizers.Adam(0.02, clipnorm=1.0)
    model(data[0][:1], data[1][:1])
    optimizer.build(model.trainable_variables)

    @autodist.function
    def step(sources: tf.Tensor, fed: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(sources, fed)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
            present = tf.cast(targets != 0, tf.float64)
            loss = tf.reduce_sum(losses * present) / tf.reduce_sum(present)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    for batch in batches(header.sizes, *data):
        yield Seen(step(*batch), (model, optimizer))
