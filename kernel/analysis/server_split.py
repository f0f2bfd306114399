"""Which side, the workers or one of the servers, computes what is computed from the gradients that servers combine."""

from collections.abc import Mapping
from functools import cached_property

import networkx as nx

from autodist_py.kernel.ir.graph import PASSES_HANDLE, VARIABLE_OP
from autodist_py.kernel.ir.names import op_of
from autodist_py.kernel.ir.tf_adapter import is_stateful
from autodist_py.kernel.program import Program
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient

WORKERS = -1
"""The side of what no server does."""


class Division:
    """Which side computes what is computed from gradients of variables that live on servers.

    Attributes:
        markers: the ops that pass on gradients, each with its variable's side.
        held: variables that live on servers, each with its server.
        side: for each op that is computed from such gradients, or writes such a variable: its server, or WORKERS.
    """

    def __init__(self, program: Program, sides: Mapping[Gradient, int]):
        self._view = program.analysis.captured
        self._varying = program.analysis.varying
        self._whole_branches = program.cuts.whole_branches
        self._writes = {handle: set(writers) for handle, writers in program.analysis.writes.items() if writers}
        self.markers = {op_of(tensor): side for gradient, side in sides.items() for tensor in gradient.tensors}
        self._trained = {gradient.variable: side for gradient, side in sides.items()}
        self._cut = {shards.variable for shards in program.cuts.shards}
        self.held: dict[str, int] = {}
        derived = self._derived()
        self._need = self._reaching(derived)
        self._lead = self._led_to(derived)
        self.side: dict[str, int] = {}
        for op in self._view.dataflow_order(derived):
            self.side[op] = self._side(op)

    @cached_property
    def server_ops(self) -> set[str]:
        """The ops that servers run in the workers' place."""
        return {op for op, side in self.side.items() if side != WORKERS}

    def users(self, handle: str) -> set[str]:
        """The ops that use the variable and are not moved."""
        found: set[str] = set()
        pending = [handle]
        while pending:
            for op in self._view.dataflow_consumers([pending.pop()]) - found:
                found.add(op)
                if self._view.nodes[op].op in PASSES_HANDLE:
                    pending.append(op)
        return found - self.server_ops

    def _derived(self) -> set[str]:
        """What is computed from gradients that servers combine, and all that writes the variables which they hold.

        A variable may be written from what another one was written before: an optimizer reads its state again.
        """
        writers = set().union(*self._writes.values())
        writing = self._view.dataflow_ancestors(writers - self._varying, blocked=self._varying)
        served = [marker for marker, side in self.markers.items() if side != WORKERS]
        derived = self._view.dataflow_descendants(served, blocked=self._varying)
        seen: set[str] = set()
        while new := {handle for handle, those in self._writes.items() if those & derived} - seen:
            seen |= new
            for handle in sorted(new):
                side = self._home(handle)
                if side == WORKERS:
                    continue
                self.held[handle] = side
                derived |= self._writes[handle]
                after = set().union(*(nx.descendants(self._view.digraph, writer) for writer in self._writes[handle]))
                reads = self._view.dataflow_consumers([handle]) & after & writing
                derived |= self._view.dataflow_descendants(reads, blocked=self._varying) & writing
        return derived

    def _home(self, handle: str) -> int:
        """Where a variable lives: one that is not trained, with the variable whose gradient its own value is made of.

        What one op writes lives together, as a trained variable and its moments. A scalar, such as a norm, may be made
        of all gradients; what is made of it is not for that. What is made of variables that live apart, as averages of
        weights that a branch writes, lives on the workers, who have all.
        """
        if handle in self._trained:
            return self._trained[handle]
        if handle in self._cut:
            return WORKERS  # They join what the servers of its shards answer.
        directory = set(self.markers.values())
        if len(directory) == 1:
            return directory.pop()
        writers = self._writes[handle]
        beside = {side for other, side in self._trained.items() if writers & self._writes.get(other, set())}
        if len(beside) == 1:
            return beside.pop()
        raw = {op_of(name) for marker in self.markers for name in self._view.nodes[marker].input} - self.markers.keys()
        for blocked in (raw | (self._view.scalars - writers - self.markers.keys()), raw):
            behind = self._view.dataflow_ancestors(writers, blocked=blocked)
            sides = {side for marker, side in self.markers.items() if marker in behind}
            sides |= {self.held[other] for other in self.held.keys() & behind}
            sides |= {WORKERS for other in behind if other in self._cut or self._trained.get(other) == WORKERS}
            if len(sides) == 1:
                return sides.pop()
        return WORKERS

    def _reaching(self, derived: set[str]) -> dict[str, set[int]]:
        """For each of `derived` the sides whose gradients it is computed from."""
        found: dict[str, set[int]] = {}
        for op in self._view.dataflow_order(derived | self.markers.keys()):
            reads = (op_of(name) for name in self._view.nodes[op].input if not name.startswith("^"))
            found[op] = (
                {self.markers[op]} if op in self.markers else set().union(*(found.get(read, ()) for read in reads))
            )
        return found

    def _led_to(self, derived: set[str]) -> dict[str, set[int]]:
        """For each of `derived` the sides of the variables that are written from it."""
        found: dict[str, set[int]] = {op: set() for op in derived}
        for handle, writers in self._writes.items():
            for writer in writers & derived:
                found[writer].add(self.held.get(handle, WORKERS))
        for op in reversed(list(self._view.dataflow_order(derived))):
            for name in self._view.nodes[op].input:
                if op_of(name) in derived and not name.startswith("^"):
                    found[op_of(name)] |= found[op]
        return found

    def _side(self, op: str) -> int:
        if op in self.markers:
            return self.markers[op]
        handles = [
            op_of(name) for name in self._view.nodes[op].input if self._view.nodes[op_of(name)].op == VARIABLE_OP
        ]
        written = {handle: self.held.get(handle, WORKERS) for handle in handles if op in self._writes.get(handle, ())}
        read = {handle: self.held[handle] for handle in handles if handle in self.held and handle not in written}
        directory = set(written.values())
        if directory - {WORKERS} and len({*directory, *read.values()}) > 1:
            by_side = {side: handle for handle, side in sorted({**read, **written}.items(), reverse=True)}
            listed = ", ".join(f"'{handle}' ({_topology(side)})" for side, handle in sorted(by_side.items()))
            why = f": {self._whole_branches[op]}" if op in self._whole_branches else ""
            raise StrategyError(
                f"one op, '{op}' ({self._view.nodes[op].op}), writes variables that live apart, or reads others where "
                f"it writes: {listed}. A loop, or a branch that cannot be taken apart, is run in one place{why}. "
                "Give its variables one synchronizer, and one server; PSLoadBalancing does so for those that it writes"
            )
        if not directory and len(set(read.values())) > 1:
            return WORKERS  # They have the new values of all.
        for sides in (
            directory or set(read.values()),
            self._lead[op],
            set() if self._is_effect(op) else self._need[op],
        ):
            if len(sides) == 1:
                return min(sides)
        return WORKERS

    def _is_effect(self, op: str) -> bool:
        """Whether the user's process must run `op`, or what it is made of: an assertion, something shown."""
        if self._lead[op]:
            return False
        reads = (op_of(name) for name in self._view.nodes[op].input if not name.startswith("^"))
        return is_stateful(self._view.nodes[op]) or any(self.side.get(read) == WORKERS for read in reads)


def _topology(side: int) -> str:
    return "workers" if side == WORKERS else f"server on worker {side}"
