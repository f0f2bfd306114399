"""Sparse features in TF1, of which some examples have none: `safe_embedding_lookup_sparse` and Adam."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng, sentences
from tests.corpus.header import Header, Seen

HEADER = Header("recommenders", "graph session", sizes=(8, 5, 7))
v1 = tf.compat.v1


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    words = sentences(30, 6).copy()
    words[2::4] = 0
    label_data = ((words > 4).sum(axis=1) % 2).astype("float64")
    initial = rng(45)
    with tf.Graph().as_default(), autodist.scope():
        padded, labels = v1.placeholder(tf.int64, [None, 6]), v1.placeholder(tf.float64, [None])
        table = v1.get_variable("table", initializer=initial.normal(size=(24, 5)))
        kernel = v1.get_variable("kernel", initializer=initial.normal(size=(5, 1)))
        ids = tf.sparse.from_dense(padded)
        pooled = v1.nn.safe_embedding_lookup_sparse(table, ids, combiner="sqrtn")
        pooled.set_shape([None, 5])
        logits = tf.squeeze(pooled @ kernel, axis=1)
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
        train_op = v1.train.AdamOptimizer(0.1).minimize(loss)
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for one, other in batches(header.sizes, words, label_data):
                yield Seen(session.run([loss, logits, train_op], {padded: one, labels: np.array(other)}), (session,))
