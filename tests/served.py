"""Strategies whose variables live on servers, by name, for the tests that compare them with one device."""

from dataclasses import dataclass

from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import AllReduceSynchronizer, Node, PSSynchronizer, Strategy
from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.parameter_server import PS, PSLoadBalancing


@dataclass(frozen=True, slots=True)
class Spread:
    """The trainable variables go round `places`: ranks of servers (the last worker's for one that is none), or None."""

    places: tuple[int | None, ...]
    sync: bool = True

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """None: the variable is reduced by collectives."""
        nodes = []
        for index, variable in enumerate(item.trainable_variables):
            rank = self.places[index % len(self.places)]
            if rank is None:
                nodes.append(Node(variable.name, AllReduceSynchronizer()))
            else:
                server = resources.workers[min(rank, len(resources.workers) - 1)]
                nodes.append(Node(variable.name, PSSynchronizer(f"{server.address}:CPU:0", sync=self.sync)))
        return Strategy(node_config=tuple(nodes), replicas=resources.replica_devices)


STRATEGIES: dict[str, StrategyBuilder] = {
    "one-server": PS(),
    "balanced": PSLoadBalancing(local_proxy_variable=True),
    "elsewhere": Spread((2,)),
    "mixed": Spread((1, None, 0)),
}
