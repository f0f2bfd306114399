"""Gradients added up in variables, and applied and cleared every third step, in a `tf.cond`."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, diabetes, rng
from tests.corpus.header import Header, Seen

HEADER = Header("optimization methods", "step function", sizes=(8, 5, 7, 6))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    initial = rng(28)
    weights = [tf.Variable(initial.normal(size=(10, 1)), name="kernel"), tf.Variable(np.zeros(1), name="bias")]
    sums = [tf.Variable(tf.zeros_like(weight), trainable=False) for weight in weights]
    count = tf.Variable(0, trainable=False)

    def update() -> tf.Tensor:
        for weight, total in zip(weights, sums, strict=True):
            weight.assign_sub(0.05 * total / 3.0)
            total.assign(tf.zeros_like(total))
        return tf.constant(True)

    @autodist.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.matmul(x, weights[0]) + weights[1] - y))
        for total, gradient in zip(sums, tape.gradient(loss, weights), strict=True):
            total.assign_add(gradient)
        count.assign_add(1)
        updated = tf.cond(tf.equal(count % 3, 0), update, lambda: tf.constant(False))
        return loss, updated

    for batch in batches(header.sizes, *diabetes()):
        yield Seen(step(*batch), (weights, sums, count))
