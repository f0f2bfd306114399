"""A WGAN with gradient penalty on wines: two critic steps to one of the generator, an optimizer for each."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import batches, rng, wines
from tests.corpus.header import Header, Seen

HEADER = Header(
    "generative models",
    "step function",
    sizes=(6, 5, 7),
)
NOISE, FEATURES = 4, 13


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    real, _ = wines()
    noise, mixing = rng(1).normal(size=(len(real), 2, NOISE)), rng(2).uniform(size=(len(real), 1))
    generator = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(FEATURES)])
    critic = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    generator.build([None, NOISE])
    critic.build([None, FEATURES])
    for_generator, for_critic = (keras.optimizers.Adam(0.01, beta_1=0.5, beta_2=0.9) for _ in range(2))
    for_generator.build(generator.trainable_variables)
    for_critic.build(critic.trainable_variables)

    def penalty(x: tf.Tensor, fake: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
        between = share * x + (1.0 - share) * fake
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = critic(between, training=True)
        norms = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(scores, between)), axis=1) + 1e-12)
        return tf.reduce_mean(tf.square(norms - 1.0))

    @autodist.function
    def step(x: tf.Tensor, z: tf.Tensor, share: tf.Tensor) -> dict[str, tf.Tensor]:
        for turn in range(2):
            with tf.GradientTape() as tape:
                fake = generator(z[:, turn])
                loss = tf.reduce_mean(critic(fake)) - tf.reduce_mean(critic(x)) + 10.0 * penalty(x, fake, share)
            for_critic.apply(tape.gradient(loss, critic.trainable_variables), critic.trainable_variables)
        with tf.GradientTape() as tape:
            generator_loss = -tf.reduce_mean(critic(generator(z[:, 0])))
        gradients = tape.gradient(generator_loss, generator.trainable_variables)
        for_generator.apply(gradients, generator.trainable_variables)
        return {"critic": loss, "generator": generator_loss}

    for batch in batches(header.sizes, real, noise, mixing):
        yield Seen(step(*batch), (generator, critic, for_generator, for_critic))
