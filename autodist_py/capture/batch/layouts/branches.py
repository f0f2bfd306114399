"""Loops and branches of TensorFlow 1's control flow: what goes round, and which of them are given what is combined."""

from collections.abc import Iterable, Sequence

import tensorflow as tf

from autodist_py.capture.batch.layouts.constants import Constants
from autodist_py.capture.batch.layouts.regions import Regions
from autodist_py.capture.batch.layouts.table import LayoutTable, wanted_of
from autodist_py.kernel.analysis.batch_layout.joins import after_turn, joined
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout
from autodist_py.kernel.ir.control_flow import BACK_EDGE, CONTROL_FLOW
from autodist_py.kernel.ir.names import op_of


class Branches:
    """What goes round loops and through branches: replicas must go the same ways, or are given what is combined."""

    def __init__(self, regions: Regions, table: LayoutTable, constants: Constants):
        self._graph, self._regions, self._table, self._constants = regions.graph, regions, table, constants
        self._turned: dict[str, BatchLayout] = {}
        """What goes round a loop, as far as the turns that were looked at show."""
        self._given_whole: set[str] = set()
        """Ops that lead into loops and branches which are given what is combined."""
        self._before: tuple[dict[str, BatchLayout], frozenset[str]] = ({}, frozenset())
        """Both, as they were when all turns were looked at the last time."""

    def begin(self) -> None:
        """Forget all turns, and which loops are given what is combined."""
        self._turned.clear()
        self._given_whole.clear()
        self._before = ({}, frozenset())

    def are_settled(self) -> bool:
        """Whether the last look at all turns showed nothing new: nothing goes round, or is combined, but what did."""
        turned, given = dict(self._turned), frozenset(self._given_whole)
        before, self._before = self._before, (turned, given)
        if given != before[1]:
            self._turned.clear()  # All turns are looked at anew, as more is combined.
            self._before = ({}, given)
            return False
        return turned == before[0]

    def note(self, node: tf.compat.v1.NodeDef) -> None:
        """Note what goes round once more."""
        if node.op in BACK_EDGE:
            self._turned[node.name] = after_turn(self._turned.get(node.name), self._table.found[node.name][0])

    def passed(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], layouts: Sequence[BatchLayout]
    ) -> tuple[BatchLayout, ...]:
        """What an op of TensorFlow 1's control flow passes on: all replicas must take the same way."""
        wanted = wanted_of(reads, layouts)
        if node.name in self._given_whole and wanted and self._table.can_combine_all(node.name, wanted):
            self._table.combine(node.name, wanted)
            return (BatchLayout.REPLICATED,)
        ways = self._graph.control_flow.chosen.get(node.name, frozenset())
        if node.op in ("Exit", "Switch"):
            switch = self._graph.nodes[op_of(reads[0])] if node.op == "Exit" else node
            ways = frozenset({op_of(switch.input[1])})
        result = self._merged(reads, layouts) if node.op == "Merge" else layouts[0]
        if not self.run_alike(ways):
            self.note_local(node.name)
            return (BatchLayout.MIXED, BatchLayout.MIXED) if node.op == "Merge" else (BatchLayout.MIXED,)
        if result is BatchLayout.MIXED and node.op == "Merge" and BatchLayout.MIXED not in layouts:
            self.note_local(node.name)
        return (result, BatchLayout.REPLICATED) if node.op == "Merge" else (result,)

    def run_alike(self, ways: Iterable[str]) -> bool:
        """Whether what decides whether something runs, or what it takes from a stack, is the same on all replicas."""
        return all(self._table.layout(way) is BatchLayout.REPLICATED for way in ways)

    def _merged(self, reads: Sequence[str], layouts: Sequence[BatchLayout]) -> BatchLayout:
        """What a Merge passes on: of a loop's, as far as it has been gone round."""
        known: dict[str, BatchLayout] = {}
        for tensor, layout in zip(reads, layouts, strict=True):
            if self._graph.nodes[op_of(tensor)].op not in BACK_EDGE:
                known[tensor] = layout
            elif op_of(tensor) in self._turned:
                known[tensor] = self._turned[op_of(tensor)]
        alike = [tensor for tensor, layout in known.items() if layout is BatchLayout.REPLICATED]
        return joined(known.values(), with_zeros=all(map(self._is_zero, alike)))

    def _is_zero(self, tensor: str) -> bool:
        """Whether `tensor`, which a loop or branch is given, or goes round with, is known to be 0."""
        node = self._graph.nodes[op_of(tensor)]
        if node.op in (*BACK_EDGE, "Enter", "Switch"):
            return self._is_zero(node.input[0])
        value = self._constants.value(tensor)
        return value is not None and not value.any()

    def note_local(self, op: str) -> None:
        """Note that `op` mixes a replica's own examples, where it cannot be given what is combined."""
        if op in self._regions.losses:
            self._table.local.append(op)
        else:
            self.give_whole(op)

    def give_whole(self, op: str) -> None:
        """Let the loops and branches around `op`, or that it ends, be given what is combined, if all of that can be."""
        seen = {op}
        pending = [op]
        entries: list[str] = []
        while pending:
            name = pending.pop()
            node = self._graph.nodes[name]
            reads = [op_of(read) for read in node.input if not read.startswith("^")]
            if node.op in ("Enter", "Switch") and all(self._graph.control_flow.runs_once(read) for read in reads):
                entries.append(name)
                continue
            if name != op and self._graph.control_flow.runs_once(name) and node.op not in CONTROL_FLOW:
                continue
            reads += sorted(self._graph.control_flow.unread.get(name, ()))
            pending += [read for read in reads if read not in seen]
            seen |= set(reads)
        for entry in entries:
            reads = [name for name in self._graph.nodes[entry].input if not name.startswith("^")]
            wanted = wanted_of(reads, [self._table.read(entry, tensor) for tensor in reads])
            if not self._table.can_combine_all(entry, wanted):
                return
        self._given_whole |= set(entries)
