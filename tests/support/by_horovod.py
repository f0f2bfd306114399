"""What tests of Horovod share: the mark of those that need it, the clusters they run on, and a step to train."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from tests.support.cluster_pool import TWO_WORKERS, Shape

is_installed = pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed: make horovod")

FOUR_REPLICAS = Shape("2-workers-2+2-replicas", (2, 2))
ON_TWO = pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
ON_BOTH = pytest.mark.parametrize(
    "cluster", [TWO_WORKERS, FOUR_REPLICAS], ids=lambda shape: shape.name, indirect=True, scope="module"
)


def descending(autodist: AutoDist) -> tuple[Callable[[Any], Any], tf.Variable]:
    """A step that trains a few weights, and these."""
    weights = tf.Variable(np.ones(3))

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.linalg.matvec(x, weights) ** 2)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))

    return autodist.function(step), weights
