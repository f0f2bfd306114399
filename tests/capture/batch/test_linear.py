"""Sums over examples with terms of none beside them stay what they are through what only moves, or adds, elements."""

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.capture.inexact import inexact
from autodist_py.testing import assert_equivalent

Made = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

MADE: dict[str, Made] = {
    "an element": lambda s, w: (s + w)[..., -1],
    "a slice": lambda s, w: (s + w)[1:],
    "turned round": lambda s, w: tf.transpose((s + w)[None]),
    "repeated": lambda s, w: tf.tile(s + w, [2]),
    "looked up": lambda s, w: tf.gather(s + w, [0, 2]),
    "a product": lambda s, w: tf.matmul((s + w)[None], tf.ones([3, 2], tf.float64)),
    "an outer product": lambda s, w: tf.einsum("i,j->ij", s + w, tf.constant([1.0, 2.0], tf.float64)),
    "beside it": lambda s, w: tf.concat([s, w * 1.0], 0),
    "in its place": lambda s, w: tf.where([True, False, True], s, w),
    "in some places": lambda s, w: tf.tensor_scatter_nd_update(w * 1.0, [[0]], s[:1]),
    "a part": lambda s, w: tf.split(s + w, 3)[1],
    "a diagonal": lambda s, w: tf.linalg.diag(s + w),
    "added to each": lambda s, w: tf.nn.bias_add(s[None], w),
}
X = np.random.default_rng(5).normal(size=(7, 3))
BATCHES = [(X,), (X[:5],), (X[2:],)]


@pytest.mark.parametrize("reduce", [tf.reduce_sum, tf.reduce_mean], ids=["a sum", "a mean"])
@pytest.mark.parametrize("made", MADE.values(), ids=MADE.keys())
def test_results_and_gradients_are_those_of_one_device(made: Made, reduce: Callable[..., tf.Tensor]) -> None:
    w = tf.Variable([1.0, 2.0, 3.0], dtype=tf.float64, name="w")

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            value = made(reduce((x * w) ** 2, axis=0), w)
            loss = 0.01 * tf.reduce_sum(value)
        w.assign_sub(tape.gradient(loss, w))
        return value, loss

    with AutoDist(batch_statistics="replica") as autodist:
        assert not list(inexact(autodist.function(step).captured(X).item))
    assert_equivalent(step, BATCHES, replicas=2, batch_statistics="replica")


def kept_in_a_list(s: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    kept = tf.TensorArray(tf.float64, size=2, element_shape=[3])
    return kept.write(0, s + w).write(1, s).stack()


@pytest.mark.parametrize(
    "made", [kept_in_a_list, lambda s, w: tf.map_fn(lambda each: each * 2.0, s + w)], ids=["a list", "a loop"]
)
def test_what_loses_sight_of_a_term_that_counts_once_is_told_of(made: Made) -> None:
    w = tf.Variable([1.0, 2.0, 3.0], dtype=tf.float64, name="w")

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(made(tf.reduce_sum((x * w) ** 2, axis=0), w))
        w.assign_sub(tape.gradient(loss, w))

    with AutoDist(batch_statistics="replica") as autodist:
        local, unknown = inexact(autodist.function(step).captured(X).item)
    assert "keep examples apart" in local
    assert unknown.startswith("the loss whose gradients train 'w' is neither")
