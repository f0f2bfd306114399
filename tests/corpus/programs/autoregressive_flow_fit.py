"""A masked autoregressive flow in `fit`: a MADE network with fixed masks, its log-likelihood added by `add_loss`."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tests.corpus.data import wines
from tests.corpus.fitting import fitted
from tests.corpus.header import Header, Seen

HEADER = Header("flows and physics", "Keras fit", sizes=(8, 8, 5))
FEATURES, HIDDEN = 5, 10


class Masked(keras.layers.Layer):
    """A dense layer whose weights are cut by a mask."""

    def __init__(self, mask: np.ndarray) -> None:
        super().__init__()
        self.mask = mask

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=self.mask.shape, name="kernel")
        self.bias = self.add_weight(shape=self.mask.shape[1:], initializer="zeros", name="bias")

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, self.kernel * self.mask) + self.bias


class Flow(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        places, units = np.arange(FEATURES), np.arange(HIDDEN) % (FEATURES - 1)
        self.first = Masked((units[None] >= places[:, None]).astype("float64"))
        self.mean = Masked((places[None] > units[:, None]).astype("float64"))
        self.scale = Masked((places[None] > units[:, None]).astype("float64"))

    def call(self, x: Any) -> Any:
        hidden = keras.ops.tanh(self.first(x))
        scale = keras.ops.tanh(self.scale(hidden))
        z = (x - self.mean(hidden)) * keras.ops.exp(-scale)
        self.add_loss(keras.ops.mean(keras.ops.sum(0.5 * keras.ops.square(z) + scale, axis=1)))
        return z


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    x = wines()[0][: sum(header.sizes), :FEATURES]
    with autodist.scope():
        model = Flow()
        model.compile(keras.optimizers.Adam(0.02), jit_compile=False)
    yield from fitted(model, x, batch_size=header.sizes[0])
