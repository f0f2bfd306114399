"""What `all_reduce_spec="AUTO"` stands for: an engine by the devices of all workers, and by what was measured.

To the kernel AUTO is RING, with the replicas of a worker added up first; where another engine is better, the strategy
that is compiled has that one in its place. Whether every worker has Horovod is `cluster/horovod.py`'s question: it is
asked where this says HOROVOD, and RING is used where one has not.
"""

from dataclasses import replace
from typing import Literal

from autodist_py.kernel.topology import is_gpu, resolve
from autodist_py.proto.dtypes import ITEM_SIZES
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, Synchronizer

Engine = Literal["RING", "NCCL", "HOROVOD"]

_HOROVOD_BYTES = 8_000_000
"""So many bytes a step are worth Horovod's own thread and its slower start: where links are fast a step of 8 MB takes
0.79 times as long as with RING, of 4 MB 0.92, of 2 MB 1.28 (docs/performance.md, "Engines")."""

_FAST_LINK = 2.5e9
"""In bit/s: RING by itself moves 40 MB in 139 ms, 2.3 Gbit/s. A slower link is what both engines wait for: at 1 Gbit/s
they are within 3% of each other from 8 MB on, and RING fails more cleanly. What is not stated is 1 Gbit/s."""


def automatic_engine(item: GraphItem, strategy: Strategy, resources: ResourceSpec) -> Engine:
    """The best engine for those gradients of a step whose spec is AUTO; HOROVOD where every worker has it, else RING.

    1. NCCL where several replicas are all on GPUs, each on its own.
    2. HOROVOD where several workers reduce many bytes over links that are fast, or within one host.
    3. RING elsewhere.
    """
    devices = [replica.device for replica in resolve(strategy.replicas, resources, worker=0).everyone]
    if len(devices) > 1 and all(map(is_gpu, devices)) and not _share_gpus(resources):
        return "NCCL"
    is_much = len(resources.workers) > 1 and _bytes_by_horovod(item, strategy) >= _HOROVOD_BYTES
    slowest = slowest_bandwidth(resources)
    return "HOROVOD" if is_much and (slowest is None or slowest >= _FAST_LINK) else "RING"


def slowest_bandwidth(resources: ResourceSpec) -> float | None:
    """Of the node whose link has least, in bit/s; None: all workers are on one host."""
    return None if resources.is_local else 1e9 * min(node.network_bandwidth for node in resources.nodes)


def _share_gpus(resources: ResourceSpec) -> bool:
    """Whether workers of one machine are on the same GPU, which NCCL refuses."""
    gpus = [gpu for node in resources.workers for gpu in node.gpus]
    return resources.is_local and len(set(gpus)) < len(gpus)


def has_automatic(strategy: Strategy) -> bool:
    """Whether the engine is AUTO for any variable."""
    return any(_automatic(one) for node in strategy.node_config for one in node.every_synchronizer)


def with_engine(strategy: Strategy, item: GraphItem, engine: Engine) -> Strategy:
    """`strategy`, with this engine in AUTO's place where it carries the gradient; RING is what AUTO is by itself."""
    if engine == "RING":
        return strategy
    nodes = (_node_with_engine(node, engine, item.variable(node.var_name).dtype) for node in strategy.node_config)
    return replace(strategy, node_config=tuple(nodes))


def _node_with_engine(node: VariableStrategy, engine: Engine, dtype: str) -> VariableStrategy:
    own = node.synchronizer
    automatic = None if own is None else _automatic(own)
    if automatic and _carries(engine, automatic, dtype):
        own = replace(automatic, spec=engine)
    parts = tuple(_node_with_engine(part, engine, dtype) for part in node.part_config)
    return replace(node, synchronizer=own, part_config=parts)


def _bytes_by_horovod(item: GraphItem, strategy: Strategy) -> int:
    """The bytes that stand for the dense gradients of a step which Horovod would sum up in AUTO's place."""
    total = 0
    for gradient in item.gradients:
        variable = item.variable(gradient.variable)
        for own, shape in strategy.node(variable.name).parts(variable.shape):
            synchronizer = _automatic(own)
            if synchronizer is None or not _carries("HOROVOD", synchronizer, variable.dtype):
                continue
            if gradient.is_sparse and not synchronizer.sparse_as_dense:
                continue  # Whether it travels as a dense one by itself depends on the batch.
            total += synchronizer.compressor.wire_bytes(shape, ITEM_SIZES.get(variable.dtype, 0))
    return total


def _automatic(synchronizer: Synchronizer) -> AllReduceSynchronizer | None:
    """The AllReduce by which gradients are summed, if its engine is AUTO."""
    reduced = synchronizer.as_all_reduce
    return reduced if reduced is not None and reduced.spec == "AUTO" else None


def _carries(engine: Engine, synchronizer: AllReduceSynchronizer, dtype: str) -> bool:
    """Whether the engine sums up what travels of gradients of a type, and has the type as which they travel."""
    compressor = synchronizer.compressor
    if engine == "NCCL" and synchronizer.local != "one_device":
        return False  # Replicas are to be added up before, and by NCCL each is a member.
    return not compressor.gathers and (engine != "HOROVOD" or compressor.travels_as(dtype) != "bfloat16")
