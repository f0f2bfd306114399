"""The next video, as TF1 has it: averaged watch histories, a sampled softmax with given candidates, lazy momentum."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng, sentences
from tests.corpus.header import Header, Seen

HEADER = Header("recommenders", "graph session")
ITEMS, WIDTH, SAMPLED = 24, 5, 6
v1 = tf.compat.v1


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    histories = sentences(40, 6, ITEMS)
    following = np.where(histories[:, 3:4] > 0, histories[:, 3:4], 2)
    initial = rng(12)
    with tf.Graph().as_default(), autodist.scope():
        watched = v1.placeholder(tf.int64, [None, 3])
        labels = v1.placeholder(tf.int64, [None, 1])
        candidates = v1.placeholder(tf.int64, [SAMPLED])
        table = v1.get_variable("table", initializer=initial.normal(size=(ITEMS, WIDTH)))
        weights = v1.get_variable("weights", initializer=initial.normal(size=(ITEMS, WIDTH)))
        biases = v1.get_variable("biases", initializer=np.zeros(ITEMS))
        present = tf.cast(watched > 0, tf.float64)[:, :, None]
        rows = tf.nn.embedding_lookup(table, watched) * present
        user = tf.reduce_sum(rows, axis=1) / (tf.reduce_sum(present, axis=1) + 1e-3)
        expected = (
            tf.fill(tf.shape(labels), np.float64(SAMPLED / ITEMS)),
            tf.fill([SAMPLED], np.float64(SAMPLED / ITEMS)),
        )
        losses = tf.nn.sampled_softmax_loss(
            weights, biases, labels, user, SAMPLED, ITEMS, sampled_values=(candidates, *expected)
        )
        loss = tf.reduce_mean(losses)
        train_op = v1.train.MomentumOptimizer(0.2, 0.8).minimize(loss)
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for number, (seen, label) in enumerate(batches(header.sizes, histories[:, :3], following)):
                drawn = rng(number).permutation(ITEMS)[:SAMPLED]
                results = session.run([loss, losses, train_op], {watched: seen, labels: label, candidates: drawn})
                yield Seen(results, (session,))
