"""Variables in shards, through every door: equal to one device."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.proto.errors import StrategyError
from tests.support.cluster_pool import SHAPES, THREE_WORKERS, TWO_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.fit_oracle import OPTIMIZERS as KERAS_OPTIMIZERS
from tests.support.oracle import Parts, Values, compare_function
from tests.support.oracle_programs import FUNCTION_FAMILIES, GRAPH_FAMILIES, MODELS, OPTIMIZERS, batches
from tests.support.served import SHARDS, InShards, fit_with, train_function, train_graph

pytestmark = pytest.mark.first


def programs(families: Any) -> list[Any]:
    """Each cluster with each strategy; the other axes go round. All but every third one are slow."""
    found = []
    for i, shape in enumerate(SHAPES):
        for j, strategy in enumerate(SHARDS):
            family = list(families)[(i + j) % len(families)]
            optimizer, model = OPTIMIZERS[(2 * i + j) % len(OPTIMIZERS)], MODELS[(i - j) % len(MODELS)]
            clip = (i + j) % 2 == 0
            name = f"{shape.name}-{strategy}-{family}-{optimizer}-{model}{'-clipped' if clip else ''}"
            marks = () if (i + j) % 3 == 0 else pytest.mark.slow
            found.append(pytest.param(shape, strategy, family, optimizer, model, clip, id=name, marks=marks))
    return found


@pytest.mark.parametrize(
    ("cluster", "strategy", "family", "optimizer", "model", "clip"),
    programs(FUNCTION_FAMILIES),
    indirect=["cluster"],
    scope="module",
)
def test_a_compiled_function_trains_as_one_device_does(
    cluster: Cluster, strategy: str, family: str, optimizer: str, model: str, clip: bool
) -> None:
    same(cluster.run(train_function, strategy=strategy, family=family, optimizer=optimizer, model=model, clip=clip))


@pytest.mark.parametrize(
    ("cluster", "strategy", "family", "optimizer", "model", "clip"),
    programs(GRAPH_FAMILIES),
    indirect=["cluster"],
    scope="module",
)
def test_a_graph_trains_as_one_device_does(
    cluster: Cluster, strategy: str, family: str, optimizer: str, model: str, clip: bool
) -> None:
    same(cluster.run(train_graph, strategy=strategy, family=family, optimizer=optimizer, model=model, clip=clip))


def fits() -> list[Any]:
    """Each optimizer on two workers; all but every third one are slow; strategies go round."""
    found = []
    for index, optimizer in enumerate(KERAS_OPTIMIZERS):
        strategy = list(SHARDS)[index % len(SHARDS)]
        marks = () if index % 3 == 1 else pytest.mark.slow
        found.append(pytest.param(TWO_WORKERS, strategy, optimizer, id=f"{strategy}-{optimizer}", marks=marks))
    return found


@pytest.mark.parametrize(("cluster", "strategy", "optimizer"), fits(), indirect=["cluster"], scope="module")
def test_fit_trains_as_on_one_device(cluster: Cluster, strategy: str, optimizer: str) -> None:
    same(cluster.run(fit_with, strategy=strategy, optimizer=optimizer))


@pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
@pytest.mark.parametrize("family", FUNCTION_FAMILIES)
@pytest.mark.parametrize("strategy", SHARDS)
def test_rows_of_one_index_may_be_added_up_on_their_way_to_a_shard(
    cluster: Cluster, strategy: str, family: str
) -> None:
    """Of seven rows each worker looks some up several times in nearly every step, and both some."""
    same(cluster.run(train_function, strategy=strategy, family=family, optimizer="sgd", model="both", clip=False))


def train_parts(strategy: str, sizes: list[tuple[int, ...]]) -> Values:
    return compare_function(
        FUNCTION_FAMILIES["keras-3"]("both", "adam", clip=True),
        batches("both", [sum(own) for own in sizes]),
        parts=Parts(sizes),
        autodist={"strategy_builder": SHARDS[strategy]},
    )


@pytest.mark.parametrize("cluster", [THREE_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
def test_each_worker_may_feed_its_own_part_of_the_batch(cluster: Cluster) -> None:
    sizes = [(2, 3, 1), (4, 0, 2), (1, 2, 2), (0, 1, 0)]
    same(cluster.run(train_parts, strategy="shards", sizes=sizes))


def refused() -> None:
    with AutoDist(strategy_builder=InShards((0, 1))) as autodist:
        weights = tf.Variable(np.ones((3, 2)), name="weights")

        @autodist.function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.matmul(x, weights) ** 2)
            gradient = tape.gradient(loss, weights)
            if tf.norm(gradient) < 1.0:
                weights.assign_sub(tf.debugging.check_numerics(gradient, "too large"))
            return loss

        words = (
            r"'weights' cannot be cut into shards: its update is in the branch .*\(If\), which cannot be taken apart"
        )
        with pytest.raises(StrategyError, match=words):
            step(np.ones((4, 3)))


def left_whole() -> Values:
    def build(seed: int) -> Any:
        return FUNCTION_FAMILIES["keras-3"]("sparse", "adagrad", clip=False)(seed)

    options = {"strategy_builder": InShards((0, 1)), "strict": False}
    return compare_function(build, batches("sparse"), autodist=options)


@pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
def test_what_cannot_be_cut_is_refused_or_left_whole_as_the_user_says(cluster: Cluster) -> None:
    cluster.run(refused)
    same(cluster.run(left_whole))
