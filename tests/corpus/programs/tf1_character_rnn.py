"""A TF1 character model: an unrolled tanh RNN, tied input and output embeddings, perplexity, clipped Adagrad."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tests.corpus.data import batches, characters, rng
from tests.corpus.header import Header, Seen

HEADER = Header("recurrent nets", "graph session", sizes=(6, 5, 7))
LETTERS, LENGTH, WIDTH = 16, 6, 5
v1 = tf.compat.v1


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    initial = rng(2)
    with tf.Graph().as_default(), autodist.scope():
        ids = v1.placeholder(tf.int64, [None, LENGTH + 1], name="ids")
        table = v1.get_variable("table", initializer=0.3 * initial.normal(size=(LETTERS, WIDTH)))
        kernel = v1.get_variable("kernel", initializer=0.5 * initial.normal(size=(2 * WIDTH, WIDTH)))
        bias = v1.get_variable("bias", WIDTH, tf.float64, v1.zeros_initializer())
        inputs = tf.unstack(tf.nn.embedding_lookup(table, ids[:, :-1]), axis=1)
        state, logits = tf.zeros_like(inputs[0]), []
        for x in inputs:
            state = tf.tanh(tf.concat([x, state], axis=1) @ kernel + bias)
            logits.append(tf.matmul(state, table, transpose_b=True))
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids[:, 1:], logits=tf.stack(logits, axis=1))
        loss = tf.reduce_mean(entropy)
        steps = v1.train.get_or_create_global_step()
        optimizer = v1.train.AdagradOptimizer(0.1)
        variables = v1.trainable_variables()
        gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 0.5)
        train_op = optimizer.apply_gradients(zip(gradients, variables, strict=True), global_step=steps)
        perplexity = tf.exp(loss)
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for (piece,) in batches(header.sizes, characters(30, LENGTH + 1, LETTERS)):
                yield Seen(session.run([perplexity, loss, train_op], {ids: piece}), (session,))
