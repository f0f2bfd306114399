"""A TF1 recurrent classifier over sentences of several lengths: a while loop with TensorArrays."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng, sentences
from tests.corpus.header import Header, Seen

HEADER = Header("recurrent nets", "graph session", sizes=(7, 5, 6))
LENGTH, WIDTH = 6, 4
v1 = tf.compat.v1


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    words = sentences(30, LENGTH)
    initial = rng(41)
    with tf.Graph().as_default(), autodist.scope():
        ids, labels = v1.placeholder(tf.int64, [None, LENGTH]), v1.placeholder(tf.int64, [None])
        table = v1.get_variable("table", initializer=0.5 * initial.normal(size=(24, WIDTH)))
        kernel = v1.get_variable("kernel", initializer=0.5 * initial.normal(size=(2 * WIDTH, 2 * WIDTH)))
        out = v1.get_variable("out", initializer=initial.normal(size=(WIDTH, 3)))
        lengths = tf.reduce_sum(tf.cast(ids > 0, tf.int32), axis=1)
        inputs = tf.transpose(tf.nn.embedding_lookup(table, ids), [1, 0, 2])
        read = tf.TensorArray(tf.float64, LENGTH).unstack(inputs)

        def body(time: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            gates = tf.concat([read.read(time), state], axis=1) @ kernel
            gate, new = tf.split(gates, 2, axis=1)
            moved = tf.sigmoid(gate) * state + (1.0 - tf.sigmoid(gate)) * tf.tanh(new)
            return time + 1, tf.where((time < lengths)[:, None], moved, state)

        zeros = tf.zeros([tf.shape(ids)[0], WIDTH], tf.float64)
        _, state = tf.while_loop(lambda time, _: time < LENGTH, body, (0, zeros))
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=state @ out))
        optimizer = v1.train.AdamOptimizer(0.02)
        pairs = [(tf.clip_by_norm(g, 1.0), v) for g, v in optimizer.compute_gradients(loss)]
        train_op = optimizer.apply_gradients(pairs)
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            kinds = ((words > 0).sum(axis=1) % 3).astype(np.int64)
            for one, other in batches(header.sizes, words, kinds):
                yield Seen(session.run([loss, state, train_op], {ids: one, labels: other}), (session,))
