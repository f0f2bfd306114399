"""Two networks that train each other, as Keras's guides write it."""

from typing import Any

import keras
import tensorflow as tf

from tests.support.fit_oracle import X, compiled, fitted, named


class Gan(keras.Model):
    """Two networks, and an optimizer for each."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.layers.Dense(5, activation="relu"), keras.layers.Dense(6)])
        self.critic = keras.Sequential([keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)])
        self.seen = keras.metrics.Mean(name="critic_loss")
        self.generator_optimizer = keras.optimizers.Adam(0.02)

    def call(self, inputs: Any) -> Any:
        return self.critic(self.generator(inputs))

    def train_step(self, data: Any) -> dict[str, Any]:
        noise, real = data
        with tf.GradientTape() as tape:
            scores = self.critic(tf.concat([self.generator(noise), real], axis=0))
            labels = tf.concat([tf.zeros([tf.shape(noise)[0], 1]), tf.ones([tf.shape(real)[0], 1])], axis=0)
            critic_loss = tf.reduce_mean(keras.losses.binary_crossentropy(labels, scores, from_logits=True))
        weights = self.critic.trainable_variables
        self.optimizer.apply(tape.gradient(critic_loss, weights), weights)
        with tf.GradientTape() as tape:
            fooled = self.critic(self.generator(noise))
            loss = tf.reduce_mean(keras.losses.binary_crossentropy(tf.ones_like(fooled), fooled, from_logits=True))
        weights = self.generator.trainable_variables
        self.generator_optimizer.apply(tape.gradient(loss, weights), weights)
        self.seen.update_state(critic_loss)
        return {"loss": loss, "critic_loss": self.seen.result()}


def fit_gan() -> dict[str, Any]:
    model = compiled(keras.optimizers.Adam(0.03), Gan, metrics=None)
    values = fitted(model, X, X[::-1] ** 2, batch_size=8)
    return {**values, **named("generator slot", model.generator_optimizer.variables)}
