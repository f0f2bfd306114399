"""Whole programs of users, with every builder: they do what they do on one device."""

from collections.abc import Callable
from typing import Any

import keras
import pytest

from autodist_py import AutoDist
from tests.support.cluster_pool import TWO_REPLICAS, TWO_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.oracle import assert_close
from tests.support.user_programs import PROGRAMS, OneDevice, Values

BUILDERS = [
    "AllReduce",
    "AllReduce(all_reduce_spec='RING', chunk_size=1)",
    "PS",
    "PSLoadBalancing",
    "Parallax",
    "PartitionedPS(min_shard_bytes=1)",
    "UnevenPartitionedPS(min_shard_bytes=1, local_proxy_variable=True)",
    "PartitionedAR(chunk_size=1, min_shard_bytes=1)",
    "RandomAxisPartitionAR(min_shard_bytes=1)",
    "ShardedOptimizer",
]


def run(program: Callable[[Any], Values], builder: str) -> Values:
    keras.config.set_floatx("float64")
    expected = program(OneDevice())
    with AutoDist(strategy_builder=builder) as autodist:
        values = program(autodist)
    assert values.keys() == expected.keys()
    for name, wanted in expected.items():
        assert_close(values[name], wanted, name, 1e-8)
    return values


@pytest.mark.on(1)
@pytest.mark.parametrize(
    "cluster", [TWO_REPLICAS, TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)
@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.replace("_", "-"))
def test_a_program_does_what_it_does_on_one_device(
    cluster: Cluster, program: Callable[[Any], Values], builder: str
) -> None:
    same(cluster.run(run, program=program, builder=builder))
