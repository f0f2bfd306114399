"""Graphs with the loops and branches of TensorFlow 1: equal to one device."""

from collections.abc import Iterator
from typing import Any

import pytest

from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.parameter_server import PSLoadBalancing
from autodist_py.strategy_builders.partitioned import PartitionedPS
from tests.support.cluster_pool import (
    ONE_DEVICE,
    THREE_WORKERS,
    TWO_REPLICAS,
    TWO_WORKERS,
    Cluster,
    same_on_all_workers,
)
from tests.support.loop_programs import PROGRAMS, behaviour_of_tensorflow_1, control_flow_of_tensorflow_1, sequences
from tests.support.oracle import Values, compare_graph

BUILDERS: dict[str, StrategyBuilder] = {
    "AllReduce": AllReduce(),
    "PSLoadBalancing": PSLoadBalancing(),
    "PartitionedPS": PartitionedPS(min_shard_bytes=1),
}
ON_TWO_WORKERS = {
    ("classifier", "AllReduce"),
    ("skipped_update", "PSLoadBalancing"),
    ("all_in_a_loop", "PartitionedPS"),
    ("both_ways", "PartitionedPS"),
}


LEFT_WHOLE = {("branches", "PartitionedPS"), ("skipped_update", "PartitionedPS")}
"""An update inside a branch is not cut: the variable stays whole, which is refused where `strict` asks for shards."""


def train(program: str, strategy: str) -> Values:
    options = {"strategy_builder": BUILDERS[strategy], "strict": (program, strategy) not in LEFT_WHOLE}
    with control_flow_of_tensorflow_1():
        return compare_graph(PROGRAMS[program], sequences(), autodist=options)


def _cases() -> Iterator[Any]:
    """Not slow is each program on two replicas, and each strategy, with some of the programs, on two workers."""
    for shape in (ONE_DEVICE, TWO_REPLICAS, TWO_WORKERS, THREE_WORKERS):
        for i, program in enumerate(PROGRAMS):
            for j, strategy in enumerate(BUILDERS):
                is_chosen = shape is TWO_REPLICAS and j == i % len(BUILDERS)
                is_chosen = is_chosen or (shape is TWO_WORKERS and (program, strategy) in ON_TWO_WORKERS)
                marks = () if is_chosen else pytest.mark.slow
                yield pytest.param(shape, program, strategy, id=f"{shape.name}-{program}-{strategy}", marks=marks)


@pytest.mark.parametrize(("cluster", "program", "strategy"), list(_cases()), indirect=["cluster"], scope="module")
def test_a_graph_with_loops_trains_as_one_device_does(cluster: Cluster, program: str, strategy: str):
    same_on_all_workers(cluster.run(train, program=program, strategy=strategy))


def train_as_before_tensorflow_2() -> Values:
    with behaviour_of_tensorflow_1():
        return compare_graph(PROGRAMS["classifier"], sequences(), autodist={"strategy_builder": "PartitionedPS"})


@pytest.mark.parametrize("cluster", [TWO_REPLICAS], ids=lambda shape: shape.name, indirect=True, scope="module")
def test_a_script_that_disables_the_behaviour_of_tensorflow_2_trains_as_one_device_does(cluster: Cluster):
    same_on_all_workers(cluster.run(train_as_before_tensorflow_2))
