"""Losses and results that are reshaped to sizes of the batch, which need not stand first, as `tf.tensordot` does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.capture.inexact import inexact
from autodist_py.proto.graph_item import GraphItem
from autodist_py.testing import assert_equivalent
from tests.support.capture_steps import capture

RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(4, 6))
BATCHES = [(RNG.normal(size=(size, 4)), RNG.normal(size=size)) for size in (6, 5, 4)]

Loss = Callable[[tf.Tensor, tf.Tensor, tf.Variable], Any]
"""Of features, a number for each example, and the weights: the loss."""


def step_of(loss_of: Loss) -> Callable[..., Any]:
    weight = tf.Variable(KERNEL, name="weight")

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(x, y, weight)
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss

    return step


def item_of(loss_of: Loss) -> GraphItem:
    return capture(step_of(loss_of), *map(tf.constant, BATCHES[0])).item


def rows(x: tf.Tensor) -> tf.Tensor:
    return tf.shape(x)[0]


def twice(x: tf.Tensor) -> tf.Tensor:
    """Two vectors of each example."""
    return tf.stack([x, x**2], axis=1)


def to(value: tf.Tensor, *sizes: Any) -> tf.Tensor:
    return tf.reshape(value, tf.stack(sizes))


def kernel(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """How near each example is to each of six centres, as Gaussian processes have it: a row for each centre."""
    centres = tf.transpose(w)
    squares = tf.reduce_sum(centres**2, 1)[:, tf.newaxis] + tf.reduce_sum(x**2, 1)
    return tf.exp(tf.tensordot(centres, x, [[-1], [-1]]) - 0.5 * squares)


def turned_pairs(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """Of each example two rows of three numbers; the examples stand along the last axis, as DLRM's products may."""
    return tf.transpose(tf.reshape(x @ w, [-1, 2, 3]), [1, 2, 0])


SEEN = {
    "weights and rows": ("sum", lambda x, y, w: tf.reduce_sum((tf.tensordot(w, x, [[0], [-1]]) - y) ** 2)),
    "weights and rows of two vectors": (
        "mean",
        lambda x, y, w: tf.reduce_mean(tf.tensordot(w, twice(x), [[0], [-1]]) ** 2),
    ),
    "rows for each centre": ("sum", lambda x, y, w: tf.reduce_sum((tf.reduce_sum(kernel(x, w), 0) - y) ** 2)),
    "turned, in two parts": ("sum", lambda x, y, w: tf.reduce_sum(to(tf.transpose(x @ w), 2, 3, rows(x)) ** 2)),
    "behind a one": ("mean", lambda x, y, w: tf.reduce_mean(to(x @ w, 1, rows(x), 6) ** 2)),
    "entries of pairs of features": (
        "sum",
        lambda x, y, w: tf.reduce_sum(
            tf.reduce_sum(tf.gather_nd(turned_pairs(x, w), [[0, 1], [1, 2], [0, 1]]) ** 3, 0)
        ),
    ),
    "entries of features, by lists": (
        "mean",
        lambda x, y, w: tf.reduce_mean(tf.gather_nd(turned_pairs(x, w), [[[0, 1], [1, 2]], [[0, 0], [0, 1]]]) ** 2),
    ),
    "some features": ("mean", lambda x, y, w: tf.reduce_mean(tf.gather_nd(turned_pairs(x, w), [[1], [1]]) ** 2)),
    "from behind a one": ("sum", lambda x, y, w: tf.reduce_sum(to((x @ w)[tf.newaxis], rows(x), 6) ** 2)),
}


@pytest.mark.turns(1)
@pytest.mark.parametrize(("reduction", "loss_of"), SEEN.values(), ids=SEEN.keys())
def test_examples_are_followed_to_where_a_shape_puts_them(reduction: str, loss_of: Loss) -> None:
    item = item_of(loss_of)
    assert [one.reduction for one in item.gradients] == [reduction]
    assert not list(inexact(item))
    assert_equivalent(step_of(loss_of), BATCHES, replicas=3, batch_statistics="replica")


MIXED = {
    "two of a row, of several examples": lambda x, y, w: to(tf.transpose(x @ w), 3, rows(x), 2),
    "rows of a turned value": lambda x, y, w: to(tf.transpose(x @ w), rows(x), 6),
    "entries by their place in the batch": lambda x, y, w: tf.gather_nd(turned_pairs(x, w), [[0, 1, 2], [1, 1, 0]]),
    "parts behind the examples": lambda x, y, w: to(x @ w, 2, rows(x), 3),
}


@pytest.mark.turns(1)
@pytest.mark.parametrize("reshaped", MIXED.values(), ids=MIXED.keys())
def test_a_shape_that_puts_several_examples_into_one_row_is_told_of(reshaped: Loss) -> None:
    item = item_of(lambda x, y, w: tf.reduce_sum(tf.reduce_sum(reshaped(x, y, w), -1) ** 2))
    assert [one.reduction for one in item.gradients] == [""]
    assert any("keep examples apart" in said for said in inexact(item))


OF_ROWS = [(None, None), (None, 2), (None, -1), (0, -3), (0, -7)]
BEHIND = [(1, None), (1, -1), (1, 2), (2, -2), (-2, None), (-1, 3)]
"""Parts of a shape of three sizes, which begin with the number of rows, or do not."""


@pytest.mark.parametrize(
    ("mode", "ends"), [("replica", BEHIND), ("global", BEHIND + OF_ROWS)], ids=["replica", "global"]
)
def test_a_part_of_a_shape_is_that_of_the_whole_batch(mode: str, ends: list[tuple[int | None, int | None]]) -> None:
    """As results, and as numbers that are computed with: of these only the number of rows differs between replicas."""

    def step(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        parts = [tf.shape(twice(x))[begin:end] for begin, end in ends]
        return [*parts, *(tf.reduce_sum(y**2) * tf.cast(tf.reduce_sum(part), y.dtype) for part in parts)]

    assert_equivalent(step, BATCHES, replicas=3, batch_statistics=mode)
