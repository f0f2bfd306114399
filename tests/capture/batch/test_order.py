"""Rows in another order pair each example with another one: a sum over such pairs is no sum over replicas'."""

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.capture.inexact import inexact
from autodist_py.testing import assert_equivalent

Made = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""Of rows, and of others for the same examples."""


def rolled(by: int, axis: int = 0) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda rows: tf.roll(rows, by, axis)


def turned(rows: tf.Tensor) -> tf.Tensor:
    return tf.reverse(rows, [0])


def contracted(rows: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
    return tf.matmul(rows, others, transpose_a=True)


PAIRED: dict[str, Made] = {
    "a product": lambda a, b: contracted(turned(a), b),
    "a product of turned": lambda a, b: tf.matmul(tf.transpose(turned(a)), b),
    "an einsum": lambda a, b: tf.einsum("bi,bj->ij", turned(a), b),
    "a tensordot": lambda a, b: tf.tensordot(turned(a), b, [[0], [0]]),
    "elements": lambda a, b: tf.reduce_sum(turned(a) * b[:, :1], axis=0),
    "elements of a mean": lambda a, b: tf.reduce_mean(turned(a) * b[:, :1], axis=0),
    "rolled by others": lambda a, b: tf.reduce_sum(rolled(1)(a) * rolled(2)(b[:, 1:]), axis=0),
    "a product of what is rolled": lambda a, b: contracted(rolled(1)(a), rolled(2)(b)),
    "rolled by one of two": lambda a, b: contracted(tf.roll(a, [1, 1], [0, 1]), tf.roll(b, [2, 1], [0, 1])),
    "by classes": lambda a, b: tf.math.unsorted_segment_sum(turned(a), tf.cast(b[:, 0] > 0.0, tf.int32), 2),
}
ALIKE: dict[str, Made] = {
    "a product": lambda a, b: contracted(turned(a), turned(b)),
    "an einsum": lambda a, b: tf.einsum("bi,bj->ij", turned(a), turned(b)),
    "elements": lambda a, b: tf.reduce_sum(rolled(1)(a) * rolled(1)(b[:, 1:]), axis=0),
    "along another axis": lambda a, b: contracted(tf.transpose(rolled(1, 1)(tf.transpose(a))), rolled(1)(b)),
    "by no places": lambda a, b: contracted(rolled(0)(a), b),
    "by places of two": lambda a, b: contracted(tf.roll(a, [1, 1], [0, 0]), rolled(2)(b)),
    "features": lambda a, b: contracted(tf.reverse(a, [1]), b),
    "rolled features": lambda a, b: contracted(rolled(1, 1)(a), rolled(2, 1)(b)),
    "by classes": lambda a, b: tf.math.unsorted_segment_sum(turned(a), turned(tf.cast(b[:, 0] > 0.0, tf.int32)), 2),
}
RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(8, 3)), RNG.normal(size=(8, 2))
BATCHES = [(X, Y), (X[:6], Y[:6]), (X[1:], Y[1:])]


def stepped(made: Made) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    w = tf.Variable([1.0, 2.0, 3.0], dtype=tf.float64, name="w")

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = 0.01 * tf.reduce_sum(made(x * w, tf.tanh(y)))
        w.assign_sub(tape.gradient(loss, w))
        return loss

    return step


@pytest.mark.parametrize("made", PAIRED.values(), ids=PAIRED.keys())
def test_a_sum_over_other_pairs_is_told_of(made: Made) -> None:
    with AutoDist(batch_statistics="replica") as autodist:
        item = autodist.function(stepped(made)).captured(X, Y).item
    assert list(inexact(item))
    assert bool(item.mixtures) == (made is not PAIRED["a tensordot"])  # Of which the reshapes are not followed.


def test_rows_that_are_rolled_by_a_number_that_is_not_known_may_be_in_one_order() -> None:
    places = tf.Variable(1)
    step = stepped(lambda a, b: contracted(tf.roll(a, places, 0), tf.roll(b, places, 0)))
    with AutoDist(batch_statistics="replica") as autodist:
        item = autodist.function(step).captured(X, Y).item
    assert not item.mixtures
    assert list(inexact(item))


@pytest.mark.parametrize("made", ALIKE.values(), ids=ALIKE.keys())
def test_a_sum_over_pairs_that_are_one_example_s_is_exact(made: Made) -> None:
    with AutoDist(batch_statistics="replica") as autodist:
        assert not list(inexact(autodist.function(stepped(made)).captured(X, Y).item))
    assert_equivalent(stepped(made), BATCHES, replicas=2, batch_statistics="replica")
