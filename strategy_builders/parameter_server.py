"""Builders whose variables live on servers, with their optimizer state and their update: PS and PSLoadBalancing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import networkx as nx

from autodist_py.proto.arguments import check_fields
from autodist_py.proto.compressors import Compressor, compressor_of, text_of
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import GraphItem, Variable
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import PSSynchronizer
from autodist_py.proto.text import shown


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the builders whose variables live on servers have in common.

    Attributes:
        local_proxy_variable: workers read a copy of each variable, which is refreshed after each update.
        sync: a step's gradients are applied together; else each worker's as it arrives.
        staleness: how many steps a worker may be ahead of the slowest one; needs `sync`.
        replicas_to_aggregate: how many workers' gradients an update waits for; None: those of all.
        compressor: how gradients are coded on their way to a server, as for AllReduce.

    Raises:
        StrategyError: a parameter is out of its range, or contradicts another.
    """

    local_proxy_variable: bool = False
    sync: bool = True
    staleness: int = 0
    replicas_to_aggregate: int | None = None
    compressor: Compressor | str = "NoneCompressor"

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_parameters(name, self.sync, self.staleness, self.replicas_to_aggregate)
        check_fields(self, error=StrategyError, but=("compressor",))
        compressor = compressor_of(self.compressor, f"compressor of {name}")
        object.__setattr__(self, "compressor", compressor)
        if compressor.gives_up and self.replicas_to_aggregate is not None:
            raise StrategyError(
                "late gradients are dropped under replicas_to_aggregate, with what a compressor held back for them; "
                f"{name} got replicas_to_aggregate={self.replicas_to_aggregate}, compressor={text_of(compressor)!r}. "
                "Leave one of the two out"
            )
        if compressor.sums_first:
            raise StrategyError(
                f"a server is sent each worker's gradient by itself; {name} got compressor={text_of(compressor)!r}, "
                "which needs a sum over workers before. Use another one, or AllReduce"
            )

    def synchronizer(self, server: str) -> PSSynchronizer:
        """That of a variable which lives on the server."""
        return PSSynchronizer(
            server,
            local_replication=self.local_proxy_variable,
            sync=self.sync,
            staleness=self.staleness,
            replicas_to_aggregate=self.replicas_to_aggregate or 0,
            compressor=self.compressor,
        )


@dataclass(frozen=True, slots=True)
class PS(ServerOptions):
    """One server, the chief's CPU, for all trainable variables. Its parameters: see `ServerOptions`."""

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """All on the first CPU of the chief."""
        destination = resources.server_devices[0]
        return _strategy(self, item, resources, {variable.name: destination for variable in item.trainable_variables})


@dataclass(frozen=True, slots=True)
class PSLoadBalancing(ServerOptions):
    """A server on every node, its first CPU: the largest variable goes first, to the server with the fewest bytes.

    Variables that one op updates (as gradient accumulation does) are placed together. Its parameters: see
    `ServerOptions`.
    """

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """Equal sizes are placed by name, and equally loaded servers filled in the order of the nodes."""
        loads = dict.fromkeys(resources.server_devices, 0)
        placed: dict[str, str] = {}
        for together in sorted(updated_together(item), key=lambda group: (-_nbytes(group), group[0].name)):
            server = min(loads, key=loads.__getitem__)
            loads[server] += _nbytes(together)
            placed |= {variable.name: server for variable in together}
        return _strategy(self, item, resources, placed)


def _nbytes(variables: Iterable[Variable]) -> int:
    return sum(variable.nbytes for variable in variables)


def updated_together(item: GraphItem) -> list[list[Variable]]:
    """The trainable variables, those together that an op updates together."""
    graph: nx.Graph[str] = nx.Graph()
    for variable in item.trainable_variables:
        graph.add_edges_from((variable.name, f"^{op}") for op in variable.update_ops)
        graph.add_node(variable.name)
    variables = {variable.name: variable for variable in item.trainable_variables}
    groups = (component & variables.keys() for component in nx.connected_components(graph))
    return [[variables[name] for name in sorted(group)] for group in groups]


def _strategy(builder: ServerOptions, item: GraphItem, resources: ResourceSpec, servers: Mapping[str, str]) -> Strategy:
    return Strategy(
        node_config=tuple(
            VariableStrategy(variable.name, builder.synchronizer(servers[variable.name]))
            for variable in item.trainable_variables
        ),
        replicas=resources.replica_devices,
    )


def check_parameters(builder: str, sync: bool, staleness: int, replicas_to_aggregate: int | None) -> None:
    """Refuse what no parameter server can do.

    Raises:
        StrategyError: the parameter, and its value.
    """
    for name, value, least in (("staleness", staleness, 0), ("replicas_to_aggregate", replicas_to_aggregate, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise StrategyError(f"{name} of {builder} must be an integer >= {least}; got {shown(value)}")
    if not isinstance(sync, bool):
        raise StrategyError(f"sync of {builder} must be True or False; got {shown(sync)}")
    if not sync and staleness:
        raise StrategyError(
            f"staleness bounds how far workers may be apart, and with sync=False nothing bounds it; "
            f"{builder} got staleness={staleness}. Leave one of the two out"
        )
    if staleness and replicas_to_aggregate is not None:
        raise StrategyError(
            f"with a staleness each gradient is applied as it arrives, so that no update waits for several; {builder} "
            f"got staleness={staleness}, replicas_to_aggregate={replicas_to_aggregate}. Leave one of the two out"
        )
    if not sync and replicas_to_aggregate is not None:
        raise StrategyError(
            f"with sync=False each gradient is applied as it arrives, so that no update waits for several; "
            f"{builder} got replicas_to_aggregate={replicas_to_aggregate}. Leave one of the two out"
        )
