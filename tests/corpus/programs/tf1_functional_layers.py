"""A TF1 convnet of `tf.layers`, as tf_keras keeps it: conv2d, batch normalization that is tested, no dropout."""

# `tf.compat.v1.layers` is this module where TF_USE_LEGACY_KERAS is set; Keras 3 has none.

from collections.abc import Iterator
from typing import Any

import tensorflow as tf
import tf_keras
from tf_keras.api._v1.keras.__internal__.legacy import layers

from tests.corpus.data import batches, digits, rng
from tests.corpus.header import Header, Seen

HEADER = Header("TF1", "graph session", tolerance=1e-6, sizes=(8, 5, 7))  # Accuracy is float32.
v1 = tf.compat.v1


def logits_of(images: tf.Tensor, is_training: tf.Tensor) -> tf.Tensor:
    def kernel(*shape: int) -> Any:
        return v1.constant_initializer(0.3 * rng(sum(shape)).normal(size=shape))

    x = layers.conv2d(
        images, 4, 3, padding="same", activation=tf.nn.relu, kernel_initializer=kernel(3, 3, 1, 4), name="conv"
    )
    x = layers.batch_normalization(x, training=False, name="normalized")
    x = layers.max_pooling2d(x, 2, 2)
    x = layers.flatten(x)
    x = layers.dropout(x, rate=0.0, training=is_training)
    return layers.dense(
        x, 10, kernel_initializer=kernel(64, 10), kernel_regularizer=tf_keras.regularizers.L2(0.01), name="logits"
    )


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    with tf.Graph().as_default(), autodist.scope():
        images = v1.placeholder(tf.float64, [None, 8, 8, 1], name="images")
        labels = v1.placeholder(tf.int64, [None], name="labels")
        is_training = v1.placeholder_with_default(True, [], name="is_training")
        with v1.variable_scope("model", reuse=v1.AUTO_REUSE):
            logits = logits_of(images, is_training)
            again = logits_of(images[:, :, ::-1], is_training)
        losses = [v1.losses.sparse_softmax_cross_entropy(labels, each) for each in (logits, again)]
        loss = v1.losses.get_total_loss()
        accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, axis=1), labels), tf.float32))
        with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
            train_op = v1.train.MomentumOptimizer(0.05, 0.9).minimize(loss)
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for x_batch, y_batch in batches(header.sizes, *digits()):
                results = session.run([loss, losses, accuracy, train_op], {images: x_batch, labels: y_batch})
                yield Seen(results, (session,))
