"""FixMatch: few labelled digits beside many unlabelled ones in one iterator; a mean over the confident ones alone."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import digits, rng
from tests.corpus.header import Header, Seen

HEADER = Header("training recipes", "step function", sizes=(4, 4, 4))
TIMES = 2
"""So many unlabelled images to one labelled one."""


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    images, labels = digits()
    flat = images.reshape(-1, 64)
    count, size = sum(header.sizes), header.sizes[0]
    weak, strong = (flat[count : 3 * count] + scale * rng(5).normal(size=(2 * count, 64)) for scale in (0.05, 0.3))
    labelled = tf.data.Dataset.from_tensor_slices((flat[:count], labels[:count])).batch(size)
    unlabelled = tf.data.Dataset.from_tensor_slices((weak, strong)).batch(TIMES * size)
    model = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(10)])
    model.build([None, 64])
    optimizer = keras.optimizers.SGD(0.3, momentum=0.9, nesterov=True)
    optimizer.build(model.trainable_variables)
    data = iter(tf.data.Dataset.zip((labelled, unlabelled)))

    @autodist.function
    def step(pairs: Any) -> dict[str, tf.Tensor]:
        (x, y), (weak_x, strong_x) = next(pairs)
        with tf.GradientTape() as tape:
            supervised = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=model(x)))
            chances = tf.stop_gradient(tf.nn.softmax(model(weak_x)))
            sure = tf.cast(tf.reduce_max(chances, axis=1) > 0.15, x.dtype)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=tf.argmax(chances, axis=1), logits=model(strong_x)
            )
            consistency = tf.math.divide_no_nan(tf.reduce_sum(sure * losses), tf.reduce_sum(sure))
            loss = supervised + 0.5 * consistency
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"loss": loss, "sure": tf.reduce_sum(sure)}

    for _ in header.sizes:
        yield Seen(step(data), (model, optimizer))
