"""Parallax, PerVariable and FromFile: which builder has which variable, and what they refuse."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient, GraphItem, Variable
from autodist_py.proto.strategy import Strategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import build_strategy, resolve_builder
from autodist_py.strategy_builders.from_file import FromFile
from autodist_py.strategy_builders.mixed import Parallax, PerVariable
from autodist_py.strategy_builders.parameter_server import PS, PSLoadBalancing


def item_of(sizes, sparse=()):
    """Variables v0, v1, ... of so many rows; the gradients of some are sparse."""
    variables = tuple(
        Variable(f"v{number}", "float32", (size, 2), update_ops=(f"u{number}",)) for number, size in enumerate(sizes)
    )
    gradients = tuple(
        Gradient(one.name, tuple(f"g/{one.name}/{part}:0" for part in range(3 if number in sparse else 1)))
        for number, one in enumerate(variables)
    )
    return GraphItem(graph_def=b"", variables=variables, gradients=gradients)


def groups_of(nodes):
    return [synchronizer.group for node in nodes for synchronizer in node.synchronizers]


sized = st.lists(st.tuples(st.integers(1, 1000), st.booleans()), min_size=1, max_size=20)


@given(sized=sized, workers=st.integers(1, 4), chunk_size=st.integers(1, 4))
def test_parallax_is_all_reduce_of_the_dense_and_balanced_servers_of_the_sparse(sized, workers, chunk_size):
    sparse = {number for number, (_, is_sparse) in enumerate(sized) if is_sparse}
    item, resources = item_of([size for size, _ in sized], sparse), local_resource_spec(workers)
    strategy = build_strategy(Parallax(chunk_size), item, resources)
    assert strategy == build_strategy(Parallax(chunk_size), item, resources)
    assert [node.var_name for node in strategy.node_config] == [one.name for one in item.variables]
    tables = [node for number, node in enumerate(strategy.node_config) if number in sparse]
    others = [node for number, node in enumerate(strategy.node_config) if number not in sparse]
    assert groups_of(others) == [index // chunk_size for index in range(len(others))]
    alone = replace(item, gradients=tuple(gradient for gradient in item.gradients if gradient.is_sparse))
    balanced = PSLoadBalancing().build(alone, resources)
    assert [node.synchronizer for node in tables] == [node.synchronizer for node in balanced.node_config]


def test_parallax_passes_its_parameters_on():
    builder = Parallax(3, local_proxy_variable=True, all_reduce_spec="RING", compressor="HorovodCompressor")
    dense, table = build_strategy(builder, item_of([4, 4], {1}), local_resource_spec(2)).node_config
    assert dense.synchronizer == AllReduceSynchronizer("RING", "HorovodCompressor", 0)
    assert table.synchronizer == PSSynchronizer("127.0.0.1:CPU:0", local_replication=True)


def test_parallax_without_dense_gradients_may_be_asynchronous():
    assert not build_strategy(Parallax(sync=False), item_of([4], {0}), local_resource_spec(2)).consistency.sync
    with pytest.raises(StrategyError, match=r"builder Parallax: a worker takes its steps for all variables at once"):
        build_strategy(Parallax(sync=False), item_of([4, 4], {0}), local_resource_spec(2))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"chunk_size": 0}, "chunk_size of AllReduce must be an integer >= 1; got 0"),
        ({"staleness": -1}, "staleness of PSLoadBalancing must be an integer >= 0; got -1"),
        ({"sync": False, "staleness": 1}, "nothing bounds it"),
        ({"compressor": "Zip"}, "no compressor is called 'Zip'"),
    ],
)
def test_parallax_refuses_parameters_out_of_range(parameters, message):
    with pytest.raises(StrategyError, match=message):
        Parallax(**parameters)


def test_each_variable_has_the_first_builder_that_its_name_matches():
    builder = PerVariable(
        {"v[02]": PS(), "v2": AllReduce(), "v1*": "AllReduce(chunk_size=1)"}, default=PSLoadBalancing()
    )
    strategy = build_strategy(builder, item_of([8] * 4), local_resource_spec(2))
    kinds = {node.var_name: node.synchronizer for node in strategy.node_config}
    assert list(kinds) == ["v0", "v1", "v2", "v3"]
    assert kinds["v0"] == kinds["v2"] == kinds["v3"] == PSSynchronizer("127.0.0.1:CPU:0")
    assert isinstance(kinds["v1"], AllReduceSynchronizer)


def test_groups_of_two_builders_are_not_reduced_together():
    builder = PerVariable({"v[01]": AllReduce(chunk_size=1)}, default=AllReduce())
    strategy = build_strategy(builder, item_of([8] * 4), local_resource_spec(2))
    assert groups_of(strategy.node_config) == [0, 1, 2, 2]


def test_a_builder_balances_its_own_variables_only():
    strategy = build_strategy(
        PerVariable({"v0": PS()}, default=PSLoadBalancing()), item_of([100, 8, 8]), local_resource_spec(2)
    )
    servers = [PSSynchronizer(f"127.0.0.{number}:CPU:0") for number in (1, 1, 2)]
    assert [node.synchronizer for node in strategy.node_config] == servers


def test_builders_by_pattern_can_be_written_as_text():
    builder = resolve_builder("PerVariable(builders={'v0': 'PS(staleness=0)'}, default='AllReduce(chunk_size=2)')")
    same = PerVariable({"v0": "PS(staleness=0)"}, default="AllReduce(chunk_size=2)")
    assert builder == same
    assert hash(builder) == hash(same)
    dense = build_strategy(builder, item_of([8, 8]), local_resource_spec(2)).node("v1")
    assert isinstance(dense.synchronizer, AllReduceSynchronizer)


class OnFirst:
    """All replicas on the first worker."""

    def build(self, item, resources):
        return Strategy(AllReduce().build(item, resources).node_config, resources.replica_devices[:1])


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (PerVariable({"v00": PS()}), r"PerVariable: pattern 'v00' matches no variable; did you mean 'v0'"),
        (PerVariable({"table*": PS()}), r"pattern 'table\*' matches no variable; known: 'v0', 'v1'"),
        (PerVariable({"v0": OnFirst()}), "same replicas; OnFirst has 127.0.0.1:CPU:0, AllReduce 127.0.0.1:CPU:0, 127"),
    ],
)
def test_what_fits_no_variable_or_no_other_builder_is_refused(builder, message):
    with pytest.raises(StrategyError, match=message):
        build_strategy(builder, item_of([8, 8]), local_resource_spec(2))


@pytest.mark.parametrize("builders", [{}, None, PS(), {"v*": object()}])
def test_what_is_no_builder_is_refused(builders):
    with pytest.raises(
        StrategyError, match=r"PerVariable is given builders by patterns|a strategy builder has a method"
    ):
        PerVariable(builders)


@pytest.mark.parametrize("suffix", ["json", "pb"])
def test_a_saved_strategy_is_built_again(tmp_path, suffix):
    item, resources = item_of([8, 4]), local_resource_spec(2)
    saved = build_strategy(PSLoadBalancing(), item, resources).save(tmp_path / f"strategy.{suffix}")
    built = build_strategy(resolve_builder(f"FromFile(path='{tmp_path}/strategy.{suffix}')"), item, resources)
    assert built.id == saved.id
    assert built == saved


def test_a_saved_strategy_is_checked_against_the_graph_and_the_resources(tmp_path):
    path = tmp_path / "strategy.json"
    build_strategy(PSLoadBalancing(), item_of([8, 4]), local_resource_spec(2)).save(path)
    with pytest.raises(StrategyError, match=r"builder FromFile: each variable with a gradient needs a node.*'v2'"):
        build_strategy(FromFile(path), item_of([8, 4, 4]), local_resource_spec(2))
    with pytest.raises(StrategyError, match=r"builder FromFile: .*must be a device of the resources; got '127.0.0.2"):
        build_strategy(FromFile(path), item_of([8, 4]), local_resource_spec(1))
    with pytest.raises(StrategyError, match=r"builder FromFile: .*other.json"):
        build_strategy(FromFile(tmp_path / "other.json"), item_of([8, 4]), local_resource_spec(1))
