"""A two-tower retriever with in-batch negatives: every other item of the batch is a negative one."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import batches, ratings, rng
from tests.corpus.header import Header, Seen

HEADER = Header("losses over the whole batch", "step function", sizes=(8, 6, 7))
USERS, ITEMS, WIDTH = 11, 9, 4


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    user, item, _ = ratings(40)
    initial = rng(14)
    users = tf.Variable(initial.normal(size=(USERS, WIDTH)), name="users")
    items = tf.Variable(initial.normal(size=(ITEMS, WIDTH)), name="items")
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build([users, items])

    @autodist.function
    def step(who: tf.Tensor, what: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            queries, candidates = tf.gather(users, who), tf.gather(items, what)
            scores = tf.matmul(queries, candidates, transpose_b=True)
            same = tf.equal(what[:, None], what[None, :]) & ~tf.eye(tf.shape(what)[0], dtype=tf.bool)
            scores -= 1e9 * tf.cast(same, tf.float64)  # An item that stands twice is no negative of itself.
            labels = tf.range(tf.shape(who)[0])
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores))
        optimizer.apply(tape.gradient(loss, [users, items]), [users, items])
        return loss

    for batch in batches(header.sizes, user, item):
        yield Seen(step(*batch), (users, items, optimizer))
