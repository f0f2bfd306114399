"""Contrastive pretraining with a probe: `fit` on pairs of unlabelled and labelled batches, of other sizes each."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import digits
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("contrastive and metric learning", "custom train_step", sizes=(8, 8, 5))


class Pretrained(keras.Model):
    """An encoder learns to tell two views of an image from those of others; a probe learns classes from its codes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential(
            [keras.layers.Conv2D(4, 3, 2, activation="relu"), keras.layers.Flatten(), keras.layers.Dense(6)]
        )
        self.head = keras.Sequential([keras.layers.Dense(6, activation="relu"), keras.layers.Dense(4)])
        self.probe = keras.layers.Dense(10)
        self.found = keras.metrics.SparseCategoricalAccuracy(name="found")
        self.told = keras.metrics.SparseCategoricalAccuracy(name="told")

    def call(self, images: Any) -> Any:
        return self.head(self.encoder(images)), self.probe(self.encoder(images))

    def contrast(self, first: Any, second: Any) -> Any:
        first, second = tf.math.l2_normalize(first, axis=1), tf.math.l2_normalize(second, axis=1)
        similarities = tf.matmul(first, second, transpose_b=True) / 0.5
        own = tf.range(tf.shape(first)[0])
        self.found.update_state(own, similarities)
        self.found.update_state(own, tf.transpose(similarities))
        losses = [
            keras.losses.sparse_categorical_crossentropy(own, one, from_logits=True)
            for one in (similarities, tf.transpose(similarities))
        ]
        return tf.add_n(losses) / 2.0

    def train_step(self, data: Any) -> Any:
        unlabelled, (labelled, labels) = data
        images = tf.concat([unlabelled, labelled], axis=0)
        with tf.GradientTape() as tape:
            views = (self.head(self.encoder(tf.roll(images, shift, axis=2)), training=True) for shift in (0, 1))
            contrastive = self.contrast(*views)
        weights = self.encoder.trainable_weights + self.head.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(contrastive, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            logits = self.probe(self.encoder(labelled, training=False))
            loss = self.compute_loss(y=labels, y_pred=logits)
        weights = self.probe.trainable_weights
        self.second.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.told.update_state(labels, logits)
        return {"contrast": tf.reduce_mean(contrastive), "loss": loss, "found": self.found.result()}


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    count = sum(header.sizes)
    images, labels = digits()
    unlabelled = tf.data.Dataset.from_tensor_slices(images[count : 2 * count]).batch(header.sizes[0])
    labelled = tf.data.Dataset.from_tensor_slices((images[: count // 2], labels[: count // 2]))
    with autodist.scope():
        model = Pretrained()
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        model.second = keras.optimizers.Adam(0.05)
        model(images[:1])
        model.second.build(model.probe.trainable_weights)
    for seen in fitted(model, tf.data.Dataset.zip((unlabelled, labelled.batch(header.sizes[0] // 2)))):
        yield Seen(seen.results, (*seen.owners, model.second))
