"""Single-device programs for the oracle: {dense, sparse, both} models × optimizers, in TF2 and in TF1."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from tests.support.oracle import Batch, GraphTraining, Training

FEATURES = 4
HIDDEN = 3
ROWS = 7
WIDTH = 2
IDS = 5
MODELS = ("dense", "sparse", "both")
OPTIMIZERS = ("sgd", "momentum", "adam", "adagrad")
SIZES = (6, 8, 5, 1, 6)
"""Batch sizes of five steps: an uneven one, and one that leaves replicas without an example."""


def batches(model: str, sizes: Sequence[int] = SIZES, *, seed: int = 0, dtype: str = "float64") -> list[Batch]:
    """Seeded inputs (features, ids with duplicates in most rows, or both) and targets."""
    rng = np.random.default_rng(seed)
    result = []
    for size in sizes:
        features = rng.normal(size=(size, FEATURES)).astype(dtype)
        ids = rng.integers(0, ROWS, size=(size, IDS))
        targets = rng.normal(size=(size, 1)).astype(dtype)
        result.append({"dense": (features,), "sparse": (ids,), "both": (features, ids)}[model] + (targets,))
    return result


def initial_values(model: str, seed: int, dtype: str = "float64") -> dict[str, np.ndarray]:
    """Of the model's weights."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    if model != "sparse":
        shapes |= {"kernel": (FEATURES, HIDDEN), "bias": (HIDDEN,), "out": (HIDDEN, 1)}
    if model != "dense":
        shapes |= {"table": (ROWS, WIDTH)}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def predict(weights: Mapping[str, Any], inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """The model: a layer of tanh over the features, and the sum of the looked-up rows, squashed."""
    inputs = list(inputs)
    parts = []
    if "kernel" in weights:
        hidden = tf.tanh(tf.matmul(inputs.pop(0), weights["kernel"]) + weights["bias"])
        parts.append(tf.matmul(hidden, weights["out"]))
    if "table" in weights:
        rows = tf.nn.embedding_lookup(weights["table"], inputs.pop(0))
        parts.append(tf.reduce_sum(tf.tanh(rows), axis=[1, 2])[:, tf.newaxis])
    return tf.add_n(parts)


def squared_error(predictions: tf.Tensor, targets: tf.Tensor, reduction: str = "mean") -> tf.Tensor:
    reduce = {"mean": tf.reduce_mean, "sum": tf.reduce_sum}[reduction]
    return reduce(tf.square(predictions - targets))


@dataclass(frozen=True, slots=True)
class HandWritten:
    """Updates written out with assignments, as in a paper's appendix; state in the user's own variables."""

    kind: str
    weights: Sequence[tf.Variable]
    slots: Mapping[str, tf.Variable]

    @classmethod
    def make(cls, kind: str, weights: Sequence[tf.Variable]) -> "HandWritten":
        names = {"sgd": (), "momentum": ("momentum",), "adam": ("m", "v"), "adagrad": ("sum",)}[kind]
        slots = {f"{w.name}/{n}": tf.Variable(tf.zeros_like(w), trainable=False) for w in weights for n in names}
        if kind == "adam":
            slots["steps"] = tf.Variable(0, dtype=tf.int64, trainable=False)
        return cls(kind, weights, slots)

    def apply(self, gradients: Sequence[Any]) -> None:
        """Update all weights."""
        if self.kind == "adam":
            self.slots["steps"].assign_add(1)
        for weight, gradient in zip(self.weights, gradients, strict=True):
            getattr(self, f"_{self.kind}")(weight, gradient)

    def _sgd(self, weight: tf.Variable, gradient: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            weight.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
        else:
            weight.assign_sub(0.1 * gradient)

    def _momentum(self, weight: tf.Variable, gradient: Any) -> None:
        velocity = self.slots[f"{weight.name}/momentum"]
        velocity.assign(0.9 * velocity + tf.convert_to_tensor(gradient))
        weight.assign_sub(0.05 * velocity)

    def _adam(self, weight: tf.Variable, gradient: Any) -> None:
        gradient = tf.convert_to_tensor(gradient)
        m, v = self.slots[f"{weight.name}/m"], self.slots[f"{weight.name}/v"]
        m.assign_add(0.1 * (gradient - m))
        v.assign_add(0.001 * (tf.square(gradient) - v))
        steps = tf.cast(self.slots["steps"], gradient.dtype)
        scale = tf.sqrt(1.0 - 0.999**steps) / (1.0 - 0.9**steps)
        weight.assign_sub(0.05 * scale * m / (tf.sqrt(v) + 1e-7))

    def _adagrad(self, weight: tf.Variable, gradient: Any) -> None:
        total = self.slots[f"{weight.name}/sum"]
        if not isinstance(gradient, tf.IndexedSlices):
            total.assign_add(tf.square(gradient))
            weight.assign_sub(0.1 * gradient / (tf.sqrt(total) + 1e-7))
            return
        rows, positions = tf.unique(gradient.indices)
        values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
        total.scatter_add(tf.IndexedSlices(tf.square(values), rows))
        update = 0.1 * values / (tf.sqrt(tf.gather(total, rows)) + 1e-7)
        weight.scatter_sub(tf.IndexedSlices(update, rows))


def keras_optimizer(kind: str) -> keras.Optimizer:
    return {
        "sgd": lambda: keras.optimizers.SGD(0.1),
        "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        "adam": lambda: keras.optimizers.Adam(0.05),
        "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    }[kind]()


def hand_written(
    model: str,
    optimizer: str,
    *,
    clip: bool = True,
    dtype: str = "float64",
    reduction: str = "mean",
) -> Callable[[int], Training]:
    """A step over raw `tf.Variable`s, with updates written by hand."""

    def build(seed: int) -> Training:
        values = initial_values(model, seed, dtype)
        weights = {name: tf.Variable(value, name=name) for name, value in values.items()}
        updates = HandWritten.make(optimizer, list(weights.values()))

        def step(*arguments: tf.Tensor) -> dict[str, tf.Tensor]:
            *inputs, targets = arguments
            with tf.GradientTape() as tape:
                predictions = predict(weights, inputs)
                loss = squared_error(predictions, targets, reduction)
            gradients = tape.gradient(loss, list(weights.values()))
            results = {"loss": loss, "predictions": predictions}
            if clip:
                gradients, results["norm"] = tf.clip_by_global_norm(gradients, 0.5)
            updates.apply(gradients)
            return results

        return Training(step, lambda: {**weights, **updates.slots})

    return build


def keras_model(model: str, seed: int) -> keras.Model:
    """The same kind of model, of Keras 3 layers."""
    uniform = keras.initializers.RandomUniform(-1.0, 1.0, seed=seed)
    inputs, parts = [], []
    if model != "sparse":
        inputs.append(keras.Input([FEATURES]))
        hidden = keras.layers.Dense(HIDDEN, activation="tanh", kernel_initializer=uniform)(inputs[-1])
        parts.append(keras.layers.Dense(1, kernel_initializer=uniform)(hidden))
    if model != "dense":
        inputs.append(keras.Input([IDS], dtype="int64"))
        rows = keras.layers.Embedding(ROWS, WIDTH, embeddings_initializer=uniform)(inputs[-1])
        parts.append(keras.ops.sum(keras.ops.tanh(rows), axis=[1, 2])[:, None])
    return keras.Model(inputs, keras.layers.Add()(parts) if len(parts) > 1 else parts[0])


def keras_3(model: str, optimizer: str, *, clip: bool = True, reduction: str = "mean") -> Callable[[int], Training]:
    """A step over Keras 3 layers and a Keras 3 optimizer, in float64."""

    def build(seed: int) -> Training:
        keras.config.set_floatx("float64")
        network = keras_model(model, seed)
        algorithm = keras_optimizer(optimizer)
        algorithm.build(network.trainable_variables)

        def step(*arguments: tf.Tensor) -> dict[str, tf.Tensor]:
            *inputs, targets = arguments
            with tf.GradientTape() as tape:
                predictions = network(inputs, training=True)
                loss = squared_error(predictions, targets, reduction)
            gradients = tape.gradient(loss, network.trainable_variables)
            if clip:
                gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
            algorithm.apply_gradients(zip(gradients, network.trainable_variables, strict=True))
            return {"loss": loss, "predictions": predictions}

        def variables() -> dict[str, tf.Variable]:
            state = (*network.variables, *algorithm.variables)
            # Keras numbers the layers of a process; the position tells them apart as well.
            return {f"{i}/{re.sub(r'_[0-9]+', '', v.path)}": v.value for i, v in enumerate(state)}

        return Training(step, variables)

    return build


FUNCTION_FAMILIES: Mapping[str, Callable[..., Callable[[int], Training]]] = {
    "hand-written": hand_written,
    "keras-3": keras_3,
}


def tf1_optimizer(kind: str) -> Callable[[Sequence[tuple[Any, Any]]], tf.Operation]:
    return {
        "sgd": lambda: tf.compat.v1.train.GradientDescentOptimizer(0.1),
        "momentum": lambda: tf.compat.v1.train.MomentumOptimizer(0.05, 0.9),
        "adam": lambda: tf.compat.v1.train.AdamOptimizer(0.05),
        "adagrad": lambda: tf.compat.v1.train.AdagradOptimizer(0.1),
    }[kind]().apply_gradients


def tf_keras_optimizer(kind: str, module: Any) -> Any:
    tf_keras.backend.set_floatx("float64")
    return {
        "sgd": lambda: module.SGD(0.1),
        "momentum": lambda: module.SGD(0.05, momentum=0.9),
        "adam": lambda: module.Adam(0.05),
        "adagrad": lambda: module.Adagrad(0.1),
    }[kind]()


def _apply_in_function(optimizer: Any) -> Callable[[Sequence[tuple[Any, Any]]], Any]:
    """What TF2's tf_keras optimizers need in a graph: their updates are ordered by a tf.function alone."""

    def apply(pairs: Sequence[tuple[Any, Any]]) -> Any:
        optimizer.build([variable for _, variable in pairs])
        return tf.function(lambda: optimizer.apply_gradients(pairs))()

    return apply


GRAPH_FAMILIES: Mapping[str, Callable[[str], Callable[[Sequence[tuple[Any, Any]]], tf.Operation]]] = {
    "tf1": tf1_optimizer,
    "tf-keras-legacy": lambda kind: tf_keras_optimizer(kind, tf_keras.optimizers.legacy).apply_gradients,
    "tf-keras": lambda kind: _apply_in_function(tf_keras_optimizer(kind, tf_keras.optimizers)),
}


def placeholders(model: str, dtype: tf.DType = tf.float64) -> list[tf.Tensor]:
    """For the model's inputs and targets."""
    inputs = {
        "x": tf.compat.v1.placeholder(dtype, [None, FEATURES], name="x"),
        "ids": tf.compat.v1.placeholder(tf.int64, [None, IDS], name="ids"),
    }
    used = {"dense": ("x",), "sparse": ("ids",), "both": ("x", "ids")}[model]
    return [inputs[name] for name in used] + [tf.compat.v1.placeholder(dtype, [None, 1], name="y")]


def graph_weights(model: str, seed: int = 1, dtype: str = "float64") -> dict[str, tf.Variable]:
    return {
        name: tf.compat.v1.get_variable(name, initializer=value)
        for name, value in initial_values(model, seed, dtype).items()
    }


def graph_program(
    model: str,
    optimizer: str,
    family: str = "tf1",
    *,
    clip: bool = True,
    dtype: str = "float64",
    reduction: str = "mean",
) -> Callable[[], GraphTraining]:
    """A TF1 graph of the model, with `tf.gradients` and an optimizer."""

    def build() -> GraphTraining:
        feeds = placeholders(model, tf.as_dtype(dtype))
        weights = graph_weights(model, dtype=dtype)
        predictions = predict(weights, feeds[:-1])
        loss = squared_error(predictions, feeds[-1], reduction)
        variables = list(weights.values())
        gradients = tf.gradients(loss, variables)
        fetches = {"loss": loss, "predictions": predictions}
        if clip:
            gradients, fetches["norm"] = tf.clip_by_global_norm(gradients, 0.5)
        train = GRAPH_FAMILIES[family](optimizer)(list(zip(gradients, variables, strict=True)))
        return GraphTraining(feeds, train, fetches)

    return build
