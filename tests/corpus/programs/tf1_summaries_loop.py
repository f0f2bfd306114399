"""A TF1 training loop with merged summaries, a supervisor's global step, and an early stop on the loss."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng, wines
from tests.corpus.header import Header, Seen

HEADER = Header("TF1", "graph session", tolerance=1e-6, sizes=(8, 5, 7))  # Summaries are float32.
v1 = tf.compat.v1


def values_of(summary: bytes) -> list[float]:
    return [value.simple_value for value in v1.Summary.FromString(summary).value]


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    initial = rng(38)
    with tf.Graph().as_default(), autodist.scope():
        x, y = v1.placeholder(tf.float64, [None, 13]), v1.placeholder(tf.int64, [None])
        with tf.name_scope("layer"):
            kernel = v1.get_variable("kernel", initializer=0.2 * initial.normal(size=(13, 3)))
            bias = v1.get_variable("bias", initializer=np.zeros(3))
            logits = x @ kernel + bias
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        loss = tf.reduce_mean(losses) + 1e-3 * tf.add_n([tf.nn.l2_loss(v) for v in v1.trainable_variables()])
        correct = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, axis=1), y), tf.float32))
        v1.summary.scalar("loss", loss)
        v1.summary.scalar("accuracy", correct)
        v1.summary.scalar("largest", tf.reduce_max(losses))
        merged = v1.summary.merge_all()
        steps = v1.train.get_or_create_global_step()
        train_op = v1.train.AdamOptimizer(0.02, beta1=0.8).minimize(loss, global_step=steps)
        best = np.inf
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            while session.run(steps) < 6 and best > 0.1:
                for one, other in batches(header.sizes, *wines()):
                    summary, value, _ = session.run([merged, loss, train_op], {x: one, y: other})
                    best = min(best, value)
                    yield Seen([np.array(values_of(summary)), value], (session,))
