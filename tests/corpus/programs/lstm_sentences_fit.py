"""Sentences told apart by their length: a masked embedding, a bidirectional LSTM, class weights."""

from collections.abc import Iterator
from typing import Any

import keras

from tests.corpus.data import sentences
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("recurrent nets", "Keras fit", sizes=(8, 8, 5))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    words = sentences(sum(header.sizes), 9)
    is_long = ((words != 0).sum(axis=1) > 6).astype("int64")
    with autodist.scope():
        model = keras.Sequential(
            [
                keras.layers.Embedding(24, 6, mask_zero=True),
                keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True)),
                keras.layers.Bidirectional(keras.layers.LSTM(3)),
                keras.layers.Dense(1, activation="sigmoid"),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.01),
            "binary_crossentropy",
            metrics=["accuracy", keras.metrics.AUC(num_thresholds=20)],
            jit_compile=False,
        )
    yield from fitted(model, words, is_long, batch_size=header.sizes[0], class_weight={0: 0.7, 1: 1.9})
