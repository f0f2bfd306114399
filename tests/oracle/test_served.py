"""Variables on parameter servers, through every door: equal to one device."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer
from tests.support.cluster_pool import SHAPES, THREE_WORKERS, TWO_REPLICAS, TWO_WORKERS, UNEVEN_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.fit_oracle import OPTIMIZERS as KERAS_OPTIMIZERS
from tests.support.fit_oracle import VALIDATION, WEIGHTS, X, Y, compare, compiled, fitted
from tests.support.gan import fit_gan
from tests.support.oracle import GraphTraining, Parts, Training, Values, compare_function, compare_graph
from tests.support.oracle_programs import (
    FUNCTION_FAMILIES,
    GRAPH_FAMILIES,
    MODELS,
    OPTIMIZERS,
    batches,
    graph_program,
    graph_weights,
    initial_values,
    placeholders,
    predict,
    squared_error,
)
from tests.support.served import WHOLE, Spread, fit_with, train_function, train_graph


def programs(families: Any, *, every: int) -> list[Any]:
    """Each cluster with each strategy, clipped and not; the other axes go round. All but `every`-th are slow."""
    found = []
    for i, shape in enumerate(SHAPES):
        for j, strategy in enumerate(WHOLE):
            for clip in (False, True):
                family = list(families)[(i + j + clip) % len(families)]
                optimizer = OPTIMIZERS[(i + 2 * clip + j) % len(OPTIMIZERS)]
                model = MODELS[(i - j + clip) % len(MODELS)]
                name = f"{shape.name}-{strategy}-{family}-{optimizer}-{model}{'-clipped' if clip else ''}"
                marks = () if (i + j // 2 + clip) % 2 == 0 and (i + j) % every == 0 else pytest.mark.slow
                found.append(pytest.param(shape, strategy, family, optimizer, model, clip, id=name, marks=marks))
    return found


@pytest.mark.parametrize(
    ("cluster", "strategy", "family", "optimizer", "model", "clip"),
    programs(FUNCTION_FAMILIES, every=1),
    indirect=["cluster"],
    scope="module",
)
def test_a_compiled_function_trains_as_one_device_does(
    cluster: Cluster, strategy: str, family: str, optimizer: str, model: str, clip: bool
) -> None:
    same(cluster.run(train_function, strategy=strategy, family=family, optimizer=optimizer, model=model, clip=clip))


@pytest.mark.parametrize(
    ("cluster", "strategy", "family", "optimizer", "model", "clip"),
    programs(GRAPH_FAMILIES, every=2),
    indirect=["cluster"],
    scope="module",
)
def test_a_graph_trains_as_one_device_does(
    cluster: Cluster, strategy: str, family: str, optimizer: str, model: str, clip: bool
) -> None:
    same(cluster.run(train_graph, strategy=strategy, family=family, optimizer=optimizer, model=model, clip=clip))


def decaying(optimizer: str) -> Callable[[], GraphTraining]:
    """As TF1 programs train: by `minimize`, which counts the steps that the learning rate is made of."""

    def build() -> GraphTraining:
        train = tf.compat.v1.train
        feeds = placeholders("both")
        weights = graph_weights("both")
        step = train.get_or_create_global_step()
        loss = squared_error(predict(weights, feeds[:-1]), feeds[-1])
        rate = train.exponential_decay(tf.constant(0.1, tf.float64), step, 2, 0.5)
        makers = {"sgd": train.GradientDescentOptimizer, "adam": train.AdamOptimizer}
        update = makers[optimizer](rate).minimize(loss, global_step=step, var_list=list(weights.values()))
        return GraphTraining(feeds, update, {"loss": loss})

    return build


def train_decaying(optimizer: str, strategy: str) -> Values:
    return compare_graph(decaying(optimizer), batches("both"), autodist={"strategy_builder": WHOLE[strategy]})


@pytest.mark.parametrize(
    ("cluster", "optimizer", "strategy"),
    [
        pytest.param(shape, optimizer, strategy, id=f"{shape.name}-{optimizer}-{strategy}")
        for shape, optimizer, strategy in [
            (UNEVEN_WORKERS, "sgd", "balanced"),
            (THREE_WORKERS, "adam", "balanced"),
            (THREE_WORKERS, "sgd", "mixed"),
        ]
    ],
    indirect=["cluster"],
    scope="module",
)
def test_a_rate_that_is_made_of_the_number_of_steps(cluster: Cluster, optimizer: str, strategy: str) -> None:
    same(cluster.run(train_decaying, optimizer=optimizer, strategy=strategy))


def legacy(seed: int) -> Training:
    """As TF2's first Keras trained: its optimizers put a slot, and its update, on the device of the variable."""
    weights = {name: tf.Variable(value, name=name) for name, value in initial_values("both", seed).items()}
    optimizer = tf_keras.optimizers.legacy.Adam(0.05)

    def step(x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = squared_error(predict(weights, [x, ids]), y)
        variables = list(weights.values())
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return Training(step, lambda: weights)


def on_cpu() -> GraphTraining:
    """As word2vec scripts put their table, whatever the machine has."""
    words, context = (tf.compat.v1.placeholder(tf.int64, shape) for shape in ([None], [None, 1]))
    with tf.device("/cpu:0"):
        table = tf.compat.v1.get_variable("table", initializer=initial_values("sparse", 1)["table"])
        embedded = tf.nn.embedding_lookup(table, words)
    scores = tf.compat.v1.get_variable("scores", initializer=initial_values("sparse", 2)["table"])
    logits = tf.matmul(embedded, scores, transpose_b=True)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.squeeze(context, 1), logits)
    loss = tf.reduce_mean(losses)
    update = tf.compat.v1.train.MomentumOptimizer(0.5, 0.9).minimize(loss)
    return GraphTraining([words, context], update, {"loss": loss})


def train_placed(door: str, strategy: str) -> Values:
    options = {"strategy_builder": WHOLE[strategy]}
    if door == "function":
        return compare_function(legacy, batches("both"), autodist=options)
    rng = np.random.default_rng(0)
    words = [(rng.integers(0, 7, 6), rng.integers(0, 7, (6, 1))) for _ in range(3)]
    return compare_graph(on_cpu, words, autodist=options)


@pytest.mark.parametrize(
    ("cluster", "door", "strategy"),
    [
        pytest.param(shape, door, strategy, id=f"{shape.name}-{door}-{strategy}")
        for shape, door, strategy in itertools.product(
            [TWO_REPLICAS, UNEVEN_WORKERS], ["function", "graph"], ["balanced", "mixed"]
        )
    ],
    indirect=["cluster"],
    scope="module",
)
def test_what_programs_place_by_hand_is_where_its_variable_is(cluster: Cluster, door: str, strategy: str) -> None:
    same(cluster.run(train_placed, door=door, strategy=strategy))


@dataclass(frozen=True, slots=True)
class Replicas:
    """AllReduce over some of the cluster's devices, by their numbers."""

    numbers: tuple[int, ...]
    spec: str

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        devices = [device for node in resources.workers for device in node.replica_devices]
        nodes = (
            VariableStrategy(variable.name, AllReduceSynchronizer(self.spec)) for variable in item.trainable_variables
        )
        return Strategy(tuple(nodes), tuple(devices[number] for number in self.numbers))


def train_on_others_in_turn(spec: str) -> list[Values]:
    program = FUNCTION_FAMILIES["hand-written"]("dense", "sgd", clip=False)
    turns = [(0, 1, 2), (0, 2), (1, 2), (0, 1, 2)]
    return [
        compare_function(program, batches("dense")[:2], autodist={"strategy_builder": Replicas(numbers, spec)})
        for numbers in turns
    ]


@pytest.mark.parametrize("cluster", [UNEVEN_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
@pytest.mark.parametrize("spec", ["RING", "AUTO"])
def test_one_autodist_after_another_may_have_other_replicas(cluster: Cluster, spec: str) -> None:
    same(cluster.run(train_on_others_in_turn, spec=spec))


def train_parts(strategy: str, sizes: list[tuple[int, ...]], sum_duplicates: bool) -> Values:
    return compare_function(
        FUNCTION_FAMILIES["hand-written"]("both", "sgd" if sum_duplicates else "adam", clip=not sum_duplicates),
        batches("both", [sum(own) for own in sizes]),
        parts=Parts(sizes),
        autodist={"strategy_builder": WHOLE[strategy], "sum_duplicates": sum_duplicates},
    )


@pytest.mark.parametrize("cluster", [THREE_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
@pytest.mark.parametrize("sum_duplicates", [False, True])
@pytest.mark.parametrize("strategy", ["one-server", "mixed"])
def test_each_worker_may_feed_its_own_part_of_the_batch(cluster: Cluster, strategy: str, sum_duplicates: bool) -> None:
    sizes = [(2, 3, 1), (4, 0, 2), (1, 2, 2), (0, 1, 0)]
    same(cluster.run(train_parts, strategy=strategy, sizes=sizes, sum_duplicates=sum_duplicates))


def train_with_idle(idle: int, door: str) -> Values:
    builder = Spread((idle,), idle=(idle,))
    if door == "graph":
        return compare_graph(
            graph_program("both", "adam", "tf1", clip=True), batches("both"), autodist={"strategy_builder": builder}
        )
    program = FUNCTION_FAMILIES["keras-3"]("both", "momentum", clip=True)
    return compare_function(program, batches("both"), autodist={"strategy_builder": builder})


@pytest.mark.parametrize("cluster", [THREE_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
@pytest.mark.parametrize("door", ["function", "graph"])
@pytest.mark.parametrize("idle", [0, 2])
def test_a_server_may_train_nothing_itself(cluster: Cluster, idle: int, door: str) -> None:
    same(cluster.run(train_with_idle, idle=idle, door=door))


def fit_idle() -> dict[str, Any]:
    options = {"batch_size": 8, "sample_weight": WEIGHTS, "validation_data": VALIDATION}
    return compare(
        lambda: fitted(compiled(keras.optimizers.Adam(0.05)), X, Y, **options),
        strategy_builder=Spread((0,), idle=(0,)),
    )


@pytest.mark.parametrize("cluster", [THREE_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
def test_fit_goes_on_with_a_chief_that_only_serves(cluster: Cluster) -> None:
    same(cluster.run(fit_idle))


def fits() -> list[Any]:
    """Each optimizer on two workers or, every third one, on three (the others are slow); strategies go round."""
    found = []
    for index, optimizer in enumerate(KERAS_OPTIMIZERS):
        strategy = "balanced" if optimizer == "accumulated" else list(WHOLE)[index % len(WHOLE)]
        for shape in (TWO_WORKERS, THREE_WORKERS):
            marks = () if (shape is THREE_WORKERS) == (index % 3 == 0) else pytest.mark.slow
            name = f"{shape.name}-{strategy}-{optimizer}"
            found.append(pytest.param(shape, strategy, optimizer, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("cluster", "strategy", "optimizer"), fits(), indirect=["cluster"], scope="module")
def test_fit_trains_as_on_one_device(cluster: Cluster, strategy: str, optimizer: str) -> None:
    same(cluster.run(fit_with, strategy=strategy, optimizer=optimizer))


def fit_two_networks(strategy: str) -> dict[str, Any]:
    return compare(fit_gan, strategy_builder=WHOLE[strategy])


@pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
@pytest.mark.parametrize("strategy", ["balanced", "mixed"])
def test_two_networks_with_an_optimizer_each_take_turns(cluster: Cluster, strategy: str) -> None:
    same(cluster.run(fit_two_networks, strategy=strategy))
