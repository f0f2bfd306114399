"""What is known of Keras's own layers: whether they keep examples apart. That models train as they should on several
replicas is tried in `tests/oracle/test_fit_models.py`.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist

VECTORS = np.ones([6, 4], np.float32)
IMAGES = np.ones([6, 8, 8, 3], np.float32)
SEQUENCES = np.ones([6, 5, 4], np.float32)


def item_of(call: Callable[[Any], Any], x: Any) -> Any:
    """What is captured of a step that trains through `call`."""
    keras.config.set_floatx("float32")
    with AutoDist(batch_statistics="replica") as autodist:
        weight = tf.Variable(1.0)
        mode = {"training": True} if isinstance(call, keras.layers.BatchNormalization) else {}

        def step(x: Any, length: Any) -> None:
            if x.shape.rank == 3:
                x = x[:, :length]  # Sequences of any length.
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(call(weight * x, **mode)))
            weight.assign_sub(0.1 * tape.gradient(loss, weight))

        return autodist.function(step).captured(x, np.int32(5)).item


def attention() -> Callable[[Any], Any]:
    layer = keras.layers.MultiHeadAttention(2, 3)
    return lambda x: layer(x, x, use_causal_mask=True)


APART: dict[str, tuple[Callable[[], Callable[[Any], Any]], Any]] = {
    "dense": (lambda: keras.layers.Dense(3, activation="relu"), VECTORS),
    "dense of sequences": (lambda: keras.layers.Dense(3, activation="relu"), SEQUENCES),
    "recurrent": (lambda: keras.layers.LSTM(3, return_sequences=True), SEQUENCES),
    "both directions": (lambda: keras.layers.Bidirectional(keras.layers.GRU(3)), SEQUENCES),
    "each time": (lambda: keras.layers.TimeDistributed(keras.layers.Dense(3)), SEQUENCES),
    "attention": (attention, SEQUENCES),
    "normalized": (keras.layers.LayerNormalization, SEQUENCES),
    "convolution": (lambda: keras.layers.Conv2D(3, 3, padding="same"), IMAGES),
    "separable": (lambda: keras.layers.SeparableConv2D(3, 3), IMAGES),
    "transposed": (lambda: keras.layers.Conv2DTranspose(3, 3), IMAGES),
    "pooling": (keras.layers.MaxPooling2D, IMAGES),
    "pooled": (keras.layers.GlobalAveragePooling2D, IMAGES),
    "groups": (lambda: keras.layers.GroupNormalization(3), IMAGES),
    "flat": (keras.layers.Flatten, IMAGES),
    "softmax": (keras.layers.Softmax, VECTORS),
    "depthwise": (lambda: keras.layers.DepthwiseConv2D(3, padding="same"), IMAGES),
    "causal": (lambda: keras.layers.Conv1D(3, 2, padding="causal"), SEQUENCES),
    "three axes": (lambda: keras.layers.Conv3D(3, 2), np.ones([6, 4, 4, 4, 2], np.float32)),
    "recurrent convolution": (lambda: keras.layers.ConvLSTM2D(2, 2), np.ones([6, 3, 5, 5, 2], np.float32)),
    "larger": (lambda: keras.layers.UpSampling2D(interpolation="bilinear"), IMAGES),
    "padded": (keras.layers.ZeroPadding2D, IMAGES),
    "resized": (lambda: keras.layers.Resizing(4, 4), IMAGES),
    "turned": (lambda: keras.layers.Permute((2, 1)), SEQUENCES),
    "repeated": (lambda: keras.layers.RepeatVector(3), VECTORS),
    "shaped": (lambda: keras.layers.Reshape((2, 2)), VECTORS),
    "averaged": (lambda: keras.layers.AveragePooling1D(2), SEQUENCES),
    "rectified": (keras.layers.PReLU, VECTORS),
    "unit": (keras.layers.UnitNormalization, VECTORS),
    "root of squares": (keras.layers.RMSNormalization, VECTORS),
}


@pytest.mark.parametrize("name", APART)
def test_layers_that_keep_examples_apart_are_known(name: str) -> None:
    make, x = APART[name]
    item = item_of(make(), x)
    assert not item.local_ops
    assert [gradient.reduction for gradient in item.gradients] == ["mean"]


class Centring(keras.layers.Layer):
    """A cell of the user's, which mixes examples."""

    def __init__(self) -> None:
        super().__init__()
        self.state_size = self.output_size = 4

    def call(self, inputs: Any, states: Any) -> Any:
        return inputs - tf.reduce_max(inputs, axis=0), states


def by_largest(x: Any) -> Any:
    return x / tf.reduce_max(tf.abs(x), axis=0)


MIX: dict[str, tuple[Callable[[], Callable[[Any], Any]], Any]] = {
    "softmax over examples": (lambda: keras.layers.Softmax(axis=0), VECTORS),
    "norm over examples": (lambda: keras.layers.UnitNormalization(axis=0), VECTORS),
    "an activation": (lambda: keras.layers.Dense(3, activation=by_largest), VECTORS),
    "an activation in a loop": (lambda: keras.layers.SimpleRNN(3, activation=by_largest), SEQUENCES),
    "a cell": (lambda: keras.layers.RNN(Centring()), SEQUENCES),
    "a subclass": (lambda: type("Own", (keras.layers.Dense,), {"call": lambda self, x: by_largest(x)})(4), VECTORS),
}


@pytest.mark.parametrize("name", MIX)
def test_layers_that_may_mix_examples_are_named(name: str) -> None:
    make, x = MIX[name]
    item = item_of(make(), x)
    assert item.local_ops or item.mixtures


def test_batch_normalization_is_named_apart() -> None:
    item = item_of(keras.layers.BatchNormalization(), VECTORS)
    assert item.normalizing_ops and not item.local_ops
