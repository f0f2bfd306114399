"""A step that is traced again is told from another one, whatever the process has counted meanwhile."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py.capture.doors.retraced import Trace
from autodist_py.kernel.analysis.own_state import own_state
from tests.support.capture_steps import batch, capture

WEIGHT = tf.Variable(tf.ones([3, 1]), name="weight")
TABLE = tf.range(5.0)


class OwnLoss(keras.losses.Loss):
    """One without a name: Keras names its ops by how many of its kind were made."""

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean((y_true - y_pred) ** 2, axis=-1)


def by_keras(x: tf.Tensor) -> tf.Tensor:
    return OwnLoss()(tf.zeros([tf.shape(x)[0], 1]), x @ WEIGHT)


def with_control_flow(x: tf.Tensor) -> tf.Tensor:
    doubled = tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, 2.0 * v), (0, x @ WEIGHT))[1]
    return tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.reduce_mean(doubled), lambda: 0.0) + tf.reduce_sum(TABLE)


def trained(loss_of: Callable[[tf.Tensor], tf.Tensor], rate: float = 0.1) -> Callable[[tf.Tensor], tf.Tensor]:
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(x)
        WEIGHT.assign_sub(rate * tape.gradient(loss, WEIGHT))
        return loss

    return step


@pytest.mark.parametrize("loss_of", [by_keras, with_control_flow])
def test_what_is_traced_again_is_the_same(loss_of: Callable[[tf.Tensor], tf.Tensor]):
    first = capture(trained(loss_of), batch())
    again = capture(trained(loss_of), batch())
    assert Trace.of(first).other_than(again) == ""
    assert Trace.of(first).other_than(capture(trained(loss_of, 0.2), batch())) == "its graph"


def test_keras_counts_what_a_step_makes():
    """Else the case of Keras shows nothing."""
    first, again = (capture(trained(by_keras), batch()).item.fingerprint for _ in range(2))
    assert first != again


@pytest.mark.parametrize(
    ("result", "other"),
    [
        (lambda x: (tf.abs(x), tf.sin(x)), lambda x: (tf.sin(x), tf.abs(x))),
        (lambda x: (x - 1.0) * 2.0, lambda x: x * 2.0 - 1.0),
    ],
    ids=["in another order", "of another order of ops"],
)
def test_results_that_are_others_are_told(result: Callable[[tf.Tensor], Any], other: Callable[[tf.Tensor], Any]):
    assert Trace.of(capture(result, batch())).other_than(capture(other, batch())) == "its graph"


def test_a_large_tensor_is_known_by_being_the_same_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autodist_py.capture.doors.retraced._DIGESTED_BYTES", 100)
    for size, differs in ((10, False), (1000, True)):
        tensors = [tf.fill([size], 1.0), tf.fill([size], 1.0)]
        first, again, equal = (
            capture(lambda x, values: x + tf.reduce_sum(values()), batch(), values=lambda one=one: one)
            for one in (tensors[0], *tensors)
        )
        assert Trace.of(first).other_than(again) == ""
        assert bool(Trace.of(first).other_than(equal)) is differs


@pytest.mark.parametrize("is_stateful", [True, False])
def test_python_code_may_keep_something(is_stateful: bool):
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.numpy_function(np.sin, [x], tf.float32, stateful=is_stateful)

    assert own_state(capture(step, batch()).item)
    assert not own_state(capture(tf.sin, batch()).item)
