"""A replay buffer in variables: each step writes its transitions at given places, and learns from others there."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import rng
from tests.corpus.header import Header, Seen

HEADER = Header("reinforcement learning", "step function", sizes=(6, 6, 6, 6))
STATE, ACTIONS, CAPACITY = 3, 2, 24


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    drawn = rng(46)
    states = tf.Variable(np.zeros((CAPACITY, STATE)), trainable=False, name="states")
    actions = tf.Variable(np.zeros(CAPACITY, "int64"), trainable=False, name="actions")
    rewards = tf.Variable(np.zeros(CAPACITY), trainable=False, name="rewards")
    net = keras.Sequential([keras.layers.Dense(6, activation="relu"), keras.layers.Dense(ACTIONS)])
    net.build([None, STATE])
    optimizer = keras.optimizers.Adam(0.02)
    optimizer.build(net.trainable_variables)

    @autodist.function
    def step(places: tf.Tensor, s: tf.Tensor, a: tf.Tensor, r: tf.Tensor, sampled: tf.Tensor) -> tf.Tensor:
        states.scatter_update(tf.IndexedSlices(s, places))
        actions.scatter_update(tf.IndexedSlices(a, places))
        rewards.scatter_update(tf.IndexedSlices(r, places))
        with tf.GradientTape() as tape:
            values = net(tf.gather(states, sampled))
            chosen = tf.gather(values, tf.gather(actions, sampled), axis=1, batch_dims=1)
            loss = tf.reduce_mean(tf.square(chosen - tf.gather(rewards, sampled)))
        optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        return loss

    for number, size in enumerate(header.sizes):
        places = np.arange(number * size, (number + 1) * size) % CAPACITY
        transitions = drawn.normal(size=(size, STATE)), drawn.integers(0, ACTIONS, size), drawn.normal(size=size)
        sampled = drawn.integers(0, (number + 1) * size, size)
        yield Seen(step(places, *transitions, sampled), (states, actions, rewards, net, optimizer))
