"""The synchronizers of a strategy's variables, and the pace at which workers may go: values, and their wire forms."""

from dataclasses import dataclass
from typing import Any

from autodist_py.proto import synchronizers_pb2 as pb
from autodist_py.proto.calls import split_call
from autodist_py.proto.checks import require_flag, require_member, require_not_negative, require_seconds
from autodist_py.proto.compressors import COMPRESSORS, Compressor, canonical, compressor_of, require_registered
from autodist_py.proto.errors import StrategyError

_COMPRESSOR_ENUM = pb.AllReduceSynchronizer.Compressor
_OTHER = "OtherCompressor"
_SPEC_ENUM = pb.AllReduceSynchronizer.Spec

ALL_REDUCE_SPECS: tuple[str, ...] = tuple(_SPEC_ENUM.keys())


@dataclass(frozen=True, slots=True)
class AllReduceSynchronizer:
    """Every replica holds the variable; the gradients of one group are summed together, by collectives.

    `bytes_per_pack` is the size of the buffers in which they are summed, 0 for an automatic one. `timeout_seconds` is
    how long a step waits for a worker that has not begun it or is not heard of, 0 for as long as its heartbeats come.
    `sparse_as_dense` says whether a sparse gradient travels as a dense one; None: where that is fewer bytes.
    """

    spec: str = "AUTO"
    compressor: str = "NoneCompressor"
    group: int = 0
    bytes_per_pack: int = 0
    timeout_seconds: float = 0.0
    sparse_as_dense: bool | None = None

    def __post_init__(self) -> None:
        require_member(self.spec, ALL_REDUCE_SPECS, "spec of an AllReduce synchronizer", error=StrategyError)
        compressor = canonical(self.compressor, "compressor of an AllReduce synchronizer")
        object.__setattr__(self, "compressor", compressor)  # Equal ones are written alike.
        for name in ("group", "bytes_per_pack"):
            require_not_negative(getattr(self, name), f"{name} of an AllReduce synchronizer", error=StrategyError)
        require_seconds(self.timeout_seconds, "timeout_seconds of an AllReduce synchronizer", error=StrategyError)
        object.__setattr__(self, "timeout_seconds", float(self.timeout_seconds))
        require_flag(self.sparse_as_dense, "sparse_as_dense of an AllReduce synchronizer", error=StrategyError)

    @property
    def coded_by(self) -> Compressor:
        """The compressor itself."""
        return compressor_of(self.compressor, "compressor of an AllReduce synchronizer")

    def to_proto(self) -> pb.AllReduceSynchronizer:
        """The wire form."""
        compressor, name, arguments = _compressor_fields(self.compressor)
        return pb.AllReduceSynchronizer(
            spec=self.spec,
            compressor=compressor,
            compressor_name=name,
            compressor_arguments=arguments,
            group=self.group,
            bytes_per_pack=self.bytes_per_pack,
            timeout_seconds=self.timeout_seconds,
            sparse_as_dense=self.sparse_as_dense,
        )

    @classmethod
    def from_proto(cls, message: pb.AllReduceSynchronizer, *, is_own: bool = False) -> "AllReduceSynchronizer":
        """The value of a message that `to_proto` made; see `Strategy.from_proto`."""
        return cls(
            spec=_enum_name(_SPEC_ENUM, message.spec),
            compressor=_compressor(message, "an AllReduce", is_own=is_own),
            group=message.group,
            bytes_per_pack=message.bytes_per_pack,
            timeout_seconds=message.timeout_seconds,
            sparse_as_dense=message.sparse_as_dense if message.HasField("sparse_as_dense") else None,
        )

    def __str__(self) -> str:
        return f"AllReduce({self.spec})"


@dataclass(frozen=True, slots=True)
class Pace:
    """How far apart workers may be. As it is made, they take every step together.

    Attributes:
        sync: whether an update waits for the gradients of several workers, or of all.
        staleness: how many steps a worker may have finished more than the slowest one.
        replicas_to_aggregate: how many workers' gradients an update waits for, 0 for those of all.
    """

    sync: bool = True
    staleness: int = 0
    replicas_to_aggregate: int = 0

    @property
    def is_together(self) -> bool:
        """Whether all workers take every step together."""
        return self == Pace()


@dataclass(frozen=True, slots=True)
class PSSynchronizer:
    """The variable lives on a server, the reduction destination, such as `10.0.0.1:CPU:0`.

    `staleness` is the number of steps a worker may run ahead; `replicas_to_aggregate` the number of gradients an update
    waits for, 0 for those of all workers.
    """

    reduction_destination: str
    local_replication: bool = False
    sync: bool = True
    staleness: int = 0
    replicas_to_aggregate: int = 0
    compressor: str = "NoneCompressor"
    group: int = 0

    def __post_init__(self) -> None:
        if not self.reduction_destination:
            raise StrategyError("a PS synchronizer needs a reduction_destination, such as '10.0.0.1:CPU:0'; got ''")
        compressor = canonical(self.compressor, "compressor of a PS synchronizer")
        object.__setattr__(self, "compressor", compressor)  # Equal ones are written alike.
        for name in ("staleness", "replicas_to_aggregate", "group"):
            require_not_negative(getattr(self, name), f"{name} of a PS synchronizer", error=StrategyError)

    @property
    def coded_by(self) -> Compressor:
        """The compressor itself."""
        return compressor_of(self.compressor, "compressor of a PS synchronizer")

    @property
    def pace(self) -> Pace:
        """How far apart it lets workers be."""
        return Pace(self.sync, self.staleness, self.replicas_to_aggregate)

    def to_proto(self) -> pb.PSSynchronizer:
        """The wire form."""
        compressor, name, arguments = _compressor_fields(self.compressor)
        return pb.PSSynchronizer(
            reduction_destination=self.reduction_destination,
            local_replication=self.local_replication,
            sync=self.sync,
            staleness=self.staleness,
            replicas_to_aggregate=self.replicas_to_aggregate,
            compressor=_COMPRESSOR_ENUM.Value(compressor),
            compressor_name=name,
            compressor_arguments=arguments,
            group=self.group,
        )

    @classmethod
    def from_proto(cls, message: pb.PSSynchronizer, *, is_own: bool = False) -> "PSSynchronizer":
        """The value of a message that `to_proto` made; see `Strategy.from_proto`."""
        return cls(
            reduction_destination=message.reduction_destination,
            local_replication=message.local_replication,
            sync=message.sync,
            staleness=message.staleness,
            replicas_to_aggregate=message.replicas_to_aggregate,
            compressor=_compressor(message, "a PS", is_own=is_own),
            group=message.group,
        )

    def __str__(self) -> str:
        return f"PS({self.reduction_destination}{', local_replication' if self.local_replication else ''})"


def _enum_name(enum: Any, number: int) -> str:
    if number not in enum.values():
        raise StrategyError(f"no {enum.DESCRIPTOR.name} has number {number}; known: {dict(enum.items())}")
    return str(enum.Name(number))


def _compressor_fields(text: str) -> tuple[str, str, str]:
    """A compressor's name in the enum, its own where it has none there, and its arguments."""
    name, arguments = split_call(text, "a compressor")
    return (name, "", arguments) if name in COMPRESSORS else (_OTHER, name, arguments)


def _compressor(message: pb.AllReduceSynchronizer | pb.PSSynchronizer, whose: str, *, is_own: bool) -> str:
    name = _enum_name(_COMPRESSOR_ENUM, message.compressor)
    name = message.compressor_name if name == _OTHER else name
    text = f"{name}({message.compressor_arguments})" if message.compressor_arguments else name
    if not is_own:
        require_registered(split_call(text, "a compressor")[0], f"compressor of {whose} synchronizer")
    return text


Synchronizer = PSSynchronizer | AllReduceSynchronizer
"""How the replicas of one variable stay equal."""
