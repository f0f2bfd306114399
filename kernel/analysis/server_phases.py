"""In which exchange a server has, and computes, what: the phases of its exchanges with the workers.

`server_closure.py` says what a server runs and is sent, `server_reads.py` what workers read before it writes. The
exchanges themselves are made in `server_ops.py`.
"""

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise

import networkx as nx

from autodist_py.kernel.analysis.server_closure import Closure
from autodist_py.kernel.analysis.server_reads import Reads
from autodist_py.kernel.analysis.server_split import WORKERS, Division
from autodist_py.kernel.events import Lookup
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of
from autodist_py.kernel.program import Program
from autodist_py.proto.errors import StrategyError


class Phases:
    """The phases of one server.

    Attributes:
        closure: what the server runs, and is sent.
        lookups: the reads of rows that it is asked for, by their ops.
        reads: what workers read before it writes.
        phase: for each of the ops that it runs or is given, that of the exchange in which the server has it.
        asked: for each op of `lookups`, that of the exchange in which it is asked for.
    """

    def __init__(self, program: Program, closure: Closure, *, lookups: Mapping[str, Lookup], reads: Reads):
        self._program = program
        self.closure, self.lookups, self.reads = closure, lookups, reads
        self.phase: dict[str, int] = {}
        self.asked: dict[str, int] = {}

    @cached_property
    def before_given(self) -> frozenset[str]:
        """Its ops that one of its gradients waits for, as for weights that decay before the step reads them."""
        return self.closure.ops & self._program.analysis.captured.ancestors(self.closure.given)

    @cached_property
    def together(self) -> list[set[str]]:
        """Its ops that have one phase: the tensors of a gradient, and what stands in one branch of TensorFlow 1.

        Of a branch that is not taken there is nothing that could be kept for a later exchange.
        """
        view, ops = self._program.analysis.captured, self.closure.ops
        sent = [set(map(op_of, gradient.tensors)) & self.closure.given for gradient in self._program.item.gradients]
        inside = {op for op in ops if view.nodes[op].op == "Switch" or not view.control_flow.runs_once(op)}
        edges = ((op, taker) for op in inside for taker in view.digraph.succ[op] if taker in ops)
        return [*filter(None, sent), *nx.connected_components(nx.Graph(edges))]

    @property
    def computing(self) -> set[int]:
        """Those of the exchanges in which it computes something."""
        return {self.phase[op] for op in self.closure.given | self.closure.ops}


def count_phases(
    program: Program,
    division: Division,
    servers: Mapping[int, Phases],
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
            for server, part in servers.items()
            for op in part.closure.given
            if op in division.markers
        }
        least |= {given: max(least.get(given, 1), phase) for given, phase in (postponed or {}).items()}
    least = _settled(program, servers, division, least)
    while merging:
        merging = False
        for server, part in servers.items():
            phases = sorted(part.computing)
            for early, late in pairwise(phases):
                before = _exchanges_of(servers)
                server_ops = {
                    (server, op): late for op in (*part.closure.given, *part.closure.ops) if part.phase[op] == early
                }
                tried = _settled(program, servers, division, least | server_ops)
                merging = _exchanges_of(servers) < before
                if merging:
                    least = tried
                    break
                _settled(program, servers, division, least)
            if merging:
                break


def _exchanges_of(servers: Mapping[int, Phases]) -> tuple[int, int]:
    """How many exchanges follow one another, and how many there are."""
    updates = {(server, number) for server, part in servers.items() for number in part.computing}
    lookups = {(server, number) for server, part in servers.items() for number in part.asked.values()}
    return max(each[1] for each in updates), len(updates) + len(lookups)


def _settled(
    program: Program, servers: Mapping[int, Phases], division: Division, least: dict[tuple[int, str], int]
) -> dict[tuple[int, str], int]:
    """Count phases, from `least` on; returns numbers that are none less.

    Raises:
        StrategyError: a branch of TensorFlow 1 waits for itself, through what workers run.
    """
    most = max(least.values(), default=1)
    most += sum(len(part.closure.given) + len(part.lookups) + len(part.reads.before) for part in servers.values())
    while True:
        _count(program.analysis.captured, servers, division, least)
        raised = dict(least)
        for server, part in servers.items():
            first = min(part.phase[op] for op in part.closure.given)
            raised |= {(server, op): max(part.phase[op], first) for op in part.closure.ops - part.before_given}
            for ops in part.together:
                last = max(part.phase[op] for op in ops)
                if last > most and ops <= part.closure.ops:  # There are no messages for so many exchanges.
                    raise _waiting_for_itself(min(ops), server)
                raised |= {(server, op): last for op in ops}
        if raised == least:
            return least
        least = raised


def _waiting_for_itself(op: str, server: int) -> StrategyError:
    return StrategyError(
        f"'{op}' belongs to a branch of TensorFlow 1's control flow, which is run in one exchange with a server. "
        f"Worker {server}, as a server, has a part of the branch only when workers have used another part. Make two "
        "branches of it, or use AllReduce for the variables that it updates"
    )


def _count(
    view: GraphView, servers: Mapping[int, Phases], division: Division, least: dict[tuple[int, str], int]
) -> None:
    """Set `phase` of each part; `least` are numbers that are not undercut, by server and op."""
    known: dict[str, int] = {}
    """For each op, the exchange after which workers have its result."""
    behind: dict[int, dict[str, int]] = {server: {} for server in servers}
    """For each server and op, the last exchange that the op waits for there."""
    for op in view.order():
        before = view.digraph.pred[op]
        own = division.side.get(op, WORKERS)
        known[op] = max((known[producer] for producer in before), default=0)
        for server in sorted(servers, key=lambda server: server != own):  # Who makes it has it first.
            part = servers[server]
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
