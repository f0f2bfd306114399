"""float16 forward, float32 master weights, a dynamic loss scale that halves when a gradient is not finite."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng, tumours
from tests.corpus.header import Header, Seen

HEADER = Header("optimization methods", "step function", tolerance=4e-3, sizes=(8, 5, 7, 6))
"""float16 has 11 bits: parts of a sum are rounded to it before they are added."""


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    x_data, y_data = tumours("float32")
    initial = rng(29)
    weights = [
        tf.Variable((0.2 * initial.normal(size=shape)).astype("float32"), name=name)
        for name, shape in {"first": (30, 6), "second": (6, 1)}.items()
    ]
    scale = tf.Variable(np.float32(2.0**17), trainable=False, name="scale")
    good_steps = tf.Variable(0, trainable=False, name="good_steps")

    @autodist.function
    def step(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            first, second = (tf.cast(weight, tf.float16) for weight in weights)
            logits = tf.cast(tf.tanh(tf.cast(x, tf.float16) @ first) @ second, tf.float32)[:, 0]
            labels = tf.cast(y, tf.float32)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
            scaled = loss * scale
        gradients = [gradient / scale for gradient in tape.gradient(scaled, weights)]
        is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.1 * tf.where(is_finite, gradient, tf.zeros_like(gradient)))
        good_steps.assign(tf.where(is_finite, good_steps + 1, 0))
        scale.assign(tf.where(is_finite, scale, scale * 0.5))
        return {"loss": loss, "is_finite": is_finite}

    for batch in batches(header.sizes, x_data, y_data):
        yield Seen(step(*batch), (weights, scale, good_steps))
