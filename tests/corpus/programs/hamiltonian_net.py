"""A Hamiltonian network learns a pendulum: the loss is about the gradient of the net's energy, inside `train_step`."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import rng
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("flows and physics", "custom train_step", sizes=(8, 8, 5))


class Hamiltonian(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.energy = keras.Sequential([keras.layers.Dense(10, activation="tanh"), keras.layers.Dense(1)])

    def call(self, states: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(states)
            energy = tf.reduce_sum(self.energy(states))
        slopes = tape.gradient(energy, states)
        return tf.stack([slopes[:, 1], -slopes[:, 0]], axis=1)

    def train_step(self, data: Any) -> dict[str, Any]:
        states, moves = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=moves, y_pred=self(states))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    states = rng(21).uniform(-2.0, 2.0, (sum(header.sizes), 2))
    moves = np.stack([states[:, 1], -np.sin(states[:, 0])], axis=1)
    with autodist.scope():
        model = Hamiltonian()
        model.energy.build([None, 2])
        model.compile(keras.optimizers.Adam(0.02), "mse", jit_compile=False)
    yield from fitted(model, states, moves, batch_size=header.sizes[0])
