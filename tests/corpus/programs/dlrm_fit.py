"""A deep recommender (DLRM): dense features, three categorical ones, pairwise dot products, Adagrad."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tests.corpus.data import ratings, rng
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Refusal, Seen

HEADER = Header(
    "recommenders",
    "Keras fit",
    sizes=(8, 8, 5),
    refused={"PartitionedPS": Refusal(r"its update uses 'adagrad/Any.*' \(Any\)", ("2-workers", "3-workers"))},
)
SIZES, WIDTH, DENSE = (11, 9, 7), 4, 3


def dlrm() -> keras.Model:
    dense = keras.Input([DENSE])
    ids = [keras.Input([], dtype="int64") for _ in SIZES]
    bottom = keras.layers.Dense(WIDTH, activation="relu")(keras.layers.Dense(8, activation="relu")(dense))
    rows = [keras.layers.Embedding(size, WIDTH)(one) for size, one in zip(SIZES, ids, strict=True)]
    features = keras.ops.stack([bottom, *rows], axis=1)
    products = keras.ops.matmul(features, keras.ops.transpose(features, [0, 2, 1]))
    first, second = np.triu_indices(len(SIZES) + 1, 1)
    flat = keras.ops.reshape(products, [-1, (len(SIZES) + 1) ** 2])
    chosen = keras.ops.take(flat, first * (len(SIZES) + 1) + second, axis=1)
    top = keras.layers.Dense(6, activation="relu")(keras.layers.Concatenate()([bottom, chosen]))
    return keras.Model([dense, *ids], keras.layers.Dense(1, activation="sigmoid")(top))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    count = sum(header.sizes)
    user, item, rating = ratings(count)
    hour, dense = rng(4).integers(0, 7, count), rng(5).lognormal(size=(count, DENSE))
    with autodist.scope():
        model = dlrm()
        model.compile(
            keras.optimizers.Adagrad(0.05), keras.losses.BinaryCrossentropy(), metrics=["accuracy"], jit_compile=False
        )
    clicked = (rating > 0).astype("float64")[:, None]
    yield from fitted(model, [np.log1p(dense), user, item, hour], clicked, batch_size=header.sizes[0])
