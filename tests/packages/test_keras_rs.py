"""keras-rs's layers and losses for recommenders, fitted as on one device."""

from typing import Any

import keras
import numpy as np
import pytest

from tests.packages.fitting import BATCH, EXAMPLES, STRATEGIES, Values, assert_as_on_one_device, package, state
from tests.support.cluster_pool import Cluster
from tests.support.cluster_pool import same_on_all_workers as same

keras_rs = package("keras_rs", "keras-rs")

RNG = np.random.default_rng(7)
NUMBERS = RNG.normal(size=[EXAMPLES, 4])
IDS = RNG.integers(0, 6, [EXAMPLES, 3])
CLICKS = RNG.integers(0, 2, [EXAMPLES, 1]).astype("float64")
GRADES = RNG.integers(0, 4, [EXAMPLES, 5]).astype("float64")


def fit(model: keras.Model, x: Any, y: Any, **compiled: Any) -> Values:
    model.compile(jit_compile=False, **compiled)
    return state(model, model.fit(x, y, batch_size=BATCH, verbose=0))


def features() -> tuple[list[Any], list[Any]]:
    numbers, ids = keras.Input([4]), keras.Input([3], dtype="int32")
    embedded = [keras.layers.Embedding(6, 5)(ids[:, column]) for column in range(3)]
    return [numbers, ids], [keras.layers.Dense(5, activation="relu")(numbers), *embedded]


def dlrm() -> Values:
    inputs, vectors = features()
    crossed = keras_rs.layers.DotInteraction()(vectors)
    hidden = keras.layers.Dense(6, activation="relu")(keras.layers.Concatenate()([crossed, vectors[0]]))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    return fit(model, [NUMBERS, IDS], CLICKS, optimizer="adagrad", loss="binary_crossentropy", metrics=["auc"])


def dcn() -> Values:
    inputs, vectors = features()
    first = keras.layers.Concatenate()(vectors)
    crossed = keras_rs.layers.FeatureCross(projection_dim=3)(first)
    crossed = keras_rs.layers.FeatureCross(kernel_regularizer="l2")(first, crossed)
    model = keras.Model(inputs, keras.layers.Dense(1)(crossed))
    return fit(model, [NUMBERS, IDS], CLICKS, optimizer="adam", loss="mse", metrics=["mae"])


def reduced_bags() -> Values:
    bags, weights = keras.Input([3], dtype="int32"), keras.Input([3])
    reduced = keras_rs.layers.EmbedReduce(6, 5, combiner="mean")(bags, weights=weights)
    model = keras.Model([bags, weights], keras.layers.Dense(1)(reduced))
    return fit(model, [IDS, np.abs(NUMBERS[:, :3])], CLICKS, optimizer="adam", loss="mse")


def ranked_pairs() -> Values:
    model = keras.Sequential([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(5)])
    loss, ranking = keras_rs.losses.PairwiseLogisticLoss(), keras_rs.metrics.NDCG(name="ndcg")
    return fit(model, NUMBERS, GRADES, optimizer="adam", loss=loss, metrics=[ranking])


def ranked_lists() -> Values:
    model = keras.Sequential([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(5)])
    ranking = keras_rs.metrics.MeanReciprocalRank(name="mrr")
    return fit(model, NUMBERS, GRADES, optimizer="adam", loss=keras_rs.losses.ListMLELoss(), metrics=[ranking])


PROGRAMS = {program.__name__: program for program in (dlrm, dcn, reduced_bags, ranked_pairs, ranked_lists)}


def fitted(program: str, strategy_builder: str) -> Values:
    def train() -> Values:
        keras.config.set_floatx("float64")
        keras.utils.set_random_seed(11)
        return PROGRAMS[program]()

    return assert_as_on_one_device(train, strategy_builder=strategy_builder)


@pytest.mark.on(1)
@pytest.mark.parametrize("strategy_builder", STRATEGIES)
@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_a_model_is_fitted_as_on_one_device(cluster: Cluster, program: str, strategy_builder: str) -> None:
    same(cluster.run(fitted, program=program, strategy_builder=strategy_builder))
