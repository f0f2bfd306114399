"""A strategy builder of somebody else's: small variables by AllReduce, large ones on servers in turns."""

from dataclasses import dataclass

from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer


@dataclass(frozen=True, slots=True)
class SplitBySize:
    """Variables of `threshold` bytes and more live on servers, in turns; the others on every worker.

    Raises:
        StrategyError: the threshold is negative.
    """

    threshold: int = 1 << 20

    def __post_init__(self) -> None:
        if self.threshold < 0:
            raise StrategyError(f"threshold of SplitBySize is a number of bytes >= 0; got {self.threshold!r}")

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """The large variables go round the servers in the order of their names."""
        large = sorted(one.name for one in item.trainable_variables if one.nbytes >= self.threshold)
        servers = resources.server_devices
        directory = {name: servers[number % len(servers)] for number, name in enumerate(large)}
        nodes = tuple(
            VariableStrategy(
                one.name, PSSynchronizer(directory[one.name]) if one.name in directory else AllReduceSynchronizer()
            )
            for one in item.trainable_variables
        )
        return Strategy(node_config=nodes, replicas=resources.replica_devices)
