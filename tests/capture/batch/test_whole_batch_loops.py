"""A replica's own examples go through loops, branches and lists as they are, where a step mixes others of the batch."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from autodist_py import AutoDist
from autodist_py.testing import assert_equivalent
from tests.support.precision import in_float64

SIZES = (6, 5, 1, 2, 7)
STEPS, WIDTH, UNITS = 6, 4, 5
REPLICAS = 3
GATHERED = {"rows", "own", "cut"}

Weights = dict[str, tf.Variable]
Program = Callable[[tf.Tensor, Weights], tf.Tensor]
"""Rows of UNITS numbers, of sequences of WIDTH numbers, one for each of STEPS."""


def weights() -> Weights:
    rng = np.random.default_rng(3)
    shapes = {"w": (WIDTH, UNITS), "u": (UNITS, UNITS), "b": (UNITS,), "o": (UNITS, 1), "scale": (UNITS,)}
    return {name: tf.Variable(rng.normal(size=shape) * 0.3, name=name) for name, shape in shapes.items()}


def normalized(h: tf.Tensor) -> tf.Tensor:
    """Of the whole batch."""
    mean, variance = tf.nn.moments(h, [0])
    return (h - mean) / tf.sqrt(variance + 1e-3)


def begun(x: tf.Tensor) -> tf.Tensor:
    return tf.zeros([tf.shape(x)[0], UNITS], x.dtype)


def turned(h: tf.Tensor, x: tf.Tensor, k: Weights) -> tf.Tensor:
    return tf.tanh(x @ k["w"] + h @ k["u"] + k["b"])


def time_major(x: tf.Tensor) -> tf.Tensor:
    return tf.transpose(x, [1, 0, 2])


def looped(x: tf.Tensor, k: Weights) -> tf.Tensor:
    turn = lambda i, h: (i + 1, turned(h, x[:, i], k))  # noqa: E731
    return tf.while_loop(lambda i, h: i < tf.shape(x)[1], turn, [0, begun(x)])[1]


def scanned(x: tf.Tensor, k: Weights) -> tf.Tensor:
    return tf.scan(lambda h, own: turned(h, own, k), time_major(x), begun(x))


def listed(x: tf.Tensor, k: Weights) -> tf.Tensor:
    states, h = tf.TensorArray(tf.float64, STEPS), begun(x)
    for i in range(STEPS):
        h = turned(h, x[:, i], k)
        states = states.write(i, h)
    return tf.reduce_mean(states.stack(), 0)


def branched(x: tf.Tensor, k: Weights) -> tf.Tensor:
    h = x[:, 0] @ k["w"]
    return tf.cond(tf.reduce_sum(k["u"]) < 9.0, lambda: tf.tanh(h @ k["u"]), lambda: tf.nn.relu(h + k["b"]))


def chosen_by_all(x: tf.Tensor, k: Weights) -> tf.Tensor:
    h = x[:, 0] @ k["w"]
    return tf.cond(tf.reduce_mean(h) < 0.0, lambda: tf.tanh(h @ k["u"]), lambda: tf.nn.relu(h) + k["b"])


def branched_in_turns(x: tf.Tensor, k: Weights) -> tf.Tensor:
    def turn(i: tf.Tensor, h: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return i + 1, tf.cond(i % 2 == 0, lambda: turned(h, x[:, i], k), lambda: 0.5 * h + k["b"])

    return tf.while_loop(lambda i, h: i < STEPS, turn, [0, begun(x)])[1]


def nested(x: tf.Tensor, k: Weights) -> tf.Tensor:
    def inner(h: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda j, h: j < 2, lambda j, h: (j + 1, tf.tanh(h @ k["u"])), [0, h])[1]

    start = x[:, 0] @ k["w"]
    return tf.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, inner(h) + k["b"]), [0, start])[1]


def summed(x: tf.Tensor, k: Weights) -> tf.Tensor:
    """A sum over examples goes round, and makes a factor of all."""
    zero = tf.zeros([], tf.float64)
    turn = lambda i, s: (i + 1, s + tf.reduce_sum((x[:, i] @ k["w"]) ** 2))  # noqa: E731
    total = tf.while_loop(lambda i, s: i < STEPS, turn, [0, zero])[1]
    return tf.tanh(x[:, 0] @ k["w"]) * (1.0 + 1e-3 * total)


FOLLOWED: dict[str, Program] = {
    "a loop": looped,
    "a scan": lambda x, k: scanned(x, k)[-1],
    "a scan backwards": lambda x, k: tf.scan(lambda h, own: turned(h, own, k), time_major(x), begun(x), reverse=True)[
        0
    ],
    "all states of a scan": lambda x, k: tf.reduce_mean(scanned(x, k) ** 2 + scanned(x, k), 0),
    "states, the examples first": lambda x, k: tf.reduce_max(time_major(scanned(x, k)), 1),
    "a list": listed,
    "a branch": branched,
    "a branch that all examples choose": chosen_by_all,
    "branches in a loop": branched_in_turns,
    "a loop in a loop": nested,
    "a sum over examples": summed,
    "a call": lambda x, k: tf.function(lambda x: tf.tanh(x @ k["w"]) + k["b"])(x[:, 0]),
}
"""Programs of which nothing is gathered."""


def normalized_in_turns(x: tf.Tensor, k: Weights) -> tf.Tensor:
    turn = lambda i, h: (i + 1, normalized(turned(h, x[:, i], k)))  # noqa: E731
    return tf.while_loop(lambda i, h: i < STEPS, turn, [0, begun(x)])[1]


def ended_by_examples(x: tf.Tensor, k: Weights) -> tf.Tensor:
    start = x[:, 0] @ k["w"]
    more = lambda i, h: (i < 9) & (tf.reduce_max(tf.abs(h)) > 0.1)  # noqa: E731
    return tf.while_loop(more, lambda i, h: (i + 1, tf.tanh(h @ k["u"] + 0.1 * k["b"])), [0, start])[1]


def turned_further(x: tf.Tensor, k: Weights) -> tf.Tensor:
    """Each turn puts the rows into an order of its own, and rows of two turns are paired."""
    h = x[:, 0] @ k["w"]
    turn = lambda i, rows: (i + 1, rows.write(i, tf.roll(h, i, 0)))  # noqa: E731
    rows = tf.while_loop(lambda i, rows: i < 2, turn, [0, tf.TensorArray(tf.float64, 2, element_shape=[None, UNITS])])
    first, second = tf.unstack(rows[1].stack())
    return h + tf.stop_gradient(tf.reduce_sum(first * second, 0))


def with_terms(x: tf.Tensor, k: Weights) -> tf.Tensor:
    """A sum over examples and terms of none, one of which a factor of examples follows."""
    h = x[:, 0] @ k["w"]
    sums = tf.cond(
        tf.reduce_sum(k["u"]) < 9.0,
        lambda: tf.reduce_sum(h, 0) + k["b"],
        lambda: k["b"] - tf.reduce_sum(h, 0),
    )
    return h + sums


@tf.custom_gradient
def centred(h: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """As it is; its gradient is centred over the batch."""
    return tf.identity(h), lambda dh: dh - tf.reduce_mean(dh, 0)


WHOLE: dict[str, Program] = {
    "what a turn normalizes": normalized_in_turns,
    "a loop that examples end": ended_by_examples,
    "a gradient that mixes": lambda x, k: tf.while_loop(
        lambda i, h: i < 2, lambda i, h: (i + 1, centred(tf.tanh(h @ k["u"]))), [0, x[:, 0] @ k["w"]]
    )[1],
    "pairs of a list's rows": lambda x, k: (
        tf.linalg.matmul(scanned(x, k), scanned(x, k), transpose_b=True)[-1] @ (x[:, 0] @ k["w"])
    ),
    "turns of examples": lambda x, k: tf.map_fn(lambda own: tf.tanh(tf.reduce_mean(own @ k["w"], 0)), x),
    "orders of turns": turned_further,
    "a sum and terms of none": with_terms,
    "rows in another order": lambda x, k: tf.while_loop(
        lambda i, h: i < 2, lambda i, h: (i + 1, tf.tanh(h @ k["u"] + h[::-1])), [0, x[:, 0] @ k["w"]]
    )[1],
}
"""Programs of which each replica computes some of the whole batch."""


def trained(program: Program) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    k = weights()

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = normalized(program(x, k)) * k["scale"]
            loss = tf.reduce_mean((h @ k["o"] - y) ** 2)
        gradients = tape.gradient(loss, list(k.values()), unconnected_gradients="zero")
        for variable, gradient in zip(k.values(), gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return step


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(size, STEPS, WIDTH)), rng.normal(size=(size, 1))) for size in SIZES]


def reductions(step: Callable[..., Any], batch: tuple[np.ndarray, ...]) -> set[str]:
    """How the statistics of the step are combined."""
    with AutoDist() as autodist:
        return {one.reduction for one in autodist.function(step).captured(*batch).item.statistics}


@pytest.mark.parametrize("name", FOLLOWED)
def test_own_examples_are_followed(name: str) -> None:
    assert not reductions(trained(FOLLOWED[name]), batches()[0]) & GATHERED
    assert_equivalent(trained(FOLLOWED[name]), batches(), replicas=REPLICAS, tolerance=1e-9)


@pytest.mark.parametrize("name", WHOLE)
def test_what_a_function_mixes_is_computed_of_the_whole_batch(name: str) -> None:
    assert reductions(trained(WHOLE[name]), batches()[0]) & GATHERED
    assert_equivalent(trained(WHOLE[name]), batches(), replicas=REPLICAS, tolerance=1e-9)


def test_only_what_is_paired_is_gathered() -> None:
    """And not the sequences that it is computed of."""
    k = weights()

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            z = normalized(scanned(x, k)[-1])
            loss = tf.reduce_mean(tf.nn.log_softmax(z @ tf.transpose(z)))
        for variable, gradient in zip(k.values(), tape.gradient(loss, list(k.values())), strict=True):
            if gradient is not None:
                variable.assign_sub(0.1 * gradient)
        return loss

    with AutoDist() as autodist:
        statistics = autodist.function(step).captured(*batches()[0]).item.statistics
    assert [one.shape for one in statistics if one.reduction == "rows"] == [(None, UNITS)]
    assert_equivalent(step, batches(), replicas=REPLICAS, tolerance=1e-9)


@pytest.mark.parametrize("normalizes", [False, True], ids=["alone", "beside batch normalization"])
@pytest.mark.parametrize("program", [looped, lambda x, k: scanned(x, k)[-1]], ids=["a loop", "a scan"])
def test_a_gradient_penalty_goes_through_a_loop(program: Program, *, normalizes: bool) -> None:
    """For tapes within one another TensorFlow makes a function of the loop, whose gradients are none of the step."""
    k = weights()

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                h = program(x, k)
                h = normalized(h) if normalizes else h
                out = tf.reduce_sum(tf.tanh(h @ k["o"]))
            loss = tf.reduce_mean(tf.reduce_sum(inner.gradient(out, x) ** 2, [1, 2]))
        trained = [k[name] for name in ("w", "u", "b", "o")]
        for variable, gradient in zip(trained, tape.gradient(loss, trained), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    assert_equivalent(step, batches(), replicas=REPLICAS, tolerance=1e-9)


LAYERS: dict[str, Callable[[Any], list[Any]]] = {
    "LSTM": lambda layers: [layers.LSTM(3)],
    "GRU": lambda layers: [layers.GRU(3)],
    "two": lambda layers: [layers.LSTM(3, return_sequences=True), layers.SimpleRNN(3, go_backwards=True)],
    "bidirectional": lambda layers: [layers.Bidirectional(layers.LSTM(2))],
    "masked": lambda layers: [layers.Masking(0.0), layers.GRU(3)],
    "over time": lambda layers: [layers.LSTM(3, return_sequences=True), layers.GlobalAveragePooling1D()],
    "convolutions": lambda layers: [
        layers.Reshape((STEPS, WIDTH, 1)),
        layers.ConvLSTM1D(2, 2),
        layers.GlobalMaxPooling1D(),
    ],
}


@pytest.mark.parametrize("library", [keras, tf_keras], ids=lambda library: library.__name__)
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers_beside_batch_normalization_gather_nothing(name: str, library: Any) -> None:
    library.utils.set_random_seed(1)
    with in_float64(library):
        model = library.Sequential(
            [
                library.Input((STEPS, WIDTH)),
                *LAYERS[name](library.layers),
                library.layers.BatchNormalization(),
                library.layers.Dense(1),
            ]
        )
        optimizer = library.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    given = [batch for batch in batches() if len(batch[0]) > REPLICAS]
    assert not reductions(step, given[0]) & GATHERED
    assert_equivalent(step, given, replicas=REPLICAS, tolerance=1e-9)
