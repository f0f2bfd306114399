"""Parameter server: a variable, its optimizer state and its update live on one worker, the server.

This module says which ops of the captured graph a server runs, and what crosses between it and the workers;
`passes/lower_exchanges.py` cuts the graph there. What it says does not depend on which worker asks. It is long, as what
crosses and when are found of the same parts.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from itertools import pairwise

import networkx as nx

from autodist_py.kernel.analysis.replica_weights import dense_bytes
from autodist_py.kernel.analysis.row_access import adds_rows_up, lookups_of
from autodist_py.kernel.analysis.server_split import WORKERS, Division
from autodist_py.kernel.events import LOCAL, SERVER, Exchange, Lookup, ServerPlan, ServerPlans
from autodist_py.kernel.ir.graph import (
    ITERATORS,
    PASSES_HANDLE,
    READS_VARIABLE,
    STANDS_ONCE,
    VARIABLE_OP,
    GraphView,
)
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.program import Program
from autodist_py.proto.compressors import text_of
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient
from autodist_py.proto.synchronizers import PSSynchronizer

_STAYS = STANDS_ONCE | ITERATORS
"""Op types that are each worker's own, with all that is made of them."""


def synchronizer_of(program: Program, gradient: Gradient) -> PSSynchronizer | None:
    """How the gradient's variable is served; None where it lives on the workers."""
    synchronizer = program.strategy.node(gradient.variable).synchronizer
    return None if synchronizer is None else synchronizer.as_ps


def server_plans(program: Program, postponed: Mapping[tuple[int, str], int] | None = None) -> ServerPlans | None:
    """How the step of `program` is divided; None where no variable lives on a server.

    Args:
        program: the captured one.
        postponed: for ops whose results servers are sent, by server and op, the first phase in which they are sent;
            where it is given, no message waits for more than it brings.

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
            sides[gradient] = program.topology.servers[synchronizer.reduction_destination]
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
    _set_phases(program, parts, division, postponed)
    plans = tuple(part.plan(stays) for part in parts.values())
    summable = frozenset(
        gradient.variable
        for gradient, side in sides.items()
        if side != WORKERS and gradient.is_sparse and adds_rows_up(program, gradient)
    )
    return ServerPlans(plans, frozenset(division.moved), frozenset(stays), summable)


def _require_available(variable: str, synchronizer: PSSynchronizer) -> None:
    compressor = synchronizer.compressor
    if compressor.sums_first:
        raise StrategyError(
            f"variable '{variable}': a server is sent each worker's gradient by itself, and {text_of(compressor)} "
            "needs a sum over workers before; use another compressor, or AllReduce"
        )
    if compressor.gives_up and synchronizer.replicas_to_aggregate:
        raise StrategyError(
            f"variable '{variable}': with replicas_to_aggregate gradients travel as sums over examples. "
            f"{text_of(compressor)} would cut them off, or hold them back for other numbers of examples, and late "
            "ones are dropped with what it held back. Leave one of the two out"
        )


def _stays(program: Program, parts: Collection["_Part"], division: Division) -> set[str]:
    """The ops that workers run: all that results, other writes, gradients and what servers are sent need."""
    captured, moved = program.analysis.captured, division.moved
    ends = {op_of(output.tensor) for output in program.item.outputs}
    ends |= {op for op in program.item.run_ops if captured.nodes[op].op not in READS_VARIABLE}
    ends |= {writer for writers in program.analysis.writes.values() for writer in writers}
    ends |= {op_of(value) for part in parts for value in part.values}
    ends |= {op_of(name) for marker in division.markers for name in captured.nodes[marker].input}
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
        given: markers and other ops whose results it is sent.
        values: tensors that it needs and cannot compute.
        counted: see ServerPlan.
        lookups: the reads of rows that it is asked for.
        phase: for each of `ops` and `given`, that of the exchange in which the server has it.
        asked: for each op of `lookups`, that of the exchange in which it is asked for.
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
        self._markers = {marker for marker, side in division.markers.items() if side == server}
        self._moved = {op for op, side in division.side.items() if side == server}
        self.values: dict[str, None] = {}
        self.counted: set[str] = set()
        self.ops = self._moved - self._markers
        self._close_over(self.ops)
        while ends := self._ends_of_branches():
            self.ops |= ends
            self._close_over(ends)
        self._require_sent_in_each_step()
        self.given = self._markers | {op_of(value) for value in self.values}
        self.lookups: dict[str, Lookup] = {}
        if len(program.topology.all_workers) > 1:
            self.lookups = {lookup.op: lookup for handle in sorted(self._held) for lookup in self._lookups(handle)}
        self.phase: dict[str, int] = {}
        self.asked: dict[str, int] = {}
        self.reads: dict[str, frozenset[str]] = {}
        self.recounted: dict[str, str] = {}

    def _lookups(self, handle: str) -> tuple[Lookup, ...]:
        gradients = self._program.item.gradients_of(handle)
        synchronizers = [synchronizer_of(self._program, gradient) for gradient in gradients]
        if any(one is None or one.local_replication for one in synchronizers):
            return ()
        return lookups_of(self._program, handle, self._division.moved)

    def plan(self, stays: set[str]) -> ServerPlan:
        """What the server does; `stays` are the ops that workers run."""
        held = tuple(sorted(self._held))
        return ServerPlan(self.server, tuple(self._exchanges(stays)), held, frozenset(self.counted))

    def _close_over(self, ops: Collection[str]) -> None:
        """Add what these ops are computed from: what the server can compute too is copied, the rest is sent."""
        nodes, own = self._view.nodes, self._workers_own()
        kept = {handle for handle, writers in self._writes.items() if handle not in self._held and writers & own}
        kept |= self._division.held.keys() - self._held
        # What workers write before they have their gradients they do themselves.
        forward = self._view.ancestors(op_of(name) for marker in self._division.markers for name in nodes[marker].input)
        kept |= {handle for handle, writers in self._writes.items() if handle not in self._held and writers & forward}
        pending = list(ops)
        while pending:
            node = nodes[pending.pop()]
            for name in node.input:
                op = op_of(name)
                if name.startswith("^") or op in self.ops or op in self._markers:
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
        for op in sorted(self._markers | {op_of(value) for value in self.values}):
            if not flow.runs_once(op):
                raise StrategyError(
                    f"worker {self.server}, as a server, needs '{op}', which is computed in a branch or a loop of "
                    "TensorFlow 1's control flow, so not once in each step. Compute it before the branch or the loop, "
                    "call tf.compat.v1.enable_control_flow_v2() before the graph is built, or use AllReduce"
                )

    def _workers_own(self) -> set[str]:
        """Ops whose results the server cannot compute by itself: others have them."""
        item, analysis = self._program.item, self._program.analysis
        sources = self._division.markers.keys() | {op_of(statistic.tensor) for statistic in item.statistics}
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
        is_bsp = self._program.strategy.consistency.is_bsp
        self._recount(late if is_bsp else set())
        for handle in sorted(self._held.union(self.recounted.values() if is_bsp else ())):
            users = self._users(handle) & late
            before: dict[str, set[str]] = {}
            for writer in self._writes[handle] if users else ():
                before[writer] = nx.ancestors(graph, writer)
            if is_bsp:
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
    def phases(self) -> set[int]:
        """Those of the exchanges in which it computes something."""
        return {self.phase[op] for op in self.given | self.ops}

    def _exchanges(self, stays: set[str]) -> Iterator[Exchange]:
        level = self._program.analysis.level
        nodes, trained = self._view.nodes, {gradient.variable for gradient in self._program.item.gradients}
        elsewhere = stays | {op for op in self._division.moved if op not in self._moved}
        read = {str(parse(name)) for op in elsewhere for name in nodes[op].input if not name.startswith("^")}
        read |= {str(parse(output.tensor)) for output in self._program.item.outputs}
        # A later gradient may be made of no examples, but of what an update has left: workers send it all the same.
        read |= {str(parse(name)) for op in self._division.markers for name in nodes[op].input if name[:1] != "^"}
        answered = {tensor for tensor in read if op_of(tensor) in self._moved}
        asked = {lookup.handle for lookup in self.lookups.values()}
        trained -= {
            name for shards in self._program.cuts.shards for name in shards.names
        }  # Workers join them themselves.
        for current in sorted({*self.phases, *self.asked.values()}):
            lookups = tuple(lookup for op, lookup in sorted(self.lookups.items()) if self.asked[op] == current)
            if lookups:
                yield self._asking(lookups, current)
            if current not in self.phases:
                continue
            ops = frozenset(op for op in self.ops if self.phase[op] == current)
            written = {handle for handle in self._held if self._writes[handle] & ops}
            gradients = tuple(
                gradient
                for gradient in self._program.item.gradients
                if (marker := op_of(gradient.tensors[0])) in self._markers and self.phase[marker] == current
            )
            values = tuple(sorted(value for value in self.values if self.phase[op_of(value)] == current))
            answers = tuple(sorted(tensor for tensor in answered if self.phase[op_of(tensor)] == current))
            yield Exchange(
                needs=(*(nodes[op_of(name)].input[0] for one in gradients for name in one.tensors), *values),
                gives=answers,
                level=max((level[op] for op in self._sent(gradients, values)), default=0),
                engine=LOCAL if self._program.serves_itself else SERVER,
                members=len(self._program.topology.all_workers),
                nbytes=self._bytes(gradients, values),
                server=self.server,
                phase=current,
                gradients=gradients,
                values=values,
                ops=ops,
                answers=answers,
                refreshed=tuple(
                    sorted(handle for handle in written - asked if handle in trained or self._users(handle) & stays)
                ),
                read_before=frozenset().union(*(self.reads.get(op, frozenset()) for op in ops)),
            )

    @staticmethod
    def _sent(gradients: Collection[Gradient], values: Collection[str]) -> set[str]:
        return {op_of(tensor) for gradient in gradients for tensor in gradient.tensors} | set(map(op_of, values))

    def _asking(self, lookups: tuple[Lookup, ...], current: int) -> Exchange:
        nodes, level = self._view.nodes, self._program.analysis.level
        return Exchange(
            needs=tuple(nodes[lookup.op].input[1] for lookup in lookups),
            gives=tuple(lookup.op for lookup in lookups),
            level=max(level[lookup.op] for lookup in lookups),
            engine=SERVER,
            members=len(self._program.topology.all_workers),
            server=self.server,
            phase=current,
            lookups=lookups,
        )

    def _bytes(self, gradients: Collection[Gradient], values: Collection[str]) -> int | None:
        """What a message of these brings, if it is known."""
        if values or any(gradient.is_sparse for gradient in gradients):
            return None
        return sum(dense_bytes(self._program, gradient) for gradient in gradients)


def _set_phases(
    program: Program,
    parts: dict[int, _Part],
    division: Division,
    postponed: Mapping[tuple[int, str], int] | None,
) -> None:
    """Number the exchanges: a server has what it is sent one exchange after the last that the sender waits for.

    The tensors of one gradient are sent together, and what a server computes of nothing that it is sent waits for its
    first message. Writes between which workers read have an exchange each. What may as well be sent later, with more,
    is. Not so where gradients are reduced by collectives, too, whose order is that of levels: a message that waited for
    a later level's could keep an earlier one's waiting. Nor where something is `postponed`, see `server_plans`.
    """
    level, least = program.analysis.level, dict[tuple[int, str], int]()
    merging = WORKERS not in division.markers.values() and postponed is None
    if not merging:
        least = {
            (server, op): level[op] for server, part in parts.items() for op in part.given if op in division.markers
        }
        least |= {given: max(least.get(given, 1), phase) for given, phase in (postponed or {}).items()}
    least = _settled(program, parts, division, least)
    while merging:
        merging = False
        for server, part in parts.items():
            phases = sorted(part.phases)
            for early, late in pairwise(phases):
                before = _exchanges_of(parts)
                moved = {(server, op): late for op in (*part.given, *part.ops) if part.phase[op] == early}
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
    updates = {(server, number) for server, part in parts.items() for number in part.phases}
    lookups = {(server, number) for server, part in parts.items() for number in part.asked.values()}
    return max(each[1] for each in updates), len(updates) + len(lookups)


def _settled(
    program: Program, parts: dict[int, _Part], division: Division, least: dict[tuple[int, str], int]
) -> dict[tuple[int, str], int]:
    """Count phases, from `least` on; returns numbers that are none less."""
    together = [{op_of(tensor) for tensor in gradient.tensors} for gradient in program.item.gradients]
    while True:
        _count_phases(program.analysis.captured, parts, division, least)
        raised = dict(least)
        for server, part in parts.items():
            first = min(part.phase[op] for op in part.given)
            raised |= {(server, op): max(part.phase[op], first) for op in part.ops - part.before_given}
            for markers in together:
                last = max((part.phase[marker] for marker in markers if marker in part.given), default=0)
                raised |= {(server, marker): last for marker in markers if marker in part.given}
        if raised == least:
            return least
        least = raised


def _count_phases(
    view: GraphView, parts: dict[int, _Part], division: Division, least: dict[tuple[int, str], int]
) -> None:
    """Set `phase` of each part; `least` are numbers that are not undercut, by server and op."""
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
                at = part.phase[op] = max(at, least.get((server, op), 1))
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
