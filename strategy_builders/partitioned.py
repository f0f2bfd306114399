"""Builders that cut variables into shards: over servers, or for collectives of smaller messages."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from autodist_py.proto.checks import is_writable
from autodist_py.proto.compressors import Compressor
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import GraphItem, Variable
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import PSSynchronizer
from autodist_py.proto.text import shown
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.parameter_server import ServerOptions, updated_together

MIN_SHARD_BYTES = 1 << 18
"""A shard is no smaller, if its builder has a say: a message costs more than a copy of so many bytes."""


@dataclass(frozen=True, slots=True)
class _ServingShards(ServerOptions):
    """What the builders have in common that cut variables along their first axis for servers.

    A variable has one shard on a server at most, and no more than it has rows, or than leaves each `min_shard_bytes`.

    Attributes:
        min_shard_bytes: the least size of a shard, on average.
    """

    min_shard_bytes: int = MIN_SHARD_BYTES

    def __post_init__(self) -> None:
        super(_ServingShards, self).__post_init__()
        check_min_shard_bytes(type(self).__name__, self.min_shard_bytes)

    def _synchronizers(self, servers: Iterable[str]) -> list[PSSynchronizer]:
        return [self.synchronizer(server) for server in servers]


@dataclass(frozen=True, slots=True)
class PartitionedPS(_ServingShards):
    """Variables are cut along their first axis, and their shards spread over servers: every node's first CPU.

    Shards are as even as can be. The largest variable goes first, its shards to the servers with the fewest bytes. Its
    parameters: see `ServerOptions` and `_ServingShards`.
    """

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """Equal sizes are placed by name, and equally loaded servers filled in the order of the nodes."""
        loads = dict.fromkeys(resources.server_devices, 0.0)
        nodes: dict[str, VariableStrategy] = {}
        for variable in _largest_first(item.trainable_variables):
            shards = num_shards(variable, 0, len(loads), self.min_shard_bytes)
            servers = _least_loaded(loads, shards)
            sizes = _even_sizes(variable, 0, servers, loads)
            nodes[variable.name] = VariableStrategy.partitioned(variable, 0, self._synchronizers(servers), sizes=sizes)
            _add(loads, variable, servers, sizes)
        return _strategy(nodes, item, resources)


@dataclass(frozen=True, slots=True)
class UnevenPartitionedPS(_ServingShards):
    """As PartitionedPS, with shards in proportion to the servers' `network_bandwidth`.

    A variable that has too few rows, or bytes, for a shard on every server has them on those with the most bandwidth.
    """

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """What is whole goes to the server with the fewest bytes for its bandwidth."""
        bandwidths = {
            device: node.network_bandwidth
            for device, node in zip(resources.server_devices, resources.workers, strict=True)
        }
        loads = dict.fromkeys(bandwidths, 0.0)
        nodes: dict[str, VariableStrategy] = {}
        for variable in _largest_first(item.trainable_variables):
            shards = num_shards(variable, 0, len(loads), self.min_shard_bytes)
            fastest = sorted(bandwidths, key=lambda device: -bandwidths[device])[:shards]
            servers = _least_loaded(loads, 1) if shards == 1 else [one for one in bandwidths if one in fastest]
            sizes = proportional(variable.shape[0], [bandwidths[one] for one in servers]) if shards > 1 else ()
            nodes[variable.name] = VariableStrategy.partitioned(variable, 0, self._synchronizers(servers), sizes=sizes)
            _add(loads, variable, servers, sizes, bandwidths)
        return _strategy(nodes, item, resources)


@dataclass(frozen=True, slots=True)
class PartitionedAR:
    """Gradients are cut along their first axis, and the parts summed by collectives, `chunk_size` to a group.

    A gradient has no more parts than there are workers, or it has rows, or than leaves each `min_shard_bytes`. All
    workers hold all of the variable: only the messages are smaller, and more of them overlap. The other parameters:
    see AllReduce.

    Raises:
        StrategyError: a parameter is out of its range.
    """

    chunk_size: int = 128
    all_reduce_spec: str = "AUTO"
    compressor: Compressor | str = "NoneCompressor"
    min_shard_bytes: int = MIN_SHARD_BYTES
    bytes_per_pack: int = 0
    timeout_seconds: float = 0.0
    sparse_as_dense: bool | None = None

    def __post_init__(self) -> None:
        self._whole()
        check_min_shard_bytes(type(self).__name__, self.min_shard_bytes)

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """The group of a part is its index among all parts // `chunk_size`."""
        return self.along({}, item, resources)

    def along(self, axes: Mapping[str, int], item: GraphItem, resources: ResourceSpec) -> Strategy:
        """As `build`, along the axes of variables that are named, and the first of all others."""
        nodes: dict[str, VariableStrategy] = {}
        whole, count = self._whole(), 0
        for variable in item.trainable_variables:
            axis = axes.get(variable.name, 0)
            parts = range(count, count + num_shards(variable, axis, len(resources.workers), self.min_shard_bytes))
            nodes[variable.name] = VariableStrategy.partitioned(variable, axis, list(map(whole.synchronizer, parts)))
            count = parts.stop
        return _strategy(nodes, item, resources)

    def _whole(self) -> AllReduce:
        return AllReduce(
            chunk_size=self.chunk_size,
            all_reduce_spec=self.all_reduce_spec,
            compressor=self.compressor,
            bytes_per_pack=self.bytes_per_pack,
            timeout_seconds=self.timeout_seconds,
            sparse_as_dense=self.sparse_as_dense,
        )


@dataclass(frozen=True, slots=True)
class RandomAxisPartitionAR:
    """As PartitionedAR, along an axis that is drawn at random for each variable; the first, if its gradient is sparse.

    Attributes:
        seed: equal seeds draw equal axes, whatever the order of the variables.
    """

    chunk_size: int = 128
    seed: int = 0
    all_reduce_spec: str = "AUTO"
    compressor: Compressor | str = "NoneCompressor"
    min_shard_bytes: int = MIN_SHARD_BYTES
    bytes_per_pack: int = 0
    timeout_seconds: float = 0.0
    sparse_as_dense: bool | None = None

    def __post_init__(self) -> None:
        self._fixed()
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not is_writable(self.seed):
            raise StrategyError(f"seed of {type(self).__name__} must be an integer; got {shown(self.seed)}")

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """An axis of one element is drawn only where there is no other."""
        sparse = {variable.name for variable in item.sparse_variables}
        axes = {}
        for variable in item.trainable_variables:
            possible = [axis for axis, size in enumerate(variable.shape) if size > 1] or [0]
            if variable.name not in sparse:
                axes[variable.name] = random.Random(f"{self.seed} {variable.name}").choice(possible)
        return self._fixed().along(axes, item, resources)

    def _fixed(self) -> PartitionedAR:
        return PartitionedAR(
            chunk_size=self.chunk_size,
            all_reduce_spec=self.all_reduce_spec,
            compressor=self.compressor,
            min_shard_bytes=self.min_shard_bytes,
            bytes_per_pack=self.bytes_per_pack,
            timeout_seconds=self.timeout_seconds,
            sparse_as_dense=self.sparse_as_dense,
        )


@dataclass(frozen=True, slots=True)
class ShardedOptimizer:
    """Each worker updates a part of every variable, and holds that part's optimizer state: 1/n of it on n workers.

    Gradients are sent to the owners of their parts, and the new values back, so that as many bytes travel as in a ring
    (known as ZeRO stage 1: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models"). A variable is cut along the first axis with an element for each worker, a table along its rows; one
    whose update cannot be cut, or which has no such axis, goes to one worker whole, the one with the fewest bytes.
    """

    def build(self, item: GraphItem, resources: ResourceSpec) -> Strategy:
        """Shards are in the order of the nodes; the largest variable is placed first."""
        options = ServerOptions()
        loads = dict.fromkeys(resources.server_devices, 0.0)
        directory = self._directory(item, list(loads))
        grouped = {variable.name for group in updated_together(item) if len(group) > 1 for variable in group}
        sparse = {variable.name for variable in item.sparse_variables}
        nodes: dict[str, VariableStrategy] = {}
        for variable in _largest_first(item.trainable_variables):
            axes = range(len(variable.shape))[: 1 if variable.name in sparse else None]
            axis = next((axis for axis in axes if variable.shape[axis] >= len(loads)), None)
            servers, whole = list(loads), options.synchronizer(directory[variable.name])
            if axis is None or not variable.nbytes:
                axis, servers = 0, [directory[variable.name]] if variable.name in grouped else _least_loaded(loads, 1)
            sizes = _even_sizes(variable, axis, servers, loads)
            synchronizers = [options.synchronizer(server) for server in servers]
            nodes[variable.name] = VariableStrategy.partitioned(variable, axis, synchronizers, sizes=sizes, whole=whole)
            _add(loads, variable, servers, sizes)
        return _strategy(nodes, item, resources)

    @staticmethod
    def _directory(item: GraphItem, servers: Sequence[str]) -> dict[str, str]:
        """Where a variable goes that cannot be cut: together with those that one op updates with it."""
        loads = dict.fromkeys(servers, 0)
        found: dict[str, str] = {}
        groups = ((sum(one.nbytes for one in group), group) for group in updated_together(item))
        for nbytes, group in sorted(groups, key=lambda pair: (-pair[0], pair[1][0].name)):
            home = min(loads, key=loads.__getitem__)
            loads[home] += nbytes
            found |= {variable.name: home for variable in group}
        return found


def num_shards(variable: Variable, axis: int, most: int, min_shard_bytes: int) -> int:
    """How many shards a variable has at best: `most` at most, and none empty or smaller than that."""
    if not variable.nbytes or not variable.shape:
        return 1
    length = variable.shape[axis]
    least = -(-min_shard_bytes * length // variable.nbytes)  # Of the elements along the axis, rounded up.
    return max(1, min(most, length // least))


def proportional(length: int, shares: Sequence[float]) -> tuple[int, ...]:
    """`length` in whole numbers of at least 1, as near to the shares as can be: by the largest remainders."""
    exact = [Fraction(share) for share in shares]  # Floats that are large enough have no sum.
    total = sum(exact)
    wanted = [length * share / total for share in exact]
    sizes = [max(1, int(one)) for one in wanted]
    while sum(sizes) != length:
        step = 1 if sum(sizes) < length else -1
        gaps = [(one - size) * step for one, size in zip(wanted, sizes, strict=True)]
        possible = [index for index, size in enumerate(sizes) if size + step >= 1]
        sizes[max(possible, key=lambda index: (gaps[index], -index))] += step
    return tuple(sizes)


def check_min_shard_bytes(builder: str, value: int) -> None:
    """Refuse what is no size.

    Raises:
        StrategyError: the parameter, and its value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise StrategyError(f"min_shard_bytes of {builder} must be an integer >= 1; got {shown(value)}")


def _largest_first(variables: Iterable[Variable]) -> list[Variable]:
    return sorted(variables, key=lambda variable: (-variable.nbytes, variable.name))


def _least_loaded(loads: dict[str, float], count: int) -> list[str]:
    """So many servers, in their own order."""
    chosen = sorted(loads, key=loads.__getitem__)[:count]
    return [server for server in loads if server in chosen]


def _even_sizes(variable: Variable, axis: int, servers: Sequence[str], loads: Mapping[str, float]) -> tuple[int, ...]:
    """Those of a shard on each server: where some are larger, by one, they go to those with the fewest bytes."""
    even, more = divmod(variable.shape[axis], len(servers)) if len(servers) > 1 else (0, 0)
    if not more:
        return ()
    larger = sorted(servers, key=loads.__getitem__)[:more]
    return tuple(even + (server in larger) for server in servers)


def _add(
    loads: dict[str, float],
    variable: Variable,
    servers: Sequence[str],
    sizes: Sequence[int],
    bandwidths: Mapping[str, float] | None = None,
) -> None:
    """The servers have the variable's shards, too; they are equal, unless sizes say otherwise."""
    sizes = sizes or (1,) * len(servers)
    for server, size in zip(servers, sizes, strict=True):
        loads[server] += variable.nbytes * size / sum(sizes) / (bandwidths[server] if bandwidths else 1.0)


def _strategy(nodes: dict[str, VariableStrategy], item: GraphItem, resources: ResourceSpec) -> Strategy:
    ordered = tuple(nodes[variable.name] for variable in item.trainable_variables)
    return Strategy(ordered, resources.replica_devices)
