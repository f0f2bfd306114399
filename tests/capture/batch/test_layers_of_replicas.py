"""Layers that normalize each replica's part by itself, beside those of the whole batch: `batch_statistics={...}`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from autodist_py import AutoDist
from autodist_py.capture.assemble import CaptureOptions
from autodist_py.proto.errors import AutoDistError, CaptureError
from autodist_py.proto.graph_item import GraphItem
from tests.support.capture_steps import capture_with
from tests.support.model_steps import descending

Step = Callable[[tf.Tensor], Any]


def item_of(step: Step, choices: Mapping[str, str], shape: Sequence[int] = (6, 3)) -> GraphItem:
    options = CaptureOptions(batch_statistics=choices, num_replicas=3)
    return capture_with(options, step, np.random.default_rng(0).normal(size=shape).astype(np.float32)).item


def reductions(item: GraphItem) -> list[str]:
    return [one.reduction for one in item.statistics]


def net(library: Any) -> Step:
    """Two layers, each called for the first time when its name is a scope already."""
    layers = library.layers
    inputs = library.Input((4, 4, 3))
    x = layers.Conv2D(4, 2, use_bias=False)(inputs)
    x = layers.ReLU()(layers.BatchNormalization(name="first")(x))
    x = layers.BatchNormalization(name="second")(layers.Conv2D(4, 2, use_bias=False)(x))
    model = library.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))
    return descending(model, library.optimizers.SGD(0.1))


@pytest.mark.parametrize("library", [keras, tf_keras], ids=lambda library: library.__name__)
def test_a_layer_sends_its_averages_alone(library: Any) -> None:
    """Its mean and variance for the moving averages; nothing before its examples are normalized."""
    item = item_of(net(library), {"first": "replica"}, (6, 4, 4, 3))
    assert reductions(item).count("moments") == 1
    assert reductions(item).count("mean") in (2, 4)  # With the second layer's of back-propagation.
    assert all("first" in name for name in item.normalizing_ops)
    assert item.normalizing_ops
    everywhere = item_of(net(library), {"*": "replica"}, (6, 4, 4, 3))
    assert "moments" not in reductions(everywhere)
    assert any("second" in name for name in everywhere.normalizing_ops)


def test_the_first_pattern_that_fits_counts() -> None:
    choices = {"sec*": "global", "*": "replica"}
    item = item_of(net(keras), choices, (6, 4, 4, 3))
    assert not any("second" in name for name in item.normalizing_ops)


def scoped(*, leaves: bool) -> Step:
    weight = tf.Variable(np.ones((3, 2), np.float32))

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            z = x @ weight
            with tf.name_scope("own"):
                spread = tf.math.sqrt(tf.reduce_mean(z**2, 0) + 0.1)
                y = z / spread
            if leaves:
                y = y + tf.sin(spread)
            loss = tf.reduce_mean(tf.tanh(y))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))

    return step


def test_what_a_layer_computes_of_its_own_statistics_stays_there() -> None:
    assert item_of(scoped(leaves=False), {"own": "replica"}).normalizing_ops
    told = item_of(scoped(leaves=True), {"own": "replica"}).mixtures
    assert "'Sin' (" in told[0]
    assert "each replica has its own" in told[0]


def test_rows_of_the_whole_batch_are_not_paired_with_a_replicas_own_statistics() -> None:
    weight = tf.Variable(np.ones((3, 2), np.float32))

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            z = x @ weight
            ordered = tf.gather(z, tf.argsort(z[:, 0]))
            with tf.name_scope("own"):
                of_own = tf.math.sqrt(tf.reduce_mean(z**2, 0) + 0.1)
                y = z / tf.reduce_sum(ordered / of_own, 0)
            loss = tf.reduce_mean(tf.tanh(y))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))

    (told, *_) = item_of(step, {"own": "replica"}).mixtures
    assert "'own/" in told
    assert "each replica has its own" in told


def test_ops_of_back_propagation_are_not_named_to_the_user() -> None:
    named = item_of(net(keras), {"*": "replica"}, (6, 4, 4, 3)).normalizing_ops
    assert named
    assert not [name for name in named if "gradient" in name]


def test_a_name_of_no_layer_is_refused() -> None:
    with pytest.raises(CaptureError, match="'frist', and the step has no layer"):
        item_of(scoped(leaves=False), {"own": "global", "frist": "replica"})


def test_another_choice_than_these_two_is_refused() -> None:
    with pytest.raises(AutoDistError, match="batch_statistics must be one of global, replica; received 'local'"):
        AutoDist(batch_statistics={"own": "local"})
