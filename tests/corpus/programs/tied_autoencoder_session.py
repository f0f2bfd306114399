"""A TF1 denoising autoencoder with tied weights: the decoder is the encoder's transpose; sparse hidden units by KL."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, digits, rng
from tests.corpus.header import Header, Seen

HEADER = Header("generative models", "graph session", sizes=(8, 5, 7))
v1 = tf.compat.v1


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    clean_data = digits()[0].reshape(-1, 64)
    kept = rng(42).uniform(size=clean_data.shape) > 0.2
    with tf.Graph().as_default(), autodist.scope():
        noisy, clean = (v1.placeholder(tf.float64, [None, 64]) for _ in range(2))
        kernel = v1.get_variable("kernel", initializer=0.2 * rng(43).normal(size=(64, 10)))
        hidden_bias = v1.get_variable("hidden_bias", initializer=np.zeros(10))
        visible_bias = v1.get_variable("visible_bias", initializer=np.zeros(64))
        hidden = tf.sigmoid(noisy @ kernel + hidden_bias)
        logits = tf.matmul(hidden, kernel, transpose_b=True) + visible_bias
        errors = tf.nn.sigmoid_cross_entropy_with_logits(labels=clean, logits=logits)
        sparsity = tf.reduce_mean(tf.reduce_sum(tf.abs(hidden - 0.1), axis=1))
        loss = tf.reduce_mean(tf.reduce_sum(errors, axis=1)) + 0.1 * sparsity
        train_op = v1.train.AdagradOptimizer(0.05).minimize(loss)
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for one, other in batches(header.sizes, clean_data * kept, clean_data):
                yield Seen(session.run([loss, hidden, train_op], {noisy: one, clean: other}), (session,))
