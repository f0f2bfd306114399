"""Center loss: features are drawn to their class's center; the centers follow by rows, outside of back-propagation."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import wines
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("contrastive and metric learning", "custom train_step", sizes=(8, 8, 5))
CLASSES, WIDTH = 3, 4


class Centered(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.features = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(WIDTH)])
        self.head = keras.layers.Dense(CLASSES)
        self.centers = self.add_weight(
            shape=[CLASSES, WIDTH], initializer="glorot_normal", trainable=False, name="centers"
        )

    def call(self, x: Any) -> Any:
        return self.head(self.features(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, labels = data
        with tf.GradientTape() as tape:
            features = self.features(x)
            logits = self.head(features)
            entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            away = features - tf.gather(tf.stop_gradient(tf.convert_to_tensor(self.centers)), labels)
            pull = 0.5 * tf.reduce_sum(tf.square(away), axis=1)
            loss = tf.reduce_mean(entropy + 0.1 * pull)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        classes = tf.one_hot(labels, CLASSES, dtype=away.dtype)
        counts = tf.reduce_sum(classes, axis=0)
        moves = tf.matmul(classes, away, transpose_a=True) / (1.0 + counts[:, None])
        self.centers.assign_add(0.5 * moves)
        return {"loss": loss, "pull": tf.reduce_mean(pull)}


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    x, labels = (array[: sum(header.sizes)] for array in wines())
    with autodist.scope():
        model = Centered()
        model(x[:1])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), jit_compile=False)
    yield from fitted(model, x, labels, batch_size=header.sizes[0])
