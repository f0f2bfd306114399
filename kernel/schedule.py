"""What workers tell one another in a step, decided once: `schedule`, of the captured graph.

All that it says holds on every worker alike, whatever its rank. What lowers it adds nothing, and leaves nothing out.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import tensorflow as tf

from autodist_py.kernel.analysis.event_graph import Waits, waits
from autodist_py.kernel.analysis.outputs import differing, output_reduction
from autodist_py.kernel.analysis.replica_weights import summed_as
from autodist_py.kernel.analysis.server_ops import server_plans
from autodist_py.kernel.collectives.collectives import CARRIED
from autodist_py.kernel.collectives.compute_order import computed_first
from autodist_py.kernel.collectives.groups import as_ready, carrying, gradient_events, reducing
from autodist_py.kernel.collectives.reductions import SUMMED
from autodist_py.kernel.events import (
    LOCAL,
    CheckData,
    CountExamples,
    Event,
    Exchange,
    FetchResults,
    GatherFactors,
    GatherRows,
    ReduceGradients,
    ReduceStatistics,
    Schedule,
    ServerPlans,
)
from autodist_py.kernel.ir.batched import batched_tensors
from autodist_py.kernel.ir.graph import ITERATOR_NEXT
from autodist_py.kernel.ir.names import op_of
from autodist_py.kernel.program import Program
from autodist_py.proto.errors import InvalidGraphError
from autodist_py.proto.graph_item import Output, Statistic

_Member = TypeVar("_Member")


def schedule(program: Program) -> Schedule:
    """The schedule of the captured program; empty where there is one replica alone.

    Buckets, statistics and messages are as large as they may be. Where some would wait for one another, one of them is
    split: those of its members that wait for the cycle go apart.

    Raises:
        StrategyError: the strategy asks for what these devices, this version or this graph cannot do.
        InvalidGraphError: events wait for one another though each is as small as can be.
    """
    if program.is_single:
        return Schedule()
    draft = _Draft(
        program,
        gradients=tuple(gradient_events(program)),
        statistics=tuple(_statistics(program)),
        servers=server_plans(program),
    )
    while True:
        events = draft.events()
        found = waits(program, events, draft.servers)
        if not found.cycle:
            ordered = _in_order(events, found.behind)
            return Schedule(ordered, draft.servers, computed_first(program, ordered, draft.servers))
        draft = draft.without(events, found)


@dataclass(frozen=True, slots=True)
class _Draft:
    """The events of a schedule, which may wait for one another.

    Attributes:
        program: the captured one.
        gradients: in the order in which they are ready.
        statistics: likewise.
        servers: how the step is divided.
        barred: outputs, each with the gradients that it must not travel with, by the event's position.
        postponed: see `server_plans`.
    """

    program: Program
    gradients: tuple[ReduceGradients, ...]
    statistics: tuple[ReduceStatistics, ...]
    servers: ServerPlans | None
    barred: frozenset[tuple[str, int]] = frozenset()
    postponed: Mapping[tuple[int, str], int] | None = None

    def events(self) -> list[Event]:
        """Gradients first, then statistics."""
        outputs = list(differing(self.program))
        gradients = carrying(self.program, self.gradients, outputs, barred=self.barred)
        carried = {output.tensor for event in gradients for output in event.outputs}
        others = [output for output in outputs if output.tensor not in carried]
        plans = self.servers.plans if self.servers else ()
        exchanges = [exchange for plan in plans for exchange in plan.exchanges]
        return [
            *gradients,
            *self.statistics,
            *_of_data(self.program),
            *exchanges,
            *_fetches(self.program, others),
        ]

    def without(self, events: Sequence[Event], found: Waits) -> "_Draft":
        """A draft in which one event of the cycle is split."""
        for position in found.cycle:
            event = events[position]
            if isinstance(event, ReduceGradients):
                late = {(one.tensor, position) for one in event.outputs if op_of(one.tensor) in found.ops} - self.barred
                if late:
                    return replace(self, barred=self.barred | late)
                split = self._with_gradients(position, found.ops)
            elif isinstance(event, ReduceStatistics):
                split = self._with_statistics(position - len(self.gradients), found.ops)
            else:
                continue
            if split is not None:
                return split
        return self._with_messages([events[position] for position in found.cycle], found.ops)

    def _with_gradients(self, position: int, ops: frozenset[str]) -> "_Draft | None":
        """A draft in which the bucket is split; None: none of its gradients waits for the cycle, or it has one."""
        event = self.gradients[position]
        parts = _apart(
            event.gradients, lambda one: one.variable, lambda one: any(self._reads(ops, name) for name in one.tensors)
        )
        if not all(parts):
            return None
        products = dict(zip(event.gradients, event.products, strict=True)) if isinstance(event, GatherFactors) else {}
        split = [
            reducing(
                self.program,
                part,
                event.synchronizer,
                is_sparse=isinstance(event, GatherRows),
                products=[products[one] for one in part if products],
            )
            for part in parts
        ]
        gradients = as_ready([*self.gradients[:position], *split, *self.gradients[position + 1 :]])
        return replace(self, gradients=tuple(gradients), barred=frozenset())

    def _with_statistics(self, position: int, ops: frozenset[str]) -> "_Draft | None":
        """A draft in which the statistics are combined apart; None: none of them waits for the cycle, or it is one."""
        event = self.statistics[position]
        parts = _apart(event.statistics, lambda one: one.tensor, lambda one: self._reads(ops, one.tensor))
        if not all(parts):
            return None
        several = [one for one in self.statistics if (one.level, one.phase) == (event.level, event.phase)]
        split = (
            replace(_of_statistics(self.program, parts[0], event.level, event.phase), part=event.part),
            replace(_of_statistics(self.program, parts[1], event.level, event.phase), part=len(several)),
        )
        statistics = (*self.statistics[:position], *split, *self.statistics[position + 1 :])
        return replace(self, statistics=statistics, barred=frozenset())

    def _reads(self, ops: frozenset[str], marker: str) -> bool:
        return op_of(self.program.analysis.captured.nodes[op_of(marker)].input[0]) in ops

    def _with_messages(self, cycle: Sequence[Event], ops: frozenset[str]) -> "_Draft":
        """A draft in which messages wait for nothing that they could do without; then one in which some is sent later.

        Raises:
            InvalidGraphError: there is nothing to send later.
        """
        postponed = dict(self.postponed or {})
        if self.postponed is not None:
            exchanges = [one for one in cycle if isinstance(one, Exchange)]
            late = {(one.server, op): one.phase + 1 for one in exchanges for op in self._sent_late(one, ops)}
            first = min(late.values(), default=0)
            postponed |= {sent: phase for sent, phase in late.items() if phase == first}
            item = self.program.item  # Each member may need a phase of its own; more are of no use.
            if not late or first > len(item.gradients) + len(item.statistics) + len(self._values()):
                raise InvalidGraphError(
                    "these events of a step wait for one another, and none of them can be split:\n"
                    + "\n".join(map(str, cycle))
                )
        servers = server_plans(self.program, postponed)
        return replace(self, servers=servers, barred=frozenset(), postponed=postponed)

    def _values(self) -> set[str]:
        """What servers are sent beside gradients."""
        plans = self.servers.plans if self.servers else ()
        return {value for plan in plans for exchange in plan.exchanges for value in exchange.values}

    def _sent_late(self, exchange: Exchange, ops: frozenset[str]) -> set[str]:
        """The ops of the message's members that wait for the cycle."""
        members = [
            (gradient.variable, gradient.tensors, any(self._reads(ops, tensor) for tensor in gradient.tensors))
            for gradient in exchange.gradients
        ]
        members += [(value, (value,), op_of(value) in ops) for value in exchange.values]
        *_, later = _apart(members, lambda member: member[0], lambda member: member[2])
        return {op_of(tensor) for _, tensors, _ in later for tensor in tensors}


def _apart(
    members: Sequence[_Member], name: Callable[[_Member], str], is_late: Callable[[_Member], bool]
) -> list[tuple[_Member, ...]]:
    """Those that do not wait for the cycle, and those that do; if all do, the first by name, and the others."""
    late = [one for one in members if is_late(one)]
    if len(late) == len(members) > 1:
        first = min(members, key=name)
        late = [one for one in members if one is not first]
    early = tuple(one for one in members if not any(one is other for other in late))
    return [early, tuple(late)]


# -- The kinds of events ----------------------------------------------------------------------------------------------


def _of_data(program: Program) -> Iterator[Event]:
    """What workers tell one another of the data that they were given."""
    if len(program.topology.workers) == 1:
        return
    view, is_global = program.analysis.captured, program.options.batch == "global"
    reads = list(view.of_type(ITERATOR_NEXT))
    if reads:
        types = [kind for read in reads for kind in read.attr["output_types"].list.type]
        hashed = sum(kind != tf.variant.as_datatype_enum for kind in types) if is_global else 0
        yield CheckData(
            needs=tuple(read.input[0] for read in reads),
            gives=tuple(read.name for read in reads),
            level=0,
            engine="RING",
            members=len(program.topology.workers),
            nbytes=tf.int64.size * (1 + hashed),
        )
    sources = batched_tensors(program.item, view)
    if sources and not is_global:
        yield CountExamples(
            needs=tuple(source.name for source in sources),
            gives=(),
            level=0,
            engine="RING",
            members=len(program.topology.workers),
            nbytes=tf.int64.size * len({source.batch for source in sources}),
        )


def _statistics(program: Program) -> Iterator[ReduceStatistics]:
    """The statistics that are combined; those that are ready at once together."""
    silent = {"part", "own", "cut", "same"} | ({"count"} if program.analysis.knows_counts else set())
    found: dict[tuple[int, int], list[Statistic]] = {}
    for statistic in program.item.statistics:
        if statistic.reduction not in silent:
            op = op_of(statistic.tensor)
            found.setdefault((program.analysis.level[op], program.analysis.phase[op]), []).append(statistic)
    for (level, phase), statistics in sorted(found.items()):
        yield _of_statistics(program, statistics, level, phase)


def _of_statistics(program: Program, statistics: Sequence[Statistic], level: int, phase: int) -> ReduceStatistics:
    nodes = program.analysis.captured.nodes
    sizes = [_bytes(statistic.dtype, statistic.shape, statistic.reduction) for statistic in statistics]
    weighted = {summed_as(tf.as_dtype(one.dtype)) for one in statistics if one.reduction == "moments"}
    sizes += [dtype.size for dtype in weighted]  # Beside moments goes how much they count.
    return ReduceStatistics(
        needs=tuple(nodes[op_of(statistic.tensor)].input[0] for statistic in statistics),
        gives=tuple(statistic.tensor for statistic in statistics),
        level=level,
        engine=_engine(program, sizes),
        members=len(program.topology.workers),
        nbytes=_total(sizes),
        statistics=tuple(statistics),
        phase=phase,
    )


def _fetches(program: Program, outputs: Sequence[Output]) -> Iterator[FetchResults]:
    """The results that are combined by themselves; those of one level together."""
    found: dict[int, list[Output]] = {}
    for output in outputs:
        found.setdefault(program.analysis.level[op_of(output.tensor)], []).append(output)
    for level, together in sorted(found.items()):
        reductions = tuple(output_reduction(program, one) for one in together)
        sizes = [_bytes(one.dtype, one.shape, how) for one, how in zip(together, reductions, strict=True)]
        yield FetchResults(
            needs=tuple(output.tensor for output in together),
            gives=(),
            level=level,
            engine=_engine(program, sizes),
            members=len(program.topology.workers),
            nbytes=_total(sizes),
            outputs=tuple(together),
            reductions=reductions,
        )


def _engine(program: Program, sizes: Sequence[int | None]) -> str:
    """What carries values of so many bytes, if anything."""
    return "RING" if len(program.topology.workers) > 1 and any(size != 0 for size in sizes) else LOCAL


def _bytes(name: str, shape: Sequence[int | None] | None, reduction: str) -> int | None:
    """What a worker gives of a value that is combined: 0, if it is not; None: known in a step only."""
    dtype = tf.as_dtype(name)
    if reduction == "local rows" or (reduction != "rows" and dtype not in SUMMED):
        return 0
    if reduction == "rows" or shape is None or None in shape:
        return None
    carried = summed_as(dtype) if dtype.is_floating else CARRIED.get(dtype, dtype)
    return math.prod(size or 0 for size in shape) * carried.size


def _total(sizes: Sequence[int | None]) -> int | None:
    return None if None in sizes else sum(size or 0 for size in sizes)


# -- Their order ------------------------------------------------------------------------------------------------------


def _in_order(events: Sequence[Event], behind: Sequence[int]) -> tuple[Event, ...]:
    """Each event after those that it waits for, else as they are ready; with their turns."""
    pending = sorted(range(len(events)), key=lambda position: _readiness(events[position]))
    found: list[Event] = []
    left, turn = (1 << len(events)) - 1, -1
    together, ready = 0, None  # The gradients of this turn, and when they are ready.
    while pending:
        position = pending.pop(next(place for place, one in enumerate(pending) if not behind[one] & left))
        left &= ~(1 << position)
        event = events[position]
        if isinstance(event, Exchange):  # Messages wait for what they bring alone.
            found.append(event)
            continue
        own = (event.level, event.depth) if isinstance(event, ReduceGradients) else None
        if own is None or own != ready or behind[position] & together:
            turn, together, ready = turn + 1, 0, own
        together |= 1 << position
        found.append(replace(event, turn=turn))
    return tuple(found)


def _readiness(event: Event) -> tuple[int, int, int]:
    """When an event is ready, as the captured graph says: by level, and as back-propagation finishes gradients.

    What is sent to a server is sent as soon as it is there. What is told of the data comes first.
    """
    match event:
        case Exchange():
            return (-2, event.phase, event.server)
        case CheckData():
            return (-1, 0, 0)
        case CountExamples():
            return (-1, 1, 0)
        case ReduceGradients():
            return (event.level, 0, event.depth)
        case ReduceStatistics():
            return (event.level, 1, event.phase)
    return (event.level, 2, 0)
