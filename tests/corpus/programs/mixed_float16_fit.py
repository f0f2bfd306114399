"""Keras's mixed_float16 with its LossScaleOptimizer, whose first scales are too large for float16."""

from collections.abc import Iterator
from typing import Any

import keras

from tests.corpus.data import wines
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header(
    "optimization methods",
    "Keras fit",
    tolerance=4e-3,
    sizes=(8, 8, 5),
    floatx="float32",
)
"""float16 has 11 bits: parts of a sum are rounded to it before they are added."""


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    x, labels = (array[: sum(header.sizes)] for array in wines())
    with autodist.scope():
        model = keras.Sequential(
            [
                keras.layers.Dense(8, activation="tanh", dtype="mixed_float16"),
                keras.layers.Dense(3, dtype="mixed_float16"),
                keras.layers.Activation("softmax", dtype="float32"),
            ]
        )
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05), initial_scale=2.0**20, dynamic_growth_steps=3
        )
        model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
        model.build([None, 13])
    yield from fitted(model, x.astype("float32"), labels, batch_size=header.sizes[0])
