"""Columns of a digit read as a sequence: a convolution, a GRU, and CTC loss against spelled-out names."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, digits
from tests.corpus.header import Header, Seen

HEADER = Header("contrastive and metric learning", "step function", tolerance=2e-4, sizes=(6, 4, 5), floatx="float32")
"""CTC is float32 in TensorFlow, and Adam divides small gradients by their size."""
LETTERS = "efghinorstuvwxz"
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    images, numbers = digits("float32")
    columns = np.repeat(images[..., 0].transpose(0, 2, 1), 2, axis=1)
    spelled = np.zeros((len(numbers), 5), "int64")
    for row, number in zip(spelled, numbers, strict=True):
        row[: len(NAMES[number])] = [1 + LETTERS.index(letter) for letter in NAMES[number]]
    model = keras.Sequential(
        [
            keras.layers.Conv1D(6, 3, padding="same", activation="relu"),
            keras.layers.GRU(6, return_sequences=True),
            keras.layers.Dense(len(LETTERS) + 1),
        ]
    )
    model.build([None, 16, 8])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)

    @autodist.function
    def step(x: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = model(x)
            lengths = tf.fill([tf.shape(x)[0]], 16)
            label_lengths = tf.math.count_nonzero(labels, axis=1, dtype=tf.int32)
            losses = tf.nn.ctc_loss(labels, logits, label_lengths, lengths, logits_time_major=False, blank_index=0)
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss, losses

    for batch in batches(header.sizes, columns, spelled):
        yield Seen(step(*batch), (model, optimizer))
