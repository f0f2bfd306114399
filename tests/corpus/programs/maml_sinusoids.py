"""MAML on sine waves: one inner gradient step for each task, second derivatives kept; a batch is a batch of tasks."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng
from tests.corpus.header import Header, Seen

HEADER = Header("optimization methods", "step function", sizes=(6, 4, 5))
POINTS, HIDDEN = 5, 6


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    drawn = rng(26)
    places = drawn.uniform(-3, 3, (20, 2, POINTS, 1))
    values = drawn.uniform(0.5, 2, (20, 1, 1, 1)) * np.sin(places + drawn.uniform(0, 3, (20, 1, 1, 1)))
    shapes = {"first": (1, HIDDEN), "bias": (HIDDEN,), "second": (HIDDEN, 1)}
    weights = [tf.Variable(0.7 * drawn.normal(size=shape), name=name) for name, shape in shapes.items()]
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(weights)

    def errors(fast: list[tf.Tensor], x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Of each task, whose weights stand along the first axis."""
        first, bias, second = fast
        hidden = tf.tanh(tf.matmul(x, first) + bias)
        return tf.reduce_mean(tf.square(tf.matmul(hidden, second) - y), axis=[1, 2])

    @autodist.function
    def step(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as outer:
            count = tf.shape(x)[0]
            fast = [
                tf.tile(tf.convert_to_tensor(weight)[None], [count, *[1] * len(weight.shape)]) for weight in weights
            ]
            fast[1] = fast[1][:, None]
            with tf.GradientTape() as inner:
                inner.watch(fast)
                support = tf.reduce_sum(errors(fast, x[:, 0], y[:, 0]))
            adapted = [
                weight - 0.1 * gradient for weight, gradient in zip(fast, inner.gradient(support, fast), strict=True)
            ]
            queries = errors(adapted, x[:, 1], y[:, 1])
            loss = tf.reduce_mean(queries)
        optimizer.apply(outer.gradient(loss, weights), weights)
        return {"loss": loss, "queries": queries}

    for batch in batches(header.sizes, places, values):
        yield Seen(step(*batch), (weights, optimizer))
