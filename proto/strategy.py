"""`Strategy`: how it is trained. One synchronizer per variable, and the devices that hold a replica.

It owns the value, the rules that need nothing else, its wire and text forms. Whether a strategy fits a graph item and
the resources is asked in `strategy_builders.validation`; what a synchronizer does is the kernel's business.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autodist_py.proto import strategy_pb2 as pb
from autodist_py.proto import wire
from autodist_py.proto.arguments import check_fields, checked
from autodist_py.proto.checks import require_unique
from autodist_py.proto.compressors import text_of
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Variable
from autodist_py.proto.synchronizers import (
    KINDS,
    AllReduceSynchronizer,
    Consistency,
    Synchronizer,
    require_synchronizer,
)
from autodist_py.proto.text import count, known_names, short, some, table

_MOST_BYTES = 64 << 20
"""Of a file: hundreds of thousands of nodes."""

_PARTITIONER = r"\s*[1-9]\d{0,4}\s*(,\s*[1-9]\d{0,4}\s*)*"


def shard_name(name: str, index: int) -> str:
    """What a shard of the variable of that name is called, and what is computed for the shard alone."""
    return f"{name}/part_{index}"


@dataclass(frozen=True, slots=True)
class VariableStrategy:
    """How one variable is trained: whole, by a synchronizer, or in shards, by one node per shard.

    A partitioner gives the number of shards per axis, such as `1,2,1`; one axis has more than one. `part_sizes` are
    their sizes along it; left out, they are as even as can be, the first ones larger. A node that has shards and a
    synchronizer of its own is trained whole, by that, where its update cannot be cut.
    """

    var_name: str
    synchronizer: Synchronizer | None
    partitioner: str = ""
    part_config: tuple["VariableStrategy", ...] = ()
    part_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, error=StrategyError, but=("synchronizer",))
        require_synchronizer(self.synchronizer, f"synchronizer of variable {self.var_name!r}")
        if not self.var_name:
            raise StrategyError("a strategy's node needs the name of a variable, got ''")
        if self.synchronizer is None and not self.part_config:
            raise StrategyError(f"variable {self.var_name!r} needs a synchronizer, or one for each of its shards")
        if self.partitioner and not re.fullmatch(_PARTITIONER, self.partitioner):
            raise StrategyError(
                f"a partitioner is the number of shards per axis, five digits at most, such as '1,2,1'; "
                f"got {self.partitioner!r} for variable {self.var_name!r}"
            )
        object.__setattr__(self, "partitioner", "".join(self.partitioner.split()))  # Equal ones are written alike.
        if sum(shards > 1 for shards in self._shards_per_axis) > 1:
            raise StrategyError(f"variable {self.var_name!r} can be cut along one axis only, got {self.partitioner!r}")
        if self.num_shards == 1 and (self.partitioner or self.part_config or self.part_sizes):
            raise StrategyError(
                f"a variable is cut into two shards at least; got partitioner {self.partitioner!r} for variable "
                f"{self.var_name!r}. To train it whole, give it a synchronizer of its own, and no partitioner, "
                "part_config or part_sizes"
            )
        if self.part_config and len(self.part_config) != self.num_shards:
            raise StrategyError(
                f"variable {self.var_name!r} needs one part_config per shard; got {len(self.part_config)} "
                f"for partitioner {self.partitioner!r}"
            )
        if self.part_sizes and (len(self.part_sizes) != self.num_shards or min(self.part_sizes) < 1):
            raise StrategyError(
                f"variable {self.var_name!r} needs a size of at least 1 for each shard, or none at all; got "
                f"{self.part_sizes} for partitioner {self.partitioner!r}"
            )

    @classmethod
    def partitioned(
        cls,
        variable: Variable,
        axis: int,
        synchronizers: Sequence[Synchronizer],
        *,
        sizes: Sequence[int] = (),
        whole: Synchronizer | None = None,
    ) -> "VariableStrategy":
        """The variable in a shard for each synchronizer, or whole, where it is one.

        Args:
            variable: the variable.
            axis: along which it is cut.
            synchronizers: of the shards.
            sizes: see `part_sizes`.
            whole: in force where the variable cannot be cut.
        """
        if len(synchronizers) == 1:
            return cls(variable.name, synchronizers[0])
        counts = ("1" if other != axis else str(len(synchronizers)) for other in range(len(variable.shape)))
        parts = tuple(cls(shard_name(variable.name, index), one) for index, one in enumerate(synchronizers))
        return cls(variable.name, whole, ",".join(counts), parts, tuple(sizes))

    @property
    def axis(self) -> int:
        """The axis that is cut; the first, where none is."""
        return next((axis for axis, shards in enumerate(self._shards_per_axis) if shards > 1), 0)

    def sizes(self, length: int) -> tuple[int, ...]:
        """The shards' sizes along an axis that is so long."""
        even, more = divmod(length, self.num_shards)
        return self.part_sizes or tuple(even + (index < more) for index in range(self.num_shards))

    @property
    def shards(self) -> tuple["VariableStrategy", ...]:
        """How each shard is trained, named after the variable: `w/part_0` and so on; none where it is whole."""
        if self.num_shards == 1:
            return ()
        parts = self.part_config or (self,) * self.num_shards
        return tuple(
            VariableStrategy(shard_name(self.var_name, index), part.synchronizer) for index, part in enumerate(parts)
        )

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes of the shards of a variable of that shape."""
        axis = self.axis
        return tuple((*shape[:axis], size, *shape[axis + 1 :]) for size in self.sizes(shape[axis]))

    def parts(self, shape: tuple[int, ...]) -> Iterator[tuple[Synchronizer, tuple[int, ...]]]:
        """The synchronizer in force, and the shape, of each shard of a variable of that shape, or of all of it."""
        synchronizers = self.synchronizers * (1 if self.part_config else self.num_shards)
        return zip(synchronizers, self.shapes(shape) if self.shards else (shape,), strict=True)

    @property
    def num_shards(self) -> int:
        """1 for a variable that is whole."""
        return math.prod(self._shards_per_axis)

    @property
    def synchronizers(self) -> tuple[Synchronizer, ...]:
        """Those in force: of the shards, where each has one; else the node's own."""
        parts = tuple(synchronizer for part in self.part_config for synchronizer in part.synchronizers)
        return parts or ((self.synchronizer,) if self.synchronizer else ())

    @property
    def every_synchronizer(self) -> tuple[Synchronizer, ...]:
        """Those in force, and the node's own, where it has shards: it is in force where the variable cannot be cut."""
        return (
            (self.synchronizer, *self.synchronizers) if self.synchronizer and self.part_config else self.synchronizers
        )

    @property
    def _shards_per_axis(self) -> tuple[int, ...]:
        return tuple(map(int, self.partitioner.split(","))) if self.partitioner else ()


@dataclass(frozen=True, slots=True)
class Strategy:
    """One node per variable that has a gradient, and the devices that hold a replica, in rank order.

    `path` is where a copy was saved; it is no part of the id.

    Raises:
        StrategyError: parts contradict each other.
    """

    node_config: tuple[VariableStrategy, ...]
    replicas: tuple[str, ...]
    path: str = ""
    _by_name: Mapping[str, VariableStrategy] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self, error=StrategyError)
        object.__setattr__(self, "_by_name", {node.var_name: node for node in self.node_config})
        if not self.replicas:
            raise StrategyError("a strategy needs a device for at least one replica, such as '127.0.0.1:CPU:0'")
        require_unique(
            (node.var_name for node in self.node_config), "a strategy has one node per variable", error=StrategyError
        )
        require_unique(self.replicas, "a device holds one replica at most", error=StrategyError)

    @property
    def id(self) -> str:
        """sha256 of what the strategy says, as hexadecimal digits: equal strategies have equal ids."""
        return wire.content_hash(self._anonymous_proto())

    def node(self, var_name: str) -> VariableStrategy:
        """The node of that variable.

        Raises:
            StrategyError: there is none.
        """
        if var_name in self._by_name:
            return self._by_name[var_name]
        raise StrategyError(
            f"the strategy says nothing of variable {var_name!r}; {known_names(var_name, self._by_name)}"
        )

    @property
    def consistency(self) -> Consistency:
        """How far apart workers may be.

        Raises:
            StrategyError: variables differ in it; collectives, which AllReduce uses, keep workers together.
        """
        consistencies: dict[Consistency, str] = {}
        for node in self.node_config:
            for one in node.every_synchronizer:
                consistencies.setdefault(one.consistency, node.var_name)
        if len(consistencies) > 1:
            (first, variable), (second, other), *_ = consistencies.items()
            raise StrategyError(
                "a worker takes its steps for all variables at once, so all have the same sync, staleness and "
                f"replicas_to_aggregate (of AllReduce: {Consistency()}). Variable {variable!r} has {first}, {other!r} "
                f"{second}"
            )
        return next(iter(consistencies), Consistency())

    @property
    def timeout_seconds(self) -> float:
        """How long a step may wait for a worker that is missing: the shortest that is asked for; 0: no limit."""
        limits = (one.timeout_seconds for node in self.node_config for one in node.every_synchronizer)
        return min(filter(None, limits), default=0.0)

    def to_proto(self) -> pb.Strategy:
        """The wire form, with its id."""
        message = self._anonymous_proto()
        message.id = wire.content_hash(message)
        message.path = self.path
        return message

    def _anonymous_proto(self) -> pb.Strategy:
        return pb.Strategy(
            node_config=[_node_to_proto(node) for node in self.node_config],
            graph_config=pb.Strategy.GraphConfig(replicas=self.replicas),
        )

    @classmethod
    def from_proto(cls, message: pb.Strategy, *, is_own: bool = False) -> "Strategy":
        """The value of a message that `to_proto` made.

        Args:
            message: the wire form.
            is_own: whether the user's own code made it, in this run: then a compressor may be named `module:Name`,
                which is imported. Of a file that would run whatever the file names.

        Raises:
            StrategyError: the id is not that of the content, or parts contradict each other.
        """
        content = pb.Strategy()
        content.CopyFrom(message)
        content.ClearField("id")
        content.ClearField("path")
        digest = wire.content_hash(content)
        if message.id and message.id != digest:  # Asked first: nothing of a damaged file is looked up.
            raise StrategyError(
                f"a strategy's id is the hash of its content, {digest!r}; got {message.id!r}: the content was "
                f"edited or damaged; clear the id to accept it as it is"
            )
        return cls(
            node_config=tuple(_node_from_proto(node, is_own=is_own) for node in message.node_config),
            replicas=tuple(message.graph_config.replicas),
            path=message.path,
        )

    @checked("path", error=StrategyError)
    def save(self, path: str | os.PathLike[str]) -> "Strategy":
        """The strategy is in the file, binary (`.pb`) or JSON (`.json`); the result knows its path."""
        saved = replace(self, path=os.fspath(path))
        wire.save(saved.to_proto(), path, error=StrategyError)
        return saved

    @classmethod
    @checked("path", error=StrategyError)
    def load(cls, path: str | os.PathLike[str], *, is_own: bool = False) -> "Strategy":
        """The strategy that `save` wrote; its path is the one it was loaded from. For `is_own` see `from_proto`."""
        message = wire.load(pb.Strategy, path, error=StrategyError, most_bytes=_MOST_BYTES)
        return replace(cls.from_proto(message, is_own=is_own), path=os.fspath(path))

    def __str__(self) -> str:
        rows = [row for node in self.node_config for row in _rows(node, node.var_name)]
        return "\n\n".join(
            [
                f"Strategy {short(self.id)}: {count(len(self.node_config), 'variable')}, "
                f"{count(len(self.replicas), 'replica')}",
                f"replicas: {', '.join(self.replicas)}",
                table(("variable", "synchronizer", "group", "compressor", "partitioner"), rows),
                self.given_up,
            ]
        )

    @property
    def replaced(self) -> tuple[str, ...]:
        """What of it is done in another way, and why, in sentences for people."""
        found = []
        others = [device for device in self.replicas if ":GPU:" not in device]
        asking = self._reduced(lambda one: one.spec == "NCCL")
        if others and asking:
            found.append(
                f"all_reduce_spec NCCL runs on GPUs only, not on {some(others)}: with AutoDist(strict=False) RING is "
                f"used in its place, for {some(asking)}; else the program is refused"
            )
        gathered = self._reduced(lambda one: one.spec in ("NCCL", "HOROVOD") and one.compressor.gathers)
        if gathered and self._num_workers > 1:
            found.append(
                f"what the compressor of {some(gathered)} makes is gathered, not summed, and gathers are rings, "
                "whatever the all_reduce_spec; use RING or AUTO, or another compressor"
            )
        return tuple(found)

    def _reduced(self, chosen: Callable[[AllReduceSynchronizer], bool]) -> list[str]:
        """The variables that have such an AllReduce synchronizer."""
        return [
            node.var_name
            for node in self.node_config
            if any(one.as_all_reduce and chosen(one.as_all_reduce) for one in node.every_synchronizer)
        ]

    @property
    def _num_workers(self) -> int:
        return len({device.rsplit(":", 2)[0] for device in self.replicas})

    @property
    def given_up(self) -> str:
        """What it gives up, compared with one device on the global batch, for people."""
        losses = [
            f"  {node.var_name}: {loss}" for node in self.node_config for loss in _given_up(node, self._num_workers)
        ]
        if not losses:
            return "gives up nothing: synchronous and lossless, equal to one device on the global batch"
        return "\n".join(["gives up, compared with one device on the global batch:", *losses])


def _node_to_proto(node: VariableStrategy) -> pb.Strategy.Node:
    message = pb.Strategy.Node(
        var_name=node.var_name,
        partitioner=node.partitioner,
        part_config=[_node_to_proto(part) for part in node.part_config],
        part_sizes=node.part_sizes,
    )
    if node.synchronizer is not None:
        own = node.synchronizer.to_proto()
        getattr(message, own.DESCRIPTOR.name).CopyFrom(own)
    return message


def _node_from_proto(message: pb.Strategy.Node, *, is_own: bool) -> VariableStrategy:
    kind = message.WhichOneof("synchronizer")
    synchronizer = None if kind is None else KINDS[kind].from_proto(getattr(message, kind), is_own=is_own)
    return VariableStrategy(
        var_name=message.var_name,
        synchronizer=synchronizer,
        partitioner=message.partitioner,
        part_config=tuple(_node_from_proto(part, is_own=is_own) for part in message.part_config),
        part_sizes=tuple(message.part_sizes),
    )


def _rows(node: VariableStrategy, label: str) -> Iterator[tuple[object, ...]]:
    synchronizer = node.synchronizer
    yield (
        label,
        synchronizer or "",
        "" if synchronizer is None else synchronizer.group,
        "" if synchronizer is None or synchronizer.compressor.passes_through else text_of(synchronizer.compressor),
        f"{node.partitioner} ({', '.join(map(str, node.part_sizes))})" if node.part_sizes else node.partitioner,
    )
    for index, part in enumerate(node.part_config):
        yield from _rows(part, f"  shard {index}")


def _given_up(node: VariableStrategy, workers: int) -> tuple[str, ...]:
    """What the node's synchronizers lose, each thing once."""
    losses = (loss for synchronizer in node.synchronizers for loss in synchronizer.losses(workers))
    return tuple(dict.fromkeys(losses))
