"""A small GPT: learnt position embeddings, causal attention, and output weights tied to the token embeddings."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import batches, characters
from tests.corpus.header import Header, Seen

HEADER = Header("attention and embeddings", "step function", still=("key/bias", "key_bias"))
VOCABULARY, LENGTH, WIDTH = 32, 10, 8


class Block(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.LayerNormalization(), keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(2, WIDTH // 2)
        self.up, self.down = keras.layers.Dense(4 * WIDTH, "gelu"), keras.layers.Dense(WIDTH)

    def call(self, x: Any) -> Any:
        y = self.first(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.down(self.up(self.second(x)))


class Gpt(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = keras.layers.Embedding(VOCABULARY, WIDTH)
        self.positions = keras.layers.Embedding(LENGTH, WIDTH)
        self.blocks = [Block(), Block()]
        self.norm = keras.layers.LayerNormalization()

    def call(self, ids: Any) -> Any:
        x = self.tokens(ids) + self.positions(tf.range(tf.shape(ids)[1]))
        for block in self.blocks:
            x = block(x)
        return tf.matmul(self.norm(x), self.tokens.embeddings, transpose_b=True)


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    pieces = characters(40, LENGTH + 1, VOCABULARY)
    model, optimizer = Gpt(), keras.optimizers.AdamW(0.01, weight_decay=0.01)
    model(pieces[:1, :-1])
    optimizer.build(model.trainable_variables)

    @autodist.function
    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(ids[:, :-1], training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids[:, 1:], logits=logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for (ids,) in batches(header.sizes, pieces):
        yield Seen(step(ids), (model, optimizer))
