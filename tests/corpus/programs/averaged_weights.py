"""Stochastic weight averaging beside an exponential one: both kept by hand, under a cyclic learning rate."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng, tumours
from tests.corpus.header import Header, Seen

HEADER = Header("optimization methods", "step function", sizes=(8, 5, 7, 3))


def average(weights: Sequence[tf.Variable], swa: Sequence[tf.Variable], count: tf.Variable) -> None:
    """Every other step counts, with a share of its own; the others' is 0."""
    share = tf.where(count % 2 == 0, 2.0 / tf.cast(count, weights[0].dtype), tf.zeros([], weights[0].dtype))
    for weight, mean in zip(weights, swa, strict=True):
        mean.assign_add(share * (weight - mean))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    return training(autodist, header, average)


def training(autodist: Any, header: Header, average_weights: Callable[..., None]) -> Iterator[Seen]:
    """`average_weights` is given the weights, their averages so far, and the number of this step."""
    initial = rng(27)
    weights = [tf.Variable(initial.normal(size=(30, 1)) * 0.1, name="kernel"), tf.Variable(np.zeros(1), name="bias")]
    swa = [tf.Variable(tf.zeros_like(weight), trainable=False) for weight in weights]
    ema = [tf.Variable(weight.read_value(), trainable=False) for weight in weights]
    count = tf.Variable(0, dtype=tf.int64, trainable=False)

    @autodist.function
    def step(x: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = tf.matmul(x, weights[0]) + weights[1]
            labels = tf.cast(y, x.dtype)[:, None]
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
        gradients = tape.gradient(loss, weights)
        rate = 0.2 - 0.05 * tf.cast(count % 3, x.dtype)
        for weight, gradient, average in zip(weights, gradients, ema, strict=True):
            weight.assign_sub(rate * gradient)
            average.assign(0.95 * average + 0.05 * weight)
        count.assign_add(1)
        average_weights(weights, swa, count)
        return {"loss": loss, "rate": rate}

    for batch in batches(header.sizes, *tumours()):
        yield Seen(step(*batch), (weights, swa, ema, count))
