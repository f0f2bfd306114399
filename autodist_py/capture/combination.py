"""Which values replicas must combine: the extent of each tensor that matters, and the edges that carry statistics.

One class, though long: whether a value may be combined depends on the extents, and the extents on what is combined.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import tensorflow as tf

from autodist_py.capture.constants import Constants
from autodist_py.capture.layers import LayerCall
from autodist_py.capture.shapes import static_shape
from autodist_py.kernel.analysis import random_ops
from autodist_py.kernel.batch import batched_tensors
from autodist_py.kernel.combining import SUMMED
from autodist_py.kernel.control_flow import BACK_EDGE, CONTROL_FLOW
from autodist_py.kernel.cross_device_ops.collective import CARRIED
from autodist_py.kernel.cross_device_ops.rows import TRAVELS
from autodist_py.kernel.extent.joins import after_turn, joined
from autodist_py.kernel.extent.rules import extent_of, is_known
from autodist_py.kernel.extent.values import FIXED, Extent, Operands
from autodist_py.kernel.graph_view import ITERATOR_NEXT, SHOWS, VARIABLE_OP, GraphView
from autodist_py.kernel.names import op_of, parse
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import GraphItem, Output, Variable

ADDITIVE = frozenset({"Add", "AddN", "AddV2"})
"""Op types whose result is the sum of their inputs."""

AGAIN = "again"
"""Not combined by one reduction, but computed again, from what is combined."""

_QUOTIENTS = frozenset({"Div", "DivNoNan", "RealDiv"})
_OF_TERMS = frozenset({*ADDITIVE, "Identity", "Mul", "Neg", "RealDiv", "Sub"})
"""Op types that are linear in what differs, where one input does, or all are added: terms of a loss are its sum's."""
_ASSIGN = "AssignVariableOp"
_ADDS = frozenset({"AssignAddVariableOp", "AssignSubVariableOp"})
_PRODUCTS = frozenset({"BatchMatMulV2", "Einsum", "MatMul"})
_OF_ROWS = frozenset({Extent.ROWS, Extent.CHOSEN})
_CHOICES = frozenset({Extent.CHOSEN, Extent.PLACES, Extent.DISTINCT})
"""Extents of what depends on which rows were chosen, or on which elements there are."""
_APART = _OF_ROWS | {Extent.SAME, Extent.SHAPE, Extent.PLACES}
"""Extents of inputs that, where the result has rows, say nothing of other replicas' examples."""
_SUMS = frozenset({Extent.SUM, Extent.COUNT, Extent.PLUS})
_REDUCTIONS = {
    Extent.SUM: "sum",
    Extent.COUNT: "sum",
    Extent.MEAN: "mean",
    Extent.ROWS: "rows",
    Extent.CHOSEN: "rows",
    Extent.PLUS: AGAIN,
    Extent.OTHER: AGAIN,
}

_RESULTS = {
    Extent.SAME: "same",
    Extent.ROWS: "rows",
    Extent.SUM: "sum",
    Extent.COUNT: "sum",
    Extent.MEAN: "mean",
}

Edge = tuple[str, int]
"""An op and the position of one of its inputs."""


class _Read(NamedTuple):
    """One data input of an op."""

    position: int
    tensor: str
    extent: Extent


class Combination:
    """The extents of all that a loss, write or result is computed from, and the edges that must carry statistics."""

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
        self._seams = {op_of(tensor) for gradient in item.gradients for tensor in gradient.tensors}
        self._rows = {str(parse(tensor.name)) for tensor in batched_tensors(item, whole)}
        self._random = random_ops(whole)
        self._unknown: set[str] = set()
        self._is_local = batch == "local"
        if self._is_local:
            self._unknown = {one.name for one in item.inputs if one.kind == "feed" and not one.batched}
            self._unknown |= {node.name for node in whole.of_type(ITERATOR_NEXT)}
        targets = {op_of(tensor) for tensors in losses for tensor in tensors}
        self._loss_region = whole.dataflow_ancestors(targets, blocked=self._seams)
        self._writers = {
            writer: variable for variable in item.variables for writer in variable.update_ops if writer in whole.nodes
        }
        ends = {
            *self._writers,
            *(node.name for node in whole.of_type(SHOWS)),
            *(op_of(output.tensor) for output in item.outputs),
        }
        self._ends = ends
        self._region = self._loss_region | whole.dataflow_ancestors(ends, blocked=self._seams)
        trained = {gradient.variable for gradient in item.gradients}
        self._trained = whole.dataflow_descendants(trained & whole.nodes.keys(), blocked=self._seams)
        discrete = {op for op in self._trained if self._is_discrete(op)}  # No gradient flows through a comparison.
        self._trained = whole.dataflow_descendants(trained & whole.nodes.keys(), blocked=self._seams | discrete)
        self._trained -= discrete
        raw = {op_of(name) for seam in self._seams for name in whole.nodes[seam].input if not name.startswith("^")}
        self._trains = self._loss_region | whole.dataflow_ancestors(raw, blocked=self._seams)
        self._sources = {op_of(tensor) for tensor in self._rows} | self._random | self._unknown
        self._layers: dict[str, LayerCall] = {}
        """The calls of layers whose results these tensors are."""
        self._inside: dict[str, LayerCall] = {}
        """The calls of layers that these ops are a part of."""
        for call in layer_calls:
            ends = {op_of(tensor) for tensor in call.reads}
            self._layers |= dict.fromkeys(call.outputs, call)
            parts = whole.dataflow_ancestors(map(op_of, call.outputs), blocked=ends) - ends
            self._inside |= dict.fromkeys(parts, call)
        assumed = Extent.SUM if item.loss_reduction == "sum" else Extent.MEAN
        self._assumed = {str(parse(tensor)): assumed for tensors in losses for tensor in tensors}
        self._terms: dict[str, Extent] = {}
        """Terms of losses that are not known, and what they are taken for where anything but a loss reads them."""
        self._flow = whole.control_flow
        self._turned: dict[str, Extent] = {}
        """What goes round a loop of TensorFlow 1, as far as the turns that were looked at show."""
        self._given_whole: set[str] = set()
        """Ops that lead into loops and branches of TensorFlow 1, which are given what is combined."""
        self._extents: dict[str, tuple[Extent, ...]] = {}
        self._blocks: dict[str, int | None] = {}
        """How many rows each example has in results of these ops."""
        self._choices: dict[str, str] = {}
        """The op that has chosen the rows that these ops return, or their places."""
        self._of_losses: dict[str, str] = {}
        """Tensors that the losses, and back-propagation, read combined."""
        self._shared: set[str] = set()
        """Of these, the ones that only losses which cannot be followed read."""
        self.edges: dict[Edge, str] = {}
        self.deltas: list[str] = []
        self.local: list[str] = []
        """Ops that mix a replica's own examples where one device mixes all."""

    def make(self) -> None:
        """Find all extents and edges."""
        known: dict[str, str] | None = None
        while known != self._of_losses:
            known = dict(self._of_losses)
            self._evaluate()
            for tensor in known:
                if self._extent(tensor) not in FIXED:  # What it is computed from is combined now.
                    self._of_losses.pop(tensor, None)
            if known == self._of_losses:
                self._of_losses |= dict.fromkeys(self._normalizers(), "share")
            if known == self._of_losses:
                self._shared |= set(self._sums_of_assumed_means())
                self._of_losses |= dict.fromkeys(self._shared & self._of_losses.keys(), "share")
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

    def _unknown_terms(self) -> dict[str, Extent]:
        """The terms of each loss that is taken for a mean, or a sum, as far as they are not known by themselves."""
        found = {name: kind for name, kind in self._assumed.items() if self._extent(name) is kind}
        pending = list(found)
        while pending:
            term = pending.pop()
            node = self._graph.nodes[op_of(term)]
            if self._known_extent(term) is not Extent.OTHER or node.op not in _OF_TERMS:
                continue
            reads = [str(parse(name)) for name in node.input if not name.startswith("^")]
            differing = [name for name in reads if self._extent(name) is not Extent.SAME]
            adds = node.op in ADDITIVE | {"Sub"}
            is_fixed = all(self._tensor_of(name).shape.is_fully_defined() for name in differing)
            if not is_fixed or not (adds or len(differing) == 1) or (node.op == "RealDiv" and differing == reads[1:]):
                continue
            new = {name for name in differing if self._extent(name) is Extent.OTHER and name not in found}
            found |= dict.fromkeys(new, found[term])
            pending += sorted(new)
        return {name: kind for name, kind in found.items() if self._extent(name) is Extent.OTHER}

    def _note_equal_writes(self) -> None:
        """Let statistics say of what is written that it is the same everywhere, where it is computed from examples."""
        differing = self._find_differing()
        for writer in self._writers:
            for index, tensor in enumerate(self._graph.nodes[writer].input):
                is_new = (writer, index) not in self.edges and not tensor.startswith("^")
                if is_new and op_of(tensor) in differing and self._extent(tensor) is Extent.SAME:
                    self.edges[writer, index] = "same"

    @property
    def varies(self) -> bool:
        """Whether anything differs between replicas."""
        return any(extent is not Extent.SAME for extents in self._extents.values() for extent in extents)

    def gradient_reduction(self, losses: Sequence[str]) -> str:
        """How a gradient of all `losses` together combines examples: "mean", "sum" or, where it is not known, "".

        Back-propagation adds up what has rows.
        """
        kinds = {self._known_extent(tensor) for tensor in losses}
        return _reduction({Extent.SUM if kind in _OF_ROWS else kind for kind in kinds})

    def result_reduction(self, tensor: str) -> str:
        """What the result `tensor` does with examples."""
        extent = self._extent(tensor)
        if extent is Extent.SAME or self.is_again(tensor):
            return "same"
        if extent is Extent.PLUS:
            return ""
        if extent in _CHOICES - _OF_ROWS:
            raise CaptureError(
                f"result '{tensor}' is made of each replica's own rows: their places in its part of the batch, or "
                "their distinct elements; and a loss reads it, too, so that it is not computed again for all rows. "
                "Return the mask, or the elements, and compute it outside of the step"
            )
        known = self._known_extent(tensor)
        if known is Extent.OTHER and op_of(tensor) not in self._of_examples:
            return "same"  # It is drawn: the first replica's is one device's.
        return "rows" if known is Extent.ROWS else _reduction({known})

    @cached_property
    def _of_examples(self) -> set[str]:
        return self._graph.dataflow_descendants(self._sources - self._random, blocked=self._seams)

    @cached_property
    def _differing(self) -> set[str]:
        return self._find_differing()

    def _find_differing(self) -> set[str]:
        """Ops that are computed from what differs between replicas, when statistics are combined."""
        found: set[str] = set()
        while True:  # What differs in one turn of a loop of TensorFlow 1 does so in the next.
            num_before = len(found)
            for name in self._graph.dataflow_order(self._graph.nodes):
                if name not in found and name not in self._seams and self._is_differing(name, found):
                    found.add(name)
            if len(found) == num_before or not self._flow.frames:
                return found

    def _is_differing(self, op: str, found: Set[str]) -> bool:
        """Whether `op` differs between replicas, as it is a source, or reads, or depends on, one of those `found`."""
        return (
            op in self._sources
            or not found.isdisjoint(self._flow.unread.get(op, ()))
            or any(
                op_of(read) in found and self.edges.get((op, index), "share") == "share"
                for index, read in enumerate(self._graph.nodes[op].input)
                if not read.startswith("^")
            )
        )

    def reads_differing(self, op: str, index: int) -> bool:
        """Whether the `index`-th input of `op` differs between replicas as it is read."""
        read = self._graph.nodes[op].input[index]
        return op_of(read) in self._differing and self.edges.get((op, index), "share") == "share"

    @property
    def loss_region(self) -> set[str]:
        """The ops that losses are computed by."""
        return self._loss_region

    def is_combined(self, tensor: str) -> bool:
        """Whether losses read `tensor` combined over replicas."""
        return str(parse(tensor)) in self._of_losses

    def extents_of(self, op: str) -> tuple[Extent, ...]:
        """The extents of what the op returns."""
        return self._extents.get(op, (Extent.SAME,))

    def extent(self, tensor: str) -> Extent:
        """The extent of `tensor`, but that a loss that is not known is that."""
        extent = self._known_extent(tensor)
        keeps = extent is Extent.OTHER and self._keeps_apart(self._layers.get(str(parse(tensor))))
        return Extent.ROWS if keeps else extent

    def has_rows(self, tensor: str) -> bool:
        """Whether `tensor`, of the loss or what it is computed from, has a row for each of the replica's examples."""
        return self._extent(tensor) is Extent.ROWS

    def seen(self, tensor: str) -> Extent | None:
        """The extent of `tensor`, of the loss, a write or a result, or what they are made of; None: it is not."""
        return self._extent(tensor) if op_of(tensor) in self._extents else None

    def is_read_whole(self, op: str) -> bool:
        """Whether `op` passes a gradient on, or is of a loss, a write or a result, or what they are made of."""
        return op in self._extents or op in self._seams

    def of_source(self, node: tf.compat.v1.NodeDef) -> tuple[Extent, ...] | None:
        """The extents of what a replica is given, as its part of the batch; None: `node` computes what it returns."""
        own_rows = [str(parse(f"{node.name}:{index}")) in self._rows for index in range(_num_outputs(node))]
        if any(own_rows):
            rest = Extent.OTHER if node.name in self._unknown else Extent.SAME
            return tuple(Extent.ROWS if has_rows else rest for has_rows in own_rows)
        if node.name in self._unknown:
            return (Extent.OTHER,)
        return (Extent.SAME,) if node.name in self._seams else None

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
            if op in hidden or not (op in self._extents or op in self._seams):
                continue
            for tensor in of_op.get(op, ()):
                symbol = self._tensor_of(tensor)
                reduction = _RESULTS.get(self._extent(tensor), "")
                shape = static_shape(symbol.shape)
                if symbol.dtype in CARRIED and reduction and _fits(shape, reduction):
                    yield Output(f"{op}:{parse(tensor).output}", symbol.dtype.name, shape, reduction)

    def is_again(self, tensor: str) -> bool:
        """Whether the result `tensor` must be computed again for all examples."""
        extent = self._extent(tensor)
        return extent in (Extent.PLUS, Extent.OTHER) and self._can_combine("", tensor, extent)

    def reduction_again(self, tensor: str) -> str:
        """How `tensor` is combined before something is computed again from it; "": it is the same everywhere."""
        extent = self._taken_for(tensor)
        return "" if extent is Extent.SAME else _REDUCTIONS[extent]

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
        """Find the extents of all ops, given what goes round the loops of TensorFlow 1."""
        self._extents.clear()
        self.edges.clear()
        self.deltas.clear()
        self.local.clear()
        for name in self._graph.dataflow_order(self._region):
            node = self._graph.nodes[name]
            self._extents[name] = self._visit(node)
            self._blocks[name] = self._block(node)
            chosen = {name} if node.op == "Where" else self._chosen_by(node)
            if len(chosen) == 1:
                self._choices[name] = chosen.pop()
            if node.op in BACK_EDGE:
                self._turned[name] = after_turn(self._turned.get(name), self._extents[name][0])

    def _block(self, node: tf.compat.v1.NodeDef) -> int | None:
        """How many rows each example has in what `node` computes, where that has rows; None: it is not known."""
        if node.name in self._sources:
            return 1
        kinds = (Extent.ROWS, Extent.PLACES)
        reads = [name for name in node.input if not name.startswith("^") and self._extent(name) in kinds]
        known = (block for name in reads if (block := self._blocks.get(op_of(name))) is not None)
        if node.op == "Merge":
            blocks = {self._blocks.get(op_of(name)) for name in reads}
            return blocks.pop() if len(blocks) == 1 else None
        block = next(known, None)
        if node.op != "Reshape" or block is None:
            return block
        sizes = [self._tensor_of(name).shape[1:].num_elements() for name in (node.input[0], f"{node.name}:0")]
        whole = [size for size in sizes if size]
        return block * whole[0] // whole[1] if len(whole) == 2 and not block * whole[0] % whole[1] else None

    def _chosen_by(self, node: tf.compat.v1.NodeDef) -> set[str]:
        """The ops that have chosen the rows, or places of rows, that `node` reads; itself for what is not known."""
        reads = [name for name in node.input if not name.startswith("^")]
        return {
            self._choices.get(op_of(name), node.name)
            for name in reads
            if self._extent(name) in (Extent.CHOSEN, Extent.PLACES)
        }

    def _belong_together(self, node: tf.compat.v1.NodeDef, reads: Sequence[str], extents: Sequence[Extent]) -> bool:
        """Whether the chosen rows that `node` reads are one choice, and places are of rows of as many per example."""
        if len(self._chosen_by(node)) > 1:
            return False
        of_places = [op_of(name) for name, one in zip(reads, extents, strict=True) if one is Extent.PLACES]
        of_rows = [op_of(name) for name, one in zip(reads, extents, strict=True) if one is Extent.ROWS]
        blocks = {self._blocks.get(op) for op in (*of_places, *of_rows)}
        return not (of_places and of_rows) or (len(blocks) == 1 and None not in blocks)

    def _read(self, reader: str, tensor: str) -> Extent:
        """The extent of `tensor` as `reader` reads it."""
        combined = self._of_losses.get(str(parse(tensor))) if reader in self._trains else None
        if combined is not None:
            return Extent.COUNT if combined == "share" else Extent.SAME
        return self._extent(tensor) if reader in self._loss_region else self._taken_for(tensor)

    def _taken_for(self, tensor: str) -> Extent:
        """The extent of `tensor` for all but losses: a term of one that is not known is taken for what that is."""
        extent = self._extent(tensor)
        return self._terms.get(str(parse(tensor)), extent) if extent is Extent.OTHER else extent

    def _extent(self, tensor: str) -> Extent:
        extent, name = self._known_extent(tensor), str(parse(tensor))
        if extent is not Extent.OTHER:
            return extent
        is_fixed = name in self._assumed and self._tensor_of(name).shape.is_fully_defined()
        if is_fixed and not self._can_compute_again(op_of(name)):
            return self._assumed[name]  # As the user is told: see `plan.inexact`.
        return Extent.ROWS if self._keeps_apart(self._layers.get(name)) else extent

    def _keeps_apart(self, call: LayerCall | None) -> bool:
        """Whether a layer keeps examples apart, as it does if what it is given does."""
        return call is not None and all(self._extent(read) in (Extent.ROWS, Extent.SAME) for read in call.reads)

    def _known_extent(self, tensor: str) -> Extent:
        """The extent of `tensor`, as far as its graph shows."""
        name = parse(tensor)
        extents = self._extents.get(name.op, (Extent.SAME,))
        return extents[name.output if len(extents) > 1 else 0]

    def _visit(self, node: tf.compat.v1.NodeDef) -> tuple[Extent, ...]:
        given = self.of_source(node)
        if given is not None:
            return given
        reads = [name for name in node.input if not name.startswith("^")]
        extents = tuple(self._read(node.name, tensor) for tensor in reads)
        if node.op in CONTROL_FLOW:
            return self._passed(node, reads, extents)
        if not self._run_alike(self._flow.unread.get(node.name, ())):
            self._note_local(node.name)
            return (Extent.OTHER,)
        if all(extent is Extent.SAME for extent in extents):
            return (Extent.OTHER if node.name in self._random else Extent.SAME,)
        if self._is_clipped_to_one(node):
            return (Extent.SAME,)
        if not self._belong_together(node, reads, extents):
            apart = (Extent.CHOSEN, Extent.PLACES)
            extents = tuple(Extent.OTHER if extent in apart else extent for extent in extents)
        operands = self.operands(node, reads, extents)
        result = extent_of(operands)
        if node.name not in self._loss_region and _CHOICES & set(result if isinstance(result, tuple) else (result,)):
            wanted = _wanted(reads, extents)
            if self._can_combine_all(node.name, wanted):  # Outside of losses all is as one device computes it.
                self._combine(node.name, wanted)
                return (Extent.SAME,)
        if isinstance(result, tuple):
            if any(extent is Extent.OTHER for extent in result):
                self.local.append(node.name)
            return result
        if result is Extent.PLUS and node.name not in self._loss_region & self._trained:
            result = Extent.OTHER  # Its terms are combined by themselves.
        if result in _SUMS | {Extent.MEAN} and self._grows(node.name, reads, extents):
            result = Extent.OTHER  # Its shape is that of the whole batch: nothing that is combined afterwards.
        if result in FIXED and self._is_uncarried_cast(node.name):
            result = Extent.OTHER  # What cannot be combined after the cast is combined before it.
        return (self._combined_first(node, reads, operands, result),)

    def _passed(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], extents: Sequence[Extent]
    ) -> tuple[Extent, ...]:
        """What an op of TensorFlow 1's control flow passes on: all replicas must take the same way."""
        wanted = _wanted(reads, extents)
        if node.name in self._given_whole and wanted and self._can_combine_all(node.name, wanted):
            self._combine(node.name, wanted)
            return (Extent.SAME,)
        ways = self._flow.chosen.get(node.name, frozenset())
        if node.op in ("Exit", "Switch"):
            switch = self._graph.nodes[op_of(reads[0])] if node.op == "Exit" else node
            ways = frozenset({op_of(switch.input[1])})
        result = self._merged(reads, extents) if node.op == "Merge" else extents[0]
        if not self._run_alike(ways):
            self._note_local(node.name)
            return (Extent.OTHER, Extent.OTHER) if node.op == "Merge" else (Extent.OTHER,)
        if result is Extent.OTHER and node.op == "Merge" and Extent.OTHER not in extents:
            self._note_local(node.name)
        return (result, Extent.SAME) if node.op == "Merge" else (result,)

    def _run_alike(self, ways: Iterable[str]) -> bool:
        """Whether what decides whether something runs, or what it takes from a stack, is the same on all replicas."""
        return all(self._extent(way) is Extent.SAME for way in ways)

    def _merged(self, reads: Sequence[str], extents: Sequence[Extent]) -> Extent:
        """What a Merge passes on: of a loop's, as far as it has been gone round."""
        known: dict[str, Extent] = {}
        for tensor, extent in zip(reads, extents, strict=True):
            if self._graph.nodes[op_of(tensor)].op not in BACK_EDGE:
                known[tensor] = extent
            elif op_of(tensor) in self._turned:
                known[tensor] = self._turned[op_of(tensor)]
        alike = [tensor for tensor, extent in known.items() if extent is Extent.SAME]
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
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], operands: Operands, result: Extent
    ) -> Extent:
        """The extent of `node`, whose own rule gives `result`, when what it reads is combined where it must be."""
        mixes = result in _OF_ROWS and not set(operands.extents) <= _APART
        if result is not Extent.OTHER and not mixes:
            return result
        if self._keeps_apart(self._inside.get(node.name)):
            return result
        wanted = [one for one in _wanted(reads, operands.extents) if not (mixes and one.extent in _APART)]
        if not self._can_combine_all(node.name, wanted):
            if not self._flow.runs_once(node.name) and node.name not in self._loss_region:
                self._give_whole(node.name)
            return self._uncombined(node, operands, wanted, mixes=mixes)
        self._combine(node.name, wanted)
        return result if mixes else Extent.SAME

    def _combine(self, reader: str, wanted: Iterable[_Read]) -> None:
        for position, tensor, extent in wanted:
            if reader in self._loss_region:
                self._of_losses[str(parse(tensor))] = _REDUCTIONS[extent]
            else:
                self.edges[reader, position] = _REDUCTIONS[extent]

    def _uncombined(
        self, node: tf.compat.v1.NodeDef, operands: Operands, wanted: Sequence[_Read], *, mixes: bool
    ) -> Extent:
        """The extent of an op that needs more combined than can be: as much as can be is, the rest stays local."""
        if not mixes and node.name in self._writers:
            self._fall_back(node, self._writers[node.name])
        is_ratio = node.op in _QUOTIENTS and set(operands.extents) == {Extent.SUM}  # See `_normalizers`.
        if node.name in self._loss_region and not is_ratio:
            partly = self._partly_combined(node, operands, wanted)
            if partly is not Extent.OTHER:
                return partly
        pairs_rows = node.op in _PRODUCTS and operands.extents[0] is Extent.ROWS
        if mixes or pairs_rows or node.name in self._loss_region:
            self.local.append(node.name)
        has_rows = (mixes or pairs_rows) and self._tensor_of(f"{node.name}:0").shape[1:].is_fully_defined()
        if not has_rows:
            return Extent.OTHER
        return Extent.CHOSEN if Extent.CHOSEN in operands.extents else Extent.ROWS

    def _partly_combined(self, node: tf.compat.v1.NodeDef, operands: Operands, wanted: Iterable[_Read]) -> Extent:
        """The extent of an op of a loss when what can be combined is, if that is enough to know it."""
        some = {one.position: one for one in wanted if self._can_combine(node.name, one.tensor, one.extent)}
        extents = tuple(Extent.SAME if index in some else one for index, one in enumerate(operands.extents))
        result = extent_of(replace(operands, extents=extents)) if some else Extent.OTHER
        if isinstance(result, tuple) or result in _OF_ROWS:
            return Extent.OTHER
        if result is not Extent.OTHER:
            self._combine(node.name, some.values())
        return result

    def _can_combine_all(self, reader: str, wanted: Iterable[_Read]) -> bool:
        """Whether `reader` gives one device's result when all that is wanted is combined."""
        return reader not in self._random and all(self._can_combine(reader, one.tensor, one.extent) for one in wanted)

    def _can_combine(self, reader: str, tensor: str, extent: Extent) -> bool:
        """Whether `reader` may be given the combined `tensor`, which is of this extent on each replica.

        Replicas would wait for one another for what is combined in loops and branches of TensorFlow 1.
        """
        if not self._flow.runs_once(op_of(tensor)):
            return False
        if reader in self._loss_region and (extent in _OF_ROWS or op_of(tensor) in self._trained):
            return False
        if reader in self._loss_region and str(parse(tensor)) in self._shared:
            return False
        shape, dtype = self._tensor_of(tensor).shape, self._tensor_of(tensor).dtype
        if extent in (Extent.PLUS, Extent.OTHER):
            return reader not in self._loss_region and self._can_compute_again(op_of(tensor))
        if dtype not in (TRAVELS if extent is Extent.ROWS else SUMMED) or shape.rank is None:
            return False
        if reader in self._loss_region and not dtype.is_floating and not self._is_uncarried_cast(reader):
            return False  # A size or an index: it is of the replica's own rows.
        if extent in _OF_ROWS:
            return bool(shape[1:].is_fully_defined())
        return extent in FIXED and bool(shape.is_fully_defined())

    def _grows(self, op: str, reads: Sequence[str], extents: Sequence[Extent]) -> bool:
        """Whether the shape of `op` may follow from that of a value which is computed from the whole batch."""
        if self._tensor_of(f"{op}:0").shape.is_fully_defined():
            return False
        shapes = [self._tensor_of(name).shape for name, one in zip(reads, extents, strict=True) if one is Extent.SAME]
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
            extent is Extent.SAME or (extent not in _OF_ROWS and self._can_combine("", tensor, extent))
            for tensor, extent in reads
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
            if self._read(name, over) is not Extent.SUM or self._read(name, under) is not Extent.SUM:
                continue
            below = self._graph.dataflow_descendants([name], blocked=self._seams) & self._loss_region
            of_rows = any(extent in _OF_ROWS for op in below for extent in self._extents.get(op, ()))
            if not of_rows and self._can_combine(name, under, Extent.SUM):
                yield str(parse(under))

    def _sums_of_assumed_means(self) -> Iterator[str]:
        """Sums over all examples that only losses read which cannot be followed, and so are taken for means.

        A replica's loss is one of its own share of the examples then, and so must be each sum that it is made of.
        """
        assumed = [tensor for tensor, extent in self._assumed.items() if extent is Extent.MEAN]
        unknown = {op_of(tensor) for tensor in assumed if self._known_extent(tensor) is Extent.OTHER}
        others = {op_of(tensor) for tensor in self._assumed} - unknown
        ancestors = self._graph.dataflow_ancestors(unknown, blocked=self._seams)
        ancestors -= self._graph.dataflow_ancestors(others, blocked=self._seams)
        for tensor, reduction in self._of_losses.items():
            if reduction == "sum" and op_of(tensor) in ancestors:
                yield tensor

    def operands(self, node: tf.compat.v1.NodeDef, reads: Sequence[str], extents: tuple[Extent, ...]) -> Operands:
        """What a rule is told about `node`, whose data inputs `reads` are of these extents."""
        shapes = [self._tensor_of(tensor).shape for tensor in reads]
        row = shapes[0][1:] if shapes[0].rank else tf.TensorShape(None)
        return Operands(
            node=node,
            extents=extents,
            ranks=tuple(shape.rank for shape in shapes),
            leading=tuple(shape[0] if shape.rank else None for shape in shapes),
            row=tuple(row.as_list()) if row.rank is not None else None,
            constants=tuple(
                self._constants.value(tensor) if extent is Extent.SAME else None
                for tensor, extent in zip(reads, extents, strict=True)
            ),
            block=self._blocks.get(op_of(reads[0])) if extents[0] is Extent.ROWS else None,
        )


def _reduction(kinds: Set[Extent]) -> str:
    """How the sum of what is of these kinds combines examples: "mean", "sum" or, where it is not known, ""."""
    if kinds and kinds <= {Extent.MEAN, Extent.SAME}:
        return "mean"  # So is that of what depends on no example.
    return "sum" if kinds & _SUMS and kinds <= _SUMS | {Extent.SAME} else ""


def _wanted(reads: Sequence[str], extents: Sequence[Extent]) -> list[_Read]:
    """The data inputs that differ between replicas."""
    return [
        _Read(index, tensor, extent)
        for index, (tensor, extent) in enumerate(zip(reads, extents, strict=True))
        if extent is not Extent.SAME
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
