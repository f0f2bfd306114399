"""Images that are changed one by one, as augmentation does: they are rows, and equal to one device's."""

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.testing import assert_equivalent
from tests.support.capture_steps import capture

RNG = np.random.default_rng(0)
BATCHES = [(RNG.uniform(size=(size, 3)), RNG.integers(0, 3, size).astype("float64")) for size in (6, 5, 2)]


def moved(x: tf.Tensor, by: tf.Tensor) -> tf.Tensor:
    """Images of one row of three, whose size is taken from their shape, as Keras's augmentation does."""
    images = tf.reshape(x, [-1, 1, 3, 1])
    transforms = tf.cast(by, tf.float32)[:, tf.newaxis] * tf.constant([[0.0, 0, 1, 0, 0, 0, 0, 0]])
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=transforms + tf.constant([[1.0, 0, 0, 0, 1, 0, 0, 0]]),
        output_shape=tf.shape(images)[1:-1],
        fill_value=0.0,
        interpolation="NEAREST",
    )


CHANGED: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "hues": lambda x, y: tf.image.adjust_hue(tf.reshape(x, [-1, 1, 1, 3]), 0.1),
    "saturations": lambda x, y: tf.image.adjust_saturation(tf.reshape(x, [-1, 1, 1, 3]), 0.5),
    "colours": lambda x, y: tf.image.hsv_to_rgb(tf.image.rgb_to_hsv(tf.reshape(x, [-1, 1, 1, 3])) * 0.5),
    "contrasts": lambda x, y: tf.image.adjust_contrast(tf.reshape(x, [-1, 3, 1, 1]), 2.0),
    "areas": lambda x, y: tf.image.resize(tf.reshape(x, [-1, 3, 1, 1]), [2, 2], "area"),
    "bicubic": lambda x, y: tf.image.resize(tf.reshape(x, [-1, 3, 1, 1]), [5, 2], "bicubic"),
    "moved by one": lambda x, y: moved(x, tf.ones([1], tf.float64)),
    "moved, each by its own": lambda x, y: moved(x, y),
}


@pytest.mark.parametrize("name", CHANGED)
def test_images_are_changed_one_by_one(name: str) -> None:
    (output,) = capture(CHANGED[name], *map(tf.constant, BATCHES[0])).item.outputs
    assert output.reduction == "rows"
    assert_equivalent(CHANGED[name], BATCHES, replicas=2, batch_statistics="replica")
