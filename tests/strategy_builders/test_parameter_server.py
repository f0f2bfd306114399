"""The builders PS and PSLoadBalancing: what they say, where they place, and what they refuse."""

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
from autodist_py.strategy_builders.parameter_server import PS, PSLoadBalancing


def item_of(sizes, update_ops=None):
    variables = tuple(
        Variable(f"v{number}", "float32", (size,), update_ops=(update_ops or {}).get(number, (f"u{number}",)))
        for number, size in enumerate(sizes)
    )
    gradients = tuple(Gradient(variable.name, (f"g/{variable.name}:0",)) for variable in variables)
    return GraphItem(graph_def=b"", variables=variables, gradients=gradients)


def server_of(node):
    (synchronizer,) = node.synchronizers
    assert isinstance(synchronizer, PSSynchronizer)
    return synchronizer.reduction_destination


def loads(strategy, item):
    found: dict[str, int] = {}
    for node in strategy.node_config:
        server = server_of(node)
        found[server] = found.get(server, 0) + item.variable(node.var_name).nbytes
    return found


def test_ps_puts_everything_on_the_chiefs_first_cpu():
    resources = ResourceSpec((NodeSpec("10.0.0.2", cpus=(2, 3)), NodeSpec("10.0.0.1", cpus=(1,), chief=True)))
    strategy = build_strategy(PS(local_proxy_variable=True, staleness=3), item_of([4, 2]), resources)
    synchronizers = {node.synchronizer for node in strategy.node_config}
    assert synchronizers == {PSSynchronizer("10.0.0.1:CPU:0", local_replication=True, staleness=3)}
    assert strategy.consistency == Consistency(staleness=3)


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=30), workers=st.integers(1, 5))
def test_load_balancing_is_deterministic_and_no_server_has_much_more_than_another(sizes, workers):
    item, resources = item_of(sizes), local_resource_spec(workers)
    strategy = build_strategy(PSLoadBalancing(), item, resources)
    assert strategy == build_strategy(PSLoadBalancing(), item, resources)
    assert [node.var_name for node in strategy.node_config] == [variable.name for variable in item.trainable_variables]
    by_server = loads(strategy, item)
    assert len(by_server) == min(workers, len(sizes))
    spread = [by_server.get(f"{node.address}:CPU:0", 0) for node in resources.workers]
    assert max(spread) - min(spread) <= 4 * max(sizes)


def test_load_balancing_takes_the_largest_first_and_fills_the_chief_first():
    strategy = build_strategy(PSLoadBalancing(), item_of([1, 9, 5, 5]), local_resource_spec(2))
    chief, other = (f"{node.address}:CPU:0" for node in local_resource_spec(2).workers)
    placed = [server_of(node) for node in strategy.node_config]
    assert placed == [chief, chief, other, other]


def test_variables_that_one_op_updates_are_placed_together():
    item = item_of([8, 6, 7, 1], {0: ("if",), 2: ("if", "u2"), 3: ("u2",)})
    strategy = build_strategy(PSLoadBalancing(), item, local_resource_spec(2))
    placed = {node.var_name: server_of(node) for node in strategy.node_config}
    assert placed["v0"] == placed["v2"] == placed["v3"] != placed["v1"]


@pytest.mark.parametrize("name", ["PS", "PSLoadBalancing"])
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("staleness=-1", r"staleness of {} must be an integer >= 0; got -1"),
        ("staleness=1.5", r"staleness of {} must be an integer >= 0; got 1.5"),
        ("replicas_to_aggregate=0", r"replicas_to_aggregate of {} must be an integer >= 1; got 0"),
        ("replicas_to_aggregate=True", r"replicas_to_aggregate of {} must be an integer >= 1; got True"),
        ("sync=False, staleness=2", r"with sync=False nothing bounds it; {} got staleness=2. Leave one of the two out"),
        ("sync=False, replicas_to_aggregate=2", r"{} got replicas_to_aggregate=2. Leave one of the two out"),
        ("staleness=1, replicas_to_aggregate=2", r"{} got staleness=1, replicas_to_aggregate=2. Leave one of"),
    ],
)
def test_parameters_that_no_server_can_keep_are_refused(name, parameters, message):
    with pytest.raises(StrategyError, match=message.format(name)):
        resolve_builder(f"{name}({parameters})")


class Given:
    """Builds what it is given."""

    def __init__(self, *synchronizers):
        self.synchronizers = synchronizers

    def build(self, item, resources):
        nodes = [
            VariableStrategy(variable.name, synchronizer)
            for variable, synchronizer in zip(item.trainable_variables, self.synchronizers, strict=True)
        ]
        return Strategy(node_config=tuple(nodes), replicas=resources.replica_devices)


@pytest.mark.parametrize(
    "other",
    [AllReduceSynchronizer(), PSSynchronizer("127.0.0.1:CPU:0"), PSSynchronizer("127.0.0.1:CPU:0", staleness=2)],
)
def test_variables_of_several_paces_are_refused(other):
    builder = Given(PSSynchronizer("127.0.0.1:CPU:0", sync=False), other)
    with pytest.raises(StrategyError, match=r"all have the same sync, staleness and .* Variable 'v0' has .* 'v1'"):
        build_strategy(builder, item_of([1, 2]), local_resource_spec(2))


def test_a_server_that_is_not_in_the_spec_is_refused():
    with pytest.raises(StrategyError, match=r"reduction_destination of variable 'v0' must be a device of the resour"):
        build_strategy(Given(PSSynchronizer("10.1.1.1:CPU:0")), item_of([1]), local_resource_spec(2))
