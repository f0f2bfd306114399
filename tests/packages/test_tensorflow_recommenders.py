"""TensorFlow Recommenders' tasks and layers, fitted as on one device.

The package is imported by workers alone: where it is, `tf.keras` must be Keras 2, which a process chooses once.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.packages.fitting import BATCH, EXAMPLES, STRATEGIES, Values, assert_as_on_one_device, require, state
from tests.support.cluster_pool import Cluster
from tests.support.cluster_pool import same_on_all_workers as same

require("tensorflow_recommenders", "tensorflow-recommenders")
pytestmark = pytest.mark.own_cluster  # Its workers have another Keras.
LEGACY = "TF_USE_LEGACY_KERAS"

RNG = np.random.default_rng(7)
USERS, FILMS = RNG.integers(0, 8, EXAMPLES), RNG.integers(0, 9, EXAMPLES)
GRADES = RNG.uniform(1.0, 5.0, [EXAMPLES, 1])
SINGLE = 1e-4
"""TensorFlow Recommenders' labels are float32."""


def recommenders() -> Any:
    return importlib.import_module("tensorflow_recommenders")


def two_towers() -> Values:
    """Negatives are all other examples of a batch, whichever replica has them."""
    tfrs = recommenders()

    class TwoTowers(tfrs.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.user = tf_keras.Sequential([tf_keras.layers.Embedding(8, 5), tf_keras.layers.Dense(4)])
            self.film = tf_keras.Sequential([tf_keras.layers.Embedding(9, 5), tf_keras.layers.Dense(4)])
            self.task = tfrs.tasks.Retrieval()

        def compute_loss(self, inputs: Any, training: bool = False) -> Any:
            users, films = inputs
            return self.task(self.user(users), self.film(films), compute_metrics=False)

    model = TwoTowers()
    model.compile(tf_keras.optimizers.Adagrad(0.1))
    data = tf.data.Dataset.from_tensor_slices((USERS, FILMS)).batch(BATCH)
    return state(model, model.fit(data, verbose=0))


def deep_and_cross() -> Values:
    tfrs = recommenders()

    class DeepAndCross(tfrs.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.user, self.film = tf_keras.layers.Embedding(8, 5), tf_keras.layers.Embedding(9, 5)
            self.cross = tfrs.layers.dcn.Cross(projection_dim=3, kernel_regularizer="l2")
            self.dot = tfrs.layers.feature_interaction.DotInteraction()
            self.out = tf_keras.layers.Dense(1)
            metrics = [tf_keras.metrics.RootMeanSquaredError()]
            self.task = tfrs.tasks.Ranking(tf_keras.losses.MeanSquaredError(), metrics)

        def compute_loss(self, inputs: Any, training: bool = False) -> Any:
            users, films, grades = inputs
            vectors = [self.user(users), self.film(films)]
            features = tf.concat([self.cross(tf.concat(vectors, 1)), self.dot(vectors)], 1)
            return self.task(labels=grades, predictions=self.out(features))

    model = DeepAndCross()
    model.compile(tf_keras.optimizers.Adagrad(0.1))
    data = tf.data.Dataset.from_tensor_slices((USERS, FILMS, GRADES.astype("float32"))).batch(BATCH)
    return state(model, model.fit(data, verbose=0))


PROGRAMS = {program.__name__: program for program in (two_towers, deep_and_cross)}


def fitted(program: str, strategy_builder: str) -> Values:
    def train() -> Values:
        tf_keras.backend.set_floatx("float32")
        tf_keras.utils.set_random_seed(11)
        return PROGRAMS[program]()

    return assert_as_on_one_device(train, strategy_builder=strategy_builder, tolerance=SINGLE)


@pytest.fixture(scope="module", autouse=True)
def legacy_keras() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LEGACY, "1")
        yield


@pytest.mark.on(1)
@pytest.mark.parametrize("strategy_builder", STRATEGIES)
@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_a_model_is_fitted_as_on_one_device(cluster: Cluster, program: str, strategy_builder: str) -> None:
    same(cluster.run(fitted, program=program, strategy_builder=strategy_builder))
