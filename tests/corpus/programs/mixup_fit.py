"""Mixup and label smoothing: each image is blended with a partner by a weight that comes with the batch."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import digits, rng
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("training recipes", "Keras fit", sizes=(8, 8, 5))


def blend(images: Any, partners: Any, labels: Any, others: Any, share: Any) -> Any:
    weight = tf.reshape(share, [-1, 1, 1, 1])
    blended = weight * images + (1.0 - weight) * partners
    targets = share[:, None] * tf.one_hot(labels, 10, dtype=share.dtype)
    return blended, targets + (1.0 - share)[:, None] * tf.one_hot(others, 10, dtype=share.dtype)


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    count = sum(header.sizes)
    images, labels = (array[:count] for array in digits())
    drawn = rng(30)
    partners, share = drawn.permutation(count), drawn.beta(0.4, 0.4, count)
    rows = tf.data.Dataset.from_tensor_slices((images, images[partners], labels, labels[partners], share))
    data = rows.batch(header.sizes[0]).map(blend).prefetch(1)
    with autodist.scope():
        model = keras.Sequential(
            [
                keras.layers.Conv2D(4, 3, 2, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.9), momentum=0.9),
            keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
            metrics=[keras.metrics.CategoricalAccuracy()],
            jit_compile=False,
        )
        model.build([None, 8, 8, 1])
    assert np.ndim(share) == 1
    yield from fitted(model, data)
