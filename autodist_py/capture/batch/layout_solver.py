"""Which values replicas must combine: the layout of each tensor that matters, and the edges that carry statistics.

One class, though long: whether a value may be combined depends on the layouts, and the layouts on what is combined.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import tensorflow as tf

from autodist_py.capture.batch.constants import Constants
from autodist_py.capture.batch.loops import RUNS, Functions
from autodist_py.capture.batch.mapped import Argument
from autodist_py.capture.recording.layers import LayerCall
from autodist_py.capture.shapes import static_shape
from autodist_py.kernel.analysis.batch_layout.along import Along, of_layout
from autodist_py.kernel.analysis.batch_layout.entries import ENTRIES, SEGMENTS
from autodist_py.kernel.analysis.batch_layout.following import OF_SHAPE, UNKNOWN, Known, followed, is_exact, of_shape
from autodist_py.kernel.analysis.batch_layout.joins import after_turn, joined
from autodist_py.kernel.analysis.batch_layout.layouts import FIXED, BatchLayout, Operands
from autodist_py.kernel.analysis.batch_layout.lists import LISTS, MAKES, UNSET
from autodist_py.kernel.analysis.batch_layout.rules import is_known, layout_of
from autodist_py.kernel.collectives.collectives import CARRIED
from autodist_py.kernel.collectives.reductions import SUMMED
from autodist_py.kernel.collectives.rows import TRAVELS
from autodist_py.kernel.ir.batched import batched_tensors
from autodist_py.kernel.ir.control_flow import BACK_EDGE, CONTROL_FLOW
from autodist_py.kernel.ir.dataflow import random_ops
from autodist_py.kernel.ir.graph import ITERATOR_NEXT, SHOWS, VARIABLE_OP, GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import GraphItem, Output, Variable

ADDITIVE = frozenset({"Add", "AddN", "AddV2"})
"""Op types whose result is the sum of their inputs."""

AGAIN = "again"
"""Not combined by one reduction, but computed again, from what is combined."""

_OF_SHARES = frozenset({"share", "part"})
"""How what a loss reads is combined, and then taken times the replica's share of the examples."""

_QUOTIENTS = frozenset({"Div", "DivNoNan", "RealDiv"})
_OF_TERMS = frozenset({*ADDITIVE, "Identity", "Mul", "Neg", "RealDiv", "Sub"})
"""Op types that are linear in what differs, where one input does, or all are added: terms of a loss are its sum's."""
_ADDS_TERMS = ADDITIVE | {"ConcatV2", "Pack", "Sub"}
"""Op types whose inputs a loss may add up, here or later."""
_ASSIGN = "AssignVariableOp"
_ADDS = frozenset({"AssignAddVariableOp", "AssignSubVariableOp"})
_PRODUCTS = frozenset({"BatchMatMulV2", "Einsum", "MatMul"})
_OF_ROWS = frozenset({BatchLayout.SHARDED, BatchLayout.SELECTED})
_OF_SETS = frozenset({BatchLayout.UNIQUE, BatchLayout.EACH, BatchLayout.KEYS, BatchLayout.CHOSEN_KEYS})
"""Layouts of what belongs to the distinct elements that one op has found."""
_OF_CHOICES = frozenset(
    {BatchLayout.SELECTED, BatchLayout.SELECTED_INDICES, BatchLayout.CHOSEN_KEYS, BatchLayout.CHOSEN_SHAPE}
)
"""Layouts of what has a row for each of those that one op has chosen."""
_CHOICES = _OF_SETS | _OF_CHOICES
"""Layouts of what depends on which rows were chosen, or on which elements there are."""
_APART = _OF_ROWS | _CHOICES | {BatchLayout.REPLICATED, BatchLayout.SHAPE, BatchLayout.TAILED}
"""Layouts of inputs that, where the result has rows, say nothing of other replicas' examples."""
_WITH_BLOCKS = frozenset(
    {
        BatchLayout.SHARDED,
        BatchLayout.TAILED,
        BatchLayout.SELECTED_INDICES,
        BatchLayout.KEYS,
        BatchLayout.SHAPE,
        BatchLayout.COUNT,
    }
)
"""Layouts of what has a number of rows for each example, or tells it."""
_FROM_SHAPE = frozenset(
    {"Cast", "ConcatV2", "GatherV2", "Identity", "Pack", "Prod", "Shape", "Slice", "SparseReshape", "StridedSlice"}
)
"""Op types that pass on with how many rows of each example a shape begins, where what they return has one."""
_FILLS = "SparseFillEmptyRows"
_CHOOSES = frozenset({"Where", _FILLS})
_WHILE = ("StatelessWhile", "While")
_FINDS = frozenset({"Unique", "UniqueWithCounts"})
_TAKES = frozenset({"GatherNd", "GatherV2", "ResourceGather"})
_ON_PLACES = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "StridedSlice"})
_SUMS = frozenset({BatchLayout.PARTIAL_SUM, BatchLayout.COUNT, BatchLayout.PARTIAL_SUM_PLUS})
_SUMMED_UP = frozenset({BatchLayout.PARTIAL_SUM, BatchLayout.MIXED})
"""Layouts of what a loss that cannot be followed divides by a number of the whole batch."""
_REDUCTIONS = {
    BatchLayout.PARTIAL_SUM: "sum",
    BatchLayout.COUNT: "sum",
    BatchLayout.PARTIAL_MEAN: "mean",
    BatchLayout.SHARDED: "rows",
    BatchLayout.SELECTED: "rows",
    BatchLayout.PARTIAL_SUM_PLUS: AGAIN,
    BatchLayout.MIXED: AGAIN,
}

_RESULTS = {
    BatchLayout.REPLICATED: "same",
    BatchLayout.SHARDED: "rows",
    BatchLayout.PARTIAL_SUM: "sum",
    BatchLayout.COUNT: "sum",
    BatchLayout.PARTIAL_MEAN: "mean",
}

Edge = tuple[str, int]
"""An op and the position of one of its inputs."""


class _Read(NamedTuple):
    """One data input of an op."""

    position: int
    tensor: str
    layout: BatchLayout


class LayoutSolver:
    """The layouts of all that a loss, write or result is computed from, and the edges that must carry statistics."""

    def __init__(
        self,
        item: GraphItem,
        whole: GraphView,
        losses: Sequence[Sequence[str]],
        tensor_of: Callable[[str], tf.Tensor],
        batch: str,
        layer_calls: Sequence[LayerCall] = (),
    ):
        self._graph, self._tensor_of = whole, tensor_of
        self._constants = Constants(whole, tensor_of)
        self._markers = {op_of(tensor) for gradient in item.gradients for tensor in gradient.tensors}
        self._rows = {str(parse(tensor.name)) for tensor in batched_tensors(item, whole)}
        self._random = random_ops(whole)
        self._unknown: set[str] = set()
        self._is_local = batch == "local"
        if self._is_local:
            self._unknown = {one.name for one in item.inputs if one.kind == "feed" and not one.batched}
            self._unknown |= {node.name for node in whole.of_type(ITERATOR_NEXT)}
        targets = {op_of(tensor) for tensors in losses for tensor in tensors}
        self._loss_region = whole.dataflow_ancestors(targets, blocked=self._markers)
        self._writers = {
            writer: variable for variable in item.variables for writer in variable.update_ops if writer in whole.nodes
        }
        ends = {
            *self._writers,
            *(node.name for node in whole.of_type(SHOWS)),
            *(op_of(output.tensor) for output in item.outputs),
        }
        self._ends = ends
        self._region = self._loss_region | whole.dataflow_ancestors(ends, blocked=self._markers)
        trained = {gradient.variable for gradient in item.gradients}
        self._trained = whole.dataflow_descendants(trained & whole.nodes.keys(), blocked=self._markers)
        discrete = {op for op in self._trained if self._is_discrete(op)}  # No gradient flows through a comparison.
        self._trained = whole.dataflow_descendants(trained & whole.nodes.keys(), blocked=self._markers | discrete)
        self._trained -= discrete
        raw = {
            op_of(name) for marker in self._markers for name in whole.nodes[marker].input if not name.startswith("^")
        }
        self._trains = self._loss_region | whole.dataflow_ancestors(raw, blocked=self._markers)
        self._sources = {op_of(tensor) for tensor in self._rows} | self._random | self._unknown
        self._layers: dict[str, LayerCall] = {}
        """The calls of layers whose results these tensors are."""
        self._inside: dict[str, LayerCall] = {}
        """The calls of layers that these ops are a part of."""
        for call in layer_calls:
            ends = {op_of(tensor) for tensor in (*call.reads, *call.shared)}
            self._layers |= dict.fromkeys(call.outputs, call)
            parts = whole.dataflow_ancestors(map(op_of, call.outputs), blocked=ends) - ends
            self._inside |= dict.fromkeys(parts, call)
        self._losses = losses
        assumed = BatchLayout.PARTIAL_SUM if item.loss_reduction == "sum" else BatchLayout.PARTIAL_MEAN
        self._assumed = {str(parse(tensor)): assumed for tensors in losses for tensor in tensors}
        self._shown = self._assumed.keys() | {str(parse(output.tensor)) for output in item.outputs}
        """The losses and results."""
        self._terms: dict[str, BatchLayout] = {}
        """Terms of losses that are not known, and what they are taken for where anything but a loss reads them."""
        self._flow = whole.control_flow
        self._functions = Functions()
        self._turned: dict[str, BatchLayout] = {}
        """What goes round a loop of TensorFlow 1, as far as the turns that were looked at show."""
        self._given_whole: set[str] = set()
        """Ops that lead into loops and branches of TensorFlow 1, which are given what is combined."""
        self._layouts: dict[str, tuple[BatchLayout, ...]] = {}
        self._blocks: dict[str, int | None] = {}
        """How many rows each example has in results of these ops."""
        self._along: dict[str, Along] = {}
        """How the results of ops go along examples whose layout does not say it."""
        self._choices: dict[str, str] = {}
        """The op that has chosen the rows that these ops return, or their places."""
        self._sets: dict[str, str] = {}
        """The op whose distinct elements these ops return, or what belongs to them."""
        self._places: dict[str, str] = {}
        """What the places that these ops return are places in: rows, or a shape that begins with their number."""
        self._of_losses: dict[str, str] = {}
        """Tensors that the losses, and back-propagation, read combined."""
        self._shared: set[str] = set()
        """Of these, the ones that only losses which cannot be followed read."""
        self.edges: dict[Edge, str] = {}
        self.deltas: list[str] = []
        self.local: list[str] = []
        """Ops that mix a replica's own examples where one device mixes all."""
        self.ending: dict[str, str] = {}
        """Ops of losses that return rows up to the last one with an entry, and what has all rows."""

    def make(self) -> None:
        """Find all layouts and edges."""
        known: dict[str, str] | None = None
        while known != self._of_losses:
            known = dict(self._of_losses)
            self._evaluate()
            for tensor, reduction in known.items():
                if reduction != "part" and self._layout(tensor) not in FIXED:
                    self._of_losses.pop(tensor, None)  # What it is computed from is combined now.
            if known == self._of_losses:
                self._of_losses |= dict.fromkeys(self._normalizers(), "share")
            if known == self._of_losses:
                self._of_losses |= dict.fromkeys(self._divisors_of_sums_beside_means(), "part")
            if known == self._of_losses:
                self._take_shares_of_assumed_means()
        self._terms |= self._unknown_terms()
        if self._terms:
            self._evaluate()
        for name in self._trains & self._graph.nodes.keys():
            for index, tensor in enumerate(self._graph.nodes[name].input):
                if not tensor.startswith("^") and str(parse(tensor)) in self._of_losses:
                    self.edges[name, index] = self._of_losses[str(parse(tensor))]
        self._keep_what_counts()
        self._note_equal_writes()
        self.edges = dict(sorted(self.edges.items()))  # Sets of names have another order in every process.

    def _unknown_terms(self) -> dict[str, BatchLayout]:
        """The terms of each loss that is taken for a mean, or a sum, as far as they are not known by themselves."""
        found = {name: kind for name, kind in self._assumed.items() if self._layout(name) is kind}
        pending = list(found)
        while pending:
            term = pending.pop()
            node = self._graph.nodes[op_of(term)]
            if self._known_layout(term) is not BatchLayout.MIXED or node.op not in _OF_TERMS:
                continue
            reads = [str(parse(name)) for name in node.input if not name.startswith("^")]
            differing = [name for name in reads if self._layout(name) is not BatchLayout.REPLICATED]
            adds = node.op in ADDITIVE | {"Sub"}
            is_fixed = all(self._tensor_of(name).shape.is_fully_defined() for name in differing)
            if not is_fixed or not (adds or len(differing) == 1) or (node.op == "RealDiv" and differing == reads[1:]):
                continue
            new = {name for name in differing if self._layout(name) is BatchLayout.MIXED and name not in found}
            found |= dict.fromkeys(new, found[term])
            pending += sorted(new)
        return {name: kind for name, kind in found.items() if self._layout(name) is BatchLayout.MIXED}

    def _note_equal_writes(self) -> None:
        """Let statistics say of what is written that it is the same everywhere, where it is computed from examples."""
        differing = self._find_differing()
        for writer in self._writers:
            for index, tensor in enumerate(self._graph.nodes[writer].input):
                is_new = (writer, index) not in self.edges and not tensor.startswith("^")
                if is_new and op_of(tensor) in differing and self._layout(tensor) is BatchLayout.REPLICATED:
                    self.edges[writer, index] = "same"

    @property
    def varies(self) -> bool:
        """Whether anything differs between replicas."""
        return any(layout is not BatchLayout.REPLICATED for layouts in self._layouts.values() for layout in layouts)

    def gradient_reduction(self, losses: Sequence[str]) -> str:
        """How a gradient of all `losses` together combines examples: "mean", "sum" or, where it is not known, "".

        Back-propagation adds up what has rows.
        """
        kinds = {self._known_layout(tensor) for tensor in losses}
        return _reduction({BatchLayout.PARTIAL_SUM if kind in _OF_ROWS else kind for kind in kinds})

    def result_reduction(self, tensor: str) -> str:
        """What the result `tensor` does with examples."""
        layout = self._layout(tensor)
        if layout is BatchLayout.REPLICATED or self.is_again(tensor):
            return "same"
        if layout is BatchLayout.PARTIAL_SUM_PLUS:
            return ""
        if layout in _CHOICES - _OF_ROWS:
            raise CaptureError(
                f"result '{tensor}' is made of each replica's own rows: their places in its part of the batch, or "
                "their distinct elements. A loss reads it, too, so it is not computed again for all rows. "
                "Return the mask, or the elements, and compute it outside of the step"
            )
        known = self._known_layout(tensor)
        if known is BatchLayout.MIXED and op_of(tensor) not in self._of_examples:
            return "same"  # It is drawn: the first replica's is one device's.
        return "rows" if known is BatchLayout.SHARDED else _reduction({known})

    def is_of_several_batches(self, tensor: str) -> bool:
        """Whether `tensor` has rows of several inputs, one behind the other: not those of replicas in their order."""
        found = self._along.get(op_of(tensor))
        return found is not None and bool(found.axes and found.joined) and self._layout(tensor) is BatchLayout.MIXED

    @cached_property
    def _of_examples(self) -> set[str]:
        return self._graph.dataflow_descendants(self._sources - self._random, blocked=self._markers)

    @cached_property
    def _differing(self) -> set[str]:
        return self._find_differing()

    def _find_differing(self) -> set[str]:
        """Ops that are computed from what differs between replicas, when statistics are combined."""
        found: set[str] = set()
        while True:  # What differs in one turn of a loop of TensorFlow 1 does so in the next.
            num_before = len(found)
            for name in self._graph.dataflow_order(self._graph.nodes):
                if name not in found and name not in self._markers and self._is_differing(name, found):
                    found.add(name)
            if len(found) == num_before or not self._flow.frames:
                return found

    def _is_differing(self, op: str, found: Set[str]) -> bool:
        """Whether `op` differs between replicas, as it is a source, or reads, or depends on, one of those `found`."""
        return (
            op in self._sources
            or not found.isdisjoint(self._flow.unread.get(op, ()))
            or any(
                op_of(read) in found and self.edges.get((op, index), "share") in _OF_SHARES
                for index, read in enumerate(self._graph.nodes[op].input)
                if not read.startswith("^")
            )
        )

    def reads_differing(self, op: str, index: int) -> bool:
        """Whether the `index`-th input of `op` differs between replicas as it is read."""
        read = self._graph.nodes[op].input[index]
        return op_of(read) in self._differing and self.edges.get((op, index), "share") in _OF_SHARES

    @property
    def loss_region(self) -> set[str]:
        """The ops that losses are computed by."""
        return self._loss_region

    def is_combined(self, tensor: str) -> bool:
        """Whether losses read `tensor` combined over replicas."""
        return str(parse(tensor)) in self._of_losses

    def layouts_of(self, op: str) -> tuple[BatchLayout, ...]:
        """The layouts of what the op returns."""
        return self._layouts.get(op, (BatchLayout.REPLICATED,))

    def layout(self, tensor: str) -> BatchLayout:
        """The layout of `tensor`, but that a loss that is not known is that."""
        layout = self._known_layout(tensor)
        keeps = layout is BatchLayout.MIXED and self._keeps_apart(self._layers.get(str(parse(tensor))))
        return BatchLayout.SHARDED if keeps else layout

    def has_rows(self, tensor: str) -> bool:
        """Whether `tensor`, of the loss or what it is computed from, has a row for each of the replica's examples."""
        return self._layout(tensor) is BatchLayout.SHARDED

    def seen(self, tensor: str) -> BatchLayout | None:
        """The layout of `tensor`, of the loss, a write or a result, or what they are made of; None: it is not."""
        return self._layout(tensor) if op_of(tensor) in self._layouts else None

    def is_read_whole(self, op: str) -> bool:
        """Whether `op` passes a gradient on, or is of a loss, a write or a result, or what they are made of."""
        return op in self._layouts or op in self._markers

    def of_source(self, node: tf.compat.v1.NodeDef) -> tuple[BatchLayout, ...] | None:
        """The layouts of what a replica is given, as its part of the batch; None: `node` computes what it returns."""
        own_rows = [str(parse(f"{node.name}:{index}")) in self._rows for index in range(_num_outputs(node))]
        if any(own_rows):
            rest = BatchLayout.MIXED if node.name in self._unknown else BatchLayout.REPLICATED
            return tuple(BatchLayout.SHARDED if has_rows else rest for has_rows in own_rows)
        if node.name in self._unknown:
            return (BatchLayout.MIXED,)
        return (BatchLayout.REPLICATED,) if node.name in self._markers else None

    def is_everyones(self, tensor: str) -> bool:
        """Whether what is the same on all replicas of a worker is so on all workers: their own batches may differ."""
        return not self._is_local or self._constants.value(tensor) is not None

    def is_random(self, op: str) -> bool:
        """Whether `op` gives another result on each replica though what it reads is equal."""
        return op in self._random

    def known_values(self, graph: GraphView) -> Iterator[Output]:
        """The tensors of `graph` of which it is known what they are for the whole batch, each after what it is of."""
        hidden = graph.dataflow_descendants(node.name for node in graph.of_type(CONTROL_FLOW))
        read = {str(parse(name)) for node in graph.nodes.values() for name in node.input if not name.startswith("^")}
        of_op: dict[str, list[str]] = {}
        for tensor in sorted(read):
            of_op.setdefault(op_of(tensor), []).append(tensor)
        for op in graph.dataflow_order(graph.nodes):
            if op in hidden or not (op in self._layouts or op in self._markers):
                continue
            for tensor in of_op.get(op, ()):
                symbol = self._tensor_of(tensor)
                reduction = _RESULTS.get(self._layout(tensor), "")
                shape = static_shape(symbol.shape)
                if symbol.dtype in CARRIED and reduction and _fits(shape, reduction):
                    yield Output(f"{op}:{parse(tensor).output}", symbol.dtype.name, shape, reduction)

    def is_again(self, tensor: str) -> bool:
        """Whether the result `tensor` must be computed again for all examples."""
        layout = self._layout(tensor)
        return layout in (BatchLayout.PARTIAL_SUM_PLUS, BatchLayout.MIXED) and self._can_combine("", tensor, layout)

    def reduction_again(self, tensor: str) -> str:
        """How `tensor` is combined before something is computed again from it; "": it is the same everywhere."""
        layout = self._taken_for(tensor)
        return "" if layout is BatchLayout.REPLICATED else _REDUCTIONS[layout]

    def _evaluate(self) -> None:
        self._turned.clear()
        self._given_whole.clear()
        while True:
            turned, given = dict(self._turned), set(self._given_whole)
            self._pass_over()
            if given != self._given_whole:
                self._turned.clear()
            elif turned == self._turned:
                return

    def _pass_over(self) -> None:
        """Find the layouts of all ops, given what goes round the loops of TensorFlow 1."""
        self._layouts.clear()
        self.edges.clear()
        self.deltas.clear()
        self.local.clear()
        self.ending.clear()
        self._along.clear()
        for name in self._graph.dataflow_order(self._region):
            node = self._graph.nodes[name]
            self._layouts[name] = self._visit(node)
            if self._layouts[name] == (BatchLayout.MIXED,):
                self._layouts[name] = self._followed(node)
            self._blocks[name] = self._block(node)
            self._note_choices(node)
            if node.op in BACK_EDGE:
                self._turned[name] = after_turn(self._turned.get(name), self._layouts[name][0])

    def _followed(self, node: tf.compat.v1.NodeDef) -> tuple[BatchLayout, ...]:
        """The layouts of results for which there is no rule, as far as it is followed how they go along examples.

        Entries of examples need not stand along axis 0 (time-major sequences), nor in their order (two batches, one
        behind the other): what is reduced over them is a sum, or a mean, all the same. An op that is not known, and is
        given rows, and returns as many, is taken to keep them apart, and told of.
        """
        if self.of_source(node) is not None or node.op in CONTROL_FLOW:
            return (BatchLayout.MIXED,)
        reads = [name for name in node.input if not name.startswith("^")]
        in_loss = node.name in self._loss_region  # All else is computed from what is combined, with all its rows.
        known = self._known(node, reads) if is_known(node.op) or (in_loss and node.op in LISTS) else UNKNOWN
        if known.along is None and not is_known(node.op):
            is_told = in_loss and node.name in self.local
            return self._taken_to_keep_apart(node, reads) if is_told else (BatchLayout.MIXED,)
        if known.along is None:
            return (BatchLayout.MIXED,)
        self._along[node.name] = known.along
        own = [self._known_of(node.name, tensor) for tensor in reads]
        if node.name in self.local and is_exact(known, node.op, own):
            self.local.remove(node.name)
        return (known.layout if in_loss or known.layout in FIXED else BatchLayout.MIXED,)

    def _known(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> Known:
        """What is known of what `node` makes of `reads`, where no rule says its layout."""
        operands = self.operands(node, reads, tuple(self._read(node.name, tensor) for tensor in reads))
        source = self._graph.nodes[op_of(reads[0])]
        if node.op in OF_SHAPE and source.op == "Shape":
            return of_shape(operands, self._known_of(node.name, source.input[0]))
        own = [self._known_of(node.name, tensor) for tensor in reads]
        return followed(operands, own, self._tensor_of(f"{node.name}:0"))

    def _known_of(self, reader: str, tensor: str) -> Known:
        """What is known of `tensor` as `reader` reads it."""
        layout = self._read(reader, tensor)
        if layout is BatchLayout.MIXED:
            return Known(layout, self.along_of(tensor))
        is_unset = layout is BatchLayout.REPLICATED and self._graph.nodes[op_of(tensor)].op in MAKES
        return Known(layout, UNSET if is_unset else of_layout(layout))

    def _argument(self, reader: str, tensor: str) -> Argument:
        """What is known of `tensor`, which `reader` gives to a function."""
        known = self._known_of(reader, tensor)
        constant = self._constants.value(tensor) if known.layout is BatchLayout.REPLICATED else None
        return Argument(known, constant, self._blocks.get(op_of(tensor)))

    def along_of(self, tensor: str) -> Along | None:
        """How `tensor`, whose layout does not say it, goes along examples, as far as it was followed."""
        return self._along.get(str(parse(tensor)), self._along.get(op_of(tensor)))

    def _run(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> tuple[BatchLayout, ...]:
        """The layouts of what a loop, branch or call of a loss returns, by what its functions compute; none: unknown.

        A value that nothing reads, as one that is kept for back-propagation, need not be known.
        """
        op = self._tensor_of(f"{node.name}:0").op
        found = self._functions.results(op, [self._argument(node.name, tensor) for tensor in reads])
        if any(one == UNKNOWN and self._is_read(node.name, index) for index, one in enumerate(found)):
            return ()
        along = {str(parse(f"{node.name}:{index}")): one.along for index, one in enumerate(found)}
        self._along |= {name: one for name, one in along.items() if one is not None}
        return tuple(one.layout for one in found)

    def _taken_to_keep_apart(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> tuple[BatchLayout, ...]:
        """The layouts of what an op of a loss returns that is not known: rows, where it is given as many."""
        layouts = [self._read(node.name, tensor) for tensor in reads]
        has_rows = BatchLayout.SHARDED in layouts and set(layouts) <= {BatchLayout.SHARDED, BatchLayout.REPLICATED}
        found = []
        for index, one in enumerate(self._tensor_of(f"{node.name}:0").op.outputs):
            is_given = has_rows
            if node.op in _WHILE:  # What goes round it begins as one of its inputs.
                is_given = layouts[index] is BatchLayout.SHARDED
            elif node.op == "TensorListStack":
                is_given = self._has_one_of_each(reads[0])
            is_batch = one.shape.rank and one.shape[0] is None and one.shape[1:].is_fully_defined()
            is_taken = is_given and is_batch and one.dtype.is_floating
            found.append(BatchLayout.SHARDED if is_taken else BatchLayout.MIXED)
        return tuple(found)

    def _has_one_of_each(self, tensor: str) -> bool:
        """Whether a list that a loop fills has been made for as many tensors as there are examples."""
        name = parse(tensor)
        node = self._graph.nodes[name.op]
        while node.op in ("Identity", *_WHILE):
            name = parse(node.input[name.output if node.op in _WHILE else 0])
            node = self._graph.nodes[name.op]
        return node.op == "TensorListReserve" and self._layout(node.input[1]) is BatchLayout.COUNT

    def _block(self, node: tf.compat.v1.NodeDef) -> int | None:
        """How many rows each example has in what `node` computes, or in what that is the shape of; None: not known."""
        if node.name in self._sources:
            return 1
        layout = self._layouts[node.name][0]
        if layout in (BatchLayout.SHAPE, BatchLayout.COUNT) and node.op not in _FROM_SHAPE:
            return None
        reads = [name for name in node.input if not name.startswith("^") and self._layout(name) in _WITH_BLOCKS]
        if node.op in ("Reshape", "SparseReshape") and reads and self._layout(reads[-1]) is BatchLayout.SHAPE:
            return self._blocks.get(op_of(reads[-1]))
        known = (block for name in reads if (block := self._blocks.get(op_of(name))) is not None)
        if node.op == "Merge" or node.op in RUNS:
            blocks = {self._blocks.get(op_of(name)) for name in reads}
            return blocks.pop() if len(blocks) == 1 else None
        block = next(known, None)
        if node.op == "Prod" and self._tensor_of(node.input[0]).shape != [1]:
            return None
        if node.op != "Reshape" or block is None:
            return block
        sizes = [self._tensor_of(name).shape[1:].num_elements() for name in (node.input[0], f"{node.name}:0")]
        whole = [size for size in sizes if size]
        return block * whole[0] // whole[1] if len(whole) == 2 and not block * whole[0] % whole[1] else None

    def _note_choices(self, node: tf.compat.v1.NodeDef) -> None:
        """Note which rows, distinct elements or places `node` returns something of."""
        reads = [name for name in node.input if not name.startswith("^")]
        chosen = {node.name} if node.op in _CHOOSES else self._chosen_by(node)
        found = {node.name} if node.op in _FINDS else {self._sets.get(op_of(name), "") for name in self._of_sets(reads)}
        places = {op_of(name) for name in reads if self._layout(name) is BatchLayout.SELECTED_INDICES}
        if node.op == "Where":
            self._places[node.name] = reads[0]
        elif node.op == "SparseReshape":
            self._places[node.name] = f"{node.name}:1"
        elif places:
            first = op_of(reads[0])
            self._places[node.name] = self._places.get(first if first in places else places.pop(), node.name)
        if len(chosen) == 1:
            self._choices[node.name] = chosen.pop()
        if len(found) == 1:
            self._sets[node.name] = found.pop()

    def _of_sets(self, reads: Sequence[str]) -> list[str]:
        return [name for name in reads if self._layout(name) in _OF_SETS]

    def _chosen_by(self, node: tf.compat.v1.NodeDef) -> set[str]:
        """The ops that have chosen the rows, or places of rows, that `node` returns; itself for what is not known."""
        reads = [name for name in node.input if not name.startswith("^")]
        if self._takes(node) and self._layout(reads[0]) in _OF_CHOICES:
            reads = reads[1:]  # Chosen once more.
        return {self._choices.get(op_of(name), node.name) for name in reads if self._layout(name) in _OF_CHOICES}

    def _takes(self, node: tf.compat.v1.NodeDef) -> bool:
        """Whether `node` takes rows by their places."""
        return node.op in _TAKES and self._layout(node.input[1]) is BatchLayout.SELECTED_INDICES

    def _belong_together(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], layouts: Sequence[BatchLayout]
    ) -> bool:
        """Whether what `node` reads of chosen rows, of distinct elements or of places is of the same ones."""
        if len(self._chosen_by(node)) > 1 or len({self._sets.get(op_of(name)) for name in self._of_sets(reads)}) > 1:
            return False
        of_places = [
            op_of(name) for name, one in zip(reads, layouts, strict=True) if one is BatchLayout.SELECTED_INDICES
        ]
        of_rows = [op_of(name) for name, one in zip(reads, layouts, strict=True) if one is BatchLayout.SHARDED]
        if self._takes(node) and layouts[0] in _OF_CHOICES:
            return self._chosen_in(op_of(reads[1])) == self._choices.get(op_of(reads[0]), node.name)
        if any(self._chosen_in(op) for op in of_places) and node.op not in _ON_PLACES:
            return False
        blocks = {self._blocks.get(op) for op in (*of_places, *of_rows)}
        return not (of_places and of_rows) or (len(blocks) == 1 and None not in blocks)

    def _chosen_in(self, op: str) -> str:
        """The op that has chosen the rows in which the places that `op` returns are; "": they are in all rows."""
        source = self._places.get(op)
        is_chosen = source is not None and self._layout(source) is BatchLayout.SELECTED
        return self._choices.get(op_of(source), op) if source is not None and is_chosen else ""

    def _read(self, reader: str, tensor: str) -> BatchLayout:
        """The layout of `tensor` as `reader` reads it."""
        combined = self._of_losses.get(str(parse(tensor))) if reader in self._trains else None
        if combined is not None:
            return BatchLayout.COUNT if combined in _OF_SHARES else BatchLayout.REPLICATED
        return self._layout(tensor) if reader in self._loss_region else self._taken_for(tensor)

    def _taken_for(self, tensor: str) -> BatchLayout:
        """The layout of `tensor` for all but losses: a term of one that is not known is taken for what that is."""
        layout = self._layout(tensor)
        return self._terms.get(str(parse(tensor)), layout) if layout is BatchLayout.MIXED else layout

    def _layout(self, tensor: str) -> BatchLayout:
        layout, name = self._known_layout(tensor), str(parse(tensor))
        if layout is not BatchLayout.MIXED:
            return layout
        is_fixed = name in self._assumed and self._tensor_of(name).shape.is_fully_defined()
        if is_fixed and not self._can_compute_again(op_of(name)):
            return self._assumed[name]  # As the user is told: see `inexact.inexact`.
        return BatchLayout.SHARDED if self._keeps_apart(self._layers.get(name)) else layout

    def _keeps_apart(self, call: LayerCall | None) -> bool:
        """Whether a layer keeps examples apart, as it does if what it is given does."""
        return (
            call is not None
            and all(self._layout(read) in (BatchLayout.SHARDED, BatchLayout.REPLICATED) for read in call.reads)
            and all(self._layout(read) is BatchLayout.REPLICATED for read in call.shared)
        )

    def _known_layout(self, tensor: str) -> BatchLayout:
        """The layout of `tensor`, as far as its graph shows."""
        name = parse(tensor)
        layouts = self._layouts.get(name.op, (BatchLayout.REPLICATED,))
        return layouts[name.output if len(layouts) > 1 else 0]

    def _visit(self, node: tf.compat.v1.NodeDef) -> tuple[BatchLayout, ...]:
        given = self.of_source(node)
        if given is not None:
            return given
        reads = [name for name in node.input if not name.startswith("^")]
        layouts = tuple(self._read(node.name, tensor) for tensor in reads)
        if node.op in CONTROL_FLOW:
            return self._passed(node, reads, layouts)
        if not self._run_alike(self._flow.unread.get(node.name, ())):
            self._note_local(node.name)
            return (BatchLayout.MIXED,)
        if all(layout is BatchLayout.REPLICATED for layout in layouts):
            return (BatchLayout.MIXED if node.name in self._random else BatchLayout.REPLICATED,)
        if self._is_clipped_to_one(node):
            return (BatchLayout.REPLICATED,)
        runs = node.op in RUNS and node.name in self._loss_region and node.name not in self._writers
        if runs and (returned := self._run(node, reads)):
            return returned
        if not self._belong_together(node, reads, layouts):
            layouts = tuple(BatchLayout.MIXED if layout in _CHOICES else layout for layout in layouts)
        operands = self.operands(node, reads, layouts)
        result = layout_of(operands)
        results = set(result if isinstance(result, tuple) else (result,))
        if node.name not in self._loss_region and (_CHOICES | {BatchLayout.TAILED}) & results:
            wanted = _wanted(reads, layouts)
            if self._can_combine_all(node.name, wanted):  # Outside of losses all is as one device computes it.
                self._combine(node.name, wanted)
                return (BatchLayout.REPLICATED,)
        if isinstance(result, tuple):
            unknown = [index for index, one in enumerate(result) if one is BatchLayout.MIXED]
            if node.op in ENTRIES:  # Not so of a batch normalization, whose rows know of its other results.
                unknown = [index for index in unknown if self._is_read(node.name, index)]
            if unknown:
                self.local.append(node.name)
            return result
        if result is BatchLayout.SHARDED and node.op in SEGMENTS:
            self._note_ending(node, reads)
        if result is BatchLayout.PARTIAL_SUM_PLUS and node.name not in self._loss_region & self._trained:
            result = BatchLayout.MIXED  # Its terms are combined by themselves.
        if result in _SUMS | {BatchLayout.PARTIAL_MEAN} and self._grows(node.name, reads, layouts):
            result = BatchLayout.MIXED  # Its shape is that of the whole batch: nothing that is combined afterwards.
        if result in FIXED and self._is_uncarried_cast(node.name):
            result = BatchLayout.MIXED  # What cannot be combined after the cast is combined before it.
        return (self._combined_first(node, reads, operands, result),)

    def _is_read(self, op: str, index: int) -> bool:
        """Whether this result of `op` is a loss or result, or one of these or a write reads it."""
        readers = self._graph.dataflow_consumers([op]) & self._region
        tensor = str(parse(f"{op}:{index}"))
        return tensor in self._shown or any(
            str(parse(name)) == tensor
            for reader in readers
            for name in self._graph.nodes[reader].input
            if not name.startswith("^")
        )

    def _note_ending(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> None:
        """Note that `node` may return fewer rows than there are, as not each is known to have an entry."""
        places = op_of(reads[-1])
        chosen = self._graph.nodes[self._choices[places]]
        if chosen.op != _FILLS:
            self.ending[node.name] = self._places[places]

    def _passed(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], layouts: Sequence[BatchLayout]
    ) -> tuple[BatchLayout, ...]:
        """What an op of TensorFlow 1's control flow passes on: all replicas must take the same way."""
        wanted = _wanted(reads, layouts)
        if node.name in self._given_whole and wanted and self._can_combine_all(node.name, wanted):
            self._combine(node.name, wanted)
            return (BatchLayout.REPLICATED,)
        ways = self._flow.chosen.get(node.name, frozenset())
        if node.op in ("Exit", "Switch"):
            switch = self._graph.nodes[op_of(reads[0])] if node.op == "Exit" else node
            ways = frozenset({op_of(switch.input[1])})
        result = self._merged(reads, layouts) if node.op == "Merge" else layouts[0]
        if not self._run_alike(ways):
            self._note_local(node.name)
            return (BatchLayout.MIXED, BatchLayout.MIXED) if node.op == "Merge" else (BatchLayout.MIXED,)
        if result is BatchLayout.MIXED and node.op == "Merge" and BatchLayout.MIXED not in layouts:
            self._note_local(node.name)
        return (result, BatchLayout.REPLICATED) if node.op == "Merge" else (result,)

    def _run_alike(self, ways: Iterable[str]) -> bool:
        """Whether what decides whether something runs, or what it takes from a stack, is the same on all replicas."""
        return all(self._layout(way) is BatchLayout.REPLICATED for way in ways)

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

    def _note_local(self, op: str) -> None:
        if op in self._loss_region:
            self.local.append(op)
        else:
            self._give_whole(op)

    def _give_whole(self, op: str) -> None:
        """Let the loops and branches around `op`, or that it ends, be given what is combined, if all of that can be."""
        seen = {op}
        pending = [op]
        entries: list[str] = []
        while pending:
            name = pending.pop()
            node = self._graph.nodes[name]
            reads = [op_of(read) for read in node.input if not read.startswith("^")]
            if node.op in ("Enter", "Switch") and all(self._flow.runs_once(read) for read in reads):
                entries.append(name)
                continue
            if name != op and self._flow.runs_once(name) and node.op not in CONTROL_FLOW:
                continue
            reads += sorted(self._flow.unread.get(name, ()))
            pending += [read for read in reads if read not in seen]
            seen |= set(reads)
        for entry in entries:
            reads = [name for name in self._graph.nodes[entry].input if not name.startswith("^")]
            wanted = _wanted(reads, [self._read(entry, tensor) for tensor in reads])
            if not self._can_combine_all(entry, wanted):
                return
        self._given_whole |= set(entries)

    def _is_discrete(self, op: str) -> bool:
        """Whether all that `op` returns are integers, truth values or texts."""
        if self._graph.nodes[op].op == VARIABLE_OP or not self._graph.dataflow_consumers([op]):
            return False
        types = [one.dtype for one in self._tensor_of(f"{op}:0").op.outputs]
        return all(dtype.is_integer or dtype.is_bool or dtype == tf.string for dtype in types)

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
        ends = {op_of(name) for name in self._assumed} | self._ends
        live = set[str]()
        while True:  # What is used in one turn of a loop of TensorFlow 1 was computed in the turn before.
            num_before = len(live)
            for name in reversed(list(self._graph.dataflow_order(self._region))):
                users = self._graph.dataflow_consumers([name]) & live
                if name in ends or any(not self._is_clipped_to_one(self._graph.nodes[user]) for user in users):
                    live.add(name)
            if len(live) == num_before or not self._flow.frames:
                break
        self.local = [name for name in self.local if name in live]

    def _combined_first(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], operands: Operands, result: BatchLayout
    ) -> BatchLayout:
        """The layout of `node`, whose own rule gives `result`, when what it reads is combined where it must be."""
        mixes = result in _OF_ROWS and not set(operands.layouts) <= _APART
        if result is not BatchLayout.MIXED and not mixes:
            return result
        if self._keeps_apart(self._inside.get(node.name)):
            return result
        wanted = [one for one in _wanted(reads, operands.layouts) if not (mixes and one.layout in _APART)]
        if not self._can_combine_all(node.name, wanted):
            if not self._flow.runs_once(node.name) and node.name not in self._loss_region:
                self._give_whole(node.name)
            return self._uncombined(node, operands, wanted, mixes=mixes)
        self._combine(node.name, wanted)
        return result if mixes else BatchLayout.REPLICATED

    def _combine(self, reader: str, wanted: Iterable[_Read]) -> None:
        for position, tensor, layout in wanted:
            if reader in self._loss_region:
                self._of_losses[str(parse(tensor))] = _REDUCTIONS[layout]
            else:
                self.edges[reader, position] = _REDUCTIONS[layout]

    def _uncombined(
        self, node: tf.compat.v1.NodeDef, operands: Operands, wanted: Sequence[_Read], *, mixes: bool
    ) -> BatchLayout:
        """The layout of an op that needs more combined than can be: as much as can be is, the rest stays local."""
        if not mixes and node.name in self._writers:
            self._fall_back(node, self._writers[node.name])
        is_ratio = node.op in _QUOTIENTS and set(operands.layouts) == {BatchLayout.PARTIAL_SUM}  # See `_normalizers`.
        if node.name in self._loss_region and not is_ratio:
            partly = self._partly_combined(node, operands, wanted)
            if partly is not BatchLayout.MIXED:
                return partly
        pairs_rows = node.op in _PRODUCTS and operands.layouts[0] is BatchLayout.SHARDED
        if mixes or pairs_rows or node.name in self._loss_region:
            self.local.append(node.name)
        has_rows = (mixes or pairs_rows) and self._tensor_of(f"{node.name}:0").shape[1:].is_fully_defined()
        if not has_rows:
            return BatchLayout.MIXED
        return BatchLayout.SELECTED if BatchLayout.SELECTED in operands.layouts else BatchLayout.SHARDED

    def _partly_combined(self, node: tf.compat.v1.NodeDef, operands: Operands, wanted: Iterable[_Read]) -> BatchLayout:
        """The layout of an op of a loss when what can be combined is, if that is enough to know it."""
        some = {one.position: one for one in wanted if self._can_combine(node.name, one.tensor, one.layout)}
        layouts = tuple(BatchLayout.REPLICATED if index in some else one for index, one in enumerate(operands.layouts))
        result = layout_of(replace(operands, layouts=layouts)) if some else BatchLayout.MIXED
        if isinstance(result, tuple) or result in _OF_ROWS:
            return BatchLayout.MIXED
        if result is not BatchLayout.MIXED:
            self._combine(node.name, some.values())
        return result

    def _can_combine_all(self, reader: str, wanted: Iterable[_Read]) -> bool:
        """Whether `reader` gives one device's result when all that is wanted is combined."""
        return reader not in self._random and all(self._can_combine(reader, one.tensor, one.layout) for one in wanted)

    def _can_combine(self, reader: str, tensor: str, layout: BatchLayout) -> bool:
        """Whether `reader` may be given the combined `tensor`, which is of this layout on each replica.

        Replicas would wait for one another for what is combined in loops and branches of TensorFlow 1.
        """
        if not self._flow.runs_once(op_of(tensor)):
            return False
        if reader in self._loss_region and (layout in _OF_ROWS or op_of(tensor) in self._trained):
            return False
        name = str(parse(tensor))
        if reader in self._loss_region and (name in self._shared or self._of_losses.get(name) == "part"):
            return False
        shape, dtype = self._tensor_of(tensor).shape, self._tensor_of(tensor).dtype
        if layout in (BatchLayout.PARTIAL_SUM_PLUS, BatchLayout.MIXED):
            return reader not in self._loss_region and self._can_compute_again(op_of(tensor))
        if dtype not in (TRAVELS if layout is BatchLayout.SHARDED else SUMMED) or shape.rank is None:
            return False
        if reader in self._loss_region and not dtype.is_floating and not self._is_uncarried_cast(reader):
            return False  # A size or an index: it is of the replica's own rows.
        if layout in _OF_ROWS:
            return bool(shape[1:].is_fully_defined())
        return layout in FIXED and bool(shape.is_fully_defined())

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

    def _is_uncarried_cast(self, op: str) -> bool:
        """A cast to a type that collectives do not carry, as of the number of random numbers that are drawn."""
        node = self._graph.nodes.get(op)
        return node is not None and node.op == "Cast" and tf.as_dtype(node.attr["DstT"].type) not in CARRIED

    def _can_compute_again(self, op: str) -> bool:
        """Whether what a loss is computed by can be computed of all examples too, beside the replica's own value."""
        node = self._graph.nodes[op]
        if op not in self._loss_region or op in self._random or not is_known(node.op):
            return False
        if not self._flow.runs_once(op):
            return False
        reads = [(tensor, self._taken_for(tensor)) for tensor in node.input if not tensor.startswith("^")]
        return all(
            layout is BatchLayout.REPLICATED or (layout not in _OF_ROWS and self._can_combine("", tensor, layout))
            for tensor, layout in reads
        )

    def _fall_back(self, node: tf.compat.v1.NodeDef, variable: Variable) -> None:
        """A write whose value cannot be traced to statistics: combine the value itself, as the variable says."""
        if node.op not in _ADDS | {_ASSIGN} or not tf.as_dtype(variable.dtype).is_floating:
            return
        self.local.append(node.name)
        if variable.aggregation == "SUM" and node.op == _ASSIGN:
            self.deltas.append(node.name)
        else:
            self.edges[node.name, 1] = "sum" if variable.aggregation == "SUM" else "mean"

    def _normalizers(self) -> Iterator[str]:
        """Sums over examples by which a loss divides another, and that no gradient flows through.

        With the sum over all examples, times the replica's share of them, in their place the quotient is a mean.
        """
        for name in self._loss_region:
            if self._graph.nodes[name].op not in _QUOTIENTS:
                continue
            over, under = self._graph.nodes[name].input[:2]
            if (
                self._read(name, over) is not BatchLayout.PARTIAL_SUM
                or self._read(name, under) is not BatchLayout.PARTIAL_SUM
            ):
                continue
            below = self._graph.dataflow_descendants([name], blocked=self._markers) & self._loss_region
            of_rows = any(layout in _OF_ROWS for op in below for layout in self._layouts.get(op, ()))
            if not of_rows and self._can_combine(name, under, BatchLayout.PARTIAL_SUM):
                yield str(parse(under))

    def _divisors_of_sums_beside_means(self) -> Iterator[str]:
        """What sums over examples are divided by that are added to means: a number made of the whole batch.

        A mask's sum plus an epsilon, say. A replica's share of that in its place makes the quotient a mean.
        """
        for name in self._loss_region:
            if self._graph.nodes[name].op in _ADDS_TERMS:
                reads = [one for one in self._graph.nodes[name].input if not one.startswith("^")]
                yield from self._divisors_beside_means(name, reads)
        for tensors in self._losses:
            yield from self._divisors_beside_means("", tensors)

    def _divisors_beside_means(self, reader: str, terms: Sequence[str]) -> Iterator[str]:
        layouts = {term: self._read(reader, term) if reader else self._layout(term) for term in terms}
        if BatchLayout.PARTIAL_MEAN not in layouts.values():
            return
        pending = [term for term, layout in layouts.items() if layout in _SUMS - {BatchLayout.COUNT}]
        seen = set(pending)
        while pending:
            node = self._graph.nodes[op_of(pending.pop())]
            reads = [name for name in node.input if not name.startswith("^")]
            if node.op in _QUOTIENTS and self._is_whole_divisor(reads[1], {BatchLayout.PARTIAL_SUM}):
                yield str(parse(reads[1]))
                continue
            new = {name for name in reads if self._read(node.name, name) in _SUMS - {BatchLayout.COUNT}} - seen
            seen |= new
            pending += sorted(new)

    def _is_whole_divisor(self, tensor: str, kinds: Set[BatchLayout]) -> bool:
        """Whether losses read a number, made of the whole batch, only to divide what is of these layouts by it."""
        symbol, op = self._tensor_of(tensor), op_of(tensor)
        is_number = symbol.dtype.is_floating and symbol.shape.is_fully_defined() and self._flow.runs_once(op)
        if not is_number or op in self._trained or op not in self._of_examples:
            return False
        for reader in self._graph.dataflow_consumers([op]) & self._loss_region:
            node = self._graph.nodes[reader]
            if node.op not in _QUOTIENTS or self._read(reader, node.input[0]) not in kinds:
                return False
            if self._read(reader, tensor) is not BatchLayout.REPLICATED:
                return False
        return True

    def _take_shares_of_assumed_means(self) -> None:
        """Let losses that cannot be followed, and so are taken for means, read shares of what is of all examples.

        A replica's loss is one of its own share of the examples then, and so must be each sum that it is made of. Where
        a loss is divided by what is computed from a sum, that counts for it.
        """
        for tensor in sorted(set(self._sums_of_assumed_means())):
            divisors = self._divisors_made_of(tensor)
            if divisors:
                self._of_losses |= dict.fromkeys(divisors, "part")
            else:
                self._shared.add(tensor)
        self._of_losses |= dict.fromkeys(self._shared & self._of_losses.keys(), "share")

    def _divisors_made_of(self, tensor: str) -> set[str]:
        """What losses are divided by that is computed from the combined `tensor`; none: they read it otherwise, too."""
        found: set[str] = set()
        pending, seen = [tensor], {tensor}
        while pending:
            name = pending.pop()
            is_known = self._of_losses.get(name) == "part"
            if is_known or (name != tensor and self._is_whole_divisor(name, _SUMMED_UP)):
                found.add(name)
                continue
            for reader in self._graph.dataflow_consumers([op_of(name)]) & self._loss_region:
                if self._layouts[reader] != (BatchLayout.REPLICATED,):
                    return set()
                if reader not in seen:
                    seen.add(reader)
                    pending.append(reader)
        return found

    def _sums_of_assumed_means(self) -> Iterator[str]:
        """Sums over all examples that only losses read which cannot be followed, and so are taken for means."""
        assumed = [tensor for tensor, layout in self._assumed.items() if layout is BatchLayout.PARTIAL_MEAN]
        unknown = {op_of(tensor) for tensor in assumed if self._known_layout(tensor) is BatchLayout.MIXED}
        others = {op_of(tensor) for tensor in self._assumed} - unknown
        ancestors = self._graph.dataflow_ancestors(unknown, blocked=self._markers)
        ancestors -= self._graph.dataflow_ancestors(others, blocked=self._markers)
        for tensor, reduction in self._of_losses.items():
            if reduction == "sum" and op_of(tensor) in ancestors:
                yield tensor

    def operands(self, node: tf.compat.v1.NodeDef, reads: Sequence[str], layouts: tuple[BatchLayout, ...]) -> Operands:
        """What a rule is told about `node`, whose data inputs `reads` are of these layouts."""
        return Operands.of(
            node,
            [self._tensor_of(tensor) for tensor in reads],
            layouts,
            [
                self._constants.value(tensor) if layout is BatchLayout.REPLICATED else None
                for tensor, layout in zip(reads, layouts, strict=True)
            ],
            [
                self._blocks.get(op_of(tensor)) if layout in _WITH_BLOCKS else None
                for tensor, layout in zip(reads, layouts, strict=True)
            ],
        )


def _reduction(kinds: Set[BatchLayout]) -> str:
    """How the sum of what is of these kinds combines examples: "mean", "sum" or, where it is not known, ""."""
    if kinds and kinds <= {BatchLayout.PARTIAL_MEAN, BatchLayout.REPLICATED}:
        return "mean"  # So is that of what depends on no example.
    return "sum" if kinds & _SUMS and kinds <= _SUMS | {BatchLayout.REPLICATED} else ""


def _wanted(reads: Sequence[str], layouts: Sequence[BatchLayout]) -> list[_Read]:
    """The data inputs that differ between replicas."""
    return [
        _Read(index, tensor, layout)
        for index, (tensor, layout) in enumerate(zip(reads, layouts, strict=True))
        if layout is not BatchLayout.REPLICATED
    ]


def _num_outputs(node: tf.compat.v1.NodeDef) -> int:
    """The number of results, as far as they can be rows of different inputs."""
    return len(node.attr["output_types"].list.type) if node.op in ITERATOR_NEXT else 1


def _fits(shape: tuple[int | None, ...] | None, reduction: str) -> bool:
    """Whether a result of this static shape can be returned for the whole batch."""
    if reduction == "same":
        return True
    if reduction == "rows":
        return shape is not None and shape[:1] == (None,) and None not in shape[1:]
    return shape is not None and None not in shape
