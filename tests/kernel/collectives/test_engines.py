"""What AUTO stands for, by devices, links and bytes; the runs that rest on it are in test_horovod.py."""

from collections.abc import Sequence

import pytest

from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.kernel.collectives.engines import Engine, automatic_engine, has_automatic, with_engine
from autodist_py.proto.graph_item import Gradient, GraphItem, Variable
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer, Synchronizer
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import StrategyBuilder, build_strategy
from autodist_py.strategy_builders.mixed import Parallax
from autodist_py.strategy_builders.parameter_server import PSLoadBalancing
from autodist_py.strategy_builders.partitioned import PartitionedAR

LARGE, SMALL = (2000, 1000), (1999, 1000)
"""Of float32: as many bytes as Horovod is worth, and 4,000 fewer."""

LOCAL = local_resource_spec(2)


def item_of(*shapes: tuple[int, ...], dtype: str = "float32", is_sparse: bool = False) -> GraphItem:
    """One variable per shape, and its gradient."""
    variables = [Variable(f"w{number}", dtype, shape) for number, shape in enumerate(shapes)]
    kinds = ("i", "v", "s") if is_sparse else ("g",)
    gradients = [Gradient(one.name, tuple(f"{one.name}/{kind}:0" for kind in kinds)) for one in variables]
    return GraphItem(graph_def=b"", variables=tuple(variables), gradients=tuple(gradients))


def hosts(*bandwidths: float) -> ResourceSpec:
    return ResourceSpec(
        tuple(
            NodeSpec(f"10.0.0.{number}", chief=not number, network_bandwidth=bandwidth)
            for number, bandwidth in enumerate(bandwidths)
        )
    )


def engine(item: GraphItem, resources: ResourceSpec, builder: StrategyBuilder | None = None) -> str:
    return automatic_engine(item, build_strategy(builder or AllReduce(), item, resources), resources)


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        (LOCAL, "HOROVOD"),
        (local_resource_spec(2, 3), "HOROVOD"),
        (hosts(10.0, 2.5, 100.0), "HOROVOD"),
        (hosts(10.0, 1.0, 100.0), "RING"),
        (hosts(0.2, 10.0), "RING"),
        (ResourceSpec((NodeSpec("10.0.0.1", chief=True), NodeSpec("10.0.0.2"))), "RING"),
        (local_resource_spec(1, 4), "RING"),
    ],
    ids=["one-host", "replicas", "fast", "one-slow", "slow", "not-stated", "one-worker"],
)
def test_the_slowest_link_tells_whether_many_bytes_are_worth_horovod(resources: ResourceSpec, expected: str) -> None:
    assert engine(item_of(LARGE), resources) == expected
    assert engine(item_of(SMALL), resources) == "RING"


def test_what_counts_is_the_sum_over_all_gradients_of_a_step() -> None:
    assert engine(item_of((1000, 1000), (999, 1000)), LOCAL) == "RING"
    assert engine(item_of((1000, 1000), (999, 1000), (1000,)), LOCAL) == "HOROVOD"
    assert engine(item_of((1000, 1000), (1000, 1000)), LOCAL, PartitionedAR()) == "HOROVOD"
    assert engine(item_of((1000, 1000), (999, 1000)), LOCAL, PartitionedAR()) == "RING"


@pytest.mark.parametrize(
    ("item", "builder"),
    [
        (item_of(LARGE, is_sparse=True), AllReduce()),
        (item_of(LARGE, is_sparse=True), Parallax()),
        (item_of(LARGE), PSLoadBalancing()),
        (item_of(LARGE), AllReduce(all_reduce_spec="RING")),
        (item_of(LARGE), AllReduce(all_reduce_spec="HOROVOD")),
        (item_of((3999, 1000)), AllReduce(compressor="HorovodCompressor")),
        (item_of((9000, 1000)), AllReduce(compressor="HorovodCompressor(dtype='bfloat16')")),
        (item_of((9000, 1000)), AllReduce(compressor="examples.plugin.brief:Brief")),
        (item_of((9000, 1000), dtype="bfloat16"), AllReduce()),
        (item_of((9000, 1000)), AllReduce(compressor="Int8Compressor")),
        (item_of((9000, 1000)), AllReduce(compressor="PowerSGDCompressor")),
    ],
    ids=[
        "rows",
        "rows-on-servers",
        "servers",
        "ring",
        "named",
        "half",
        "bfloat16",
        "bfloat16-of-a-plug-in",
        "of-bfloat16",
        "gathered",
        "narrow",
    ],
)
def test_only_bytes_that_horovod_would_sum_up_in_the_place_of_auto_count(
    item: GraphItem, builder: StrategyBuilder
) -> None:
    assert engine(item, LOCAL, builder) == "RING"


def test_half_of_the_bytes_may_be_enough() -> None:
    assert engine(item_of((4000, 1000)), LOCAL, AllReduce(compressor="HorovodCompressor")) == "HOROVOD"


def with_gpus(*gpus: Sequence[int]) -> ResourceSpec:
    return ResourceSpec(
        tuple(NodeSpec(f"10.0.0.{number}", tuple(own), chief=not number) for number, own in enumerate(gpus))
    )


def test_gpus_use_nccl_where_there_is_nothing_else() -> None:
    for shape in (LARGE, (3,)):
        assert engine(item_of(shape), with_gpus([0], [0, 1])) == "NCCL"
        assert engine(item_of(shape), with_gpus([0, 1])) == "NCCL"
        assert engine(item_of(shape), with_gpus([0])) == "RING"
        assert engine(item_of(shape), with_gpus([0], [])) == "RING"


def test_workers_of_one_machine_on_the_same_gpu_do_not_use_nccl() -> None:
    """It refuses two members on one card."""
    nodes = [NodeSpec(f"127.0.0.{number}", (gpu,), chief=number == 1) for number, gpu in ((1, 0), (2, 0))]
    assert engine(item_of(SMALL), ResourceSpec(tuple(nodes))) == "RING"
    apart = ResourceSpec((nodes[0], NodeSpec("127.0.0.2", (1,))))
    assert engine(item_of(SMALL), apart) == "NCCL"


def test_a_worker_that_only_serves_keeps_the_others_from_nccl() -> None:
    resources, synchronizer = with_gpus([0, 1], [0]), AllReduceSynchronizer()
    everywhere = Strategy((VariableStrategy("w0", synchronizer),), resources.replica_devices)
    of_the_chief = Strategy((VariableStrategy("w0", synchronizer),), ("10.0.0.0:GPU:0", "10.0.0.0:GPU:1"))
    assert automatic_engine(item_of((3,)), everywhere, resources) == "NCCL"
    assert automatic_engine(item_of((3,)), of_the_chief, resources) == "RING"


# -- The strategy that is compiled -------------------------------------------------------------------------------------


def strategy_of(*synchronizers: Synchronizer) -> Strategy:
    """The last one is of a variable in two shards, and in force also where it cannot be cut."""
    item = item_of(*[(4, 2)] * len(synchronizers))
    nodes = [VariableStrategy(one.name, own) for one, own in zip(item.variables, synchronizers, strict=True)]
    parts = [synchronizers[-1]] * 2
    nodes[-1] = VariableStrategy.partitioned(item.variables[-1], 0, parts, whole=synchronizers[-1])
    return Strategy(tuple(nodes), LOCAL.replica_devices)


def test_an_engine_stands_in_the_place_of_auto_and_of_nothing_else() -> None:
    server = PSSynchronizer("127.0.0.1:CPU:0")
    kept: list[Synchronizer] = [AllReduceSynchronizer("RING"), server, AllReduceSynchronizer("HOROVOD", group=1)]
    strategy = strategy_of(*kept, AllReduceSynchronizer("AUTO", group=2, bytes_per_pack=64))
    asked = strategy_of(*kept, AllReduceSynchronizer("HOROVOD", group=2, bytes_per_pack=64))
    item = item_of(*[(4, 2)] * 4)
    assert with_engine(strategy, item, "HOROVOD") == asked
    assert with_engine(strategy, item, "RING") == strategy
    assert has_automatic(strategy)
    assert not has_automatic(asked)


def test_auto_stays_where_gradients_are_gathered_and_not_summed() -> None:
    strategy = strategy_of(AllReduceSynchronizer(compressor="Int8Compressor"))
    engines: tuple[Engine, ...] = ("HOROVOD", "NCCL")
    for other in engines:
        assert with_engine(strategy, item_of((4, 2)), other) == strategy


def test_auto_stays_where_horovod_does_not_carry_the_type() -> None:
    item = item_of((4, 2), dtype="bfloat16")
    for own in ("NoneCompressor", "HorovodCompressor"):
        strategy = strategy_of(AllReduceSynchronizer(compressor=own))
        assert with_engine(strategy, item, "HOROVOD") == strategy
    strategy = strategy_of(AllReduceSynchronizer(compressor="PowerSGDCompressor"))  # Its factors are of float32.
    assert with_engine(strategy, item, "HOROVOD") != strategy
    strategy = strategy_of(AllReduceSynchronizer(compressor="HorovodCompressor(dtype='bfloat16')"))
    assert with_engine(strategy, item_of((4, 2)), "HOROVOD") == strategy
    assert with_engine(strategy, item_of((4, 2), dtype="float16"), "HOROVOD") != strategy


def test_nccl_stands_in_the_place_of_auto_for_what_horovod_alone_does_not_carry() -> None:
    asked = strategy_of(AllReduceSynchronizer("NCCL"))
    assert with_engine(strategy_of(AllReduceSynchronizer()), item_of((4, 2), dtype="bfloat16"), "NCCL") == asked


def test_auto_is_not_nccl_where_replicas_are_to_be_added_up_before() -> None:
    strategy = strategy_of(AllReduceSynchronizer(local="hierarchical"))
    assert with_engine(strategy, item_of((4, 2)), "NCCL") == strategy
    assert with_engine(strategy, item_of((4, 2)), "HOROVOD") != strategy


@pytest.mark.parametrize(("sparse_as_dense", "expected"), [(True, "HOROVOD"), (False, "RING"), (None, "RING")])
def test_rows_that_are_to_travel_as_dense_gradients_count_as_such(sparse_as_dense: bool | None, expected: str) -> None:
    builder = AllReduce(sparse_as_dense=sparse_as_dense)
    assert engine(item_of(LARGE, is_sparse=True), LOCAL, builder) == expected
