"""What one server runs, and what it is sent: the ops that it runs in the workers' place, and copies of what these need.

`server_split.py` says which ops servers run in the workers' place; when they run is found in `server_ops.py`.
"""

from collections.abc import Collection
from dataclasses import dataclass

import networkx as nx
import tensorflow as tf

from autodist_py.kernel.analysis.server_split import Division
from autodist_py.kernel.ir.graph import SHARED_BY_NAME, STANDS_ONCE, VARIABLE_OP, GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.program import Program
from autodist_py.proto.errors import StrategyError

_STAYS = STANDS_ONCE | SHARED_BY_NAME
"""Op types that are each worker's own, with all that is made of them."""


_PASSES_ON = frozenset({"Const", "Identity", "NoOp", "Switch"})
"""Op types that only pass on whether a branch is taken, where others wait for them."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one server holds, and runs in the workers' place.

    Attributes:
        server: the worker that is the server.
        held: the variables that live on it.
        markers: the ops that pass on their gradients.
        server_ops: the ops that it runs in the workers' place, with the markers.
    """

    server: int
    held: frozenset[str]
    markers: frozenset[str]
    server_ops: frozenset[str]

    @classmethod
    def of(cls, division: Division, server: int) -> "Holding":
        """That of the server, as the step is divided."""
        held, markers, server_ops = (
            frozenset(name for name, side in sides.items() if side == server)
            for sides in (division.held, division.markers, division.side)
        )
        return cls(server, held, markers, server_ops)


@dataclass(frozen=True, slots=True)
class Closure:
    """The ops that one server runs, and what it needs for that.

    Attributes:
        ops: all that the server runs: the server ops, and copies of what they are computed from.
        values: tensors that it needs and cannot compute.
        mirrored_ops: see ServerPlan.
        given: markers and other ops whose results it is sent.
    """

    ops: frozenset[str]
    values: frozenset[str]
    mirrored_ops: frozenset[str]
    given: frozenset[str]

    @classmethod
    def of(cls, program: Program, division: Division, own: Holding) -> "Closure":
        """That of the server's own ops.

        Raises:
            StrategyError: the server would use what others write in the step, or what is not computed in each step.
        """
        closing = _Closing(program, division, own)
        closing.close()
        given = own.markers | {op_of(value) for value in closing.values}
        _require_sent_in_each_step(program.analysis.captured, own.server, given)
        return cls(frozenset(closing.ops), frozenset(closing.values), frozenset(closing.mirrored_ops), given)


def writers_of(program: Program) -> dict[str, set[str]]:
    """The ops that write a variable, for each that is written."""
    return {handle: set(writers) for handle, writers in program.analysis.writes.items() if writers}


def _require_sent_in_each_step(view: GraphView, server: int, given: Collection[str]) -> None:
    flow = view.control_flow
    for op in sorted(given):
        if not flow.runs_once(op):
            raise StrategyError(
                f"worker {server}, as a server, needs '{op}', which is computed in a branch or a loop of "
                "TensorFlow 1's control flow, so not once in each step. Compute it before the branch or the loop, "
                "call tf.compat.v1.enable_control_flow_v2() before the graph is built, or use AllReduce"
            )


class _Closing:
    """Finds what a server's ops are computed from; `ops`, `values` and `mirrored_ops` are those of a Closure."""

    def __init__(self, program: Program, division: Division, own: Holding):
        self._program, self._division, self._own = program, division, own
        self._view, self._writes = program.analysis.captured, writers_of(program)
        self.ops: set[str] = set(own.server_ops - own.markers)
        self.values: set[str] = set()
        self.mirrored_ops: set[str] = set()

    def close(self) -> None:
        """Add all that the server ops are computed from, and what waits for it at the end of a branch."""
        self._close_over(self.ops)
        while ends := self._ends_of_branches():
            self.ops |= ends
            self._close_over(ends)
        if self._view.control_flow.predicates:
            self._require_decided()

    def _close_over(self, ops: Collection[str]) -> None:
        """Add what these ops are computed from: what the server can compute too is copied, the rest is sent."""
        nodes, held, own = self._view.nodes, self._own.held, self._workers_own()
        kept = {handle for handle, writers in self._writes.items() if handle not in held and writers & own}
        kept |= self._division.held.keys() - held
        # What workers write before they have their gradients they do themselves.
        forward = self._view.ancestors(op_of(name) for marker in self._division.markers for name in nodes[marker].input)
        kept |= {handle for handle, writers in self._writes.items() if handle not in held and writers & forward}
        pending = list(ops)
        while pending:
            node = nodes[pending.pop()]
            for name in (*(one for one in node.input if one[0] != "^"), *self._pivots(node, own)):
                op = op_of(name)
                if op in self.ops or op in self._own.markers:
                    continue
                if nodes[op].op == VARIABLE_OP:
                    if op in kept:
                        raise StrategyError(
                            f"'{node.name}', which worker {self._own.server} runs as a server, uses variable '{op}', "
                            "which is written elsewhere in the same step. Use AllReduce for the variables that it "
                            "updates"
                        )
                    if op not in held:
                        writers = self._writes.get(op, set())
                        pending += writers - self.ops
                        self.mirrored_ops |= writers
                        self.ops |= writers
                elif op in own or self._handles_of(op) & kept:
                    self.values.add(str(parse(name)))
                else:
                    self.ops.add(op)
                    pending.append(op)

    def _pivots(self, node: tf.compat.v1.NodeDef, own: Collection[str]) -> list[str]:
        """What the op only waits for, by which it stands in a branch of TensorFlow 1, as a constant does."""
        nodes, hidden = self._view.nodes, self._hidden(node.name)
        waited = [name[1:] for name in node.input if name[0] == "^"] if hidden else []
        predicates = self._view.control_flow.predicates
        return [
            op for op in waited if op not in own and nodes[op].op in _PASSES_ON and hidden & predicates.get(op, set())
        ]

    def _hidden(self, op: str) -> frozenset[str]:
        """The predicates that decide whether the op runs, and of which none of the tensors that it reads is made."""
        flow = self._view.control_flow
        return flow.unread.get(op, frozenset()) & flow.predicates.get(op, frozenset())

    def _require_decided(self) -> None:
        """Refuse what would be run in each step, as it waits in its branch for what is left out, if others take it."""
        flow, nodes, waits = self._view.control_flow, self._view.nodes, waited_for(self._view, self.ops)

        def is_decided(op: str, hidden: frozenset[str]) -> bool:
            return any(hidden <= flow.predicates.get(one, frozenset()) for one in waits[op])

        hidden = {op: found for op in self.ops if (found := self._hidden(op))}
        undecided = {op for op, found in hidden.items() if not is_decided(op, found)}
        for op in sorted(undecided):
            for taker in self._view.dataflow_consumers([op]) & self.ops:
                others = {op_of(name) for name in nodes[taker].input if name[0] != "^"} - undecided
                if nodes[taker].op == "Merge" or not any(
                    hidden[op] <= flow.predicates.get(one, set()) for one in others
                ):
                    raise StrategyError(
                        f"worker {self._own.server}, as a server, needs '{op}', which stands in a branch of TensorFlow "
                        "1's control flow only as it waits for what workers run there. Call "
                        "tf.compat.v1.enable_control_flow_v2() before the graph is built, or use AllReduce"
                    )

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

    def _workers_own(self) -> set[str]:
        """Ops whose results the server cannot compute by itself: others have them."""
        item, analysis = self._program.item, self._program.analysis
        sources = self._division.markers.keys() | {op_of(statistic.tensor) for statistic in item.statistics}
        sources |= {node.name for node in self._view.of_type(_STAYS)} | analysis.varying | self._division.side.keys()
        server_ops = self._own.server_ops
        return self._view.dataflow_descendants(sources - server_ops, blocked=server_ops) - server_ops

    def _handles_of(self, op: str) -> set[str]:
        return {other for other in map(op_of, self._view.nodes[op].input) if self._view.nodes[other].op == VARIABLE_OP}


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
