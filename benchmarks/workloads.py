"""What is trained: seven models in raw TensorFlow ops, with their data, the same for every system that trains them.

Plain stochastic gradient descent in float32. Weights and batches are drawn from fixed seeds, so all systems start
from the same ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

RATE = 0.05
POOL = 4
"""How many batches there are; steps take them by turns."""

Arrays = tuple[npt.NDArray[Any], ...]


@dataclass(frozen=True, slots=True)
class Model:
    """Its trainable variables, and the mean loss of a batch."""

    variables: list[tf.Variable]
    loss: Callable[..., tf.Tensor]

    def gradients(self, *batch: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor | tf.IndexedSlices]]:
        """The loss, and the gradient for each variable."""
        with tf.GradientTape() as tape:
            loss = self.loss(*batch)
        return loss, tape.gradient(loss, self.variables)

    def step(self, *batch: tf.Tensor) -> tf.Tensor:
        """The loss; the variables are those after one step of one device."""
        loss, gradients = self.gradients(*batch)
        for variable, gradient in zip(self.variables, gradients, strict=True):
            descend(variable, gradient)
        return loss


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, and what it is trained on.

    Attributes:
        batch_size: examples a worker.
        make: the model, its weights drawn by this generator.
        draw: a batch of so many examples.
    """

    batch_size: int
    make: Callable[[np.random.Generator], Model]
    draw: Callable[[np.random.Generator, int], Arrays]

    def model(self) -> Model:
        return self.make(np.random.default_rng(1))

    def batches(self, workers: int) -> list[Arrays]:
        """The whole batches of all workers together."""
        rng = np.random.default_rng(2)
        return [self.draw(rng, workers * self.batch_size) for _ in range(POOL)]

    def part(self, batch: Arrays, rank: int) -> Arrays:
        """What the worker of that rank has of a whole batch."""
        return tuple(array[rank * self.batch_size : (rank + 1) * self.batch_size] for array in batch)


def descend(variable: tf.Variable, gradient: tf.Tensor | tf.IndexedSlices) -> None:
    """A step of gradient descent; of a table only the rows that the gradient has."""
    if isinstance(gradient, tf.IndexedSlices):
        variable.scatter_sub(tf.IndexedSlices(RATE * gradient.values, gradient.indices))
    else:
        variable.assign_sub(RATE * gradient)


class _Weights:
    """Variables by name, in the order in which they are made."""

    def __init__(self, rng: np.random.Generator):
        self._rng = rng
        self.all: list[tf.Variable] = []

    def normal(self, name: str, *shape: int, scale: float | None = None) -> tf.Variable:
        """By default scaled for a product with it to keep the size of its input."""
        scale = float(np.prod(shape[:-1])) ** -0.5 if scale is None else scale
        return self._made(name, np.float32(scale) * self._rng.standard_normal(shape, np.float32))

    def constant(self, name: str, size: int, value: float = 0.0) -> tf.Variable:
        return self._made(name, np.full([size], value, np.float32))

    def _made(self, name: str, value: npt.NDArray[np.float32]) -> tf.Variable:
        self.all.append(tf.Variable(value, name=name))
        return self.all[-1]


def _cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


# --- mlp: 40 MB of dense gradients, little to compute -----------------------------------------------------------------

_MLP_SIZES = (784, 2048, 2048, 2048, 10)


def _mlp(rng: np.random.Generator) -> Model:
    weights = _Weights(rng)
    sizes = list(pairwise(_MLP_SIZES))
    layers = [
        (weights.normal(f"kernel_{index}", *size), weights.constant(f"bias_{index}", size[1]))
        for index, size in enumerate(sizes)
    ]

    def loss(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        value = images
        for kernel, bias in layers[:-1]:
            value = tf.nn.relu(value @ kernel + bias)
        kernel, bias = layers[-1]
        return _cross_entropy(labels, value @ kernel + bias)

    return Model(weights.all, loss)


def _mlp_batch(rng: np.random.Generator, size: int) -> Arrays:
    return rng.standard_normal((size, _MLP_SIZES[0]), np.float32), rng.integers(0, 10, size, np.int32)


# --- emb: a large table of which a step uses few rows -----------------------------------------------------------------

_ROWS, _WIDTH, _BAG = 200_000, 64, 50


def _emb(rng: np.random.Generator) -> Model:
    weights = _Weights(rng)
    table = weights.normal("table", _ROWS, _WIDTH, scale=0.1)
    hidden, hidden_bias = weights.normal("hidden", _WIDTH, _WIDTH), weights.constant("hidden_bias", _WIDTH)
    top, top_bias = weights.normal("top", _WIDTH, 2), weights.constant("top_bias", 2)

    def loss(ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        pooled = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), axis=1)
        return _cross_entropy(labels, tf.nn.relu(pooled @ hidden + hidden_bias) @ top + top_bias)

    return Model(weights.all, loss)


def _emb_batch(rng: np.random.Generator, size: int) -> Arrays:
    return zipf(rng, _ROWS, (size, _BAG)), rng.integers(0, 2, size, np.int32)


def zipf(rng: np.random.Generator, count: int, shape: Sequence[int]) -> npt.NDArray[np.int32]:
    """Ids below `count`, the one of rank r (from 1) with a probability in proportion to 1 / r."""
    cumulated = np.cumsum(1.0 / np.arange(1, count + 1))
    return np.searchsorted(cumulated, rng.random(shape) * cumulated[-1]).astype(np.int32)


# --- cnn: much to compute, little to send -----------------------------------------------------------------------------

_CHANNELS = (3, 32, 64, 128)


def _cnn(rng: np.random.Generator) -> Model:
    weights = _Weights(rng)
    sizes = list(pairwise(_CHANNELS))
    filters = [
        (weights.normal(f"filter_{index}", 3, 3, *size), weights.constant(f"bias_{index}", size[1]))
        for index, size in enumerate(sizes)
    ]
    top, top_bias = weights.normal("top", 4 * 4 * _CHANNELS[-1], 10), weights.constant("top_bias", 10)

    def loss(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        value = images
        for kernel, bias in filters:
            value = tf.nn.relu(tf.nn.conv2d(value, kernel, strides=2, padding="SAME") + bias)
        return _cross_entropy(labels, tf.reshape(value, [-1, 4 * 4 * _CHANNELS[-1]]) @ top + top_bias)

    return Model(weights.all, loss)


def _cnn_batch(rng: np.random.Generator, size: int) -> Arrays:
    return rng.standard_normal((size, 32, 32, 3), np.float32), rng.integers(0, 10, size, np.int32)


# --- resnet: 20 layers, each with a normalization over the batches of all workers together ----------------------------

_STAGES = (16, 32, 64)


def _resnet(rng: np.random.Generator) -> Model:
    """ResNet-20 of He et al. (2016), on images of 16x16; shortcuts to more channels are padded, its option A."""
    weights = _Weights(rng)
    stem = _normalized_convolution(weights, "stem", 3, _STAGES[0])
    sizes = list(pairwise([_STAGES[0], *(channels for channels in _STAGES for _ in range(3))]))
    blocks = [_residual_block(weights, f"block_{index}", *size) for index, size in enumerate(sizes)]
    top = weights.normal(
        "top", _STAGES[-1], 10, scale=0.01
    )  # Losses are compared: first steps must not amplify rounding.
    top_bias = weights.constant("top_bias", 10)

    def loss(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        value = tf.nn.relu(stem(images))
        for block in blocks:
            value = block(value)
        return _cross_entropy(labels, tf.reduce_mean(value, [1, 2]) @ top + top_bias)

    return Model(weights.all, loss)


def _residual_block(weights: _Weights, name: str, before: int, channels: int) -> Callable[[tf.Tensor], tf.Tensor]:
    """Two convolutions, and what they were given beside them; where there are more channels, of every second place."""
    stride = 1 if channels == before else 2
    first = _normalized_convolution(weights, f"{name}_first", before, channels, stride)
    second = _normalized_convolution(weights, f"{name}_second", channels, channels)

    def applied(value: tf.Tensor) -> tf.Tensor:
        shortcut = tf.pad(value[:, ::stride, ::stride], [[0, 0], [0, 0], [0, 0], [0, channels - before]])
        return tf.nn.relu(second(tf.nn.relu(first(value))) + shortcut)

    return applied


def _normalized_convolution(
    weights: _Weights, name: str, before: int, channels: int, stride: int = 1
) -> Callable[[tf.Tensor], tf.Tensor]:
    kernel = weights.normal(name, 3, 3, before, channels)
    normalization = keras.layers.BatchNormalization(synchronized=True, name=f"{name}_normalization")
    normalization.build([None, None, None, channels])
    weights.all += [variable.value for variable in normalization.trainable_variables]
    return lambda value: normalization(tf.nn.conv2d(value, kernel, strides=stride, padding="SAME"), training=True)


def _resnet_batch(rng: np.random.Generator, size: int) -> Arrays:
    return rng.standard_normal((size, 16, 16, 3), np.float32), rng.integers(0, 10, size, np.int32)


# --- tlm: a transformer, with a table and 5.7 MB of dense gradients ---------------------------------------------------

_VOCABULARY, _MODEL, _LAYERS, _HEADS, _TOKENS = 8_000, 128, 2, 4, 64


def _tlm(rng: np.random.Generator) -> Model:
    weights = _Weights(rng)
    table = weights.normal("table", _VOCABULARY, _MODEL, scale=0.1)
    positions = weights.normal("positions", _TOKENS, _MODEL, scale=0.1)
    layers = [_transformer_layer(weights, f"layer_{index}") for index in range(_LAYERS)]
    norm = _layer_norm(weights, "norm")
    top = weights.normal("top", _MODEL, _VOCABULARY)

    def loss(tokens: tf.Tensor) -> tf.Tensor:
        value = tf.nn.embedding_lookup(table, tokens[:, :-1]) + positions
        for layer in layers:
            value = layer(value)
        return _cross_entropy(tf.reshape(tokens[:, 1:], [-1]), tf.reshape(norm(value), [-1, _MODEL]) @ top)

    return Model(weights.all, loss)


def _layer_norm(weights: _Weights, name: str) -> Callable[[tf.Tensor], tf.Tensor]:
    scale, offset = weights.constant(f"{name}/scale", _MODEL, 1.0), weights.constant(f"{name}/offset", _MODEL)

    def normalized(value: tf.Tensor) -> tf.Tensor:
        centred = value - tf.reduce_mean(value, axis=-1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centred), axis=-1, keepdims=True)
        return centred * tf.math.rsqrt(variance + 1e-5) * scale + offset

    return normalized


def _transformer_layer(weights: _Weights, name: str) -> Callable[[tf.Tensor], tf.Tensor]:
    """Causal self-attention and a layer of 4 times the width, each after a normalization and added to its input."""
    first_norm, second_norm = _layer_norm(weights, f"{name}/norm_1"), _layer_norm(weights, f"{name}/norm_2")
    mixed, joined = weights.normal(f"{name}/qkv", _MODEL, 3 * _MODEL), weights.normal(f"{name}/out", _MODEL, _MODEL)
    wide = weights.normal(f"{name}/wide", _MODEL, 4 * _MODEL)
    narrow = weights.normal(f"{name}/narrow", 4 * _MODEL, _MODEL)
    future = np.triu(np.full([_TOKENS, _TOKENS], -1e9, np.float32), 1)
    depth = _MODEL // _HEADS

    def product(value: tf.Tensor, matrix: tf.Variable) -> tf.Tensor:
        return tf.reshape(tf.reshape(value, [-1, matrix.shape[0]]) @ matrix, [-1, _TOKENS, matrix.shape[1]])

    def attention(value: tf.Tensor) -> tf.Tensor:
        parts = tf.reshape(product(value, mixed), [-1, _TOKENS, 3, _HEADS, depth])
        queries, keys, values = tf.unstack(tf.transpose(parts, [2, 0, 3, 1, 4]))
        scores = tf.matmul(queries, keys, transpose_b=True) * depth**-0.5 + future
        heads = tf.transpose(tf.matmul(tf.nn.softmax(scores), values), [0, 2, 1, 3])
        return product(tf.reshape(heads, [-1, _TOKENS, _MODEL]), joined)

    def layer(value: tf.Tensor) -> tf.Tensor:
        value += attention(first_norm(value))
        return value + product(tf.nn.relu(product(second_norm(value), wide)), narrow)

    return layer


def _tlm_batch(rng: np.random.Generator, size: int) -> Arrays:
    return (zipf(rng, _VOCABULARY, (size, _TOKENS + 1)),)


# --- dlrm: many tables of one width, and their products (Naumov et al., 2019) -----------------------------------------

_DLRM_TABLES, _DLRM_ROWS, _DLRM_WIDTH = 8, 50_000, 32
_CATEGORICAL, _NUMERIC = 26, 13


def _dlrm(rng: np.random.Generator) -> Model:
    weights = _Weights(rng)
    tables = [weights.normal(f"table_{index}", _DLRM_ROWS, _DLRM_WIDTH, scale=0.1) for index in range(_DLRM_TABLES)]
    bottom = _dense_layers(weights, "bottom", (_NUMERIC, 128, _DLRM_WIDTH))
    pairs = np.stack(np.tril_indices(_CATEGORICAL + 1, -1), axis=1)
    top = _dense_layers(weights, "top", (len(pairs) + _DLRM_WIDTH, 512, 256, 1))

    def loss(numbers: tf.Tensor, ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        first = tf.nn.relu(bottom(numbers))
        rows = [
            tf.nn.embedding_lookup(tables[feature % _DLRM_TABLES], ids[:, feature]) for feature in range(_CATEGORICAL)
        ]
        vectors = tf.stack([first, *rows], axis=1)
        products = tf.transpose(tf.matmul(vectors, vectors, transpose_b=True), [1, 2, 0])
        features = tf.concat([tf.transpose(tf.gather_nd(products, pairs)), first], axis=1)
        return _binary_cross_entropy(labels, top(features))

    return Model(weights.all, loss)


def _dense_layers(weights: _Weights, name: str, sizes: Sequence[int]) -> Callable[[tf.Tensor], tf.Tensor]:
    """Rectified between them, not after the last one."""
    layers = [
        (weights.normal(f"{name}/kernel_{index}", *size), weights.constant(f"{name}/bias_{index}", size[1]))
        for index, size in enumerate(pairwise(sizes))
    ]

    def applied(value: tf.Tensor) -> tf.Tensor:
        for index, (kernel, bias) in enumerate(layers):
            value = (value if index == 0 else tf.nn.relu(value)) @ kernel + bias
        return value

    return applied


def _binary_cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, tf.reshape(logits, [-1])))


def _dlrm_batch(rng: np.random.Generator, size: int) -> Arrays:
    numbers = rng.standard_normal((size, _NUMERIC), np.float32)
    return numbers, zipf(rng, _DLRM_ROWS, (size, _CATEGORICAL)), rng.integers(0, 2, size).astype(np.float32)


# --- wide: wide and deep, tables of very different sizes (Cheng et al., 2016) -----------------------------------------

_WIDE_ROWS, _WIDE_WIDTH = (100, 1_000, 10_000, 100_000, 1_000_000), 16


def _wide(rng: np.random.Generator) -> Model:
    weights = _Weights(rng)
    deep = [weights.normal(f"deep_{rows}", rows, _WIDE_WIDTH, scale=0.1) for rows in _WIDE_ROWS]
    linear = [weights.normal(f"wide_{rows}", rows, 1, scale=0.1) for rows in _WIDE_ROWS]
    top = _dense_layers(weights, "top", (len(deep) * _WIDE_WIDTH, 256, 128, 1))

    def loss(ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        columns = tf.unstack(ids, axis=1)
        rows = [tf.nn.embedding_lookup(table, column) for table, column in zip(deep, columns, strict=True)]
        terms = [tf.nn.embedding_lookup(table, column) for table, column in zip(linear, columns, strict=True)]
        return _binary_cross_entropy(labels, top(tf.concat(rows, axis=1)) + tf.add_n(terms))

    return Model(weights.all, loss)


def _wide_batch(rng: np.random.Generator, size: int) -> Arrays:
    ids = np.stack([zipf(rng, rows, (size,)) for rows in _WIDE_ROWS], axis=1)
    return ids, rng.integers(0, 2, size).astype(np.float32)


WORKLOADS = {
    "mlp": Workload(16, _mlp, _mlp_batch),
    "emb": Workload(64, _emb, _emb_batch),
    "cnn": Workload(32, _cnn, _cnn_batch),
    "resnet": Workload(32, _resnet, _resnet_batch),
    "tlm": Workload(8, _tlm, _tlm_batch),
    "dlrm": Workload(64, _dlrm, _dlrm_batch),
    "wide": Workload(64, _wide, _wide_batch),
}
