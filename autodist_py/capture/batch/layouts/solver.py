"""Finds all layouts: op by op in the order of the data, again and again until what is combined stays as it is."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import tensorflow as tf

from autodist_py.capture.batch.layouts.blocks import Blocks
from autodist_py.capture.batch.layouts.branches import Branches
from autodist_py.capture.batch.layouts.choices import CHOICES, Choices
from autodist_py.capture.batch.layouts.constants import Constants
from autodist_py.capture.batch.layouts.divisors import QUOTIENTS, Divisors
from autodist_py.capture.batch.layouts.followed import Followed
from autodist_py.capture.batch.layouts.loops import RUNS
from autodist_py.capture.batch.layouts.regions import Layers, Regions, Sources
from autodist_py.capture.batch.layouts.solution import Solution, differing
from autodist_py.capture.batch.layouts.table import OF_ROWS, SUMS, LayoutTable, Read, wanted_of
from autodist_py.capture.recording.layers import LayerCall
from autodist_py.kernel.analysis.batch_layout.arithmetic import ADDITIVE
from autodist_py.kernel.analysis.batch_layout.entries import ENTRIES, SEGMENTS
from autodist_py.kernel.analysis.batch_layout.layouts import FIXED, TAKES_SHAPE, BatchLayout, Operands
from autodist_py.kernel.analysis.batch_layout.rules import layout_of
from autodist_py.kernel.ir.control_flow import CONTROL_FLOW
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.proto.graph_item import GraphItem, Variable

_OF_TERMS = frozenset({*ADDITIVE, "Identity", "Mul", "Neg", "RealDiv", "Sub"})
"""Op types that are linear in what differs, where one input does, or all are added: terms of a loss are its sum's."""
_ASSIGN = "AssignVariableOp"
_ADDS = frozenset({"AssignAddVariableOp", "AssignSubVariableOp"})
_PRODUCTS = frozenset({"BatchMatMulV2", "Einsum", "MatMul"})
_APART = OF_ROWS | CHOICES | {BatchLayout.REPLICATED, BatchLayout.SHAPE, BatchLayout.TAILED}
"""Layouts of inputs that, where the result has rows, say nothing of other replicas' examples."""
_OF_OWN = _APART - {BatchLayout.SHAPE}


def solve(
    item: GraphItem,
    whole: GraphView,
    losses: Sequence[Sequence[str]],
    tensor_of: Callable[[str], tf.Tensor],
    batch: str,
    layer_calls: Sequence[LayerCall] = (),
) -> Solution:
    """The layouts of all that a loss, write or result is computed from, and what must be combined for them.

    Args:
        item: what was captured.
        whole: the graph it was cut from, which has the losses too.
        losses: those that each of its gradients was asked for.
        tensor_of: a tensor of `whole` by its name; only its shape and type are used.
        batch: whether workers are given the same ("global"), or each its own part ("local").
        layer_calls: of Keras's layers, in order.
    """
    regions = Regions.of(item, whole, losses, tensor_of)
    sources = Sources.of(item, whole, regions.markers, batch)
    return _Solver(regions, sources, Layers.of(layer_calls, whole)).solved()


class _Solver:
    """Visits the ops, and notes what its parts are to know of each."""

    def __init__(self, regions: Regions, sources: Sources, layers: Layers):
        self._graph, self._tensor_of = regions.graph, regions.tensor_of
        self._regions, self._sources = regions, sources
        self._table = LayoutTable(regions, sources, layers)
        self._constants = Constants(regions.graph, regions.tensor_of)
        self._blocks = Blocks(regions.tensor_of, sources, self._table, self._constants)
        self._choices = Choices(regions, self._table, self._blocks)
        self._followed = Followed(regions, sources, self._table, self._blocks, self._constants)
        self._branches = Branches(regions, self._table, self._constants)
        self._divisors = Divisors(regions, sources, self._table)
        self._deltas: list[str] = []

    def solved(self) -> Solution:
        """All layouts and edges."""
        table = self._table
        known: dict[str, str] | None = None
        while known != table.for_losses:
            known = dict(table.for_losses)
            self._evaluate()
            for tensor, reduction in known.items():
                if reduction != "part" and table.layout(tensor) not in FIXED:
                    table.for_losses.pop(tensor, None)  # What it is computed from is combined now.
            if known == table.for_losses:
                table.for_losses |= dict.fromkeys(self._divisors.normalizers(), "share")
            if known == table.for_losses:
                table.for_losses |= dict.fromkeys(self._divisors.of_sums_beside_means(), "part")
            if known == table.for_losses:
                self._divisors.take_shares_of_assumed_means()
        table.terms |= self._unknown_terms()
        if table.terms:
            self._evaluate()
        for name in self._regions.trains & self._graph.nodes.keys():
            for index, tensor in enumerate(self._graph.nodes[name].input):
                if not tensor.startswith("^") and str(parse(tensor)) in table.for_losses:
                    table.edges[name, index] = table.for_losses[str(parse(tensor))]
        self._keep_what_counts()
        self._note_equal_writes()
        edges = dict(sorted(table.edges.items()))  # Sets of names have another order in every process.
        return Solution(
            regions=self._regions,
            sources=self._sources,
            table=table,
            blocks=self._blocks,
            choices=self._choices,
            followed=self._followed,
            constants=self._constants,
            edges=edges,
            deltas=self._deltas,
        )

    def _unknown_terms(self) -> dict[str, BatchLayout]:
        """The terms of each loss that is taken for a mean, or a sum, as far as they are not known by themselves."""
        found = {name: kind for name, kind in self._regions.assumed.items() if self._table.layout(name) is kind}
        pending = list(found)
        while pending:
            term = pending.pop()
            node = self._graph.nodes[op_of(term)]
            if self._table.known_layout(term) is not BatchLayout.MIXED or node.op not in _OF_TERMS:
                continue
            reads = [str(parse(name)) for name in node.input if not name.startswith("^")]
            varying = [name for name in reads if self._table.layout(name) is not BatchLayout.REPLICATED]
            adds = node.op in ADDITIVE | {"Sub"}
            is_fixed = all(self._tensor_of(name).shape.is_fully_defined() for name in varying)
            if not is_fixed or not (adds or len(varying) == 1) or (node.op == "RealDiv" and varying == reads[1:]):
                continue
            new = {name for name in varying if self._table.layout(name) is BatchLayout.MIXED and name not in found}
            found |= dict.fromkeys(new, found[term])
            pending += sorted(new)
        return {name: kind for name, kind in found.items() if self._table.layout(name) is BatchLayout.MIXED}

    def _note_equal_writes(self) -> None:
        """Let statistics say of what is written that it is the same everywhere, where it is computed from examples."""
        found = differing(self._regions, self._sources, self._table.edges)
        for writer in self._regions.writers:
            for index, tensor in enumerate(self._graph.nodes[writer].input):
                is_new = (writer, index) not in self._table.edges and not tensor.startswith("^")
                if is_new and op_of(tensor) in found and self._table.layout(tensor) is BatchLayout.REPLICATED:
                    self._table.edges[writer, index] = "same"

    def _evaluate(self) -> None:
        """Find the layouts of all ops, given what losses read combined."""
        self._branches.begin()
        while True:
            self._pass_over()
            if self._branches.are_settled():
                return

    def _pass_over(self) -> None:
        """Find the layouts of all ops, given what goes round the loops of TensorFlow 1."""
        self._table.begin()
        self._choices.begin()
        self._followed.begin()
        self._deltas.clear()
        for name in self._graph.dataflow_order(self._regions.region):
            node = self._graph.nodes[name]
            self._table.found[name] = self._visit(node)
            if self._table.found[name] == (BatchLayout.MIXED,):
                self._table.found[name] = self._followed.layouts_of(node)
            self._blocks.note(node)
            self._choices.note(node)
            self._branches.note(node)

    def _visit(self, node: tf.compat.v1.NodeDef) -> tuple[BatchLayout, ...]:
        given = self._sources.of_source(node)
        if given is not None:
            return given
        reads = [name for name in node.input if not name.startswith("^")]
        layouts = tuple(self._table.read(node.name, tensor) for tensor in reads)
        if node.op in CONTROL_FLOW:
            return self._branches.passed(node, reads, layouts)
        if not self._branches.run_alike(self._graph.control_flow.unread.get(node.name, ())):
            self._branches.note_local(node.name)
            return (BatchLayout.MIXED,)
        if all(layout is BatchLayout.REPLICATED for layout in layouts):
            return (BatchLayout.MIXED if node.name in self._sources.random else BatchLayout.REPLICATED,)
        if self._is_clipped_to_one(node):
            return (BatchLayout.REPLICATED,)
        runs = node.op in RUNS and node.name in self._regions.losses and node.name not in self._regions.writers
        if runs and (returned := self._followed.run(node, reads)):
            return returned
        if not self._choices.belong_together(node, reads, layouts):
            layouts = tuple(BatchLayout.MIXED if layout in CHOICES else layout for layout in layouts)
        operands = self._blocks.operands(node, reads, layouts)
        result = layout_of(operands)
        results = set(result if isinstance(result, tuple) else (result,))
        if node.name not in self._regions.losses and (CHOICES | {BatchLayout.TAILED}) & results:
            wanted = wanted_of(reads, layouts)
            if self._table.can_combine_all(node.name, wanted):  # Outside of losses all is as one device computes it.
                self._table.combine(node.name, wanted)
                return (BatchLayout.REPLICATED,)
        if isinstance(result, tuple):
            unknown = [index for index, one in enumerate(result) if one is BatchLayout.MIXED]
            if node.op in ENTRIES:  # Not so of a batch normalization, whose rows know of its other results.
                unknown = [index for index in unknown if self._followed.is_read(node.name, index)]
            if unknown:
                self._table.local.append(node.name)
            return result
        if result is BatchLayout.SHARDED and node.op in SEGMENTS:
            self._choices.note_ending(node, reads)
        if result is BatchLayout.PARTIAL_SUM_PLUS and node.name not in self._regions.losses & self._regions.trained:
            result = BatchLayout.MIXED  # Its terms are combined by themselves.
        if result in SUMS | {BatchLayout.PARTIAL_MEAN} and self._grows(node.name, reads, layouts):
            result = BatchLayout.MIXED  # Its shape is that of the whole batch: nothing that is combined afterwards.
        if result in FIXED and self._table.is_uncarried_cast(node.name):
            result = BatchLayout.MIXED  # What cannot be combined after the cast is combined before it.
        return (self._combined_first(node, reads, operands, result),)

    def _is_clipped_to_one(self, node: tf.compat.v1.NodeDef) -> bool:
        """Whether `node` is the smaller of a constant and what is no smaller: a size that is clipped to one number."""
        if node.op != "Minimum" or self._tensor_of(f"{node.name}:0").shape.rank != 0:
            return False
        for above, other in (node.input[:2], node.input[1::-1]):
            inner = self._graph.nodes[op_of(other)]
            limit, bounds = self._constants.value(above), map(self._constants.value, inner.input[:2])
            is_above = inner.op == "Maximum" and limit is not None and limit.ndim == 0
            if is_above and any(bound is not None and bound.ndim == 0 and bound >= limit for bound in bounds):
                return True
        return False

    def _keep_what_counts(self) -> None:
        """Of the local ops leave those of which anything comes but a size that is clipped to one number."""
        ends = {op_of(name) for name in self._regions.assumed} | self._regions.ends
        live = set[str]()
        while True:  # What is used in one turn of a loop of TensorFlow 1 was computed in the turn before.
            num_before = len(live)
            for name in reversed(list(self._graph.dataflow_order(self._regions.region))):
                users = self._graph.dataflow_consumers([name]) & live
                if name in ends or any(not self._is_clipped_to_one(self._graph.nodes[user]) for user in users):
                    live.add(name)
            if len(live) == num_before or not self._graph.control_flow.frames:
                break
        self._table.local = [name for name in self._table.local if name in live]

    def _combined_first(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], operands: Operands, result: BatchLayout
    ) -> BatchLayout:
        """The layout of `node`, whose own rule gives `result`, when what it reads is combined where it must be."""
        mixes = result in OF_ROWS and not all(
            layout in _APART and (layout is not BatchLayout.SHAPE or TAKES_SHAPE.get(node.op) is not None)
            for layout in operands.layouts
        )
        if result is not BatchLayout.MIXED and not mixes:
            return result
        if self._table.is_in_row_wise_layer(node.name):
            return result
        wanted = [one for one in wanted_of(reads, operands.layouts) if not (mixes and one.layout in _OF_OWN)]
        if not self._table.can_combine_all(node.name, wanted):
            if not self._graph.control_flow.runs_once(node.name) and node.name not in self._regions.losses:
                self._branches.give_whole(node.name)
            return self._uncombined(node, operands, wanted, mixes=mixes)
        self._table.combine(node.name, wanted)
        return result if mixes else BatchLayout.REPLICATED

    def _uncombined(
        self, node: tf.compat.v1.NodeDef, operands: Operands, wanted: Sequence[Read], *, mixes: bool
    ) -> BatchLayout:
        """The layout of an op that needs more combined than can be: as much as can be is, the rest stays local."""
        if not mixes and node.name in self._regions.writers:
            self._fall_back(node, self._regions.writers[node.name])
        is_ratio = node.op in QUOTIENTS and set(operands.layouts) == {
            BatchLayout.PARTIAL_SUM
        }  # See `Divisors.normalizers`.
        if node.name in self._regions.losses and not is_ratio:
            partly = self._partly_combined(node, operands, wanted)
            if partly is not BatchLayout.MIXED:
                return partly
        pairs_rows = node.op in _PRODUCTS and operands.layouts[0] is BatchLayout.SHARDED
        if mixes or pairs_rows or node.name in self._regions.losses:
            self._table.local.append(node.name)
        shape = self._tensor_of(f"{node.name}:0").shape if mixes or pairs_rows else tf.TensorShape(None)
        if not shape.rank or not shape[1:].is_fully_defined():
            return BatchLayout.MIXED
        return BatchLayout.SELECTED if BatchLayout.SELECTED in operands.layouts else BatchLayout.SHARDED

    def _partly_combined(self, node: tf.compat.v1.NodeDef, operands: Operands, wanted: Iterable[Read]) -> BatchLayout:
        """The layout of an op of a loss when what can be combined is, if that is enough to know it."""
        some = {one.position: one for one in wanted if self._table.can_combine(node.name, one.tensor, one.layout)}
        layouts = tuple(BatchLayout.REPLICATED if index in some else one for index, one in enumerate(operands.layouts))
        result = layout_of(replace(operands, layouts=layouts)) if some else BatchLayout.MIXED
        if isinstance(result, tuple) or result in OF_ROWS:
            return BatchLayout.MIXED
        if result is not BatchLayout.MIXED:
            self._table.combine(node.name, some.values())
        return result

    def _grows(self, op: str, reads: Sequence[str], layouts: Sequence[BatchLayout]) -> bool:
        """Whether the shape of `op` may follow from that of a value which is computed from the whole batch."""
        if self._tensor_of(f"{op}:0").shape.is_fully_defined():
            return False
        shapes = [
            self._tensor_of(name).shape
            for name, one in zip(reads, layouts, strict=True)
            if one is BatchLayout.REPLICATED
        ]
        return not all(shape.is_fully_defined() for shape in shapes)

    def _fall_back(self, node: tf.compat.v1.NodeDef, variable: Variable) -> None:
        """A write whose value cannot be traced to statistics: combine the value itself, as the variable says."""
        if node.op not in _ADDS | {_ASSIGN} or not tf.as_dtype(variable.dtype).is_floating:
            return
        self._table.local.append(node.name)
        if variable.aggregation == "SUM" and node.op == _ASSIGN:
            self._deltas.append(node.name)
        else:
            self._table.edges[node.name, 1] = "sum" if variable.aggregation == "SUM" else "mean"
