"""Lookahead around Adam, as an optimizer class of the user's: slow weights meet the fast ones every two steps."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import diabetes
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("optimization methods", "Keras fit", sizes=(8, 8, 5))


class Lookahead(keras.optimizers.Adam):
    """Every `period` steps the weights go back half of the way to where they were before."""

    def __init__(self, rate: float, period: int = 2, **options: Any) -> None:
        super().__init__(rate, **options)
        self.period = period

    def build(self, variables: Any) -> None:
        if not self.built:
            self.slow = [self.add_variable_from_reference(variable, "slow") for variable in variables]
        super().build(variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        slow = self.slow[self._get_variable_index(variable)]
        is_first = keras.ops.equal(self.iterations, 0)
        slow.assign(keras.ops.where(is_first, variable, slow))
        super().update_step(gradient, variable, learning_rate)
        meet = keras.ops.equal((self.iterations + 1) % self.period, 0)
        slow.assign(keras.ops.where(meet, slow + 0.5 * (variable - slow), slow))
        variable.assign(keras.ops.where(meet, slow, variable))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    x, y = (array[: sum(header.sizes)] for array in diabetes())
    with autodist.scope():
        model = keras.Sequential([keras.layers.Dense(7, activation="softplus"), keras.layers.Dense(1)])
        model.compile(Lookahead(0.02), "mse", metrics=["mae"], jit_compile=False)
        model.build([None, 10])
    yield from fitted(model, x, tf.constant(y).numpy(), batch_size=header.sizes[0])
