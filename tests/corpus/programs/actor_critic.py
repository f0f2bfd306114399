"""Advantage actor-critic on a batch of transitions: policy gradient, value loss, entropy bonus, a shared trunk."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import batches, rng
from tests.corpus.header import Header, Seen

HEADER = Header("reinforcement learning", "step function", sizes=(8, 5, 7))
STATE, ACTIONS = 4, 3


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    drawn = rng(23)
    states, actions, returns = drawn.normal(size=(30, STATE)), drawn.integers(0, ACTIONS, 30), drawn.normal(size=30)
    inputs = keras.Input([STATE])
    trunk = keras.layers.Dense(8, activation="tanh")(inputs)
    net = keras.Model(inputs, [keras.layers.Dense(ACTIONS)(trunk), keras.layers.Dense(1)(trunk)])
    optimizer = keras.optimizers.RMSprop(0.01, global_clipnorm=0.5)
    optimizer.build(net.trainable_variables)
    average_return = tf.Variable(tf.zeros([], tf.float64), name="average_return")

    @autodist.function
    def step(s: tf.Tensor, a: tf.Tensor, g: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits, values = net(s)
            advantages = g - values[:, 0]
            chosen = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=a, logits=logits)
            chances = tf.nn.softmax(logits)
            entropy = -tf.reduce_mean(tf.reduce_sum(chances * tf.nn.log_softmax(logits), axis=1))
            actor = tf.reduce_mean(chosen * tf.stop_gradient(advantages))
            critic = 0.5 * tf.reduce_mean(tf.square(advantages))
            loss = actor + critic - 0.01 * entropy
        optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        average_return.assign(0.95 * average_return + 0.05 * tf.reduce_mean(g))
        return {"loss": loss, "actor": actor, "critic": critic, "entropy": entropy}

    for batch in batches(header.sizes, states, actions, returns):
        yield Seen(step(*batch), (net, optimizer, average_return))
