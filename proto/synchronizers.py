"""The synchronizers of a strategy's variables, and how far apart workers may be: values, and their wire forms."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

from google.protobuf.message import Message

from autodist_py.proto import synchronizers_pb2 as pb
from autodist_py.proto.arguments import check_fields
from autodist_py.proto.calls import split_call
from autodist_py.proto.checks import require_flag, require_member, require_not_negative, require_seconds
from autodist_py.proto.compressors import COMPRESSORS, PLUGINS, Compressor, NoneCompressor, call_of, compressor_of
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.text import count, shown

_COMPRESSOR_ENUM = pb.AllReduceSynchronizer.Compressor
_OTHER = "OtherCompressor"
_SPEC_ENUM = pb.AllReduceSynchronizer.Spec

_LOCAL_ENUM = pb.AllReduceSynchronizer.Local

ALL_REDUCE_SPECS: tuple[str, ...] = tuple(_SPEC_ENUM.keys())
LOCAL_REDUCTIONS: tuple[str, ...] = tuple(_LOCAL_ENUM.keys())
LOCAL_FIRST = frozenset({"AUTO", "HOROVOD"})
"""The specs by which a worker's replicas are added up before their sum leaves it, so that each worker is one member."""


@dataclass(frozen=True, slots=True)
class Consistency:
    """How far apart workers may be. As it is made, they take every step together.

    Attributes:
        sync: whether an update waits for the gradients of several workers, or of all.
        staleness: how many steps a worker may have finished more than the slowest one.
        replicas_to_aggregate: how many workers' gradients an update waits for, 0 for those of all.
        first_tokens: how many tokens for workers there are at the start; None: they take none.
    """

    sync: bool = True
    staleness: int = 0
    replicas_to_aggregate: int = 0
    first_tokens: int | None = None

    @property
    def is_bsp(self) -> bool:
        """Whether all workers take every step together."""
        return self == Consistency()


@runtime_checkable
class Synchronizer(Protocol):
    """How the replicas of one variable stay equal: a frozen dataclass.

    A kind is lowered to one of the two that the kernel knows, collectives or servers. One of `as_all_reduce` and
    `as_ps` says how, and the other is None.

    Attributes:
        compressor: how its gradients are coded on the wire.
        group: gradients of one group travel together.
        consistency: how far apart it lets workers be.
        servers: the devices that hold the variable; none, where every replica does.
        timeout_seconds: how long a step waits for a worker that is missing; 0: no limit.
        as_all_reduce: the AllReduce by which gradients are summed.
        as_ps: the server to which gradients are sent.
    """

    @property
    def compressor(self) -> Compressor: ...
    @property
    def group(self) -> int: ...
    @property
    def consistency(self) -> Consistency: ...
    @property
    def servers(self) -> tuple[str, ...]: ...
    @property
    def timeout_seconds(self) -> float: ...
    @property
    def as_all_reduce(self) -> "AllReduceSynchronizer | None": ...
    @property
    def as_ps(self) -> "PSSynchronizer | None": ...

    def with_groups_from(self, first: int) -> "Synchronizer":
        """The same, where groups are counted from that number on."""
        ...

    def losses(self, workers: int) -> Iterator[str]:
        """What it gives up on so many workers, compared with one device on the global batch, for people."""
        ...

    def to_proto(self) -> Message:
        """The wire form: the message of a strategy's node that is named after its type."""
        ...


class _CompressorField:
    """What a type checker sees of a field that is given as a text or a value, and holds the value.

    At run time a slot is in its place, which `__post_init__` fills.
    """

    def __get__(self, instance: object, owner: type | None = None) -> Compressor:
        return NoneCompressor()

    def __set__(self, instance: object, value: Compressor | str) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class AllReduceSynchronizer:
    """Every replica holds the variable; the gradients of one group are summed together, by collectives.

    `bytes_per_pack` is the size of the buffers in which they are summed, 0 for an automatic one. `timeout_seconds` is
    how long a step waits for a worker that has not begun it or is not heard of, 0 for as long as its heartbeats come.
    `sparse_as_dense` says whether a sparse gradient travels as a dense one; None: where that is fewer bytes. `local` is
    how a worker's replicas are added up where each worker is one member. `factors` says whether of a gradient that is a
    product of rows the factors are gathered; None: where that takes less time.
    """

    spec: str = "AUTO"
    compressor: _CompressorField = _CompressorField()
    group: int = 0
    bytes_per_pack: int = 0
    timeout_seconds: float = 0.0
    sparse_as_dense: bool | None = None
    local: str = "one_device"
    factors: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self, error=StrategyError, but=("compressor",))
        require_member(self.spec, ALL_REDUCE_SPECS, "spec of an AllReduce synchronizer", error=StrategyError)
        require_local(self.local, self.spec, "an AllReduce synchronizer")
        object.__setattr__(
            self, "compressor", compressor_of(self.compressor, "compressor of an AllReduce synchronizer")
        )
        for name in ("group", "bytes_per_pack"):
            require_not_negative(getattr(self, name), f"{name} of an AllReduce synchronizer", error=StrategyError)
        require_seconds(self.timeout_seconds, "timeout_seconds of an AllReduce synchronizer", error=StrategyError)
        object.__setattr__(self, "timeout_seconds", float(self.timeout_seconds))
        require_flag(self.sparse_as_dense, "sparse_as_dense of an AllReduce synchronizer", error=StrategyError)
        require_flag(self.factors, "factors of an AllReduce synchronizer", error=StrategyError)

    @property
    def consistency(self) -> Consistency:
        """Collectives keep workers together."""
        return Consistency()

    @property
    def servers(self) -> tuple[str, ...]:
        """None: every replica holds the variable."""
        return ()

    @property
    def as_all_reduce(self) -> "AllReduceSynchronizer":
        """Itself."""
        return self

    @property
    def as_ps(self) -> None:
        """None."""

    def with_groups_from(self, first: int) -> "AllReduceSynchronizer":
        """See Synchronizer."""
        return replace(self, group=first + self.group)

    def losses(self, workers: int) -> Iterator[str]:
        """See Synchronizer."""
        if self.compressor.gives_up:
            yield self.compressor.gives_up

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
            local=self.local,
            factors=self.factors,
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
            local=_enum_name(_LOCAL_ENUM, message.local),
            factors=message.factors if message.HasField("factors") else None,
        )

    def __str__(self) -> str:
        return f"AllReduce({self.spec})"


@dataclass(frozen=True, slots=True)
class PSSynchronizer:
    """The variable lives on a server, the reduction destination, such as `10.0.0.1:CPU:0`.

    `staleness` is the number of steps a worker may run ahead; `replicas_to_aggregate` the number of gradients an update
    waits for, 0 for those of all workers. With `first_tokens` workers take tokens, as in `update_rules.Tokens`.
    """

    reduction_destination: str
    local_replication: bool = False
    sync: bool = True
    staleness: int = 0
    replicas_to_aggregate: int = 0
    compressor: _CompressorField = _CompressorField()
    group: int = 0
    first_tokens: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, error=StrategyError, but=("compressor",))
        if not self.reduction_destination:
            raise StrategyError("a PS synchronizer needs a reduction_destination, such as '10.0.0.1:CPU:0'; got ''")
        object.__setattr__(self, "compressor", compressor_of(self.compressor, "compressor of a PS synchronizer"))
        for name in ("staleness", "replicas_to_aggregate", "group"):
            require_not_negative(getattr(self, name), f"{name} of a PS synchronizer", error=StrategyError)
        if self.first_tokens is not None:
            require_not_negative(self.first_tokens, "first_tokens of a PS synchronizer", error=StrategyError)
            if not self.replicas_to_aggregate:
                raise StrategyError(
                    f"workers take tokens under replicas_to_aggregate; got first_tokens={self.first_tokens} and "
                    "replicas_to_aggregate=0"
                )

    @property
    def consistency(self) -> Consistency:
        """How far apart it lets workers be."""
        return Consistency(self.sync, self.staleness, self.replicas_to_aggregate, self.first_tokens)

    @property
    def servers(self) -> tuple[str, ...]:
        """The one that holds the variable."""
        return (self.reduction_destination,)

    @property
    def timeout_seconds(self) -> float:
        """No limit of its own."""
        return 0.0

    @property
    def as_all_reduce(self) -> None:
        """None."""

    @property
    def as_ps(self) -> "PSSynchronizer":
        """Itself."""
        return self

    def with_groups_from(self, first: int) -> "PSSynchronizer":
        """The same: what one server is sent travels together, whatever else does."""
        return self

    def losses(self, workers: int) -> Iterator[str]:
        """See Synchronizer."""
        if self.compressor.gives_up:
            yield self.compressor.gives_up
        if not self.sync:
            yield "asynchronous: gradients are applied as they arrive, computed from older values"
        if self.staleness:
            yield f"staleness: a worker may run {count(self.staleness, 'step')} ahead of the slowest"
        if 0 < self.replicas_to_aggregate < workers:
            yield (
                f"backup workers: an update waits for {count(self.replicas_to_aggregate, 'gradient')} "
                f"of {workers} workers, and drops those that come later"
            )

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
            first_tokens=self.first_tokens,
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
            first_tokens=message.first_tokens if message.HasField("first_tokens") else None,
        )

    def __str__(self) -> str:
        return f"PS({self.reduction_destination}{', local_replication' if self.local_replication else ''})"


def require_local(local: str, spec: str, whose: str) -> None:
    """Check how a worker's replicas are to be added up.

    Raises:
        StrategyError: it is no such way, or with this spec every replica is a member, and nothing is added up before.
    """
    require_member(local, LOCAL_REDUCTIONS, f"local of {whose}", error=StrategyError)
    if local != LOCAL_REDUCTIONS[0] and spec not in LOCAL_FIRST:
        raise StrategyError(
            f"local of {whose} is for {' and '.join(sorted(LOCAL_FIRST))}, which add up a worker's replicas first; got "
            f"local={local!r} with {spec}, by which every replica is a member. Leave one of them out"
        )


def _enum_name(enum: Any, number: int) -> str:
    if number not in enum.values():
        raise StrategyError(f"no {enum.DESCRIPTOR.name} has number {number}; known: {dict(enum.items())}")
    return str(enum.Name(number))


def _compressor_fields(compressor: Compressor) -> tuple[str, str, str]:
    """A compressor's name in the enum, its own where it has none there, and its arguments."""
    name, arguments = call_of(compressor)
    return (name, "", arguments) if name in COMPRESSORS else (_OTHER, name, arguments)


def _compressor(message: pb.AllReduceSynchronizer | pb.PSSynchronizer, whose: str, *, is_own: bool) -> str:
    name = _enum_name(_COMPRESSOR_ENUM, message.compressor)
    name = message.compressor_name if name == _OTHER else name
    text = f"{name}({message.compressor_arguments})" if message.compressor_arguments else name
    if not is_own:
        PLUGINS.require_registered(split_call(text, "a compressor")[0], f"compressor of {whose} synchronizer")
    return text


_MEMBERS = ("compressor", "group", "consistency", "servers", "timeout_seconds", "as_all_reduce", "as_ps", "to_proto")


def require_synchronizer(value: object, what: str) -> None:
    """Refuse what is no synchronizer, nor None; its class is asked, so that nothing of a foreign object runs.

    Raises:
        StrategyError: `what` is of another type, or is lowered to none of the two kinds, or to both.
    """
    if value is None:
        return
    if not all(hasattr(type(value), member) for member in _MEMBERS):
        raise StrategyError(f"{what} must be Synchronizer or None; got {shown(value)} ({type(value).__name__})")
    synchronizer = cast(Synchronizer, value)
    if (synchronizer.as_all_reduce is None) == (synchronizer.as_ps is None):
        raise StrategyError(
            f"{what} is lowered to collectives or to a server: one of as_all_reduce and as_ps is None, and the other "
            f"is not; got {shown(value)}"
        )


KINDS: Mapping[str, type[AllReduceSynchronizer | PSSynchronizer]] = {
    message.DESCRIPTOR.name: kind
    for message, kind in ((pb.PSSynchronizer, PSSynchronizer), (pb.AllReduceSynchronizer, AllReduceSynchronizer))
}
"""By the field of a strategy's node that has the kind's message."""
