"""A tag for each word: forward and backward GRUs, weights of zero for padding, per-word metrics."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tests.corpus.data import sentences
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("recurrent nets", "Keras fit", tolerance=1e-6, sizes=(8, 8, 5))  # Keras's metrics are float32.


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    words = sentences(sum(header.sizes), 7)
    tags = np.minimum(words // 5, 3)
    weights = (words != 0).astype("float64")
    with autodist.scope():
        inputs = keras.Input([7], dtype="int64")
        x = keras.layers.Embedding(24, 5)(inputs)
        forward = keras.layers.GRU(4, return_sequences=True)(x)
        backward = keras.layers.GRU(4, return_sequences=True, go_backwards=True)(x)
        x = keras.layers.Concatenate()([forward, keras.ops.flip(backward, axis=1)])
        model = keras.Model(inputs, keras.layers.Dense(4, activation="softmax")(x))
        model.compile(
            keras.optimizers.Nadam(0.01),
            "sparse_categorical_crossentropy",
            weighted_metrics=["accuracy"],
            jit_compile=False,
        )
    yield from fitted(model, words, tags, sample_weight=weights, batch_size=header.sizes[0])
