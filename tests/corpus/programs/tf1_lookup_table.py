"""Words through a TF1 lookup table with buckets for unknown ones, embeddings, and a hinge loss."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng, text
from tests.corpus.header import Header, Seen

HEADER = Header("TF1", "graph session", tolerance=1e-5, sizes=(9, 6, 7))  # `losses` are float32.
v1 = tf.compat.v1


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    words = np.array(text().lower().split()[:120]).reshape(40, 3)
    is_long = np.array([[1 if len("".join(row)) > 13 else 0] for row in words], "float64")
    known = sorted({word for row in words[:20] for word in row})[:20]
    initial = rng(36)
    with tf.Graph().as_default(), autodist.scope():
        x, y = v1.placeholder(tf.string, [None, 3]), v1.placeholder(tf.float64, [None, 1])
        numbers = tf.lookup.KeyValueTensorInitializer(tf.constant(known), tf.range(20, dtype=tf.int64))
        table = tf.lookup.StaticVocabularyTable(numbers, num_oov_buckets=4)
        embeddings = v1.get_variable("embeddings", initializer=initial.normal(size=(24, 4)))
        kernel = v1.get_variable("kernel", initializer=initial.normal(size=(12, 1)))
        ids = table.lookup(x)
        looked_up = tf.reshape(tf.nn.embedding_lookup(embeddings, ids), [-1, 12])
        loss = v1.losses.hinge_loss(y, looked_up @ kernel)
        train_op = v1.train.AdadeltaOptimizer(1.0).minimize(loss)
        with autodist.create_distributed_session() as session:
            session.run([v1.global_variables_initializer(), v1.tables_initializer()])
            for one, other in batches(header.sizes, words, is_long):
                yield Seen(session.run([loss, ids, train_op], {x: one, y: other}), (session,))
