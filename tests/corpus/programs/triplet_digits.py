"""A triplet loss with a margin: anchors, positives and negatives come together; the share of hard ones is kept."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, digits, rng
from tests.corpus.header import Header, Seen

HEADER = Header("contrastive and metric learning", "step function", sizes=(6, 5, 7))


def triplets(count: int) -> tuple[np.ndarray, ...]:
    images, labels = digits()
    drawn, chosen = rng(4), []
    for anchor in range(count):
        same = np.flatnonzero(labels == labels[anchor])
        other = np.flatnonzero(labels != labels[anchor])
        chosen.append((anchor, drawn.choice(same), drawn.choice(other)))
    return tuple(images[list(rows)] for rows in zip(*chosen, strict=True))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    model = keras.Sequential(
        [
            keras.layers.Conv2D(3, 3, 2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(5),
            keras.layers.UnitNormalization(),
        ]
    )
    model.build([None, 8, 8, 1])
    optimizer = keras.optimizers.Adamax(0.01)
    optimizer.build(model.trainable_variables)
    hard_share = tf.Variable(np.float64(1.0), name="hard_share")

    @autodist.function
    def step(anchors: tf.Tensor, positives: tf.Tensor, negatives: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            anchor, positive, negative = (model(images) for images in (anchors, positives, negatives))
            near = tf.reduce_sum(tf.square(anchor - positive), axis=1)
            far = tf.reduce_sum(tf.square(anchor - negative), axis=1)
            losses = tf.maximum(near - far + 0.4, 0.0)
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        hard = tf.math.count_nonzero(losses, dtype=tf.float64) / tf.cast(tf.shape(losses)[0], tf.float64)
        hard_share.assign(0.8 * hard_share + 0.2 * hard)
        return {"loss": loss, "hard": hard}

    for batch in batches(header.sizes, *triplets(20)):
        yield Seen(step(*batch), (model, optimizer, hard_share))
