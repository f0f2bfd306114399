"""Parameter server: a variable, its optimizer state and its update live on one worker, the server.

This module says what crosses between a server and the workers, and in which exchange; `passes/lower_exchanges.py` cuts
the graph there. What it says does not depend on which worker asks. `server_split.py`, `server_closure.py` and
`server_reads.py` say which ops a server runs, with what, and after which reads.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import networkx as nx

from autodist_py.kernel.analysis.replica_weights import dense_bytes
from autodist_py.kernel.analysis.row_access import adds_rows_up, lookups_of
from autodist_py.kernel.analysis.server_closure import Closure, Holding, writers_of
from autodist_py.kernel.analysis.server_reads import Reads, early_reads
from autodist_py.kernel.analysis.server_split import WORKERS, Division
from autodist_py.kernel.events import LOCAL, SERVER, Exchange, Lookup, ServerPlan, ServerPlans
from autodist_py.kernel.ir.graph import READS_VARIABLE, SHOWS, GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.program import Program
from autodist_py.proto.compressors import text_of
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient
from autodist_py.proto.synchronizers import PSSynchronizer


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
    holdings = [Holding.of(division, server) for server in servers]
    closures = [Closure.of(program, division, own) for own in holdings]
    worker_ops = _worker_ops(program, closures, division)
    run_there = division.server_ops.union(*(one.mirrored_ops for one in closures))
    late = _late(program.analysis.captured, run_there) & worker_ops
    parts = {
        own.server: _Part(
            program,
            division,
            own,
            closure,
            lookups=_lookups(program, division, own, worker_ops),
            reads=Reads.of(program, division, own, mirrored_ops=closure.mirrored_ops, late=late),
        )
        for own, closure in zip(holdings, closures, strict=True)
    }
    _set_phases(program, parts, division, postponed)
    plans = tuple(part.plan(worker_ops, late) for part in parts.values())
    summable = frozenset(
        gradient.variable
        for gradient, side in sides.items()
        if side != WORKERS and gradient.is_sparse and adds_rows_up(program, gradient)
    )
    return ServerPlans(plans, frozenset(division.server_ops), frozenset(worker_ops), summable)


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


def _worker_ops(program: Program, closures: Collection[Closure], division: Division) -> set[str]:
    """The ops that workers run: all that results, other writes, gradients and what servers are sent need."""
    captured, server_ops = program.analysis.captured, division.server_ops
    ends = {op_of(output.tensor) for output in program.item.outputs}
    ends |= {op for op in program.item.run_ops if captured.nodes[op].op not in READS_VARIABLE}
    ends |= {writer for writers in program.analysis.writes.values() for writer in writers}
    ends |= {op_of(value) for closure in closures for value in closure.values}
    ends |= {op_of(name) for marker in division.markers for name in captured.nodes[marker].input}
    for op in sorted(captured.ancestors(ends)) if captured.control_flow.predicates else ():
        decided_there = captured.control_flow.predicates.get(op, frozenset()) & server_ops
        if decided_there and captured.nodes[op].op in SHOWS | {"Assert"}:
            raise StrategyError(
                f"'{op}' shows or asserts something in a branch of TensorFlow 1's control flow. A server decides by "
                f"'{min(decided_there)}' whether it is taken, and workers, who show and assert, are not told. Call "
                "tf.compat.v1.enable_control_flow_v2() before the graph is built, or use AllReduce"
            )
    return captured.ancestors(ends - server_ops, blocked=server_ops)


def _late(view: GraphView, server_ops: set[str]) -> set[str]:
    """What waits for one of the ops that servers run."""
    found: set[str] = set()
    for op in view.order():
        producers = view.digraph.pred[op]
        if not (server_ops.isdisjoint(producers) and found.isdisjoint(producers)):
            found.add(op)
    return found


def _lookups(program: Program, division: Division, own: Holding, worker_ops: set[str]) -> dict[str, Lookup]:
    """The reads of rows that the server is asked for; rows that only the update is made of it reads itself."""
    if len(program.topology.all_workers) == 1:
        return {}
    found: dict[str, Lookup] = {}
    for handle in sorted(own.held):
        synchronizers = [synchronizer_of(program, gradient) for gradient in program.item.gradients_of(handle)]
        if not any(one is None or one.local_replication for one in synchronizers):
            found |= {
                lookup.op: lookup
                for lookup in lookups_of(program, handle, division.server_ops)
                if lookup.op in worker_ops
            }
    return found


class _Part:
    """The part of the captured graph around the update of what one server holds.

    Attributes:
        closure: what the server runs, and is sent.
        lookups: the reads of rows that it is asked for, by their ops.
        reads: what workers read before it writes.
        phase: for each of the ops that it runs or is given, that of the exchange in which the server has it.
        asked: for each op of `lookups`, that of the exchange in which it is asked for.
    """

    def __init__(
        self,
        program: Program,
        division: Division,
        own: Holding,
        closure: Closure,
        *,
        lookups: Mapping[str, Lookup],
        reads: Reads,
    ):
        self._program, self._division, self._own = program, division, own
        self.closure, self.lookups, self.reads = closure, lookups, reads
        self.phase: dict[str, int] = {}
        self.asked: dict[str, int] = {}

    def plan(self, worker_ops: set[str], late: set[str]) -> ServerPlan:
        """What the server does; workers run `worker_ops`, of which those `late` wait for a server."""
        held = tuple(sorted(self._own.held))
        return ServerPlan(self._own.server, tuple(self._exchanges(worker_ops, late)), held, self.closure.mirrored_ops)

    @cached_property
    def before_given(self) -> frozenset[str]:
        """Its ops that one of its gradients waits for, as for weights that decay before the step reads them."""
        return self.closure.ops & self._program.analysis.captured.ancestors(self.closure.given)

    @cached_property
    def branches(self) -> list[set[str]]:
        """Its ops that read of one another, or wait for, what is not there in each step: a branch of TensorFlow 1."""
        view = self._program.analysis.captured
        flow = view.control_flow
        inside = {op for op in self.closure.ops if view.nodes[op].op == "Switch" or not flow.runs_once(op)}
        edges = ((op, taker) for op in inside for taker in view.digraph.succ[op] if taker in self.closure.ops)
        return list(nx.connected_components(nx.Graph(edges)))

    @property
    def phases(self) -> set[int]:
        """Those of the exchanges in which it computes something."""
        return {self.phase[op] for op in self.closure.given | self.closure.ops}

    def _exchanges(self, worker_ops: set[str], late: set[str]) -> Iterator[Exchange]:
        level = self._program.analysis.level
        nodes, writes = self._program.analysis.captured.nodes, writers_of(self._program)
        trained = {gradient.variable for gradient in self._program.item.gradients}
        elsewhere = worker_ops | {op for op in self._division.server_ops if op not in self._own.server_ops}
        read = {str(parse(name)) for op in elsewhere for name in nodes[op].input if not name.startswith("^")}
        read |= {str(parse(output.tensor)) for output in self._program.item.outputs}
        # A later gradient may be made of no examples, but of what an update has left: workers send it all the same.
        read |= {str(parse(name)) for op in self._division.markers for name in nodes[op].input if name[:1] != "^"}
        answered = {tensor for tensor in read if op_of(tensor) in self._own.server_ops}
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
            ops = frozenset(op for op in self.closure.ops if self.phase[op] == current)
            written = {handle for handle in self._own.held if writes[handle] & ops}
            gradients = tuple(
                gradient
                for gradient in self._program.item.gradients
                if (marker := op_of(gradient.tensors[0])) in self._own.markers and self.phase[marker] == current
            )
            values = tuple(sorted(value for value in self.closure.values if self.phase[op_of(value)] == current))
            answers = tuple(sorted(tensor for tensor in answered if self.phase[op_of(tensor)] == current))
            needs = (*(nodes[op_of(name)].input[0] for one in gradients for name in one.tensors), *values)
            yield Exchange(
                needs=needs,
                gives=answers,
                level=max((level[op] for op in self._sent(gradients, values)), default=0),
                engine=LOCAL if self._program.serves_itself else SERVER,
                members=len(self._program.topology.all_workers),
                nbytes=self._bytes(gradients, values),
                server=self._own.server,
                phase=current,
                gradients=gradients,
                values=values,
                ops=ops,
                answers=answers,
                refreshed=tuple(
                    sorted(
                        handle
                        for handle in written - asked
                        if handle in trained or self._division.users(handle) & worker_ops
                    )
                ),
                read_before=frozenset().union(
                    self._read_ahead(ops, needs, worker_ops - late), *(self.reads.before.get(op, ()) for op in ops)
                ),
            )

    def _read_ahead(self, ops: frozenset[str], needs: Sequence[str], readers: set[str]) -> set[str]:
        """What `readers` read of the variables that `ops` write, before that, and no tensor that they send needs.

        Where such a read is run in a branch of TensorFlow 1, its end, as a message waits for what is run in each step.
        """
        view, found = self._program.analysis.captured, set[str]()
        readers = readers - view.ancestors(map(op_of, needs)) - self.closure.mirrored_ops
        for handle, op in early_reads(self._program, self._division, ops, readers):
            takers = view.digraph.succ[op].keys()
            if takers and takers <= self.lookups.keys():
                continue  # The server is asked for rows.
            ends = view.ends_of_branch(op) & readers
            if not ends:
                raise StrategyError(
                    f"'{op}' reads variable '{handle}' in a branch of TensorFlow 1's control flow. Worker "
                    f"{self._own.server}, as a server, writes it later, and nothing that is run in each step waits "
                    "for the read. Call tf.compat.v1.enable_control_flow_v2() before the graph is built, or use "
                    "AllReduce"
                )
            found |= ends
        return found

    @staticmethod
    def _sent(gradients: Collection[Gradient], values: Collection[str]) -> set[str]:
        return {op_of(tensor) for gradient in gradients for tensor in gradient.tensors} | set(map(op_of, values))

    def _asking(self, lookups: tuple[Lookup, ...], current: int) -> Exchange:
        nodes, level = self._program.analysis.captured.nodes, self._program.analysis.level
        return Exchange(
            needs=tuple(nodes[lookup.op].input[1] for lookup in lookups),
            gives=tuple(lookup.op for lookup in lookups),
            level=max(level[lookup.op] for lookup in lookups),
            engine=SERVER,
            members=len(self._program.topology.all_workers),
            server=self._own.server,
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
            (server, op): level[op]
            for server, part in parts.items()
            for op in part.closure.given
            if op in division.markers
        }
        least |= {given: max(least.get(given, 1), phase) for given, phase in (postponed or {}).items()}
    least = _settled(program, parts, division, least)
    while merging:
        merging = False
        for server, part in parts.items():
            phases = sorted(part.phases)
            for early, late in pairwise(phases):
                before = _exchanges_of(parts)
                server_ops = {
                    (server, op): late for op in (*part.closure.given, *part.closure.ops) if part.phase[op] == early
                }
                tried = _settled(program, parts, division, least | server_ops)
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
    """Count phases, from `least` on; returns numbers that are none less.

    The ops of a branch of TensorFlow 1 are run in one exchange: what is not computed is not kept for a later one.

    Raises:
        StrategyError: such a branch waits for itself, through what workers run.
    """
    together = [{op_of(tensor) for tensor in gradient.tensors} for gradient in program.item.gradients]
    most = max(least.values(), default=1)
    most += sum(len(part.closure.given) + len(part.lookups) + len(part.reads.before) for part in parts.values())
    while True:
        _count_phases(program.analysis.captured, parts, division, least)
        raised = dict(least)
        for server, part in parts.items():
            first = min(part.phase[op] for op in part.closure.given)
            raised |= {(server, op): max(part.phase[op], first) for op in part.closure.ops - part.before_given}
            for markers in together:
                last = max((part.phase[marker] for marker in markers if marker in part.closure.given), default=0)
                raised |= {(server, marker): last for marker in markers if marker in part.closure.given}
            for branch in part.branches:
                last = max(part.phase[op] for op in branch)
                if last > most:
                    raise StrategyError(
                        f"'{min(branch)}' stands in a branch of TensorFlow 1's control flow, part of which worker "
                        f"{server}, as a server, can compute only when workers have used another part. A branch is run "
                        "in one exchange with a server. Make it two, or use AllReduce"
                    )
                raised |= {(server, op): last for op in branch}
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
            if op in part.closure.given:
                at = known[op] + 1
            at = max([at, *(known[read] + 1 for read in part.reads.before.get(op, ()))])
            if op in part.closure.ops or op in part.closure.given:
                at = part.phase[op] = max(at, least.get((server, op), 1))
            if op in part.lookups:
                part.asked[op] = known[op] = known[op] + 1
            behind[server][op] = at
            if server == own:
                known[op] = at
            elif op in part.reads.recounted:  # The server's own worker has it from the server.
                known[op] = max(known[op], at)
