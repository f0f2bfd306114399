"""A TF1 convnet of raw ops: variable scopes, an L2 collection, Adam on a clipped gradient, accuracy beside."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, digits, rng
from tests.corpus.header import Header, Seen

HEADER = Header("convnets and residual nets", "graph session")
v1 = tf.compat.v1


def variable(name: str, shape: tuple[int, ...], decay: float = 0.0) -> tf.Variable:
    initial = rng(sum(shape)).normal(size=shape) / np.sqrt(np.prod(shape[:-1]))
    made = v1.get_variable(name, initializer=initial)
    if decay:
        v1.add_to_collection("losses", decay * tf.nn.l2_loss(made))
    return made


def conv(x: tf.Tensor, name: str, filters: int) -> tf.Tensor:
    with v1.variable_scope(name):
        y = tf.nn.conv2d(x, variable("kernel", (3, 3, x.shape[-1], filters)), 1, "SAME")
        y = tf.nn.relu(tf.nn.bias_add(y, variable("bias", (filters,))))
        return tf.nn.max_pool2d(y, 2, 2, "SAME")


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    with tf.Graph().as_default(), autodist.scope():
        images = v1.placeholder(tf.float64, [None, 8, 8, 1])
        labels = v1.placeholder(tf.int64, [None])
        x = tf.reshape(conv(conv(images, "first", 3), "second", 4), [-1, 16])
        logits = x @ variable("dense", (16, 10), 0.01) + variable("offset", (10,))
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        v1.add_to_collection("losses", tf.reduce_mean(entropy))
        loss = tf.add_n(v1.get_collection("losses"))
        optimizer = v1.train.AdamOptimizer(0.02)
        gradients, variables = zip(*optimizer.compute_gradients(loss), strict=True)
        gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
        train_op = optimizer.apply_gradients(zip(gradients, variables, strict=True))
        accuracy = tf.reduce_mean(tf.cast(tf.nn.in_top_k(labels, tf.cast(logits, tf.float32), 3), tf.float64))
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for x_batch, y_batch in batches(header.sizes, *digits()):
                results = session.run([loss, norm, accuracy, train_op], {images: x_batch, labels: y_batch})
                yield Seen(results, (session,))
