"""A vision transformer: patches of a digit, a class token, learnt positions, pre-norm blocks, a cosine schedule."""

from collections.abc import Iterator
from typing import Any

import keras

from tests.corpus.data import digits
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("attention and embeddings", "Keras fit", sizes=(8, 8, 3), still=("key/bias", "key_bias"))
PATCHES, WIDTH = 16, 8


class Patches(keras.layers.Layer):
    """2 × 2 pixels each, after a class token, with their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.project = keras.layers.Conv2D(WIDTH, 2, 2)
        self.flatten = keras.layers.Reshape([PATCHES, WIDTH])
        self.positions = keras.layers.Embedding(PATCHES + 1, WIDTH)

    def build(self, shape: Any) -> None:
        self.token = self.add_weight(shape=[1, 1, WIDTH], initializer="glorot_uniform", name="token")

    def call(self, images: Any) -> Any:
        patches = self.flatten(self.project(images))
        tokens = keras.ops.broadcast_to(self.token, [keras.ops.shape(images)[0], 1, WIDTH])
        return keras.ops.concatenate([tokens, patches], axis=1) + self.positions(keras.ops.arange(PATCHES + 1))


def network() -> keras.Model:
    inputs = keras.Input([8, 8, 1])
    x = Patches()(inputs)
    y = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.MultiHeadAttention(2, 4)(y, y)
    y = keras.layers.LayerNormalization()(x)
    x = x + keras.layers.Dense(WIDTH)(keras.layers.Dense(16, activation="gelu")(y))
    return keras.Model(inputs, keras.layers.Dense(10)(x[:, 0]))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    images, labels = (array[: sum(header.sizes)] for array in digits())
    with autodist.scope():
        model = network()
        model.compile(
            keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.01, 6, warmup_steps=2, warmup_target=0.02)),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=False,
        )
    yield from fitted(model, images, labels, batch_size=header.sizes[0])
