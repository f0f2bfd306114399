"""What losses divide by, and sums in losses that are taken for means: a replica's share of those of all examples."""

from collections.abc import Iterator, Sequence, Set

from autodist_py.capture.batch.layouts.regions import Regions, Sources
from autodist_py.capture.batch.layouts.table import OF_ROWS, SUMS, LayoutTable
from autodist_py.kernel.analysis.batch_layout.arithmetic import ADDITIVE
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout
from autodist_py.kernel.ir.names import op_of, parse

QUOTIENTS = frozenset({"Div", "DivNoNan", "RealDiv"})
_ADDS_TERMS = ADDITIVE | {"ConcatV2", "Pack", "Sub"}
"""Op types whose inputs a loss may add up, here or later."""
_SUMMED_UP = frozenset({BatchLayout.PARTIAL_SUM, BatchLayout.MIXED})
"""Layouts of what a loss that cannot be followed divides by a number of the whole batch."""


class Divisors:
    """Finds what losses divide by, in the layouts that are known, and lets losses read shares of it."""

    def __init__(self, regions: Regions, sources: Sources, table: LayoutTable):
        self._graph, self._tensor_of = regions.graph, regions.tensor_of
        self._regions, self._sources, self._table = regions, sources, table

    def normalizers(self) -> Iterator[str]:
        """Sums over examples by which a loss divides another, and that no gradient flows through.

        With the sum over all examples, times the replica's share of them, in their place the quotient is a mean.
        """
        for name in self._regions.losses:
            if self._graph.nodes[name].op not in QUOTIENTS:
                continue
            over, under = self._graph.nodes[name].input[:2]
            if (
                self._table.read(name, over) is not BatchLayout.PARTIAL_SUM
                or self._table.read(name, under) is not BatchLayout.PARTIAL_SUM
            ):
                continue
            below = self._graph.dataflow_descendants([name], blocked=self._regions.markers) & self._regions.losses
            of_rows = any(layout in OF_ROWS for op in below for layout in self._table.found.get(op, ()))
            if not of_rows and self._table.can_combine(name, under, BatchLayout.PARTIAL_SUM):
                yield str(parse(under))

    def of_sums_beside_means(self) -> Iterator[str]:
        """What sums over examples are divided by that are added to means: a number made of the whole batch.

        A mask's sum plus an epsilon, say. A replica's share of that in its place makes the quotient a mean.
        """
        for name in self._regions.losses:
            if self._graph.nodes[name].op in _ADDS_TERMS:
                reads = [one for one in self._graph.nodes[name].input if not one.startswith("^")]
                yield from self._divisors_beside_means(name, reads)
        for tensors in self._regions.targets:
            yield from self._divisors_beside_means("", tensors)

    def _divisors_beside_means(self, reader: str, terms: Sequence[str]) -> Iterator[str]:
        layouts = {term: self._table.read(reader, term) if reader else self._table.layout(term) for term in terms}
        if BatchLayout.PARTIAL_MEAN not in layouts.values():
            return
        pending = [term for term, layout in layouts.items() if layout in SUMS - {BatchLayout.COUNT}]
        seen = set(pending)
        while pending:
            node = self._graph.nodes[op_of(pending.pop())]
            reads = [name for name in node.input if not name.startswith("^")]
            if node.op in QUOTIENTS and self._is_whole_divisor(reads[1], {BatchLayout.PARTIAL_SUM}):
                yield str(parse(reads[1]))
                continue
            new = {name for name in reads if self._table.read(node.name, name) in SUMS - {BatchLayout.COUNT}} - seen
            seen |= new
            pending += sorted(new)

    def _is_whole_divisor(self, tensor: str, kinds: Set[BatchLayout]) -> bool:
        """Whether losses read a number, made of the whole batch, only to divide what is of these layouts by it."""
        symbol, op = self._tensor_of(tensor), op_of(tensor)
        is_number = symbol.dtype.is_floating and symbol.shape.is_fully_defined()
        if not is_number or not self._graph.control_flow.runs_once(op):
            return False
        if op in self._regions.trained or op not in self._sources.of_examples:
            return False
        for reader in self._graph.dataflow_consumers([op]) & self._regions.losses:
            node = self._graph.nodes[reader]
            if node.op not in QUOTIENTS or self._table.read(reader, node.input[0]) not in kinds:
                return False
            if self._table.read(reader, tensor) is not BatchLayout.REPLICATED:
                return False
        return True

    def take_shares_of_assumed_means(self) -> None:
        """Let losses that cannot be followed, and so are taken for means, read shares of what is of all examples.

        A replica's loss is one of its own share of the examples then, and so must be each sum that it is made of. Where
        a loss is divided by what is computed from a sum, that counts for it.
        """
        for tensor in sorted(set(self._sums_of_assumed_means())):
            divisors = self._divisors_made_of(tensor)
            if divisors:
                self._table.for_losses |= dict.fromkeys(divisors, "part")
            else:
                self._table.shared.add(tensor)
        self._table.for_losses |= dict.fromkeys(self._table.shared & self._table.for_losses.keys(), "share")

    def _divisors_made_of(self, tensor: str) -> set[str]:
        """What losses are divided by that is computed from the combined `tensor`; none: they read it otherwise, too."""
        found: set[str] = set()
        pending, seen = [tensor], {tensor}
        while pending:
            name = pending.pop()
            is_known = self._table.for_losses.get(name) == "part"
            if is_known or (name != tensor and self._is_whole_divisor(name, _SUMMED_UP)):
                found.add(name)
                continue
            for reader in self._graph.dataflow_consumers([op_of(name)]) & self._regions.losses:
                if self._table.found[reader] != (BatchLayout.REPLICATED,):
                    return set()
                if reader not in seen:
                    seen.add(reader)
                    pending.append(reader)
        return found

    def _sums_of_assumed_means(self) -> Iterator[str]:
        """Sums over all examples that only losses read which cannot be followed, and so are taken for means."""
        assumed = [tensor for tensor, layout in self._regions.assumed.items() if layout is BatchLayout.PARTIAL_MEAN]
        unknown = {op_of(tensor) for tensor in assumed if self._table.known_layout(tensor) is BatchLayout.MIXED}
        others = {op_of(tensor) for tensor in self._regions.assumed} - unknown
        ancestors = self._graph.dataflow_ancestors(unknown, blocked=self._regions.markers)
        ancestors -= self._graph.dataflow_ancestors(others, blocked=self._regions.markers)
        for tensor, reduction in self._table.for_losses.items():
            if reduction == "sum" and op_of(tensor) in ancestors:
                yield tensor
