"""Strategies whose variables live on servers, or in shards, by name, and what is trained with them and compared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.proto.graph_item import GraphItem, Variable
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.parameter_server import PS, PSLoadBalancing
from tests.support.fit_oracle import OPTIMIZERS as KERAS_OPTIMIZERS
from tests.support.fit_oracle import VALIDATION, WEIGHTS, X, Y, compare, compiled, fitted
from tests.support.oracle import Values, compare_function, compare_graph
from tests.support.oracle_programs import FUNCTION_FAMILIES, batches, graph_program


@dataclass(frozen=True, slots=True)
class Spread:
    """The trainable variables go round `places`: ranks of servers (the last worker's for one that is none), or None."""

    places: tuple[int | None, ...]
    sync: bool = True
    idle: tuple[int, ...] = ()
    """The ranks of workers that train nothing themselves."""

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """None: the variable is reduced by collectives."""
        nodes = []
        for index, variable in enumerate(item.trainable_variables):
            rank = self.places[index % len(self.places)]
            if rank is None:
                nodes.append(VariableStrategy(variable.name, AllReduceSynchronizer()))
            else:
                server = resources.workers[min(rank, len(resources.workers) - 1)]
                nodes.append(VariableStrategy(variable.name, PSSynchronizer(f"{server.address}:CPU:0", sync=self.sync)))
        training = (node for rank, node in enumerate(resources.workers) if rank not in self.idle)
        replicas = tuple(device for node in training for device in node.replica_devices)
        return Strategy(node_config=tuple(nodes), replicas=replicas)


@dataclass(frozen=True, slots=True)
class InShards:
    """Each trainable variable in a shard for each of `places`, as in Spread: the first one is the largest."""

    places: tuple[int | None, ...]
    axis: int = 0
    sync: bool = True
    staleness: int = 0
    proxies: bool = False
    or_whole: bool = False
    """Whether what cannot be cut is whole, on the first of the places."""

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """A variable that has fewer elements along the axis has fewer shards; along its last axis, if it has fewer."""
        return Strategy(
            tuple(self._node(one, resources) for one in item.trainable_variables), resources.replica_devices
        )

    def _node(self, variable: Variable, resources: ResourceSpec) -> VariableStrategy:
        synchronizers = [self._synchronizer(topology, resources) for topology in self.places]
        axis = min(self.axis, len(variable.shape) - 1)
        count = min(len(self.places), variable.shape[axis]) if variable.shape else 1
        if count == 1:
            return VariableStrategy(variable.name, synchronizers[0])
        sizes = (variable.shape[axis] - count + 1, *(1 for _ in range(count - 1)))
        whole = synchronizers[0] if self.or_whole else None
        return VariableStrategy.partitioned(variable, axis, synchronizers[:count], sizes=sizes, whole=whole)

    def _synchronizer(self, topology: int | None, resources: ResourceSpec) -> PSSynchronizer | AllReduceSynchronizer:
        if topology is None:
            return AllReduceSynchronizer()
        server = resources.workers[min(topology, len(resources.workers) - 1)]
        return PSSynchronizer(
            f"{server.address}:CPU:0", local_replication=self.proxies, sync=self.sync, staleness=self.staleness
        )


WHOLE: dict[str, StrategyBuilder] = {
    "one-server": PS(),
    "balanced": PSLoadBalancing(local_proxy_variable=True),
    "elsewhere": Spread((2,)),
    "mixed": Spread((1, None, 0)),
}
SHARDS: dict[str, StrategyBuilder] = {
    "shards": InShards((0, 1, 2), or_whole=True),
    "columns": InShards((1, 0), axis=1, or_whole=True),
    "mixed-shards": InShards((None, 1), or_whole=True),
    "reduced-shards": InShards((None, None, None), axis=1),
    "proxies": InShards((2, 2, 0), proxies=True, or_whole=True),
}
STRATEGIES = WHOLE | SHARDS


def train_function(strategy: str, family: str, optimizer: str, model: str, clip: bool) -> Values:
    program = FUNCTION_FAMILIES[family](model, optimizer, clip=clip)
    return compare_function(program, batches(model), autodist={"strategy_builder": STRATEGIES[strategy]})


def train_graph(strategy: str, family: str, optimizer: str, model: str, clip: bool) -> Values:
    program = graph_program(model, optimizer, family, clip=clip)
    return compare_graph(program, batches(model), autodist={"strategy_builder": STRATEGIES[strategy]})


def fit_with(strategy: str, optimizer: str) -> dict[str, Any]:
    options = {"batch_size": 8, "sample_weight": WEIGHTS, "validation_data": VALIDATION}
    return compare(
        lambda: fitted(compiled(KERAS_OPTIMIZERS[optimizer]()), X, Y, **options),
        strategy_builder=STRATEGIES[strategy],
    )


def descending(autodist: AutoDist) -> tuple[Callable[[], None], tf.Variable]:
    """A step whose gradient is 1 everywhere, and the variable that it takes it from."""
    weights = tf.Variable(np.zeros(2))

    @autodist.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights)
        weights.assign_sub(tape.gradient(loss, weights))

    return step, weights
