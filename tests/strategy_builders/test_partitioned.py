"""The builders that cut variables: how many shards, of which sizes, where, and what they refuse."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient, GraphItem, Variable
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, Consistency, PSSynchronizer
from autodist_py.strategy_builders.base import build_strategy, resolve_builder
from autodist_py.strategy_builders.partitioned import (
    PartitionedAR,
    PartitionedPS,
    RandomAxisPartitionAR,
    ShardedOptimizer,
    UnevenPartitionedPS,
    num_shards,
    proportional,
)

Shape = tuple[int, ...]
shapes = st.lists(st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1, max_size=12)


def item_of(shapes: list[Shape], sparse: tuple[int, ...] = ()) -> GraphItem:
    variables = tuple(Variable(f"v{number}", "float32", shape) for number, shape in enumerate(shapes))
    gradients = []
    for number, variable in enumerate(variables):
        parts = ("indices", "values", "shape") if number in sparse and variable.shape else ("dense",)
        gradients.append(Gradient(variable.name, tuple(f"g/{variable.name}/{part}:0" for part in parts)))
    return GraphItem(graph_def=b"", variables=variables, gradients=tuple(gradients))


def servers_of(node: VariableStrategy) -> list[str]:
    return [one.reduction_destination for one in node.synchronizers if isinstance(one, PSSynchronizer)]


def shard_bytes(node: VariableStrategy, variable: Variable) -> list[float]:
    if not node.shards:
        return [variable.nbytes]
    length = variable.shape[node.axis]
    return [variable.nbytes / length * size for size in node.sizes(length)]


def loads(strategy: Strategy, item: GraphItem) -> Counter[str]:
    found: Counter[str] = Counter()
    for node in strategy.node_config:
        sizes = shard_bytes(node, item.variable(node.var_name))
        for server, size in zip(servers_of(node), sizes, strict=True):
            found[server] += size  # type: ignore[assignment]
    return found


BUILDERS = (
    PartitionedPS(min_shard_bytes=1),
    PartitionedPS(local_proxy_variable=True, min_shard_bytes=64),
    UnevenPartitionedPS(min_shard_bytes=1),
    PartitionedAR(chunk_size=3, min_shard_bytes=1),
    RandomAxisPartitionAR(seed=5, min_shard_bytes=1),
    ShardedOptimizer(),
)


@given(shapes=shapes, workers=st.integers(1, 5), builder=st.sampled_from(BUILDERS))
def test_every_variable_is_covered_by_shards_that_are_none_empty(shapes, workers, builder):
    item, resources = item_of(shapes, sparse=(0,)), local_resource_spec(workers)
    strategy = build_strategy(builder, item, resources)
    assert [node.var_name for node in strategy.node_config] == [variable.name for variable in item.variables]
    for node in strategy.node_config:
        shape = item.variable(node.var_name).shape
        assert node.num_shards <= workers
        assert len(set(servers_of(node))) == len(servers_of(node)), "one shard on a server at most"
        if node.shards:
            assert min(node.sizes(shape[node.axis])) >= 1
            assert sum(node.sizes(shape[node.axis])) == shape[node.axis]
            assert [shard.var_name for shard in node.shards] == [
                f"{node.var_name}/part_{i}" for i in range(node.num_shards)
            ]
            assert node.axis == 0 or node.var_name != "v0", "rows of a sparse gradient are cut along the first axis"


@given(shapes=shapes, workers=st.integers(1, 5), builder=st.sampled_from(BUILDERS), seed=st.randoms())
def test_a_strategy_does_not_depend_on_the_order_of_the_variables(shapes, workers, builder, seed):
    item, resources = item_of(shapes), local_resource_spec(workers)
    strategy = build_strategy(builder, item, resources)
    assert strategy.to_proto().SerializeToString(deterministic=True) == build_strategy(
        builder, item, resources
    ).to_proto().SerializeToString(deterministic=True)
    shuffled = list(item.variables)
    seed.shuffle(shuffled)
    other = build_strategy(builder, GraphItem(b"", tuple(shuffled), item.gradients), resources)
    if not isinstance(builder, PartitionedAR | RandomAxisPartitionAR):  # Their groups are by the variables' order.
        assert {node.var_name: node for node in other.node_config} == {
            one.var_name: one for one in strategy.node_config
        }


@given(shapes=shapes, workers=st.integers(1, 5))
def test_servers_are_balanced_within_the_largest_variable(shapes, workers):
    item, resources = item_of(shapes), local_resource_spec(workers)
    for builder in (PartitionedPS(min_shard_bytes=1), ShardedOptimizer()):
        found = loads(build_strategy(builder, item, resources), item)
        spread = [found[server] for server in resources.server_devices]
        assert max(spread) - sum(spread) / workers <= max(variable.nbytes for variable in item.variables)


def test_a_table_of_many_rows_has_a_shard_for_each_server_and_no_more():
    node = build_strategy(PartitionedPS(), item_of([(10_007, 64)]), local_resource_spec(3)).node("v0")
    assert (node.partitioner, node.sizes(10_007)) == ("3,1", (3_336, 3_336, 3_335))


@pytest.mark.parametrize(
    ("shape", "least", "shards"),
    [
        ((6, 4), 1, 3),
        ((2, 400), 1, 2),
        ((), 1, 1),
        ((1, 400), 1, 1),
        ((65_536, 1), 1 << 18, 1),
        ((131_071, 1), 1 << 18, 1),
        ((131_072, 1), 1 << 18, 2),
        ((1 << 20, 1), 1 << 18, 3),
        ((3, 51_200), 1 << 18, 1),
        ((4, 51_200), 1 << 18, 2),
        ((0, 4), 1, 1),
    ],
)
def test_shards_are_bounded_by_the_rows_and_their_least_size(shape, least, shards):
    node = build_strategy(PartitionedPS(min_shard_bytes=least), item_of([shape]), local_resource_spec(3)).node("v0")
    assert node.num_shards == shards


def test_the_options_of_a_server_are_those_of_each_shard():
    builder = PartitionedPS(local_proxy_variable=True, staleness=2, min_shard_bytes=1)
    strategy = build_strategy(builder, item_of([(4, 2)]), local_resource_spec(2))
    assert strategy.consistency == Consistency(staleness=2)
    assert {one.local_replication for one in strategy.node("v0").synchronizers} == {True}  # type: ignore[attr-defined]


# -- Uneven -----------------------------------------------------------------------------------------------------------


def with_bandwidths(*bandwidths: float) -> ResourceSpec:
    return ResourceSpec(
        tuple(
            NodeSpec(f"10.0.0.{index}", chief=index == 0, network_bandwidth=one) for index, one in enumerate(bandwidths)
        )
    )


def test_shard_sizes_follow_the_bandwidths():
    strategy = build_strategy(UnevenPartitionedPS(), item_of([(60_000, 32)]), with_bandwidths(1, 2, 3))
    node = strategy.node("v0")
    assert node.sizes(60_000) == (10_000, 20_000, 30_000)
    assert servers_of(node) == ["10.0.0.0:CPU:0", "10.0.0.1:CPU:0", "10.0.0.2:CPU:0"]
    assert Strategy.from_proto(strategy.to_proto()) == strategy


def test_few_rows_are_on_the_servers_with_the_most_bandwidth():
    node = build_strategy(UnevenPartitionedPS(min_shard_bytes=1), item_of([(2, 9)]), with_bandwidths(1, 30, 10)).node(
        "v0"
    )
    assert (servers_of(node), node.sizes(2)) == (["10.0.0.1:CPU:0", "10.0.0.2:CPU:0"], (1, 1))


@given(length=st.integers(1, 1000), shares=st.lists(st.floats(0.01, 1000), min_size=1, max_size=6))
def test_proportional_sizes_are_within_one_of_their_shares_but_for_those_of_one(length, shares):
    length = max(length, len(shares))
    sizes = proportional(length, shares)
    assert sum(sizes) == length
    assert min(sizes) >= 1
    wanted = [length * share / sum(shares) for share in shares]
    lifted = sum(1 for one in wanted if one < 1)
    for size, one in zip(sizes, wanted, strict=True):
        assert math.floor(one) - lifted <= size <= max(1, math.ceil(one))


def test_a_shard_has_as_many_bytes_as_is_asked_for_however_many_these_are():
    assert num_shards(Variable("v", "float32", (9, 3)), 0, 9, 10**400) == 1
    assert num_shards(Variable("v", "float32", (9, 3)), 0, 9, 13) == 4


def test_shares_whose_sum_is_no_float_are_shares():
    assert proportional(4, [1.7e308, 1.7e308]) == (2, 2)


# -- Collectives ------------------------------------------------------------------------------------------------------


def test_parts_are_numbered_through_and_go_to_groups_of_chunk_size():
    builder = PartitionedAR(chunk_size=2, all_reduce_spec="RING", min_shard_bytes=1)
    strategy = build_strategy(builder, item_of([(4, 2), (), (3,)]), local_resource_spec(2))
    groups = [one.group for node in strategy.node_config for one in node.synchronizers]
    assert groups == [0, 0, 1, 1, 2]
    assert {one.spec for node in strategy.node_config for one in node.synchronizers} == {"RING"}  # type: ignore[attr-defined]


def test_axes_are_drawn_by_seed_and_name_among_those_that_can_be_cut():
    item, resources = item_of([(4, 5, 6)] * 30 + [(1, 7)], sparse=(0, 1)), local_resource_spec(2)
    drawn = {
        seed: [
            node.axis
            for node in build_strategy(RandomAxisPartitionAR(seed=seed, min_shard_bytes=1), item, resources).node_config
        ]
        for seed in (0, 1)
    }
    assert drawn[0] != drawn[1]
    assert set(drawn[0]) == {0, 1, 2}
    assert drawn[0][:2] == [0, 0]
    assert drawn[0][-1] == 1


# -- The sharded optimizer --------------------------------------------------------------------------------------------


def test_every_worker_owns_an_even_part_of_every_variable():
    item = item_of([(9, 4), (2, 30), (2,), (), (100, 3)], sparse=(4,))
    strategy = build_strategy(ShardedOptimizer(), item, local_resource_spec(3))
    assert [node.partitioner for node in strategy.node_config] == ["3,1", "1,3", "", "", "3,1"]
    assert all(node.synchronizer is not None for node in strategy.node_config), "one that cannot be cut is whole"
    assert len({servers_of(strategy.node(name))[0] for name in ("v2", "v3")}) == 2


def test_what_cannot_be_cut_is_shared_out_too_and_what_one_op_updates_stays_together():
    resources = local_resource_spec(2)
    strategy = build_strategy(ShardedOptimizer(), item_of([(64, 64)] * 6), resources)
    whole = Counter(node.synchronizer.reduction_destination for node in strategy.node_config)  # type: ignore[union-attr]
    assert set(whole.values()) == {3}
    item = item_of([(8,), (4, 4), (1,)])
    together = GraphItem(b"", tuple(replace(one, update_ops=("cond",)) for one in item.variables), item.gradients)
    strategy = build_strategy(ShardedOptimizer(), together, resources)
    assert len({node.synchronizer.reduction_destination for node in strategy.node_config}) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("builder", [PartitionedPS(min_shard_bytes=1), ShardedOptimizer()])
def test_remainders_are_shared_out(builder):
    item = item_of([(4, 1)] * 300)
    found = loads(build_strategy(builder, item, local_resource_spec(3)), item)
    assert max(found.values()) - min(found.values()) <= 16


def test_one_worker_owns_all():
    strategy = build_strategy(ShardedOptimizer(), item_of([(9, 4)]), local_resource_spec(1))
    assert strategy.node("v0").shards == ()


# -- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("PartitionedPS(min_shard_bytes=0)", "min_shard_bytes of PartitionedPS must be an integer >= 1; got 0"),
        ("UnevenPartitionedPS(min_shard_bytes=true)", "min_shard_bytes of UnevenPartitionedPS must be"),
        ("PartitionedPS(sync=false, staleness=1)", "PartitionedPS got staleness=1"),
        ("UnevenPartitionedPS(staleness=-1)", "staleness of UnevenPartitionedPS must be an integer >= 0; got -1"),
        ("PartitionedAR(chunk_size=0)", "chunk_size of AllReduce must be an integer >= 1"),
        ("RandomAxisPartitionAR(all_reduce_spec='X')", "all_reduce_spec of AllReduce"),
        ("RandomAxisPartitionAR(seed='a')", "seed of RandomAxisPartitionAR must be an integer; got 'a'"),
        ("ShardedOptimizer(sync=false)", "ShardedOptimizer has no parameter 'sync'"),
    ],
)
def test_parameters_out_of_range_are_refused(spec, message):
    with pytest.raises(StrategyError, match="^.*" + message.replace("(", r"\(").replace(")", r"\)")):
        resolve_builder(spec)


def test_shards_that_do_not_make_the_variable_are_refused():
    class Short:
        def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
            parts = tuple(VariableStrategy(f"v0/part_{index}", AllReduceSynchronizer()) for index in range(2))
            return Strategy((VariableStrategy("v0", None, "2,1", parts, (2, 3)),), resources.replica_devices)

    with pytest.raises(StrategyError, match=r"strategy builder Short: .*'v0' has size 6 .* got shards of \(2, 3\)"):
        build_strategy(Short(), item_of([(6, 4)]), local_resource_spec(2))
    assert "3,1 (1, 2, 3)" in str(
        Strategy((VariableStrategy("w", AllReduceSynchronizer(), "3,1", part_sizes=(1, 2, 3)),), ("a:CPU:0",))
    )
    with pytest.raises(StrategyError, match=r"needs a size of at least 1 for each shard"):
        VariableStrategy("v0", AllReduceSynchronizer(), "2,1", part_sizes=(6, 0))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (PSSynchronizer("9.9.9.9:CPU:0"), "9.9.9.9:CPU:0"),
        (AllReduceSynchronizer(), "all have the same sync"),
    ],
)
def test_what_is_in_force_where_a_variable_cannot_be_cut_is_checked_too(own, message):
    class Falling:
        def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
            parts = [
                PSSynchronizer(device, sync=not isinstance(own, AllReduceSynchronizer))
                for device in resources.server_devices
            ]
            named = tuple(VariableStrategy(f"v0/part_{index}", part) for index, part in enumerate(parts))
            return Strategy((VariableStrategy("v0", own, "2,1", named),), resources.replica_devices)

    with pytest.raises(StrategyError, match=message):
        build_strategy(Falling(), item_of([(6, 4)]), local_resource_spec(2))
