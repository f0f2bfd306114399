"""`aggregating`: a strategy for a program that says itself how many gradients an update waits for."""

from dataclasses import replace

from autodist_py.proto.compressors import text_of
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import PSSynchronizer


def aggregating(strategy: Strategy, item: GraphItem, resources: ResourceSpec) -> Strategy:
    """`strategy`, by which servers wait for as many gradients as the item says; itself, where the item says nothing.

    What it all-reduces goes to the chief's server, as `PS` has it: collectives wait for every worker.

    Raises:
        StrategyError: it cuts a variable into shards, compresses, or says something else of when workers wait.
    """
    if not item.replicas_to_aggregate:
        return strategy
    nodes = tuple(_aggregating(node, item, resources) for node in strategy.node_config)
    return replace(strategy, node_config=nodes)


def _aggregating(node: VariableStrategy, item: GraphItem, resources: ResourceSpec) -> VariableStrategy:
    wanted = item.replicas_to_aggregate
    one = node.synchronizer
    if node.part_config or one is None:
        raise StrategyError(
            f"SyncReplicasOptimizer updates whole variables, and {node.var_name!r} is cut into shards. Use PS()"
        )
    server = one.as_ps or PSSynchronizer(resources.server_devices[0], compressor=one.compressor)
    if not server.compressor.passes_through:
        raise StrategyError(
            "SyncReplicasOptimizer averages what workers send, and drops what is late with what a compressor held "
            f"back; {node.var_name!r} has the compressor {text_of(server.compressor)!r}. Leave it out"
        )
    if not server.sync or server.staleness or server.replicas_to_aggregate not in (0, wanted):
        raise StrategyError(
            f"SyncReplicasOptimizer says that an update waits for {wanted} gradients; the strategy says "
            f"sync={server.sync}, staleness={server.staleness}, replicas_to_aggregate={server.replicas_to_aggregate} "
            f"of {node.var_name!r}. Leave that out of the strategy"
        )
    served = replace(server, replicas_to_aggregate=wanted, first_tokens=item.first_tokens)
    return replace(node, synchronizer=served)
