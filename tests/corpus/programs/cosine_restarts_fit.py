"""A schedule of the user's own class, layer-wise frozen weights, and callbacks that reduce the rate on a plateau."""

from collections.abc import Iterator
from typing import Any

import keras

from tests.corpus.data import wines
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("training recipes", "Keras fit", sizes=(8, 8, 5))


class WarmRestarts(keras.optimizers.schedules.LearningRateSchedule):
    """A cosine from `top` to zero, again and again, after a linear start."""

    def __init__(self, top: float, period: int) -> None:
        self.top, self.period = top, period

    def __call__(self, step: Any) -> Any:
        step = keras.ops.cast(step, "float64")
        turn = (step % self.period) / self.period
        return self.top * keras.ops.minimum(1.0, (step + 1.0) / 2.0) * 0.5 * (1.0 + keras.ops.cos(3.14159 * turn))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    x, labels = (array[: sum(header.sizes)] for array in wines())
    with autodist.scope():
        model = keras.Sequential(
            [
                keras.Input([13]),
                keras.layers.Dense(8, activation="tanh", trainable=False),
                keras.layers.Dense(6, activation="mish", kernel_regularizer=keras.regularizers.L1L2(1e-3, 1e-3)),
                keras.layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(
            keras.optimizers.Adam(WarmRestarts(0.05, 4), amsgrad=True),
            "sparse_categorical_crossentropy",
            metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy()],
            jit_compile=False,
        )
    yield from fitted(model, x, labels, batch_size=header.sizes[0])
