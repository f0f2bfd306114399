"""A residual network with group normalization reads handwritten digits; Nesterov momentum and an L2 regularizer."""

from collections.abc import Iterator
from typing import Any

import keras

from tests.corpus.data import digits
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("convnets and residual nets", "Keras fit", sizes=(8, 8, 5))


def block(x: Any, filters: int, stride: int) -> Any:
    regularizer = keras.regularizers.L2(1e-3)
    y = keras.layers.Conv2D(filters, 3, stride, padding="same", kernel_regularizer=regularizer)(x)
    y = keras.layers.GroupNormalization(2)(y)
    y = keras.layers.ReLU()(y)
    y = keras.layers.Conv2D(filters, 3, padding="same", kernel_regularizer=regularizer)(y)
    y = keras.layers.GroupNormalization(2)(y)
    if stride > 1:
        x = keras.layers.Conv2D(filters, 1, stride)(x)
    return keras.layers.ReLU()(keras.layers.Add()([x, y]))


def network() -> keras.Model:
    inputs = keras.Input([8, 8, 1])
    x = keras.layers.Conv2D(4, 3, padding="same")(inputs)
    x = block(x, 4, 1)
    x = block(x, 6, 2)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    images, labels = (array[: sum(header.sizes)] for array in digits())
    with autodist.scope():
        model = network()
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=False,
        )
    yield from fitted(model, images, labels, batch_size=header.sizes[0])
