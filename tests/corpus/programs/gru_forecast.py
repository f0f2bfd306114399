"""The next values of noisy waves: stacked GRUs, Huber loss, a metric object that counts over the steps."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import batches, series
from tests.corpus.header import Header, Seen

HEADER = Header("recurrent nets", "step function", sizes=(6, 4, 7))
LENGTH, AHEAD = 8, 2


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    waves = series(30, LENGTH + AHEAD)[:, :, None]
    model = keras.Sequential(
        [keras.layers.GRU(5, return_sequences=True), keras.layers.GRU(4), keras.layers.Dense(AHEAD)]
    )
    model.build([None, LENGTH, 1])
    optimizer = keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True)
    optimizer.build(model.trainable_variables)
    huber, error = keras.losses.Huber(0.5), keras.metrics.MeanAbsoluteError()

    @autodist.function
    def step(past: tf.Tensor, future: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            predicted = model(past, training=True)
            loss = huber(future, predicted)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = [tf.clip_by_value(gradient, -0.05, 0.05) for gradient in gradients]
        optimizer.apply(gradients, model.trainable_variables)
        error.update_state(future, predicted)
        return {"loss": loss, "error": error.result()}

    for past, future in batches(header.sizes, waves[:, :LENGTH], waves[:, LENGTH:, 0]):
        yield Seen(step(past, future), (model, optimizer, error))
