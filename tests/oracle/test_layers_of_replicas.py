"""A layer that normalizes each replica's part, beside one of the whole batch: as one device that is told the parts."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import tensorflow as tf

from tests.support.cluster_pool import THREE_WORKERS, UNEVEN_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.oracle import Training, Values, compare_function

REPLICAS = 3
"""Of both clusters."""

Normalized = tuple[tf.Tensor, tf.Tensor, tf.Tensor]
"""Rows, and the mean and the variance that they had."""


def normalized(z: tf.Tensor) -> Normalized:
    mean = tf.reduce_mean(z, 0)
    variance = tf.reduce_mean(tf.math.squared_difference(z, mean), 0)
    return tf.nn.batch_normalization(z, mean, variance, None, None, 1e-2), mean, variance


def normalized_in_parts(z: tf.Tensor) -> Normalized:
    """The rows of the first replicas are one more, where they do not divide; averages are weighted by rows."""
    rows = tf.shape(z)[0]
    begins = [index * (rows // REPLICAS) + tf.minimum(index, rows % REPLICAS) for index in range(REPLICAS + 1)]
    made = [normalized(z[begin:end]) for begin, end in pairwise(begins)]
    shares = [tf.cast(end - begin, z.dtype) for begin, end in pairwise(begins)]
    examples, *moments = zip(*made, strict=True)
    weighted = [[share * one for share, one in zip(shares, each, strict=True)] for each in moments]
    mean, variance = (tf.add_n(each) / tf.cast(rows, z.dtype) for each in weighted)
    return tf.concat(examples, 0), mean, variance


def train_both(builder: str) -> Values:
    """The first program that is built is one device's."""
    rng = np.random.default_rng(0)
    batches = [(rng.normal(1.0, 2.0, size=(size, 3)),) for size in (9, 7, 3, 8)]
    makers: list[Callable[[tf.Tensor], Normalized]] = [normalized, normalized_in_parts]

    def build(seed: int) -> Training:
        own, start = makers.pop(), np.random.default_rng(seed)
        first, second, scale = (
            tf.Variable(start.normal(size=shape), name=name)
            for name, shape in (("first", (3, 4)), ("second", (4, 2)), ("scale", (4,)))
        )
        averages = [tf.Variable(np.zeros(4), trainable=False, name=name) for name in ("mean", "variance")]

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                with tf.name_scope("own"):
                    y, *moments = own(x @ first)
                    y = y * scale
                z, *_ = normalized(tf.tanh(y) @ second)
                loss = tf.reduce_mean(tf.tanh(z) * [1.0, 2.0]) + 0.01 * tf.reduce_sum(scale**2)
            trained = (first, second, scale)
            for variable, gradient in zip(trained, tape.gradient(loss, trained), strict=True):
                variable.assign_sub(0.1 * gradient)
            for average, now in zip(averages, moments, strict=True):
                average.assign(0.5 * average + 0.5 * now)
            return loss

        return Training(step, lambda: {one.name: one for one in (first, second, scale, *averages)})

    choices = {"own": "replica"}
    return compare_function(build, batches, autodist={"batch_statistics": choices, "strategy_builder": builder})


@pytest.mark.parametrize(
    "cluster", [UNEVEN_WORKERS, THREE_WORKERS], ids=lambda s: s.name, indirect=True, scope="module"
)
@pytest.mark.parametrize("builder", ["AllReduce", "PSLoadBalancing"])
def test_a_layer_mixes_each_replicas_part(cluster: Cluster, builder: str) -> None:
    same(cluster.run(train_both, builder=builder))
