"""Metric learning by an additive angular margin: normalized features and weights, a larger angle for the true class."""

from collections.abc import Iterator
from typing import Any

import keras

from tests.corpus.data import wines
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("contrastive and metric learning", "Keras fit", sizes=(8, 8, 5))


class ArcFace(keras.layers.Layer):
    def __init__(self, classes: int, margin: float = 0.2, scale: float = 8.0) -> None:
        super().__init__()
        self.classes, self.margin, self.scale = classes, margin, scale

    def build(self, shapes: Any) -> None:
        self.kernel = self.add_weight(shape=[shapes[0][-1], self.classes], name="kernel")

    def call(self, inputs: Any) -> Any:
        features, labels = inputs
        kernel = keras.ops.normalize(self.kernel, axis=0)
        cosines = keras.ops.clip(keras.ops.matmul(keras.ops.normalize(features, axis=1), kernel), -0.999, 0.999)
        true = keras.ops.one_hot(labels, self.classes, dtype=cosines.dtype)
        return self.scale * keras.ops.cos(keras.ops.arccos(cosines) + self.margin * true)


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    x, labels = (array[: sum(header.sizes)] for array in wines())
    with autodist.scope():
        inputs, classes = keras.Input([13]), keras.Input([], dtype="int64")
        features = keras.layers.Dense(5)(keras.layers.Dense(8, activation="elu")(inputs))
        model = keras.Model([inputs, classes], ArcFace(3)([features, classes]))
        model.compile(
            keras.optimizers.Adam(0.02, weight_decay=0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=False,
        )
    yield from fitted(model, [x, labels], labels, batch_size=header.sizes[0])
