"""Losses that mix the examples of a batch are told from others, by their gradients on a batch and on its parts."""

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from autodist_py import AutoDist
from autodist_py.capture.inexact import inexact
from autodist_py.proto.graph_item import GraphItem
from autodist_py.testing import assert_equivalent
from tests.support.unseen import turned

ROWS, WIDTH = 6, 3
X = np.random.default_rng(3).normal(size=(ROWS, 4))
Y = np.array([0, 1, 1, 0, 2, 1], np.int64)
BANK = np.random.default_rng(4).normal(size=(5, WIDTH))
WEIGHT = np.random.default_rng(5).normal(size=(4, WIDTH))

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor | list[tf.Tensor]]
"""Of embeddings, a row for each example, and of labels; of several the gradients are added up."""


def in_batch(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    scores = tf.matmul(z, z + 1.0, transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(z)[0]), scores))


def two_views(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    both = tf.math.l2_normalize(tf.concat([z, tf.sin(z)], 0), axis=1)
    scores = both @ tf.transpose(both) - 9.0 * tf.eye(tf.shape(both)[0], dtype=tf.float64)
    return -tf.reduce_mean(tf.nn.log_softmax(scores))


def distances(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    apart = tf.reduce_sum((z[:, None] - z[None]) ** 2, axis=-1)
    same = tf.cast(y[:, None] == y[None], tf.float64)
    return tf.reduce_mean(same * apart + (1.0 - same) * tf.maximum(1.0 - apart, 0.0))


def forgotten_axis(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean((z[:, :1] - tf.cast(y, tf.float64)) ** 2)


def centered(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean((z - tf.reduce_mean(z, axis=0)) ** 2)


def covariance(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum((tf.matmul(z, z, transpose_a=True) - 1.0) ** 2)


def class_means(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    means = tf.math.unsorted_segment_sum(z, y, 3) / 2.0
    return tf.reduce_mean((z - tf.gather(means, y)) ** 2)


def drawn_pairs(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    labels = tf.cast(y, tf.float64)
    pairs = tf.random.shuffle(labels, seed=1) * tf.random.shuffle(tf.cos(labels), seed=2)
    return tf.reduce_mean(z**2) * tf.reduce_mean(pairs)


MIXING: dict[str, tuple[Loss, str]] = {
    "in-batch negatives": (in_batch, "pairs each example"),
    "two views, SimCLR": (two_views, "pairs each example"),
    "distances between all": (distances, "pairs each example"),
    "a forgotten axis": (forgotten_axis, "pairs each example"),
    "by einsum": (lambda z, y: tf.reduce_mean(tf.einsum("ik,jk->ij", z, z) ** 2), "pairs each"),
    "a batch of pairs": (
        lambda z, y: tf.reduce_mean(tf.exp(tf.matmul(tf.transpose(z)[:, :, None], tf.transpose(z)[:, None]))),
        "pairs each example",
    ),
    "softmax over the batch": (lambda z, y: tf.reduce_sum(tf.nn.softmax(z, axis=0) ** 2), "along the axis of the exam"),
    "a running sum": (lambda z, y: tf.reduce_mean(tf.cumsum(z) ** 2), "along the axis of the examples"),
    "another example": (lambda z, y: tf.reduce_mean(z * tf.reverse(z, [0])), "pairs each example with another"),
    "another one that is drawn": (drawn_pairs, "pairs each example with another"),
    "the next example": (lambda z, y: tf.reduce_mean((z[1:] - z[:-1]) ** 2), "by their place in the batch"),
    "the first one": (lambda z, y: tf.reduce_mean(z**2) + tf.reduce_sum(z[0] ** 2), "by their place in the batch"),
    "the first ones": (lambda z, y: tf.reduce_mean(z[:2] ** 2), "by their place in the batch"),
    "two by their numbers": (lambda z, y: tf.reduce_mean(tf.gather(z, [1, 0]) ** 2), "by their place in the batch"),
    "two by their numbers, turned": (
        lambda z, y: tf.reduce_mean(tf.gather(tf.transpose(z), [1, 0], axis=1) ** 2),
        "by their place in the batch",
    ),
    "the first half": (lambda z, y: tf.reduce_mean(z[: tf.shape(z)[0] // 2] ** 2), "by their place in the batch"),
    "all but the last": (lambda z, y: tf.reduce_mean(z[: tf.shape(y)[0] - 1] ** 2), "by their place in the batch"),
    "the second half": (
        lambda z, y: tf.reduce_sum(tf.slice(z, [tf.shape(z)[0] // 2, 0], [-1, -1]) ** 2),
        "by their place in the batch",
    ),
    "a mean of those whose places are chosen": (
        lambda z, y: tf.reduce_mean(tf.gather(z**2, tf.where(tf.equal(y, 1))[:, 0])),
        "averages over examples that were chosen",
    ),
    "the largest": (lambda z, y: tf.reduce_sum(tf.reduce_max(z, axis=0)), "reduces all examples to one"),
    "a mean and a sum, together": (
        lambda z, y: [tf.reduce_mean(z**2), tf.reduce_sum(tf.cos(z))],
        r"is a sum over examples.* its gradient is added to that of 'Mean:0', a mean",
    ),
    "a mean of those that are chosen": (
        lambda z, y: tf.reduce_mean(tf.boolean_mask(z**2, tf.equal(y, 1))),
        "averages over examples that were chosen.* divide their sum by their number",
    ),
    "root of the mean": (lambda z, y: tf.sqrt(tf.reduce_mean(z**2)), "no sum or mean over examples"),
    "norm of all": (lambda z, y: tf.norm(z), "no sum or mean over examples"),
    "logarithm of a mean": (lambda z, y: tf.math.log(tf.reduce_mean(tf.exp(z))), "no sum or mean"),
    "a mean by a learnt weight": (
        lambda z, y: tf.reduce_sum(z * tf.exp(z)) / tf.reduce_sum(tf.exp(z)),
        "no sum or mean over examples",
    ),
    "a sum and a mean": (lambda z, y: tf.reduce_sum(z**2) + tf.reduce_mean(tf.cos(z)), "adds a sum"),
    "a variance": (centered, "with a sum or mean over the batch"),
    "normalized by hand": (
        lambda z, y: tf.reduce_mean(tf.sin(z / tf.math.reduce_std(z, axis=0))),
        "with a sum or mean over the batch|no sum or mean over examples",
    ),
    "a covariance": (covariance, "no sum or mean over examples"),
    "a determinant": (lambda z, y: tf.linalg.logdet(tf.matmul(z, z, transpose_a=True)), "no sum or mean over examples"),
    "distances to the means of classes": (class_means, "adds a sum over examples to what"),
    "free bits": (lambda z, y: tf.maximum(tf.reduce_mean(z**2), 3.0), "no sum or mean over examples"),
}


def over_time(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    steps = tf.transpose(z[:, :, None], [1, 0, 2])
    return tf.reduce_mean(tf.cumsum(steps, axis=0) ** 2)


def of_a_loop(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, v * 2.0), (0, tf.reduce_mean(z**2)))[1]


def stable(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.reduce_logsumexp(z, axis=1))


def masked(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    kept = tf.sequence_mask(y + 1, dtype=tf.float64)  # As many columns as the largest label asks for.
    return tf.reduce_mean(tf.reduce_sum(kept, axis=1) * z[:, 0])


def distinct(y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """What is made of each label once, and where each example has it."""
    labels, keys = tf.unique(y)
    return tf.gather(tf.sin(BANK[:, 0]), labels), keys


def joined(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    both, size = tf.concat([z, tf.sin(z)], 0), tf.shape(z)[0]
    one, other = tf.split(both * 2.0, 2)
    return tf.reduce_mean(one**2) + tf.reduce_mean(tf.cos(other)) + tf.reduce_mean(tf.exp(both[:size]) * both[size:])


EXACT: dict[str, Loss] = {
    "a sum of those that are chosen": lambda z, y: tf.reduce_sum(tf.boolean_mask(z**2, y > 0)),
    "a sum of means of those that are chosen": (
        lambda z, y: tf.reduce_sum(tf.reduce_mean(tf.boolean_mask(z**2, y > 0), axis=1))
    ),
    "a mean, and what is of no example": lambda z, y: [tf.reduce_mean(z**2), tf.reduce_sum(tf.constant(BANK) ** 2)],
    "what each example has, and a sum": lambda z, y: [tf.reduce_sum(z**2, axis=1), tf.reduce_sum(tf.cos(z))],
    "a mean": lambda z, y: tf.reduce_mean(z**2),
    "a sum": lambda z, y: tf.reduce_sum(z**2),
    "cross entropy": lambda z, y: tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, z)),
    "a memory bank": lambda z, y: tf.reduce_mean(tf.nn.log_softmax(tf.matmul(z, BANK, transpose_b=True))),
    "columns of one example": lambda z, y: tf.reduce_mean(tf.matmul(z[:, :, None], z[:, None]) ** 2),
    "a mean term in each example": lambda z, y: tf.reduce_mean(tf.reduce_sum(z**2, axis=1) + tf.reduce_mean(tf.cos(z))),
    "by the number of examples": lambda z, y: tf.reduce_sum(z**2 / tf.cast(tf.shape(z)[0], tf.float64)),
    "time-major": over_time,
    "a running sum of means": lambda z, y: tf.reduce_sum(tf.cumsum(tf.reduce_mean(z**2, axis=0))),
    "both turned round": lambda z, y: tf.reduce_mean(
        tf.reverse(z, [0]) * tf.reverse(tf.cast(y, z.dtype), [0])[:, None]
    ),
    "complex": lambda z, y: tf.math.real(tf.complex(tf.reduce_mean(z**2), tf.zeros([], z.dtype))),
    "in another order": lambda z, y: tf.reduce_mean(tf.tanh(tf.reverse(z, [0])) * 2.0),
    "joined and taken apart": joined,
    "new axes before and behind": lambda z, y: tf.reduce_mean(tf.cos(z[None, :, :, None])),
    "columns": lambda z, y: tf.reduce_mean(z[..., 1:] * z[:, :-1, None][:, :, 0]),
    "a loop": of_a_loop,
    "all, by their number": lambda z, y: tf.reduce_mean(z[: tf.shape(y)[0]] ** 2),
    "a sum of those whose places are chosen": lambda z, y: tf.reduce_sum(tf.gather(z**2, tf.where(y > 0)[:, 0])),
    "of distinct elements": lambda z, y: tf.reduce_mean(z * tf.gather(*distinct(y))[:, None]),
    "two batches joined": lambda z, y: tf.reduce_mean(tf.concat([z, tf.sin(z)], 0) ** 2),
    "stabilized": stable,
    "masked by lengths": masked,
    "a Gram matrix": lambda z, y: tf.linalg.trace(tf.matmul(z, z, transpose_a=True)),
    "a regularizer": lambda z, y: tf.reduce_mean(z**2) + tf.sqrt(tf.reduce_sum(tf.constant(BANK) ** 2)),
    "only its shape": lambda z, y: (
        tf.reduce_mean(z**2) * tf.reduce_mean(tf.ones_like(tf.matmul(z, z, transpose_b=True)))
    ),
    "time-major columns": lambda z, y: tf.reduce_mean(tf.reduce_sum(tf.transpose(z) ** 2, axis=0)),
}


def normalized(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    moments = tf.nn.moments(z, [0])
    return tf.reduce_mean(tf.sin(tf.nn.batch_normalization(z, *moments, None, None, 1e-3)))


def fused(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    ones = tf.ones([WIDTH])
    return tf.reduce_mean(
        tf.sin(tf.compat.v1.nn.fused_batch_norm(tf.cast(z, tf.float32)[:, None, None], ones, ones)[0])
    )


def by_a_layer(library: Any) -> Loss:
    layer = library.layers.BatchNormalization(dtype="float64")
    layer.build([None, WIDTH])
    return lambda z, y: tf.reduce_mean(tf.sin(layer(z, training=True)))


NORMALIZED: dict[str, Loss] = {
    "by moments": normalized,
    "fused": fused,
    "Keras": by_a_layer(keras),
    "Keras 2": by_a_layer(tf_keras),
}


def captured(loss: Loss, x: Any = X, y: Any = Y) -> GraphItem:
    weight = tf.Variable(WEIGHT, name="weight")

    with AutoDist(batch_statistics="replica") as autodist:

        @autodist.function
        def step(x: tf.Tensor, y: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                value = loss(tf.matmul(x, weight), y)
            weight.assign_sub(0.1 * tape.gradient(value, weight))

        return step.captured(x, y).item


def parts(loss: Loss) -> tuple[np.ndarray, list[np.ndarray]]:
    """The gradients on the whole batch, and on two halves."""

    def gradient(rows: slice) -> np.ndarray:
        weight = tf.Variable(WEIGHT)
        with tf.GradientTape() as tape:
            value = loss(tf.matmul(X[rows], weight), tf.constant(Y[rows]))
        return np.array(tape.gradient(value, weight))

    return gradient(slice(None)), [gradient(slice(0, ROWS // 2)), gradient(slice(ROWS // 2, None))]


def is_combined(whole: np.ndarray, halves: list[np.ndarray]) -> bool:
    return np.allclose(whole, np.mean(halves, axis=0)) or np.allclose(whole, np.sum(halves, axis=0))


@pytest.mark.parametrize(("loss", "reason"), MIXING.values(), ids=MIXING.keys())
def test_a_loss_that_mixes_examples_is_named_and_is_none_of_its_parts(loss: Loss, reason: str) -> None:
    assert not is_combined(*parts(loss))
    (mixture,) = captured(loss).mixtures
    assert mixture.startswith("the loss '") and "trains 'weight'" in mixture
    assert __file__ in mixture
    assert re.search(reason, mixture), mixture


@pytest.mark.parametrize("loss", EXACT.values(), ids=EXACT.keys())
def test_a_loss_that_keeps_examples_apart_is_not_said_to_mix_them(loss: Loss) -> None:
    assert is_combined(*parts(loss))
    assert not captured(loss).mixtures


@pytest.mark.parametrize("loss", NORMALIZED.values(), ids=NORMALIZED.keys())
def test_batch_normalization_is_told_apart(loss: Loss) -> None:
    item = captured(loss)
    assert not item.mixtures and item.gradients[0].reduction == "mean"
    (said,) = inexact(item)
    assert said.startswith("batch normalization ('")


def test_what_is_mixed_before_a_batch_normalization_is_named() -> None:
    (mixture,) = captured(lambda z, y: normalized(tf.matmul(z, z, transpose_b=True) @ z, y)).mixtures
    assert "pairs each example" in mixture


def test_losses_that_are_asked_together_count_for_their_own_variables() -> None:
    weights = [tf.Variable(WEIGHT), tf.Variable(WEIGHT)]

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            losses = [tf.reduce_mean(tf.matmul(x, weights[0]) ** 2), tf.reduce_sum(tf.matmul(x, weights[1]) ** 2)]
        for weight, gradient in zip(weights, tape.gradient(losses, weights), strict=True):
            weight.assign_sub(0.01 * gradient)

    assert_equivalent(step, [(X[:rows],) for rows in (6, 5, 4)], batch_statistics="replica")


def test_what_is_not_seen_of_another_loss_is_said_beside_a_mixture() -> None:
    weights = [tf.Variable(WEIGHT, name="mixed"), tf.Variable(WEIGHT, name="unknown")]

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape(persistent=True) as tape:
            losses = [in_batch(tf.matmul(x, weights[0]), x), turned(tf.reduce_mean(tf.matmul(x, weights[1])))]
        for weight, loss in zip(weights, losses, strict=True):
            weight.assign_sub(0.01 * tape.gradient(loss, weight))

    with AutoDist(batch_statistics="replica") as autodist:
        mixture, local, unknown = inexact(autodist.function(step).captured(X).item)
    assert "trains 'mixed', mixes" in mixture
    assert local.startswith("it is not seen that 'while")
    assert unknown.startswith("the loss whose gradients train 'unknown' is neither")


@pytest.mark.parametrize("counts", [True, False], ids=["with a batch", "without"])
def test_the_gradient_of_a_loss_of_no_example_is_the_same_on_all(counts: bool) -> None:
    weight, count = tf.Variable(WEIGHT), tf.Variable(0.0, dtype=tf.float64)

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight**2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        if counts:
            count.assign_add(tf.reduce_sum(x))

    with AutoDist(loss_reduction="sum", batch_statistics="replica") as autodist:
        (gradient,) = autodist.function(step).captured(X).item.gradients
    assert gradient.reduction == "mean"


@pytest.mark.parametrize("name", [name for name in MIXING if "drawn" not in name])
def test_what_is_refused_trains_by_the_whole_batch(name: str) -> None:
    loss_of, weight = MIXING[name][0], tf.Variable(WEIGHT)

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(tf.matmul(x, weight), y)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    rng = np.random.default_rng(7)
    batches = [(rng.normal(size=(size, 4)), rng.integers(0, 3, size)) for size in (6, 5, 7)]
    assert_equivalent(step, batches, replicas=3, batch_statistics="global", tolerance=1e-9)
