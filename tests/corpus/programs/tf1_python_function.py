"""A `py_function` augments images inside the graph; the rest is a TF1 softmax regression with Nesterov's momentum."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, digits, rng
from tests.corpus.header import Header, Seen

HEADER = Header("TF1", "graph session", sizes=(8, 5, 7))
v1 = tf.compat.v1


def sharpen(images: np.ndarray) -> np.ndarray:
    """Each image by itself."""
    return np.clip(1.5 * images - 0.5 * np.roll(images, 1, axis=1), 0.0, 1.0)


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    initial = rng(37)
    with tf.Graph().as_default(), autodist.scope():
        images, labels = v1.placeholder(tf.float64, [None, 8, 8, 1]), v1.placeholder(tf.int64, [None])
        sharper = v1.py_func(sharpen, [images], tf.float64, stateful=False)
        sharper.set_shape([None, 8, 8, 1])
        kernel = v1.get_variable("kernel", initializer=0.1 * initial.normal(size=(64, 10)))
        logits = tf.reshape(sharper, [-1, 64]) @ kernel
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        loss = tf.reduce_mean(entropy)
        train_op = v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True).minimize(loss)
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for one, other in batches(header.sizes, *digits()):
                yield Seen(session.run([loss, train_op], {images: one, labels: other}), (session,))
