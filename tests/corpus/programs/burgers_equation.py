"""A physics-informed network for Burgers' equation: second derivatives by nested tapes, initial and boundary points."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng
from tests.corpus.header import Header, Seen

HEADER = Header("flows and physics", "step function", sizes=(9, 6, 8))
VISCOSITY = 0.01 / np.pi


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    points = rng(20).uniform((0.0, -1.0), (1.0, 1.0), (40, 2))
    places = np.linspace(-1.0, 1.0, 7)
    fixed = np.concatenate([np.stack([np.zeros(7), places], axis=1), [[0.5, -1.0], [0.5, 1.0]]])
    fixed_values = np.concatenate([-np.sin(np.pi * places), [0.0, 0.0]])[:, None]
    model = keras.Sequential(
        [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    )
    model.build([None, 2])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    def residual(tx: tf.Tensor) -> tf.Tensor:
        t, x = tx[:, :1], tx[:, 1:]
        with tf.GradientTape() as second:
            second.watch(x)
            with tf.GradientTape(persistent=True) as first:
                first.watch([t, x])
                u = model(tf.concat([t, x], axis=1))
            u_x, u_t = first.gradient(u, x), first.gradient(u, t)
        return u_t + u * u_x - VISCOSITY * second.gradient(u_x, x)

    @autodist.function
    def step(tx: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            inside = tf.reduce_mean(tf.square(residual(tx)))
            known = tf.reduce_mean(tf.square(model(tf.constant(fixed)) - fixed_values))
            loss = inside + known
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"loss": loss, "inside": inside, "known": known}

    for (tx,) in batches(header.sizes, points):
        yield Seen(step(tx), (model, optimizer))
