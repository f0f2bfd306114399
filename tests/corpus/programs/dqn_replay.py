"""Double DQN: replayed transitions, importance weights, Huber loss, a target network copied every two steps."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import batches, rng
from tests.corpus.header import Header, Seen

HEADER = Header("reinforcement learning", "step function", sizes=(8, 5, 7, 6))
STATE, ACTIONS = 4, 3


def q_network() -> keras.Model:
    net = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(ACTIONS)])
    net.build([None, STATE])
    return net


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    drawn = rng(22)
    states, following = drawn.normal(size=(2, 30, STATE))
    actions, rewards = drawn.integers(0, ACTIONS, 30), drawn.normal(size=30)
    done, importance = (drawn.uniform(size=30) < 0.2).astype("float64"), drawn.uniform(0.5, 1.0, 30)
    online, target = q_network(), q_network()
    target.set_weights(online.get_weights())
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(online.trainable_variables)
    steps = tf.Variable(0, dtype=tf.int64, name="steps")

    @autodist.function
    def step(s: tf.Tensor, a: tf.Tensor, r: tf.Tensor, n: tf.Tensor, d: tf.Tensor, w: tf.Tensor) -> tuple[Any, Any]:
        best = tf.argmax(online(n), axis=1)
        future = tf.reduce_sum(tf.one_hot(best, ACTIONS, dtype=tf.float64) * target(n), axis=1)
        wanted = tf.stop_gradient(r + 0.99 * (1.0 - d) * future)
        with tf.GradientTape() as tape:
            values = tf.reduce_sum(online(s) * tf.one_hot(a, ACTIONS, dtype=tf.float64), axis=1)
            errors = wanted - values
            huber = tf.where(tf.abs(errors) < 1.0, 0.5 * tf.square(errors), tf.abs(errors) - 0.5)
            loss = tf.reduce_mean(w * huber)
        optimizer.apply(tape.gradient(loss, online.trainable_variables), online.trainable_variables)
        steps.assign_add(1)
        if steps % 2 == 0:
            for weight, source in zip(target.weights, online.weights, strict=True):
                weight.assign(source)
        return loss, tf.abs(errors)

    for batch in batches(header.sizes, states, actions, rewards, following, done, importance):
        yield Seen(step(*batch), (online, target, optimizer, steps))
