"""A two-tower retriever: users and items meet in a dot product, each positive among negatives given with it."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, ratings, rng
from tests.corpus.header import Header, Refusal, Seen

HEADER = Header(
    "recommenders",
    "step function",
    sizes=(8, 5, 7),
    refused={"PartitionedPS": Refusal(r"its update uses 'adagrad/Any.*' \(Any\)", ("2-workers", "3-workers"))},
)
USERS, ITEMS, WIDTH, NEGATIVES = 11, 9, 4, 4


class Tower(keras.Model):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(size, WIDTH)
        self.layers_on_top = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(WIDTH)])

    def call(self, ids: Any) -> Any:
        return tf.nn.l2_normalize(self.layers_on_top(self.table(ids)), axis=-1)


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    user, item, _ = ratings(40)
    negatives = rng(13).integers(0, ITEMS, (40, NEGATIVES))
    users, items = Tower(USERS), Tower(ITEMS)
    users(user[:1]), items(negatives[:1])
    weights = [*users.trainable_variables, *items.trainable_variables]
    optimizer = keras.optimizers.Adagrad(0.1)
    optimizer.build(weights)
    best = tf.Variable(np.float64(0.0), name="hit_rate_average")

    @autodist.function
    def step(who: tf.Tensor, what: tf.Tensor, others: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            candidates = items(tf.concat([what[:, None], others], axis=1))
            scores = tf.einsum("bd,bnd->bn", users(who), candidates) / 0.2
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.zeros_like(who), logits=scores)
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, weights), weights)
        hits = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(scores, axis=1), 0), tf.float64))
        best.assign(0.9 * best + 0.1 * hits)
        return {"loss": loss, "hits": hits}

    for batch in batches(header.sizes, user, item, negatives):
        yield Seen(step(*batch), (users, items, optimizer, best))
