"""A summed loss with kernel regularizers on layers over time: dense layers before and after a GRU, in `fit`."""

from collections.abc import Iterator
from typing import Any

import keras

from tests.corpus.data import series
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("recurrent nets", "Keras fit", sizes=(8, 8, 5))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    waves = series(sum(header.sizes), 9)[:, :, None]
    regularizer = keras.regularizers.L2(0.01)
    with autodist.scope():
        model = keras.Sequential(
            [
                keras.layers.Dense(4, activation="tanh", kernel_regularizer=regularizer),
                keras.layers.GRU(4, return_sequences=True, recurrent_regularizer=regularizer),
                keras.layers.Dense(1, kernel_regularizer=regularizer, bias_regularizer=keras.regularizers.L1(0.01)),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.5),
            keras.losses.MeanSquaredError(reduction="sum"),
            metrics=["mae"],
            jit_compile=False,
        )
        model.build([None, 8, 1])
    yield from fitted(model, waves[:, :-1], waves[:, 1:], batch_size=header.sizes[0])
