"""Soft actor-critic: twin critics, reparametrized actions from given noise, a learnt temperature, Polyak averages."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng
from tests.corpus.header import Header, Seen

HEADER = Header("reinforcement learning", "step function", sizes=(7, 5, 6))
STATE, ACTION = 3, 2


def net(inputs: int, outputs: int) -> keras.Model:
    made = keras.Sequential([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(outputs)])
    made.build([None, inputs])
    return made


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    drawn = rng(25)
    states, following = drawn.normal(size=(2, 30, STATE))
    actions, noise = drawn.uniform(-1, 1, (30, ACTION)), drawn.normal(size=(30, 2, ACTION))
    rewards = drawn.normal(size=30)
    actor = net(STATE, 2 * ACTION)
    critics, targets = [[net(STATE + ACTION, 1) for _ in range(2)] for _ in range(2)]
    log_alpha = tf.Variable(np.float64(-1.0), name="log_alpha")
    critic_weights = [weight for critic in critics for weight in critic.trainable_variables]
    groups = [critic_weights, actor.trainable_variables, [log_alpha]]
    optimizers = [keras.optimizers.Adam(0.01) for _ in groups]
    for optimizer, group in zip(optimizers, groups, strict=True):
        optimizer.build(group)

    def act(s: tf.Tensor, e: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        mean, log_scale = tf.split(actor(s), 2, axis=1)
        log_scale = tf.clip_by_value(log_scale, -3.0, 1.0)
        action = tf.tanh(mean + tf.exp(log_scale) * e)
        log_chance = -0.5 * tf.square(e) - log_scale - tf.math.log(1.0 - tf.square(action) + 1e-6)
        return action, tf.reduce_sum(log_chance, axis=1)

    def value(nets: list[keras.Model], s: tf.Tensor, a: tf.Tensor) -> list[tf.Tensor]:
        return [one(tf.concat([s, a], axis=1))[:, 0] for one in nets]

    @autodist.function
    def step(s: tf.Tensor, a: tf.Tensor, r: tf.Tensor, n: tf.Tensor, e: tf.Tensor) -> list[tf.Tensor]:
        alpha = tf.exp(tf.convert_to_tensor(log_alpha))
        next_action, next_chance = act(n, e[:, 0])
        wanted = r + 0.98 * (tf.minimum(*value(targets, n, next_action)) - alpha * next_chance)
        with tf.GradientTape() as tape:
            critic_loss = tf.add_n([tf.reduce_mean(tf.square(q - wanted)) for q in value(critics, s, a)])
        gradients = [tape.gradient(critic_loss, critic_weights)]
        with tf.GradientTape() as tape:
            action, chance = act(s, e[:, 1])
            actor_loss = tf.reduce_mean(alpha * chance - tf.minimum(*value(critics, s, action)))
        gradients.append(tape.gradient(actor_loss, actor.trainable_variables))
        with tf.GradientTape() as tape:
            alpha_loss = -tf.reduce_mean(log_alpha * tf.stop_gradient(chance - ACTION))
        gradients.append(tape.gradient(alpha_loss, [log_alpha]))
        for optimizer, gradient, group in zip(optimizers, gradients, groups, strict=True):
            optimizer.apply(gradient, group)
        for target, critic in zip(targets, critics, strict=True):
            for slow, fast in zip(target.variables, critic.variables, strict=True):
                slow.assign(0.9 * slow + 0.1 * fast)
        return [critic_loss, actor_loss, alpha_loss]

    for batch in batches(header.sizes, states, actions, rewards, following, noise):
        yield Seen(step(*batch), (actor, critics, targets, log_alpha, optimizers))
