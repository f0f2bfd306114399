"""TF1's streaming metrics: accuracy, a mean, precision and recall in local variables, reset between epochs."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng, tumours
from tests.corpus.header import Header, Seen

HEADER = Header("TF1", "graph session", tolerance=1e-6, sizes=(8, 5, 7))  # The metrics are float32.
v1 = tf.compat.v1


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    initial = rng(34)
    with tf.Graph().as_default(), autodist.scope():
        x = v1.placeholder(tf.float64, [None, 30], name="x")
        y = v1.placeholder(tf.int64, [None], name="y")
        kernel = v1.get_variable("kernel", initializer=0.1 * initial.normal(size=(30, 1)))
        bias = v1.get_variable("bias", initializer=np.zeros(1))
        logits = tf.squeeze(x @ kernel + bias, axis=1)
        labels = tf.cast(y, tf.float64)
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
        predicted = tf.cast(logits > 0.0, tf.int64)
        metrics = [
            v1.metrics.accuracy(y, predicted),
            v1.metrics.mean(tf.cast(logits, tf.float32)),
            v1.metrics.precision(y, predicted),
            v1.metrics.recall(y, predicted, weights=v1.where(y > 0, v1.ones_like(y), v1.zeros_like(y))),
        ]
        updates = tf.group(*(update for _, update in metrics))
        train_op = v1.train.AdamOptimizer(0.02).minimize(loss)
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(2):
                session.run(v1.local_variables_initializer())
                for one, other in batches(header.sizes, *tumours()):
                    session.run([train_op, updates], {x: one, y: other})
                yield Seen(session.run([value for value, _ in metrics]), (session,))
