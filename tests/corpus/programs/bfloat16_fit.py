"""Keras's mixed_bfloat16 policy: a dense classifier of digits with a float32 output, trained by SGD."""

from collections.abc import Iterator
from typing import Any

import keras

from tests.corpus.data import digits
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("optimization methods", "Keras fit", tolerance=2e-2, sizes=(8, 8, 5), floatx="float32")
"""bfloat16 has 8 bits, so a part of a gradient is rounded by up to 1/256."""


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    images, labels = (array[: sum(header.sizes)] for array in digits("float32"))
    with autodist.scope():
        model = keras.Sequential(
            [
                keras.layers.Flatten(),
                keras.layers.Dense(12, activation="tanh", dtype="mixed_bfloat16"),
                keras.layers.Dense(10, dtype="mixed_bfloat16"),
                keras.layers.Activation("softmax", dtype="float32"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", jit_compile=False)
        model.build([None, 8, 8, 1])
    yield from fitted(model, images, labels, batch_size=header.sizes[0])
