"""PPO: clipped ratios to the old policy's chances, two epochs over each batch in one step, a learnt log-deviation."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng
from tests.corpus.header import Header, Seen

HEADER = Header(
    "reinforcement learning",
    "step function",
    sizes=(8, 5, 7),
)
STATE, ACTION = 4, 2


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    drawn = rng(24)
    states, actions = drawn.normal(size=(30, STATE)), drawn.normal(size=(30, ACTION))
    old, advantages, returns = drawn.normal(-3.0, 0.3, 30), drawn.normal(size=30), drawn.normal(size=30)
    policy = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(ACTION)])
    value = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    policy.build([None, STATE])
    value.build([None, STATE])
    log_deviation = tf.Variable(np.full(ACTION, -0.5), name="log_deviation")
    weights = [*policy.trainable_variables, *value.trainable_variables, log_deviation]
    optimizer = keras.optimizers.Adam(0.005)
    optimizer.build(weights)

    def log_chance(s: tf.Tensor, a: tf.Tensor) -> tf.Tensor:
        scaled = (a - policy(s)) * tf.exp(-log_deviation)
        return -tf.reduce_sum(0.5 * tf.square(scaled) + log_deviation + 0.5 * np.log(2.0 * np.pi), axis=1)

    @autodist.function
    def step(s: tf.Tensor, a: tf.Tensor, before: tf.Tensor, adv: tf.Tensor, g: tf.Tensor) -> list[tf.Tensor]:
        losses = []
        for _ in range(2):
            with tf.GradientTape() as tape:
                ratio = tf.exp(log_chance(s, a) - before)
                gain = tf.minimum(ratio * adv, tf.clip_by_value(ratio, 0.8, 1.2) * adv)
                error = tf.reduce_mean(tf.square(value(s)[:, 0] - g))
                loss = -tf.reduce_mean(gain) + 0.5 * error - 0.01 * tf.reduce_sum(log_deviation)
            optimizer.apply(tape.gradient(loss, weights), weights)
            losses.append(loss)
        divergence = tf.reduce_mean(before - log_chance(s, a))
        return [*losses, divergence]

    for batch in batches(header.sizes, states, actions, old, advantages, returns):
        yield Seen(step(*batch), (policy, value, log_deviation, optimizer))
