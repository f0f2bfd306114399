"""A self-attentive sequence recommender: item and position embeddings, causal attention, masked next items."""

from collections.abc import Iterator
from typing import Any

import keras

from tests.corpus.data import sentences
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("recommenders", "Keras fit", sizes=(8, 8, 6), still=("key/bias", "key_bias"))
ITEMS, LENGTH, WIDTH = 24, 7, 6


class Positioned(keras.layers.Layer):
    """Item embeddings plus position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.items = keras.layers.Embedding(ITEMS, WIDTH)
        self.positions = keras.layers.Embedding(LENGTH, WIDTH)

    def call(self, ids: Any) -> Any:
        places = keras.ops.arange(keras.ops.shape(ids)[1], dtype="int32")
        return self.items(ids) * WIDTH**0.5 + self.positions(places)


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    histories = sentences(sum(header.sizes), LENGTH + 1, ITEMS)
    inputs, following = histories[:, :-1], histories[:, 1:]
    with autodist.scope():
        ids = keras.Input([LENGTH], dtype="int64")
        x = Positioned()(ids)
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(1, WIDTH)(y, y, use_causal_mask=True)
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(WIDTH)(keras.layers.Dense(12, activation="relu")(y))
        model = keras.Model(ids, keras.layers.Dense(ITEMS)(x))
        model.compile(
            keras.optimizers.Adam(0.01, beta_2=0.98),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
    yield from fitted(model, inputs, following, sample_weight=(following > 0) * 1.0, batch_size=header.sizes[0])
