"""Parameter server: a variable, its optimizer state and its update live on one worker, the server.

This module says what crosses between a server and the workers, and in which exchange; `passes/lower_exchanges.py` cuts
the graph there. What it says does not depend on which worker asks. `server_split.py`, `server_closure.py` and
`server_reads.py` say which ops a server runs, with what, and after which reads. `server_phases.py` numbers the
exchanges.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from autodist_py.kernel.analysis.replica_weights import dense_bytes
from autodist_py.kernel.analysis.row_access import adds_rows_up, lookups_of
from autodist_py.kernel.analysis.server_closure import Closure, Holding, writers_of
from autodist_py.kernel.analysis.server_phases import Phases, count_phases
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
    phases = {
        own.server: Phases(
            program,
            closure,
            lookups=_lookups(program, division, own, worker_ops),
            reads=Reads.of(program, division, own, mirrored_ops=closure.mirrored_ops, late=late),
        )
        for own, closure in zip(holdings, closures, strict=True)
    }
    count_phases(program, division, phases, postponed)
    plans = tuple(_Part(program, division, own, phases[own.server]).plan(worker_ops, late) for own in holdings)
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
    """The part of the captured graph around the update of what one server holds, in numbered exchanges."""

    def __init__(self, program: Program, division: Division, own: Holding, phases: Phases):
        self._program, self._division, self._own, self._phases = program, division, own, phases
        self._closure, self._lookups = phases.closure, phases.lookups

    def plan(self, worker_ops: set[str], late: set[str]) -> ServerPlan:
        """What the server does; workers run `worker_ops`, of which those `late` wait for a server."""
        held = tuple(sorted(self._own.held))
        return ServerPlan(self._own.server, tuple(self._exchanges(worker_ops, late)), held, self._closure.mirrored_ops)

    def _exchanges(self, worker_ops: set[str], late: set[str]) -> Iterator[Exchange]:
        level, phase, before = self._program.analysis.level, self._phases.phase, self._phases.reads.before
        nodes, writes = self._program.analysis.captured.nodes, writers_of(self._program)
        trained = {gradient.variable for gradient in self._program.item.gradients}
        elsewhere = worker_ops | {op for op in self._division.server_ops if op not in self._own.server_ops}
        read = {str(parse(name)) for op in elsewhere for name in nodes[op].input if not name.startswith("^")}
        read |= {str(parse(output.tensor)) for output in self._program.item.outputs}
        # A later gradient may be made of no examples, but of what an update has left: workers send it all the same.
        read |= {str(parse(name)) for op in self._division.markers for name in nodes[op].input if name[:1] != "^"}
        answered = {tensor for tensor in read if op_of(tensor) in self._own.server_ops}
        asked = {lookup.handle for lookup in self._lookups.values()}
        trained -= {
            name for shards in self._program.cuts.shards for name in shards.names
        }  # Workers join them themselves.
        for current in sorted({*self._phases.computing, *self._phases.asked.values()}):
            lookups = tuple(lookup for op, lookup in sorted(self._lookups.items()) if self._phases.asked[op] == current)
            if lookups:
                yield self._asking(lookups, current)
            if current not in self._phases.computing:
                continue
            ops = frozenset(op for op in self._closure.ops if phase[op] == current)
            written = {handle for handle in self._own.held if writes[handle] & ops}
            gradients = tuple(
                gradient
                for gradient in self._program.item.gradients
                if (marker := op_of(gradient.tensors[0])) in self._own.markers and phase[marker] == current
            )
            values = tuple(sorted(value for value in self._closure.values if phase[op_of(value)] == current))
            answers = tuple(sorted(tensor for tensor in answered if phase[op_of(tensor)] == current))
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
                    self._read_ahead(ops, needs, worker_ops - late),
                    *(before.get(op, ()) for op in ops),
                ),
            )

    def _read_ahead(self, ops: frozenset[str], needs: Sequence[str], readers: set[str]) -> set[str]:
        """What `readers` read of the variables that `ops` write, before that, and no tensor that they send needs.

        Where such a read is run in a branch of TensorFlow 1, its end, as a message waits for what is run in each step.
        """
        view, found = self._program.analysis.captured, set[str]()
        readers = readers - view.ancestors(map(op_of, needs)) - self._closure.mirrored_ops
        for handle, op in early_reads(self._program, self._division, ops, readers):
            takers = view.digraph.succ[op].keys()
            if takers and takers <= self._lookups.keys():
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
