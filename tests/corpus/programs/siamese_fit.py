"""A siamese network in `fit`: one encoder for two images, their distance, and a contrastive loss with a margin."""

from collections.abc import Iterator
from typing import Any

import keras

from tests.corpus.data import digits, rng
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("contrastive and metric learning", "Keras fit", sizes=(8, 8, 5))


def distance(pair: Any) -> Any:
    squares = keras.ops.sum(keras.ops.square(pair[0] - pair[1]), axis=1, keepdims=True)
    return keras.ops.sqrt(keras.ops.maximum(squares, 1e-7))


def contrastive(is_other: Any, distances: Any) -> Any:
    near = (1.0 - is_other) * keras.ops.square(distances)
    far = is_other * keras.ops.square(keras.ops.maximum(1.0 - distances, 0.0))
    return keras.ops.mean(near + far)


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    images, labels = digits()
    count = sum(header.sizes)
    partners = rng(6).permutation(count)
    is_other = (labels[:count] != labels[partners]).astype("float64")[:, None]
    with autodist.scope():
        encoder = keras.Sequential(
            [
                keras.layers.Conv2D(3, 3, activation="tanh"),
                keras.layers.AveragePooling2D(2),
                keras.layers.Flatten(),
                keras.layers.Dense(4, activation="tanh"),
            ]
        )
        first, second = keras.Input([8, 8, 1]), keras.Input([8, 8, 1])
        model = keras.Model([first, second], keras.layers.Lambda(distance)([encoder(first), encoder(second)]))
        model.compile(keras.optimizers.RMSprop(0.01), contrastive, jit_compile=False)
    yield from fitted(model, [images[:count], images[partners]], is_other, batch_size=header.sizes[0])
