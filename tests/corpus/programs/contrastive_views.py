"""SimCLR's NT-Xent loss: two noisy views of each digit, all other views of the batch as negatives."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import batches, digits, rng
from tests.corpus.header import Header, Seen

HEADER = Header("contrastive and metric learning", "step function", sizes=(6, 5, 7))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    images = digits()[0]
    views = [images + 0.2 * rng(seed).normal(size=images.shape) for seed in (1, 2)]
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10, activation="relu"), keras.layers.Dense(4)])
    model.build([None, 8, 8, 1])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    def nt_xent(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
        features = tf.math.l2_normalize(tf.concat([first, second], axis=0), axis=1)
        count = tf.shape(first)[0]
        scores = tf.matmul(features, features, transpose_b=True) / 0.5
        scores -= 1e9 * tf.eye(2 * count, dtype=tf.float64)
        labels = tf.concat([tf.range(count) + count, tf.range(count)], axis=0)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores))

    @autodist.function
    def step(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = nt_xent(model(one), model(other))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    for batch in batches(header.sizes, *views):
        yield Seen(step(*batch), (model, optimizer))
