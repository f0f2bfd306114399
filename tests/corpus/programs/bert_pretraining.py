"""BERT's two losses in one step: masked words, by their number and an epsilon, and whether a sentence is the next."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng, sentences
from tests.corpus.header import Header, Seen

HEADER = Header("attention and embeddings", "step function", still=("key/bias", "key_bias"))
WORDS, LENGTH, WIDTH, MASKED = 24, 9, 8, 3


def encoder() -> keras.Model:
    ids = keras.Input([LENGTH], dtype="int64")
    x = keras.layers.LayerNormalization()(keras.layers.Embedding(WORDS, WIDTH, name="words")(ids))
    y = keras.layers.MultiHeadAttention(2, 4)(x, x, attention_mask=keras.ops.not_equal(ids, 0)[:, None, :])
    return keras.Model(ids, keras.layers.LayerNormalization()(x + y))


def examples(rows: int) -> tuple[np.ndarray, ...]:
    """Sentences, the places of some of their words, these words, which of them count, and whether one follows."""
    words = sentences(rows, LENGTH, WORDS)
    draw = rng()
    places = np.argsort(draw.uniform(size=words.shape), axis=1)[:, :MASKED]
    hidden = np.take_along_axis(words, places, axis=1)
    counted = (hidden > 0) & (draw.uniform(size=hidden.shape) < 0.7)
    shown = words.copy()
    np.put_along_axis(shown, places, 1, axis=1)
    return shown, places, hidden, counted.astype("float64"), draw.integers(0, 2, rows)


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    model = encoder()
    table = model.get_layer("words").embeddings
    bias = tf.Variable(tf.zeros(WORDS, tf.float64), name="output_bias")
    is_next = keras.layers.Dense(2, name="next")
    is_next.build((None, WIDTH))
    trained = [*model.trainable_variables, bias, *is_next.trainable_variables]
    optimizer = keras.optimizers.AdamW(0.01)
    optimizer.build(trained)

    @autodist.function
    def step(
        shown: tf.Tensor, places: tf.Tensor, hidden: tf.Tensor, counted: tf.Tensor, follows: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            states = model(shown, training=True)
            picked = tf.gather(states, places, batch_dims=1)
            logits = tf.tensordot(tf.nn.gelu(picked), tf.transpose(table), 1) + bias
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=hidden, logits=logits)
            words = tf.reduce_sum(counted * losses) / (tf.reduce_sum(counted) + 1e-5)
            pairs = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=follows, logits=is_next(states[:, 0]))
            loss = words + tf.reduce_mean(pairs)
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, trained), 1.0)
        optimizer.apply(gradients, trained)
        return {"loss": loss, "words": words, "norm": norm}

    for batch in batches(header.sizes, *examples(30)):
        yield Seen(step(*batch), (model, is_next, bias, optimizer))
