"""TF1 layers of tf_keras: dense ones with regularizers, dropout by a mask that is fed, a training switch."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from tests.corpus.data import batches, rng, tumours
from tests.corpus.header import Header, Seen

HEADER = Header("TF1", "graph session", tolerance=1e-5, sizes=(8, 5, 7))  # `losses` are float32.
v1 = tf.compat.v1


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    masks = (rng(40).uniform(size=(40, 8)) < 0.7) / 0.7
    with tf.Graph().as_default(), autodist.scope():
        x, y = v1.placeholder(tf.float64, [None, 30]), v1.placeholder(tf.int64, [None])
        mask = v1.placeholder(tf.float64, [None, 8])
        is_training = v1.placeholder_with_default(True, [])
        layers = [
            tf_keras.layers.Dense(
                width,
                activation,
                kernel_initializer=tf_keras.initializers.GlorotUniform(width),
                kernel_regularizer=tf_keras.regularizers.L2(0.01),
            )
            for width, activation in ((8, "relu"), (2, None))
        ]
        hidden = layers[0](x)
        hidden = tf.cond(is_training, lambda: hidden * mask, lambda: hidden)
        logits = layers[1](hidden)
        penalties = tf.add_n([loss for layer in layers for loss in layer.losses])
        loss = v1.losses.sparse_softmax_cross_entropy(y, logits) + penalties
        train_op = v1.train.AdamOptimizer(0.02).minimize(loss)
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for one, other, kept in batches(header.sizes, *tumours(), masks):
                fed = {x: one, y: other, mask: kept}
                trained, _ = session.run([loss, train_op], fed)
                tested = session.run(loss, {**fed, is_training: np.array(False)})
                yield Seen([trained, tested], (session,))
