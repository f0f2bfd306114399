"""Keras's own gradient accumulation: AdamW updates every second batch."""

from collections.abc import Iterator
from typing import Any

import keras

from tests.corpus.data import tumours
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("optimization methods", "Keras fit", sizes=(8, 8, 8, 5))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    x, y = (array[: sum(header.sizes)] for array in tumours())
    with autodist.scope():
        model = keras.Sequential([keras.layers.Dense(6, activation="gelu"), keras.layers.Dense(2)])
        model.compile(
            keras.optimizers.AdamW(0.02, gradient_accumulation_steps=2),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        model.build([None, 30])
    yield from fitted(model, x, y, batch_size=header.sizes[0])
