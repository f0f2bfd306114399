"""Cox's proportional hazards: a partial likelihood in which every patient is compared with all who live longer."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import batches, diabetes, rng
from tests.corpus.header import Header, Seen

HEADER = Header("losses over the whole batch", "step function", sizes=(9, 6, 8))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    x_data, y_data = diabetes()
    seen_data = (rng(3).uniform(size=y_data.shape) < 0.7).astype("float64")
    model = keras.Sequential([keras.layers.Dense(6, activation="selu"), keras.layers.Dense(1, use_bias=False)])
    model.build([None, 10])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    @autodist.function
    def step(x: tf.Tensor, times: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            risks = model(x)[:, 0]
            at_risk = tf.cast(times[:, 0][None, :] >= times[:, 0][:, None], tf.float64)
            totals = tf.math.log(tf.reduce_sum(at_risk * tf.exp(risks)[None, :], axis=1))
            loss = tf.reduce_sum((totals - risks) * seen[:, 0]) / tf.reduce_sum(seen)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    for batch in batches(header.sizes, x_data, y_data, seen_data):
        yield Seen(step(*batch), (model, optimizer))
