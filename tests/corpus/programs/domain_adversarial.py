"""Domain-adversarial training: a head whose gradient is reversed on its way back, and gradients of examples clipped."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import batches, digits, rng
from tests.corpus.header import Header, Seen

HEADER = Header("training recipes", "step function")
LIMIT = 0.01


@tf.custom_gradient
def reversed_gradient(features: tf.Tensor, strength: tf.Tensor) -> Any:
    def back(gradient: tf.Tensor) -> tuple[tf.Tensor, None]:
        return -strength * gradient, None

    return tf.identity(features), back


@tf.custom_gradient
def clipped_gradient(features: tf.Tensor) -> Any:
    """No example's gradient has a larger norm, and no number of it is larger than a tenth of that."""

    def back(gradient: tf.Tensor) -> tf.Tensor:
        return tf.clip_by_value(tf.clip_by_norm(gradient, LIMIT, axes=[1]), -LIMIT / 10, LIMIT / 10)

    return tf.identity(features), back


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    images, labels = digits()
    count = sum(header.sizes)
    source = images[:count].reshape(-1, 64)
    target = images[count : 2 * count].reshape(-1, 64) + 0.3 * rng(3).normal(size=(count, 64))
    body = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(8, activation="tanh")])
    classes, domains = keras.layers.Dense(10), keras.layers.Dense(1)
    for part, width in ((body, 64), (classes, 8), (domains, 8)):
        part.build((None, width))
    trained = [*body.trainable_variables, *classes.trainable_variables, *domains.trainable_variables]
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    optimizer.build(trained)
    progress = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    @autodist.function
    def step(x: tf.Tensor, y: tf.Tensor, other: tf.Tensor) -> dict[str, tf.Tensor]:
        strength = 2.0 / (1.0 + tf.exp(-10.0 * progress)) - 1.0
        with tf.GradientTape() as tape:
            own, others = (clipped_gradient(body(part)) for part in (x, other))
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=classes(own))
            scores = [domains(reversed_gradient(part, strength)) for part in (own, others)]
            confusion = tf.reduce_mean(tf.nn.softplus(-scores[0])) + tf.reduce_mean(tf.nn.softplus(scores[1]))
            loss = tf.reduce_mean(losses) + 0.5 * confusion
        optimizer.apply(tape.gradient(loss, trained), trained)
        progress.assign_add(0.1)
        return {"loss": loss, "confusion": confusion}

    for batch in batches(header.sizes, source, labels[:count], target):
        yield Seen(step(*batch), (body, classes, domains, optimizer, progress))
