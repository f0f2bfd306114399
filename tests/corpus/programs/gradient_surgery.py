"""PCGrad: where the gradients of two tasks disagree, each loses its part along the other one before they are added."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import batches, diabetes
from tests.corpus.header import Header, Seen

HEADER = Header(
    "optimization methods",
    "step function",
    sizes=(8, 5, 7),
)


def project(one: list[tf.Tensor], other: list[tf.Tensor]) -> list[tf.Tensor]:
    flat, along = (tf.concat([tf.reshape(gradient, [-1]) for gradient in each], axis=0) for each in (one, other))
    product = tf.reduce_sum(flat * along)
    share = tf.minimum(product, 0.0) / (tf.reduce_sum(along * along) + 1e-12)
    return [gradient - share * direction for gradient, direction in zip(one, other, strict=True)]


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    x_data, y_data = diabetes()
    inputs = keras.Input([9])
    trunk = keras.layers.Dense(6, activation="tanh")(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(1)(trunk), keras.layers.Dense(1)(trunk)])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    weights = model.trainable_variables
    optimizer.build(weights)

    @autodist.function
    def step(x: tf.Tensor, disease: tf.Tensor, pressure: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape:
            first, second = model(x)
            losses = [tf.reduce_mean(tf.square(first - disease)), tf.reduce_mean(tf.abs(second - pressure))]
        gradients = [
            [tf.zeros_like(weight) if gradient is None else gradient for weight, gradient in pairs]
            for pairs in (zip(weights, tape.gradient(loss, weights), strict=True) for loss in losses)
        ]
        projected = [project(gradients[0], gradients[1]), project(gradients[1], gradients[0])]
        optimizer.apply([one + other for one, other in zip(*projected, strict=True)], weights)
        return losses

    for batch in batches(header.sizes, x_data[:, :9], y_data, x_data[:, 9:]):
        yield Seen(step(*batch), (model, optimizer))
