"""The builder registry, the AllReduce builder, and the rules that every strategy keeps."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.proto import plugins
from autodist_py.proto.compressors import COMPRESSORS
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient, GraphItem, Variable
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from autodist_py.strategy_builders import base
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import StrategyBuilder, build_strategy, resolve_builder
from autodist_py.strategy_builders.mixed import Parallax
from autodist_py.strategy_builders.parameter_server import PS
from autodist_py.strategy_builders.partitioned import PartitionedAR, RandomAxisPartitionAR
from autodist_py.strategy_builders.validation import validate_strategy

ROOT = Path(__file__).resolve().parents[2]

names = st.lists(st.text("abc/_", min_size=1, max_size=6), min_size=1, max_size=12, unique=True)


def item_of(trainable, others=()):
    variables = tuple(Variable(name, "float32", (6, 4)) for name in (*others, *trainable))
    gradients = tuple(Gradient(name, (f"grad/{name}:0",)) for name in reversed(trainable))
    return GraphItem(graph_def=b"", variables=variables, gradients=gradients)


# -- AllReduce --------------------------------------------------------------------------------------------------------


@given(names=names, split=st.integers(0, 12), chunk_size=st.integers(1, 5), workers=st.integers(1, 3))
def test_all_reduce_covers_each_trainable_variable_once_in_groups_of_chunk_size(names, split, chunk_size, workers):
    trainable, others = names[:split], names[split:]
    resources = local_resource_spec(workers)
    strategy = build_strategy(AllReduce(chunk_size=chunk_size), item_of(trainable, others), resources)
    assert [node.var_name for node in strategy.node_config] == trainable
    groups = [node.synchronizers[0].group for node in strategy.node_config]
    assert groups == [index // chunk_size for index in range(len(trainable))]
    assert strategy.replicas == resources.replica_devices


def test_all_reduce_passes_its_parameters_to_each_synchronizer():
    builder = AllReduce(all_reduce_spec="RING", compressor="HorovodCompressor")
    strategy = builder.build(item_of(["w"]), local_resource_spec(2))
    assert strategy.node("w").synchronizer == AllReduceSynchronizer("RING", "HorovodCompressor", 0)


def test_all_reduce_builds_equal_bytes_under_every_hash_seed():
    code = """
from autodist_py.proto import wire
from autodist_py.proto.graph_item import GraphItem, Gradient, Variable
from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.strategy_builders.base import resolve_builder
names = [f"layer{index}/w" for index in range(40)]
item = GraphItem(
    b"", tuple(Variable(name, "float32", ()) for name in names), tuple(Gradient(name, (name + ":0",)) for name in names)
)
print(wire.to_bytes(resolve_builder("AllReduce(chunk_size=3)").build(item, local_resource_spec(3)).to_proto()).hex())
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(outputs) == 1
    assert len(outputs.pop()) > 40


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"chunk_size": 0}, "chunk_size of AllReduce must be an integer >= 1; got 0"),
        ({"chunk_size": True}, "must be an integer >= 1; got True"),
        ({"chunk_size": "8"}, "must be an integer >= 1; got '8'"),
        ({"all_reduce_spec": "ring"}, "must be one of AUTO, NCCL, RING, HOROVOD; got 'ring'"),
        ({"compressor": "Zip"}, "compressor of AllReduce: no compressor is called 'Zip'; known: 'HorovodCompressor'"),
        (
            {"timeout_seconds": -1},
            "timeout_seconds of AllReduce must be a number of seconds from 0 to 1000000000; got -1",
        ),
        ({"local": "tree"}, "local of AllReduce must be one of one_device, hierarchical, nccl; got 'tree'"),
        (
            {"local": "hierarchical", "all_reduce_spec": "RING"},
            "local of AllReduce is for AUTO and HOROVOD, .*; got local='hierarchical' with RING, by which every",
        ),
        ({"sparse_as_dense": 1}, "sparse_as_dense of AllReduce must be True, False or None; got 1"),
        (
            {"timeout_seconds": float("inf")},
            "timeout_seconds of AllReduce must be a number of seconds from 0 to 1000000000; got inf",
        ),
    ],
)
def test_all_reduce_refuses_parameters_out_of_range(parameters, message):
    with pytest.raises(StrategyError, match=message):
        AllReduce(**parameters)


@pytest.mark.parametrize("local", ["one_device", "hierarchical", "nccl"])
def test_how_a_workers_replicas_are_added_up_is_the_synchronizers(local):
    strategy = build_strategy(AllReduce(local=local), item_of(["w"]), RESOURCES)
    assert strategy.node("w").synchronizers == (AllReduceSynchronizer(local=local),)
    assert Strategy.from_proto(strategy.to_proto()) == strategy


# -- The registry -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fixed:
    strategy: Strategy | None = None
    shout: bool = False

    def build(self, item, resources):
        return self.strategy


def needs_two(first, *, second=None):
    return Fixed(shout=second)


def no_builder():
    return 3


@pytest.fixture
def this_module(monkeypatch):
    """The name under which this module can be imported by a builder's location."""
    monkeypatch.setitem(sys.modules, "some_package.builders", sys.modules[__name__])
    return "some_package.builders"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, AllReduce()),
        ("AllReduce", AllReduce()),
        (" AllReduce ( ) ", AllReduce()),
        ("AllReduce(chunk_size=32)", AllReduce(chunk_size=32)),
        ("AllReduce(chunk_size=32, all_reduce_spec='RING',)", AllReduce(chunk_size=32, all_reduce_spec="RING")),
        ("autodist_py.strategy_builders.all_reduce:AllReduce(chunk_size=2)", AllReduce(chunk_size=2)),
        (AllReduce(chunk_size=7), AllReduce(chunk_size=7)),
    ],
)
def test_a_builder_is_resolved_from_what_the_user_writes(spec, expected):
    assert resolve_builder(spec) == expected


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("True", True), ("none", None)])
def test_lower_case_constants_are_accepted(this_module, text, value):
    assert resolve_builder(f"{this_module}:Fixed(shout={text})") == Fixed(shout=value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("AllReduse", r"no strategy builder is called 'AllReduse'; did you mean 'AllReduce'\?"),
        ("Zzz", "no strategy builder is called 'Zzz'; known: 'AllReduce'"),
        ("AllReduce(chunk=32)", r"AllReduce has no parameter 'chunk'; its parameters: chunk_size: int = 128"),
        ("AllReduce(32)", "are named; write key=value"),
        ("AllReduce(**{})", "are named; write key=value"),
        ("AllReduce(chunk_size=)", "are written key=value"),
        ("AllReduce(chunk_size=1) + 1", "is written Name"),
        ("AllReduce(all_reduce_spec=RING)", "is a literal, a text in quotes, or a number of few digits; got RING"),
        (f"PS(staleness=0x{'f' * 5000})", "is a literal, .* number of few digits; got 0xffff"),
        (f"AllReduce(compressor=[{{1: 0x{'f' * 5000}}}])", "number of few digits"),
        (f"AllReduce(compressor='Int8Compressor(block=0x{'f' * 5000})')", "number of few digits"),
        ("AllReduce(chunk_size=open('x'))", "is a literal"),
        ("AllReduce(chunk_size=0)", "must be an integer >= 1"),
        ("AllReduce)(", "is written Name"),
        ("", "is written Name"),
        ("no.such.module:Builder", "cannot be imported"),
        ("..up:Builder", r"or module:Name; got '\.\.up:Builder'"),
        ("a..b:Builder", r"or module:Name; got 'a\.\.b:Builder'"),
        ("autodist_py.strategy_builders.all_reduce:AllReduc", r"has no 'AllReduc'; did you mean 'AllReduce'\?"),
        (AllReduce, r"got the class; write AllReduce\(\)"),
        (3, "has a method build"),
    ],
)
def test_what_is_no_builder_is_refused_with_what_there_is(spec, message):
    with pytest.raises(StrategyError, match=message):
        resolve_builder(spec)


def test_a_missing_argument_is_reported_for_its_builder(this_module):
    with pytest.raises(StrategyError, match=r"some_package.builders:needs_two does not accept \{\}: .*'first'"):
        resolve_builder(f"{this_module}:needs_two")


def test_a_factory_that_makes_no_builder_is_refused(this_module):
    with pytest.raises(StrategyError, match="no_builder is no strategy builder"):
        resolve_builder(f"{this_module}:no_builder")


@dataclass(frozen=True)
class Installed:
    """As much of an entry point as is used."""

    name: str
    value: str


def test_an_installed_package_adds_builders(this_module, monkeypatch):
    monkeypatch.setattr(plugins, "entry_points", lambda group: [Installed("Mine", f"{this_module}:Fixed")])
    assert resolve_builder("Mine") == Fixed()
    assert base.builder_locations()["Mine"] == f"{this_module}:Fixed"


def test_two_packages_cannot_share_a_name(monkeypatch):
    monkeypatch.setattr(plugins, "entry_points", lambda group: [Installed("AllReduce", "their.package:AllReduce")])
    with pytest.raises(StrategyError, match=r"'AllReduce' is registered for .* and 'their.package:AllReduce'"):
        resolve_builder("AllReduce")


def test_all_reduce_is_a_strategy_builder():
    builder: StrategyBuilder = AllReduce()
    assert isinstance(builder, StrategyBuilder)


# -- The rules --------------------------------------------------------------------------------------------------------

ITEM = item_of(["w", "table"], others=["count"])
RESOURCES = ResourceSpec((NodeSpec("10.0.0.1", gpus=(0,)),))
W = VariableStrategy("w", AllReduceSynchronizer())
TABLE = VariableStrategy("table", PSSynchronizer("10.0.0.1:CPU:0"), partitioner="3,1")
FITTING = Strategy((W, TABLE), ("10.0.0.1:GPU:0",))
SHARD = VariableStrategy("table/0", PSSynchronizer("10.0.0.9:CPU:0"))


def test_a_strategy_that_fits_is_accepted():
    validate_strategy(FITTING, ITEM, RESOURCES)
    last = replace(W, synchronizer=AllReduceSynchronizer(group=3))
    validate_strategy(replace(FITTING, node_config=(last, TABLE)), ITEM, RESOURCES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"node_config": (W,)}, "each variable with a gradient needs a node; missing: 'table'"),
        ({"node_config": (W, TABLE, replace(W, var_name="count"))}, "variable 'count' has a node, but no gradient"),
        ({"node_config": (W, TABLE, replace(W, var_name="ww"))}, r"variable 'ww' has a node, but no gradient"),
        ({"replicas": ("10.0.0.1:GPU:1",)}, "replica must be a device of the resources; got '10.0.0.1:GPU:1'"),
        (
            {"node_config": (W, replace(TABLE, synchronizer=PSSynchronizer("10.0.0.9:CPU:0")))},
            "reduction_destination of variable 'table' must be a device .* got '10.0.0.9:CPU:0'",
        ),
        (
            {"node_config": (W, replace(TABLE, partitioner="2,1", part_config=(SHARD, SHARD)))},
            "reduction_destination of variable 'table' must be a device",
        ),
        ({"node_config": (W, replace(TABLE, partitioner="3"))}, r"'table' has shape \(6, 4\); got '3'"),
        ({"node_config": (W, replace(TABLE, partitioner="1,5"))}, r"'table' has shape \(6, 4\); got '1,5'"),
        (
            {"node_config": (replace(W, synchronizer=AllReduceSynchronizer(group=4)), TABLE)},
            "each variable or shard, of which this strategy has 4; got group 4 for variable 'w'",
        ),
        (
            {"node_config": (W, replace(TABLE, synchronizer=PSSynchronizer("10.0.0.1:CPU:0", group=99)))},
            "got group 99 for variable 'table'",
        ),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused_by_the_builders_name(change, message):
    with pytest.raises(StrategyError, match=f"strategy builder Fixed: .*{message}"):
        build_strategy(Fixed(replace(FITTING, **change)), ITEM, RESOURCES)


@pytest.mark.parametrize("name", ["PowerSGDCompressor", "TopKCompressor", "Int8Compressor"])
def test_rows_are_compressed_by_rounding_alone(name):
    item = replace(item_of(["table"]), gradients=(Gradient("table", ("i:0", "v:0", "s:0")),))
    with pytest.raises(StrategyError, match=f"'table' has a sparse gradient, which {name} cannot compress; use Horo"):
        build_strategy(AllReduce(compressor=name), item, RESOURCES)
    build_strategy(AllReduce(compressor="HorovodCompressorEF"), item, RESOURCES)
    with pytest.raises(StrategyError, match=f"'table' has a sparse gradient, which {name} cannot compress; use Horo"):
        build_strategy(AllReduce(compressor=name, sparse_as_dense=False), item, RESOURCES)
    build_strategy(AllReduce(compressor=name, sparse_as_dense=True), item, RESOURCES)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"compressor": "PowerSGDCompressor"},
            "a server is sent each worker's gradient by itself; PS got comp",
        ),
        (
            {"compressor": "Int8Compressor", "replicas_to_aggregate": 1},
            "late gradients are dropped .* PS got rep",
        ),
    ],
)
def test_what_servers_cannot_compress_is_refused(parameters, message):
    with pytest.raises(StrategyError, match=message):
        PS(**parameters)


@pytest.mark.parametrize("name", [name for name in COMPRESSORS if name != "NoneCompressor"])
def test_integers_are_not_compressed(name):
    item = item_of(["w"])
    item = replace(item, variables=(replace(item.variable("w"), dtype="int32"),))
    with pytest.raises(StrategyError, match=f"codes floats; variable 'w' is of type int32; got {name}; use None"):
        build_strategy(AllReduce(compressor=name), item, RESOURCES)
    build_strategy(AllReduce(), item, RESOURCES)


@pytest.mark.parametrize("builder", [AllReduce, Parallax, PartitionedAR, RandomAxisPartitionAR])
def test_what_collectives_are_told_is_a_parameter_of_all_builders_that_use_them(builder):
    given = {
        "all_reduce_spec": "RING",
        "compressor": "Int8Compressor",
        "bytes_per_pack": 1 << 20,
        "timeout_seconds": 2.5,
    }
    strategy = build_strategy(builder(**given), item_of(["w"]), RESOURCES)
    assert strategy.timeout_seconds == 2.5
    for one in strategy.node("w").synchronizers:
        assert one == AllReduceSynchronizer("RING", "Int8Compressor", one.group, 1 << 20, 2.5)


@pytest.mark.parametrize("builder", [AllReduce, PartitionedAR, RandomAxisPartitionAR])
@pytest.mark.parametrize("as_dense", [None, True, False])
def test_whether_sparse_gradients_travel_as_dense_is_a_parameter_of_builders_that_reduce_them(builder, as_dense):
    strategy = build_strategy(builder(sparse_as_dense=as_dense), item_of(["w"]), RESOURCES)
    assert strategy.node("w").synchronizers == (AllReduceSynchronizer(sparse_as_dense=as_dense),)


@pytest.mark.parametrize("builder", [AllReduce, Parallax, PartitionedAR, RandomAxisPartitionAR])
@pytest.mark.parametrize(
    ("compressor", "message"),
    [
        ("PowerSGDCompressor(rank=0)", "rank of PowerSGDCompressor must be an integer >= 1; got 0"),
        ("TopKCompressor(ratio=2)", "ratio of TopKCompressor is more than 0 and at most 1; got 2"),
        ("Zip", "no compressor is called 'Zip'; known: 'HorovodCompressor', .*, 'TopKCompressor'"),
    ],
)
def test_a_wrong_compressor_is_refused_where_it_is_given(builder, compressor, message):
    with pytest.raises(StrategyError, match=message):
        builder(compressor=compressor)
