"""A U-Net marks the ink of noisy digits: skip connections, transposed convolutions, cross-entropy plus Dice loss."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import batches, digits, rng
from tests.corpus.header import Header, Seen

HEADER = Header("convnets and residual nets", "step function", sizes=(6, 3, 4))


def unet() -> keras.Model:
    inputs = keras.Input([8, 8, 1])
    top = keras.layers.Conv2D(3, 3, padding="same", activation="relu")(inputs)
    middle = keras.layers.Conv2D(4, 3, 2, padding="same", activation="relu")(top)
    bottom = keras.layers.Conv2D(5, 3, 2, padding="same", activation="relu")(middle)
    x = keras.layers.Conv2DTranspose(4, 2, 2, activation="relu")(bottom)
    x = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(keras.layers.Concatenate()([x, middle]))
    x = keras.layers.UpSampling2D()(x)
    x = keras.layers.Conv2D(3, 3, padding="same", activation="relu")(keras.layers.Concatenate()([x, top]))
    return keras.Model(inputs, keras.layers.Conv2D(1, 1)(x))


def dice_loss(masks: tf.Tensor, chances: tf.Tensor) -> tf.Tensor:
    """Of each image, then their mean."""
    overlap = tf.reduce_sum(masks * chances, axis=[1, 2, 3])
    size = tf.reduce_sum(masks + chances, axis=[1, 2, 3])
    return tf.reduce_mean(1.0 - (2.0 * overlap + 1.0) / (size + 1.0))


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    images, _ = digits()
    masks = (images > 0.5).astype("float64")
    noisy = images + 0.2 * rng().normal(size=images.shape)
    model, optimizer = unet(), keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    @autodist.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            entropy = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=logits))
            dice = dice_loss(y, tf.sigmoid(logits))
            loss = entropy + 0.5 * dice
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
        return loss, dice

    for x, y in batches(header.sizes, noisy, masks):
        yield Seen(step(x, y), (model, optimizer))
