"""Parameter server: a variable, its optimizer state and its update live on one worker, the server.

This module says which ops of the captured graph a server runs, and what crosses between it and the workers; the Serve
pass cuts the graph there. What it says does not depend on which worker asks. It is long, as what crosses and when are
found of the same parts.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import networkx as nx

from autodist_py.kernel.graph_view import (
    ITERATORS,
    PASSES_HANDLE,
    READS_VARIABLE,
    STANDS_ONCE,
    VARIABLE_OP,
    GraphView,
)
from autodist_py.kernel.names import op_of, parse
from autodist_py.kernel.program import Program
from autodist_py.kernel.synchronizers.division import WORKERS, Division
from autodist_py.kernel.synchronizers.lookups import Lookup, adds_rows_up, lookups_of
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient
from autodist_py.proto.synchronizers import PSSynchronizer

_STAYS = STANDS_ONCE | ITERATORS
"""Op types that are each worker's own, with all that is made of them."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What every worker sends to a server, what the server makes of it, and what each gets back.

    Attributes:
        gradients: raw ones that are sent; the server combines them over the workers.
        values: tensors that are equal on all workers, which the server needs beside.
        ops: what the server computes, of the captured graph.
        answers: tensors that it computes and workers read.
        refreshed: handles of the variables that it writes and workers read.
        lookups: reads of rows of its tables. An exchange that has some has nothing else, and every worker is answered
            by itself.
        read_before: what workers read of the variables that it writes, and have read before they send anything.
    """

    gradients: tuple[Gradient, ...] = ()
    values: tuple[str, ...] = ()
    ops: frozenset[str] = frozenset()
    answers: tuple[str, ...] = ()
    refreshed: tuple[str, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    read_before: frozenset[str] = frozenset()

    @property
    def seams(self) -> frozenset[str]:
        """The ops that pass on its gradients."""
        return frozenset(op_of(tensor) for gradient in self.gradients for tensor in gradient.tensors)


@dataclass(frozen=True, slots=True)
class Service:
    """What one server does for a step.

    Attributes:
        worker: the server's rank.
        exchanges: in the order in which they follow one another.
        held: handles of the variables that live there.
        counted: ops that write what the update reads, though no gradient reaches them (a number of steps): the server
            runs them as part of the update; every other worker runs them for its own copy of the variable.
    """

    worker: int
    exchanges: tuple[Exchange, ...]
    held: tuple[str, ...]
    counted: frozenset[str]


@dataclass(frozen=True, slots=True)
class Serving:
    """How a step is divided between the workers and the servers.

    Attributes:
        services: what each server does, by rank.
        moved: ops of the captured graph that servers run in the workers' place.
        stays: ops that workers run.
        summable: the variables of whose sparse gradients rows may be added up before the update sees them.
    """

    services: tuple[Service, ...]
    moved: frozenset[str]
    stays: frozenset[str]
    summable: frozenset[str]


def synchronizer_of(program: Program, gradient: Gradient) -> PSSynchronizer | None:
    """How the gradient's variable is served; None where it lives on the workers."""
    synchronizer = program.strategy.node(gradient.variable).synchronizer
    return synchronizer if isinstance(synchronizer, PSSynchronizer) else None


def serving(program: Program) -> Serving | None:
    """How the step of `program` is divided; None where no variable lives on a server.

    Raises:
        StrategyError: the strategy asks for what this version, or this graph, cannot do; it names the variable.
    """
    sides: dict[Gradient, int] = {}
    for gradient in program.item.gradients:
        synchronizer = synchronizer_of(program, gradient)
        if synchronizer is None:
            sides[gradient] = WORKERS
        else:
            _require_available(gradient.variable, synchronizer)
            sides[gradient] = program.place.servers[synchronizer.reduction_destination]
    servers = sorted(set(sides.values()) - {WORKERS})
    if not servers:
        return None
    division = Division(program, sides)
    parts = {server: _Part(program, division, server) for server in servers}
    stays = _stays(program, parts.values(), division)
    late = _late(program.analysis.captured, division.moved.union(*(part.counted for part in parts.values()))) & stays
    for part in parts.values():  # Rows that only the update is made of the server reads itself.
        part.lookups = {op: lookup for op, lookup in part.lookups.items() if op in stays}
        part.set_reads(late)
    _set_rounds(program, parts, division)
    services = tuple(part.service(stays) for part in parts.values())
    summable = frozenset(
        gradient.variable
        for gradient, side in sides.items()
        if side != WORKERS and gradient.is_sparse and adds_rows_up(program, gradient)
    )
    return Serving(services, frozenset(division.moved), frozenset(stays), summable)


def _require_available(variable: str, synchronizer: PSSynchronizer) -> None:
    compressor = synchronizer.coded_by
    if compressor.sums_first:
        raise StrategyError(
            f"variable '{variable}': a server is sent each worker's gradient by itself, and {synchronizer.compressor} "
            "needs a sum over workers before; use another compressor, or AllReduce"
        )
    if compressor.gives_up and synchronizer.replicas_to_aggregate:
        raise StrategyError(
            f"variable '{variable}': with replicas_to_aggregate gradients travel as sums over examples, which "
            f"{synchronizer.compressor} would cut off, or hold back for other numbers of examples, and late ones are "
            "dropped with what it held back; leave one of the two out"
        )


def _stays(program: Program, parts: Collection["_Part"], division: Division) -> set[str]:
    """The ops that workers run: all that results, other writes, gradients and what servers are sent need."""
    captured, moved = program.analysis.captured, division.moved
    ends = {op_of(output.tensor) for output in program.item.outputs}
    ends |= {op for op in program.item.run_ops if captured.nodes[op].op not in READS_VARIABLE}
    ends |= {writer for writers in program.analysis.writes.values() for writer in writers}
    ends |= {op_of(value) for part in parts for value in part.values}
    ends |= {op_of(name) for seam in division.seams for name in captured.nodes[seam].input}
    return captured.ancestors(ends - moved, blocked=moved)


def _late(view: GraphView, moved: set[str]) -> set[str]:
    """What waits for one of the ops that servers run."""
    found: set[str] = set()
    for op in view.order():
        producers = view.digraph.pred[op]
        if not (moved.isdisjoint(producers) and found.isdisjoint(producers)):
            found.add(op)
    return found


class _Part:
    """The part of the captured graph around the update of what one server holds.

    Attributes:
        ops: all that the server runs: the moved ops, and copies of what they are computed from.
        given: seams and other ops whose results it is sent.
        values: tensors that it needs and cannot compute.
        counted: see Service.
        lookups: the reads of rows that it is asked for.
        round: for each of `ops` and `given`, the number of the exchange in which the server has it.
        asked: for each op of `lookups`, the number of the exchange in which it is asked for.
        reads: for each op that writes what the server holds, what workers read of that before, after something
            that a server does: it writes in an exchange that they begin when they have read.
        recounted: of `counted` those that write what is written several times, or read before by what waits for a
            server; each with the variable.
    """

    def __init__(self, program: Program, division: Division, server: int):
        self.server = server
        self._program, self._division = program, division
        self._view = program.analysis.captured
        self._writes = {handle: set(writers) for handle, writers in program.analysis.writes.items() if writers}
        self._held = {handle for handle, side in division.held.items() if side == server}
        self._seams = {seam for seam, side in division.seams.items() if side == server}
        self._moved = {op for op, side in division.side.items() if side == server}
        self.values: dict[str, None] = {}
        self.counted: set[str] = set()
        self.ops = self._moved - self._seams
        self._close_over(self.ops)
        while ends := self._ends_of_branches():
            self.ops |= ends
            self._close_over(ends)
        self._require_sent_in_each_step()
        self.given = self._seams | {op_of(value) for value in self.values}
        self.lookups: dict[str, Lookup] = {}
        if len(program.place.all_workers) > 1:
            self.lookups = {lookup.op: lookup for handle in sorted(self._held) for lookup in self._lookups(handle)}
        self.round: dict[str, int] = {}
        self.asked: dict[str, int] = {}
        self.reads: dict[str, frozenset[str]] = {}
        self.recounted: dict[str, str] = {}

    def _lookups(self, handle: str) -> tuple[Lookup, ...]:
        gradients = (one for one in self._program.item.gradients if one.variable == handle)
        synchronizers = [synchronizer_of(self._program, gradient) for gradient in gradients]
        if any(one is None or one.local_replication for one in synchronizers):
            return ()
        return lookups_of(self._program, handle, self._division.moved)

    def service(self, stays: set[str]) -> Service:
        """What the server does; `stays` are the ops that workers run."""
        held = tuple(sorted(self._held))
        return Service(self.server, tuple(self._exchanges(stays)), held, frozenset(self.counted))

    def _close_over(self, ops: Collection[str]) -> None:
        """Add what these ops are computed from: what the server can compute too is copied, the rest is sent."""
        nodes, own = self._view.nodes, self._workers_own()
        kept = {handle for handle, writers in self._writes.items() if handle not in self._held and writers & own}
        kept |= self._division.held.keys() - self._held
        # What workers write before they have their gradients they do themselves.
        forward = self._view.ancestors(op_of(name) for seam in self._division.seams for name in nodes[seam].input)
        kept |= {handle for handle, writers in self._writes.items() if handle not in self._held and writers & forward}
        pending = list(ops)
        while pending:
            node = nodes[pending.pop()]
            for name in node.input:
                op = op_of(name)
                if name.startswith("^") or op in self.ops or op in self._seams:
                    continue
                if nodes[op].op == VARIABLE_OP:
                    if op in kept:
                        raise StrategyError(
                            f"'{node.name}', which worker {self.server} runs as a server, uses variable '{op}', which "
                            "is written elsewhere in the same step. Use AllReduce for the variables that it updates"
                        )
                    if op not in self._held:
                        writers = self._writes.get(op, set())
                        pending += writers - self.ops
                        self.counted |= writers
                        self.ops |= writers
                elif op in own or self._handles_of(op) & kept:
                    self.values[str(parse(name))] = None
                else:
                    self.ops.add(op)
                    pending.append(op)

    def _ends_of_branches(self) -> set[str]:
        """What ends a branch of TensorFlow 1 of which the server runs an op, where another of its ops waits for that.

        Who waited for the op itself would not run where the branch is not taken.
        """
        graph, predicates = self._view.digraph, self._view.control_flow.predicates
        found: set[str] = set()
        for op, others in waited_for(self._view, self.ops).items() if predicates else ():
            for other in others - graph.pred[op].keys():
                if predicates.get(other, frozenset()) - predicates.get(op, frozenset()):
                    after: set[str] = nx.descendants(graph, other)
                    before: set[str] = nx.ancestors(graph, op)
                    found |= after & before & self._view.control_flow.chosen.keys()
        return found

    def _require_sent_in_each_step(self) -> None:
        flow = self._view.control_flow
        for op in sorted(self._seams | {op_of(value) for value in self.values}):
            if not flow.runs_once(op):
                raise StrategyError(
                    f"worker {self.server}, as a server, needs '{op}', which is computed in a branch or a loop of "
                    "TensorFlow 1's control flow, so not once in each step. Compute it before the branch or the loop, "
                    "call tf.compat.v1.enable_control_flow_v2() before the graph is built, or use AllReduce"
                )

    def _workers_own(self) -> set[str]:
        """Ops whose results the server cannot compute by itself: others have them."""
        item, analysis = self._program.item, self._program.analysis
        sources = self._division.seams.keys() | {op_of(statistic.tensor) for statistic in item.statistics}
        sources |= {node.name for node in self._view.of_type(_STAYS)} | analysis.varying | self._division.side.keys()
        return self._view.dataflow_descendants(sources - self._moved, blocked=self._moved) - self._moved

    def _handles_of(self, op: str) -> set[str]:
        return {other for other in map(op_of, self._view.nodes[op].input) if self._view.nodes[other].op == VARIABLE_OP}

    def _users(self, handle: str) -> set[str]:
        """The ops that use the variable and are not moved."""
        found: set[str] = set()
        pending = [handle]
        while pending:
            for op in self._view.dataflow_consumers([pending.pop()]) - found:
                found.add(op)
                if self._view.nodes[op].op in PASSES_HANDLE:
                    pending.append(op)
        return found - self._moved

    def set_reads(self, late: set[str]) -> None:
        """Find what workers read of a variable after a server has written, and before it writes that variable.

        Args:
            late: the ops that workers run and that wait for a server.

        Raises:
            StrategyError: a variable is read between two of its writes, and workers take their steps by themselves, so
                that others' writes come between, too.
        """
        graph = self._view.digraph
        is_together = self._program.strategy.pace.is_together
        self._recount(late if is_together else set())
        for handle in sorted(self._held.union(self.recounted.values() if is_together else ())):
            users = self._users(handle) & late
            before: dict[str, set[str]] = {}
            for writer in self._writes[handle] if users else ():
                before[writer] = nx.ancestors(graph, writer)
            if is_together:
                self.reads |= {
                    writer: self.reads.get(writer, frozenset()) | (users & those) for writer, those in before.items()
                }
                continue
            for op in sorted(users & set().union(*before.values())):
                behind: set[str] = nx.ancestors(graph, op)
                if self._writes[handle] & behind:
                    raise StrategyError(
                        f"'{op}' reads variable '{handle}' between two of its writes in a step, and with sync=False, a "
                        "staleness or replicas_to_aggregate, writes of other workers come between. Read it before or "
                        "after the update, or leave these options out"
                    )

    def _recount(self, late: set[str]) -> None:
        for handle, writers in self._writes.items():
            counted, users = writers & self.counted, self._users(handle) & late
            before: set[str] = set().union(*(nx.ancestors(self._view.digraph, writer) for writer in counted))
            if len(writers) > 1 or users & before:
                self.recounted |= dict.fromkeys(counted, handle)

    @cached_property
    def before_given(self) -> set[str]:
        """Its ops that one of its gradients waits for, as for weights that decay before the step reads them."""
        return self.ops & self._view.ancestors(self.given)

    @property
    def rounds(self) -> set[int]:
        """The numbers of the exchanges in which it computes something."""
        return {self.round[op] for op in self.given | self.ops}

    def _exchanges(self, stays: set[str]) -> Iterator[Exchange]:
        nodes, trained = self._view.nodes, {gradient.variable for gradient in self._program.item.gradients}
        elsewhere = stays | {op for op in self._division.moved if op not in self._moved}
        read = {str(parse(name)) for op in elsewhere for name in nodes[op].input if not name.startswith("^")}
        read |= {str(parse(output.tensor)) for output in self._program.item.outputs}
        answered = {tensor for tensor in read if op_of(tensor) in self._moved}
        asked = {lookup.handle for lookup in self.lookups.values()}
        trained -= {name for shards in self._program.shards for name in shards.names}  # Workers join them themselves.
        for current in sorted({*self.rounds, *self.asked.values()}):
            lookups = tuple(lookup for op, lookup in sorted(self.lookups.items()) if self.asked[op] == current)
            if lookups:
                yield Exchange(lookups=lookups)
            if current not in self.rounds:
                continue
            ops = frozenset(op for op in self.ops if self.round[op] == current)
            written = {handle for handle in self._held if self._writes[handle] & ops}
            yield Exchange(
                tuple(
                    gradient
                    for gradient in self._program.item.gradients
                    if (seam := op_of(gradient.tensors[0])) in self._seams and self.round[seam] == current
                ),
                tuple(sorted(value for value in self.values if self.round[op_of(value)] == current)),
                ops,
                tuple(sorted(tensor for tensor in answered if self.round[op_of(tensor)] == current)),
                tuple(sorted(handle for handle in written - asked if handle in trained or self._users(handle) & stays)),
                read_before=frozenset().union(*(self.reads.get(op, frozenset()) for op in ops)),
            )


def _set_rounds(program: Program, parts: dict[int, _Part], division: Division) -> None:
    """Number the exchanges: a server has what it is sent one exchange after the last that the sender waits for.

    The tensors of one gradient are sent together, and what a server computes of nothing that it is sent waits for its
    first message. Writes between which workers read have an exchange each. What may as well be sent later, with more,
    is. Not so where gradients are reduced by collectives, too, whose order is that of stages: a message that waited for
    a later stage's could keep an earlier one's waiting.
    """
    stage, least = program.analysis.stage, dict[tuple[int, str], int]()
    merging = WORKERS not in division.seams.values()
    if not merging:
        least = {(server, op): stage[op] for server, part in parts.items() for op in part.given if op in division.seams}
    least = _settled(program, parts, division, least)
    while merging:
        merging = False
        for server, part in parts.items():
            rounds = sorted(part.rounds)
            for early, late in pairwise(rounds):
                before = _exchanges_of(parts)
                moved = {(server, op): late for op in (*part.given, *part.ops) if part.round[op] == early}
                tried = _settled(program, parts, division, least | moved)
                merging = _exchanges_of(parts) < before
                if merging:
                    least = tried
                    break
                _settled(program, parts, division, least)
            if merging:
                break


def _exchanges_of(parts: dict[int, _Part]) -> tuple[int, int]:
    """How many exchanges follow one another, and how many there are."""
    updates = {(server, number) for server, part in parts.items() for number in part.rounds}
    lookups = {(server, number) for server, part in parts.items() for number in part.asked.values()}
    return max(each[1] for each in updates), len(updates) + len(lookups)


def _settled(
    program: Program, parts: dict[int, _Part], division: Division, least: dict[tuple[int, str], int]
) -> dict[tuple[int, str], int]:
    """Count rounds, from `least` on; returns numbers that are none less."""
    together = [{op_of(tensor) for tensor in gradient.tensors} for gradient in program.item.gradients]
    while True:
        _count_rounds(program.analysis.captured, parts, division, least)
        raised = dict(least)
        for server, part in parts.items():
            first = min(part.round[op] for op in part.given)
            raised |= {(server, op): max(part.round[op], first) for op in part.ops - part.before_given}
            for seams in together:
                last = max((part.round[seam] for seam in seams if seam in part.given), default=0)
                raised |= {(server, seam): last for seam in seams if seam in part.given}
        if raised == least:
            return least
        least = raised


def _count_rounds(
    view: GraphView, parts: dict[int, _Part], division: Division, least: dict[tuple[int, str], int]
) -> None:
    """Set `round` of each part; `least` are numbers that are not undercut, by server and op."""
    known: dict[str, int] = {}
    """For each op, the exchange after which workers have its result."""
    behind: dict[int, dict[str, int]] = {server: {} for server in parts}
    """For each server and op, the last exchange that the op waits for there."""
    for op in view.order():
        before = view.digraph.pred[op]
        own = division.side.get(op, WORKERS)
        known[op] = max((known[producer] for producer in before), default=0)
        for server in sorted(parts, key=lambda server: server != own):  # Who makes it has it first.
            part = parts[server]
            at = max((behind[server][producer] for producer in before), default=0)
            if op in part.given:
                at = known[op] + 1
            at = max([at, *(known[read] + 1 for read in part.reads.get(op, ()))])
            if op in part.ops or op in part.given:
                at = part.round[op] = max(at, least.get((server, op), 1))
            if op in part.lookups:
                part.asked[op] = known[op] = known[op] + 1
            behind[server][op] = at
            if server == own:
                known[op] = at
            elif op in part.recounted:  # The server's own worker has it from the server.
                known[op] = max(known[op], at)


def waited_for(view: GraphView, ops: Collection[str]) -> dict[str, set[str]]:
    """For each of `ops` those others that it reads or waits for, directly or through what is not among them."""
    behind: set[str] = set()
    found: dict[str, set[str]] = {}
    for name in view.order():
        producers = view.digraph.pred[name]
        if name not in ops and behind.isdisjoint(producers):
            continue
        behind.add(name)
        found[name] = set().union(*({one} if one in ops else found.get(one, set()) for one in producers))
    return {op: found.get(op, set()) for op in ops}
