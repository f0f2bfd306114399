"""The communication of one step, as values: what workers tell one another and servers, and in which order.

`schedule.py` decides it, once, on the captured graph; passes lower it. So all that is named here is of that graph.
It is long, as all kinds of events stand here.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import tensorflow as tf

from autodist_py.kernel.ir.fragment import Shape
from autodist_py.kernel.ir.names import KERNEL_SCOPE, op_of
from autodist_py.kernel.ir.product import Factor, Product
from autodist_py.proto.compressors import Compressor
from autodist_py.proto.graph_item import Gradient, Output, Statistic
from autodist_py.proto.synchronizers import AllReduceSynchronizer

SERVER = "SERVER"
"""The engine of what is exchanged with a server."""
LOCAL = "LOCAL"
"""The engine of what one worker combines by itself: nothing travels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One piece of communication, in which all workers take part.

    Attributes:
        needs: the tensors that it takes.
        gives: the tensors whose readers read what it makes of them.
        level: how many combined gradients follow one another on the way to it; of gradients, with these.
        engine: RING, NCCL or HOROVOD; SERVER; or LOCAL. Of collectives it carries the sums; gathers and broadcasts are
            rings.
        members: how many take part, workers or replicas.
        nbytes: what a member of it gives, without padding; of what is coded, what its compressor says of each gradient
            by itself; None: known in a step only.
        turn: events of one turn are ready at once, and issue their collectives in turns.
    """

    needs: tuple[str, ...]
    gives: tuple[str, ...]
    level: int
    engine: str
    members: int = 1
    nbytes: int | None = None
    turn: int = 0

    @property
    def what(self) -> str:
        """What it tells or combines, in words."""
        raise NotImplementedError

    @property
    def travels(self) -> bool:
        """Whether workers have collectives for it."""
        return self.engine not in (LOCAL, SERVER)

    def __str__(self) -> str:
        size = "bytes of a step" if self.nbytes is None else f"{self.nbytes} bytes"
        facts = f"{self.engine}, level {self.level}"
        if self.engine != LOCAL:
            facts += f", {size} of each of {self.members}"
        return f"{type(self).__name__}[{facts}] {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckData(Event):
    """Whether all workers have data, and the same."""

    @property
    def what(self) -> str:
        return "whether there are data"


@dataclass(frozen=True, slots=True, kw_only=True)
class CountExamples(Event):
    """How many examples the step has, over all workers."""

    @property
    def what(self) -> str:
        return "number of examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceStatistics(Event):
    """Statistics of one level that are ready at once.

    Attributes:
        statistics: those that are combined.
        phase: how many statistics follow one another on the way to them, within the level.
        part: numbers what has the same level and phase.
    """

    statistics: tuple[Statistic, ...]
    phase: int
    part: int = 0

    @property
    def scope(self) -> str:
        """The name scope of its ops."""
        scope = f"{KERNEL_SCOPE}/Statistics/level_{self.level}_phase_{self.phase}"
        return f"{scope}_part_{self.part}" if self.part else scope

    @property
    def what(self) -> str:
        return f"statistics {', '.join(statistic.tensor for statistic in self.statistics)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceGradients(Event):
    """Gradients that AllReduce combines together, or one: see the two kinds below.

    Attributes:
        gradients: those that are combined.
        shapes: of each the shapes of its tensors, as far as they are known.
        synchronizer: how.
        reduction: how replicas are weighted, as `GraphItem.weighting_of` says.
        dtype: the variables'.
        depth: how deep in the captured graph the last of the gradients is: the later it is ready, the greater.
        outputs: results of the step that are combined along with the gradients.
    """

    gradients: tuple[Gradient, ...]
    shapes: tuple[tuple[Shape, ...], ...]
    synchronizer: AllReduceSynchronizer
    reduction: str
    dtype: tf.DType
    depth: int
    outputs: tuple[Output, ...] = ()

    @property
    def scope(self) -> str:
        """The name scope of its ops."""
        raise NotImplementedError

    @property
    def compressor(self) -> Compressor:
        """How its gradients are coded."""
        return self.synchronizer.compressor

    @property
    def variables(self) -> str:
        """The variables' names, as a list."""
        return ", ".join(gradient.variable for gradient in self.gradients)

    @property
    def _along(self) -> str:
        return "".join(f", with {output.tensor}" for output in self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceBucket(ReduceGradients):
    """Gradients that are laid into one buffer: the same synchronizer, level, reduction and type.

    Sparse ones travel as dense ones.

    Attributes:
        bucket: numbers those which differ in nothing else.
        is_coded: whether a compressor codes what leaves a worker.
        is_local_first: whether a worker's replicas are added up before; else each is a member of the collective.
        local: how they are: one_device, hierarchical or nccl.
        product: what its gradient is made of, which is computed and reduced in pieces of rows; None: it is not.
    """

    bucket: int = 0
    is_coded: bool = False
    is_local_first: bool = True
    local: str = "one_device"
    product: Product | None = None

    @property
    def scope(self) -> str:
        """The name scope of its ops."""
        spec, number = self.synchronizer.spec, self.synchronizer.group
        scope = f"{KERNEL_SCOPE}/AllReduce/{spec}_group_{number}_level_{self.level}_{self.reduction}_{self.dtype.name}"
        return f"{scope}_bucket_{self.bucket}" if self.bucket else scope

    @property
    def what(self) -> str:
        return f"dense gradients of {self.variables}{', in pieces' if self.product else ''}" + self._along


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRows(ReduceGradients):
    """Sparse gradients whose rows are gathered; or one, whose rows are added up, as all replicas have its indices."""

    @property
    def scope(self) -> str:
        """The name scope of its ops."""
        return f"{KERNEL_SCOPE}/AllReduce/{op_of(self.gradients[0].tensors[1])}"

    @property
    def what(self) -> str:
        return f"sparse gradients of {self.variables}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherFactors(ReduceGradients):
    """Gradients that are products: their factors' rows are gathered, and multiplied once.

    Attributes:
        products: what each gradient is made of.
    """

    products: tuple[Product, ...]

    @property
    def factors(self) -> tuple[Factor, ...]:
        """All that are gathered, each once."""
        return tuple(dict.fromkeys(one for product in self.products for one in product.factors))

    @property
    def scope(self) -> str:
        """The name scope of its ops."""
        return f"{KERNEL_SCOPE}/AllReduce/{op_of(self.gives[0])}"

    @property
    def what(self) -> str:
        size = sum(self.replica_bytes.values())
        sent = f"; {size:.0f} bytes of each replica for the first batch" if size else ""
        return f"factors of the gradients of {self.variables}{self._along}{sent}"

    @property
    def replica_bytes(self) -> dict[str, float]:
        """For each variable the bytes of its factors on a replica, for the first batch; 0: not known.

        Of a factor that several have, each has its share.
        """
        users = Counter(one for product in self.products for one in product.factors)
        found: dict[str, float] = {}
        for gradient, product in zip(self.gradients, self.products, strict=True):
            row = sum(one.width * one.dtype.size / users[one] for one in product.factors)
            found[gradient.variable] = found.get(gradient.variable, 0.0) + (product.rows or 0) * row
        return found


@dataclass(frozen=True, slots=True)
class Lookup:
    """An op whose result is rows of a table: its second input says which.

    Attributes:
        handle: the table's.
        op: the op.
    """

    handle: str
    op: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange(Event):
    """What every worker sends to a server, what the server makes of it, and what each gets back.

    Attributes:
        server: the server's rank.
        phase: how many exchanges, of all servers, follow one another up to this one.
        gradients: raw ones that are sent; the server combines them over the workers.
        values: tensors that are equal on all workers, which the server needs beside.
        ops: what the server computes, of the captured graph.
        answers: tensors that it computes and workers read.
        refreshed: handles of the variables that it writes and workers read.
        lookups: reads of rows of its tables. An exchange that has some has nothing else, and every worker is answered
            by itself.
        read_before: what workers read, before they send anything, of the variables that the server's ops write.
    """

    server: int
    phase: int
    gradients: tuple[Gradient, ...] = ()
    values: tuple[str, ...] = ()
    ops: frozenset[str] = frozenset()
    answers: tuple[str, ...] = ()
    refreshed: tuple[str, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    read_before: frozenset[str] = frozenset()

    @property
    def markers(self) -> frozenset[str]:
        """The ops that pass on its gradients."""
        return frozenset(op_of(tensor) for gradient in self.gradients for tensor in gradient.tensors)

    @property
    def what(self) -> str:
        lists = {
            "rows of": dict.fromkeys(lookup.handle for lookup in self.lookups),
            "gradients of": dict.fromkeys(gradient.variable for gradient in self.gradients),
            "values": self.values,
            "for": (*self.answers, *self.refreshed),
        }
        listed = " ".join(f"{word} {', '.join(names)}" for word, names in lists.items() if names)
        return f"with server {self.server}: {listed or 'its turn'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchResults(Event):
    """Results of the step that differ between replicas, of one level.

    Attributes:
        outputs: those that are combined.
        reductions: how each is, as `reductions.Part` says.
    """

    outputs: tuple[Output, ...]
    reductions: tuple[str, ...]

    @property
    def scope(self) -> str:
        """The name scope of its ops."""
        return f"{KERNEL_SCOPE}/Fetch/level_{self.level}"

    @property
    def what(self) -> str:
        return f"fetches {', '.join(output.tensor for output in self.outputs)}"


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What one server does for a step.

    Attributes:
        worker: the server's rank.
        exchanges: in the order in which they follow one another.
        held: handles of the variables that live there.
        mirrored_ops: ops that write what the update reads, though no gradient reaches them (a number of steps): the
            server runs them as part of the update; every other worker runs them for its own copy of the variable.
    """

    worker: int
    exchanges: tuple[Exchange, ...]
    held: tuple[str, ...]
    mirrored_ops: frozenset[str]


@dataclass(frozen=True, slots=True)
class ServerPlans:
    """How a step is divided between the workers and the servers.

    Attributes:
        plans: what each server does.
        server_ops: ops of the captured graph that servers run in the workers' place.
        worker_ops: ops that workers run.
        summable: the variables of whose sparse gradients rows may be added up before the update sees them.
    """

    plans: tuple[ServerPlan, ...]
    server_ops: frozenset[str]
    worker_ops: frozenset[str]
    summable: frozenset[str]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of an event, on one worker.

    Attributes:
        ops: the ops by which this worker's devices take part in it.
        event: the event's position in the schedule.
        what: what the event tells or combines, in words.
        nbytes: what one member gives; None: known in a step only.
        by_name: workers find each other's parts by the op's name, the same on all of them, in whatever order they come
            to it; TensorFlow does not know that the op does anything beside what it returns.
    """

    ops: tuple[str, ...]
    event: int
    what: str
    nbytes: int | None = None
    by_name: bool = False


_Kind = TypeVar("_Kind", bound=Event)


@dataclass(frozen=True, slots=True)
class Schedule:
    """All that workers tell one another in a step; the same on every worker.

    Attributes:
        events: in the order in which they are issued.
        servers: how the step is divided between workers and servers; None where no variable lives on a server.
        computed_first: pairs of ops of the captured graph, the second of which waits for the first.
    """

    events: tuple[Event, ...] = ()
    servers: ServerPlans | None = None
    computed_first: tuple[tuple[str, str], ...] = ()

    def of_kind(self, kind: type[_Kind]) -> list[_Kind]:
        """The events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def position(self, kind: type[Event]) -> int | None:
        """Where the first event of a kind stands; None: there is none."""
        return next((position for position, event in enumerate(self.events) if isinstance(event, kind)), None)

    def in_order(self, collectives: Iterable[Collective]) -> tuple[Collective, ...]:
        """The collectives of its events, of each in their order, as they are issued."""
        made: Counter[int] = Counter()
        ranks: list[tuple[int, int, int]] = []
        listed = list(collectives)
        for one in listed:
            ranks.append((self.events[one.event].turn, made[one.event], one.event))
            made[one.event] += 1
        return tuple(listed[position] for position in sorted(range(len(listed)), key=ranks.__getitem__))

    def __str__(self) -> str:
        return "\n".join(map(str, self.events))
