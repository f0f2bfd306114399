"""A mobile convnet: depthwise separable convolutions, swish, squeeze and excitation; a training step of its own."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import digits
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("convnets and residual nets", "custom train_step", sizes=(8, 8, 5))


class SqueezeExcite(keras.layers.Layer):
    def __init__(self, filters: int) -> None:
        super().__init__()
        self.pool = keras.layers.GlobalAveragePooling2D(keepdims=True)
        self.down = keras.layers.Conv2D(2, 1, activation="relu")
        self.up = keras.layers.Conv2D(filters, 1, activation="sigmoid")

    def call(self, x: Any) -> Any:
        return x * self.up(self.down(self.pool(x)))


class MobileNet(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.stem = keras.layers.Conv2D(4, 3, activation="swish")
        self.separable = keras.layers.SeparableConv2D(6, 3, padding="same", activation="swish")
        self.excite = SqueezeExcite(6)
        self.depthwise = keras.layers.DepthwiseConv2D(3, activation="swish")
        self.pool = keras.layers.GlobalAveragePooling2D()
        self.norm = keras.layers.LayerNormalization()
        self.head = keras.layers.Dense(10)

    def call(self, images: Any) -> Any:
        x = self.excite(self.separable(self.stem(images)))
        return self.head(self.norm(self.pool(self.depthwise(x))))

    def train_step(self, data: Any) -> dict[str, Any]:
        images, labels = data
        with tf.GradientTape() as tape:
            logits = self(images, training=True)
            loss = self.compute_loss(y=labels, y_pred=logits)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(labels, logits)
        return {"norm": norm, **{metric.name: metric.result() for metric in self.metrics}}


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    images, labels = (array[: sum(header.sizes)] for array in digits())
    with autodist.scope():
        model = MobileNet()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.RMSprop(0.01), loss, metrics=["accuracy"], jit_compile=False)
    yield from fitted(model, images, labels, batch_size=header.sizes[0])
