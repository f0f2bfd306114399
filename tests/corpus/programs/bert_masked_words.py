"""A small BERT fills in masked words: padding masks, a loss over the masked words only, clipping, and EMA weights."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng, sentences
from tests.corpus.header import Header, Seen

HEADER = Header("attention and embeddings", "step function", still=("key/bias", "key_bias"))
WORDS, LENGTH, WIDTH, MASK = 24, 9, 8, 1


def encoder() -> keras.Model:
    ids = keras.Input([LENGTH], dtype="int64")
    places = keras.Input([LENGTH], dtype="int64")
    x = keras.layers.Embedding(WORDS, WIDTH)(ids) + keras.layers.Embedding(LENGTH, WIDTH)(places)
    x = keras.layers.LayerNormalization()(x)
    present = keras.ops.not_equal(ids, 0)[:, None, :]
    y = keras.layers.MultiHeadAttention(2, 4)(x, x, attention_mask=present)
    x = keras.layers.LayerNormalization()(x + y)
    y = keras.layers.Dense(WIDTH)(keras.layers.Dense(16, activation="gelu")(x))
    x = keras.layers.LayerNormalization()(x + y)
    return keras.Model([ids, places], keras.layers.Dense(WORDS)(x))


def masked(rows: int) -> tuple[np.ndarray, ...]:
    """Sentences with some words masked, the words, and where they were."""
    words = sentences(rows, LENGTH, WORDS)
    hidden = (rng().uniform(size=words.shape) < 0.3) & (words > 1)
    places = np.broadcast_to(np.arange(LENGTH), words.shape)
    return np.where(hidden, MASK, words), places, words, hidden.astype("float64")


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    model = encoder()
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.004, use_ema=True, ema_momentum=0.9)
    optimizer.build(model.trainable_variables)

    @autodist.function
    def step(ids: tf.Tensor, places: tf.Tensor, words: tf.Tensor, hidden: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = model([ids, places], training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=words, logits=logits)
            loss = tf.reduce_sum(losses * hidden) / tf.reduce_sum(hidden)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
        optimizer.apply(gradients, model.trainable_variables)
        hits = tf.cast(tf.equal(tf.argmax(logits, axis=-1), words), tf.float64)
        return {"loss": loss, "norm": norm, "accuracy": tf.reduce_sum(hits * hidden) / tf.reduce_sum(hidden)}

    for batch in batches(header.sizes, *masked(30)):
        yield Seen(step(*batch), (model, optimizer))
