"""Sharpness-aware minimization: weights climb along the gradient; the gradient there is applied from below."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import tumours
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header(
    "optimization methods",
    "custom train_step",
    sizes=(8, 8, 5),
)


class SharpnessAware(keras.Model):
    def __init__(self, radius: float = 0.05) -> None:
        super().__init__()
        self.radius = radius
        self.net = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])

    def call(self, x: Any) -> Any:
        return self.net(x)

    def gradients(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        return loss, tape.gradient(loss, self.trainable_variables)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        loss, gradients = self.gradients(x, y)
        norm = tf.linalg.global_norm(gradients)
        moves = [self.radius * gradient / (norm + 1e-12) for gradient in gradients]
        for weight, move in zip(self.trainable_variables, moves, strict=True):
            weight.assign_add(move)
        sharp, gradients = self.gradients(x, y)
        for weight, move in zip(self.trainable_variables, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "sharp": sharp}


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    x, y = (array[: sum(header.sizes)] for array in tumours())
    with autodist.scope():
        model = SharpnessAware()
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=False)
        model.net.build([None, 30])
    yield from fitted(model, x, y.astype("float64")[:, None], batch_size=header.sizes[0])
