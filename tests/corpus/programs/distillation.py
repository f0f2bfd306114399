"""Distillation: a student learns labels and a frozen teacher's softened answers; focal weights on the hard ones."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import digits
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("training recipes", "custom train_step", sizes=(8, 8, 5))


class Distiller(keras.Model):
    def __init__(self, student: keras.Model, teacher: keras.Model) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False
        self.temperature, self.alpha = 3.0, 0.4

    def call(self, x: Any) -> Any:
        return self.student(x)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        hard = keras.ops.one_hot(y, 10, dtype=y_pred.dtype)
        chances = keras.ops.softmax(y_pred)
        focal = keras.ops.square(1.0 - keras.ops.sum(hard * chances, axis=1))
        labels = keras.ops.mean(focal * keras.losses.categorical_crossentropy(hard, y_pred, from_logits=True))
        soft = keras.ops.softmax(self.teacher(x, training=False) / self.temperature)
        student = keras.ops.log_softmax(y_pred / self.temperature)
        divergence = keras.ops.mean(keras.ops.sum(soft * (keras.ops.log(soft) - student), axis=1))
        return self.alpha * labels + (1.0 - self.alpha) * self.temperature**2 * divergence

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            logits = self.student(x, training=True)
            loss = self.compute_loss(x, y, logits)
        weights = self.student.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    images, labels = (array[: sum(header.sizes)] for array in digits())
    with autodist.scope():
        nets = [
            keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(width, "relu"), keras.layers.Dense(10)])
            for width in (6, 16)
        ]
        for net in nets:
            net.build([None, 8, 8, 1])
        model = Distiller(*nets)
        model.compile(keras.optimizers.Adam(0.01), jit_compile=False)
    yield from fitted(model, images, labels, batch_size=header.sizes[0])
