"""Layouts of a whole program, its losses and its back-propagation alike, in which nothing is a replica's own mixture.

Every value is one device's: the same on all replicas, or rows, or a part of a sum. What an op is not known to make of
rows and parts is computed of the whole batch, by every replica alike: it reads its inputs gathered, or added up. From
there on values are *whole*. They have rows of all examples, until an op pairs them with a replica's own rows again, and
takes its own ones of them. So a gradient is a part of a sum over examples, however the loss mixes them, and needs no
weights: what divides by a number of examples reads that of the whole batch.

This is the propagation of shardings along one axis of GSPMD (Xu et al. 2021), with one fixed choice.

Before → after, of scores of all pairs, where `z` has rows:

    scores = MatMul(z, z, transpose_b=True)     → MatMul(rows of all, rows of all)
    dz = MatMul(dscores, z)                     → MatMul(dscores, rows of all)
    dw = MatMul(x, dz, transpose_a=True)        → MatMul(x, own rows of dz): a part of a sum
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import tensorflow as tf

from autodist_py.capture.batch.layouts.blocks import Blocks
from autodist_py.capture.batch.layouts.constants import Constants
from autodist_py.capture.batch.layouts.regions import Sources
from autodist_py.capture.batch.whole_batch.drawn import why_not_alike
from autodist_py.capture.batch.whole_batch.known_shapes import KnownShapes
from autodist_py.capture.batch.whole_batch.shapes import FROM_SHAPES, Shapes
from autodist_py.capture.recording.user_code import line_of
from autodist_py.kernel.analysis.batch_layout.arithmetic import ADDITIVE
from autodist_py.kernel.analysis.batch_layout.back_propagation import BACK_PROPAGATION
from autodist_py.kernel.analysis.batch_layout.layouts import (
    COUNT,
    MIXED,
    PARTIAL_MEAN,
    PARTIAL_SUM,
    PARTIAL_SUM_PLUS,
    REPLICATED,
    SHAPE,
    SHARDED,
    TAKES_SHAPE,
    BatchLayout,
    Operands,
)
from autodist_py.kernel.analysis.batch_layout.rules import layout_of
from autodist_py.kernel.collectives.reductions import SUMMED
from autodist_py.kernel.collectives.rows import TRAVELS
from autodist_py.kernel.ir.control_flow import CONTROL_FLOW
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.ir.node import reads_of

Edge = tuple[str, int]
"""An op, and the position of one of its inputs."""

REDUCTIONS = {PARTIAL_SUM: "sum", PARTIAL_MEAN: "mean", COUNT: "sum", SHARDED: "rows", SHAPE: "shape"}
"""How what differs between replicas becomes what one device has."""
_KNOWN = frozenset({REPLICATED, SHARDED, PARTIAL_SUM, PARTIAL_MEAN, COUNT, SHAPE})
_PARTS = frozenset({PARTIAL_SUM, PARTIAL_MEAN, COUNT})
_CHECKS = "CheckNumerics"
_LEADS_IN = frozenset({"Enter", "Switch"})
"""Op types that lead into loops and branches of TensorFlow 1's control flow, which are computed of the whole batch."""
_APART = frozenset({SHARDED, REPLICATED, SHAPE})
"""Layouts of inputs that, where the result has rows, say nothing of other replicas' examples."""


class NotFollowedError(Exception):
    """An op of which it is not known how it could be computed of the whole batch; the message says which, and why."""


@dataclass
class WholeBatch:
    """The layouts of a program, and what its ops read combined.

    Attributes:
        graph: the program's.
        sources: what a replica is given.
        tensor_of: a tensor by its name; only its shape and type are used.
        writers: the ops that write variables, or show something.
        given_shapes: of tensors whose shape is known though the graph does not say it.
        found: the layouts of what each op returns.
        whole: the ops that are computed from rows, or numbers, of the whole batch.
        edges: the inputs that are not read as they are, and how.
        drawn: the random ops that draw the same on all replicas.
    """

    graph: GraphView
    sources: Sources
    tensor_of: Callable[[str], tf.Tensor]
    writers: Iterable[str]
    given_shapes: Mapping[str, tf.TensorShape]
    found: dict[str, tuple[BatchLayout, ...]] = field(default_factory=dict, init=False)
    whole: set[str] = field(default_factory=set, init=False)
    edges: dict[Edge, str] = field(default_factory=dict, init=False)
    drawn: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._constants = Constants(self.graph, self.tensor_of)
        self.shapes = KnownShapes(self.graph, self.tensor_of, self._constants, self.given_shapes)
        self._blocks = Blocks(self.tensor_of, self.sources, self, self._constants)
        self._shapes = Shapes(self.graph, self.shapes, self, self._constants)
        self._early: set[str] = set()
        self._whole_turns: set[str] = set()

    def solve(self) -> None:
        """Find all layouts.

        Raises:
            NotFollowedError: an op cannot be followed.
        """
        order = list(self.graph.dataflow_order(self.graph.nodes))
        num_found = -1
        while num_found < len(self._early) + len(self._whole_turns):
            num_found = len(self._early) + len(self._whole_turns)
            for known in (self.found, self.whole, self.edges, self.drawn, self._shapes.values):
                known.clear()
            self.shapes.forget()
            for name in order:
                node = self.graph.nodes[name]
                self.shapes.infer(node, self._shapes.sizes)
                self.found[name] = self._visit(node)
                self._blocks.note(node)
                if node.op == "Reshape" and {self.layout(f"{name}:0"), self.layout(node.input[0])} == {SHARDED}:
                    self.shapes.note_rows(node, self._blocks.of(op_of(node.input[0])), self._blocks.of(name))
            self._early |= self._combined_early()
            self._whole_turns |= self._turned_whole()

    @property
    def values(self) -> Mapping[str, np.ndarray]:
        """What ops of FROM_SHAPES return, whatever the number of rows."""
        return self._shapes.values

    def layout(self, tensor: str) -> BatchLayout:
        """The layout of `tensor`."""
        name = parse(tensor)
        layouts = self.found.get(name.op, (REPLICATED,))
        return layouts[name.output if len(layouts) > 1 else 0]

    def is_whole(self, tensor: str) -> bool:
        """Whether `tensor`, which is the same on all replicas, may have a size that depends on the batch, or tell one.

        A number of fixed shape that is computed of the whole batch is as any other.
        """
        if op_of(tensor) not in self.whole or self.layout(tensor) is not REPLICATED:
            return False
        shape = self.shapes.of(tensor)
        return not shape.is_fully_defined() or (self.tensor_of(tensor).dtype.is_integer and shape.rank != 0)

    def has_whole_rows(self, tensor: str) -> bool:
        """Whether `tensor` may be rows of the whole batch, of which a replica may take its own."""
        shape = self.shapes.of(tensor)
        return self.is_whole(tensor) and bool(shape.rank) and shape[0] is None

    def combine(self, op: str, index: int, tensor: str) -> None:
        """Let `op` read its `index`-th input as one device has it.

        Raises:
            NotFollowedError: replicas cannot exchange it.
        """
        layout, symbol, shape = self.layout(tensor), self.tensor_of(tensor), self.shapes.of(tensor)
        if layout is REPLICATED:
            return
        is_row = layout is SHARDED
        carried = symbol.dtype in (TRAVELS if is_row else SUMMED)
        is_known = shape.rank is not None and (shape[1:] if is_row else shape).is_fully_defined()
        if layout not in REDUCTIONS or not carried or not is_known:
            self._refuse(op, f"needs '{tensor}' of the whole batch, of type {symbol.dtype.name}, shape {shape}")
        flow = self.graph.control_flow
        if not flow.runs_once(op_of(tensor)) or not (flow.runs_once(op) or self.graph.nodes[op].op == "Enter"):
            self._refuse(op, f"needs '{tensor}' of the whole batch, inside TensorFlow 1's control flow")
        self.edges[op, index] = REDUCTIONS[layout]

    def _refuse(self, op: str, reason: str) -> None:
        has_results = bool(self.graph.dataflow_consumers([op]))
        line = line_of(self.tensor_of(f"{op}:0").op) if has_results else ""
        raise NotFollowedError(f"'{op}'{f' ({line})' if line else ''} {reason}")

    # -- One op -------------------------------------------------------------------------------------------------------

    def _visit(self, node: tf.compat.v1.NodeDef) -> tuple[BatchLayout, ...]:
        given = self.sources.of_source(node)
        if given is not None:
            if not set(given) <= _KNOWN:
                self._refuse(node.name, "gives each worker something of its own, of which it is not known what")
            return given
        reads = reads_of(node)
        layouts = self._as_read(node, reads)
        is_drawn = node.name in self.sources.random
        if set(layouts) <= {REPLICATED}:
            if is_drawn:
                self._draw_alike(node)
            self._note_whole(node, reads)
            return (REPLICATED,)
        if node.op in CONTROL_FLOW - _LEADS_IN:
            self._refuse(node.name, "passes on what differs between replicas, in TensorFlow 1's control flow")
        if node.op in _LEADS_IN or (node.name in self.writers and not is_drawn):
            return self._all_combined(node, reads)
        whole = [index for index, read in enumerate(reads) if self.is_whole(read)]
        found = self._beside_whole(node, reads, layouts, whole) if whole else self._of_own(node, reads, layouts)
        if found is not None:
            return found
        if is_drawn:
            self._draw_alike(node)
        return self._all_combined(node, reads)

    def _draw_alike(self, node: tf.compat.v1.NodeDef) -> None:
        """Let `node` draw the same numbers on all replicas: they are of the whole batch, or of none of its examples."""
        reason = why_not_alike(node, self.graph.library)
        if reason is not None:
            self._refuse(node.name, reason)
        self.drawn.add(node.name)

    def _as_read(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> tuple[BatchLayout, ...]:
        """The layouts of what `node` reads, when what is combined early is."""
        layouts = list(map(self.layout, reads))
        for index, tensor in enumerate(reads):
            if op_of(tensor) in self._early and layouts[index] in (PARTIAL_SUM, PARTIAL_MEAN):
                self.combine(node.name, index, tensor)
                layouts[index] = REPLICATED
        return tuple(layouts)

    def _combined_early(self) -> set[str]:
        """The sums and means over examples that are combined where they are made, not what is computed from them.

        A mean may be read by a square, by a difference and by a moving average: once combined it serves all.
        """
        derived: dict[str, set[str]] = {}
        for (op, index), reduction in self.edges.items():
            tensor = str(parse(self.graph.nodes[op].input[index]))
            if reduction in ("sum", "mean") and (origin := self._origin(tensor)):
                derived.setdefault(origin, set()).add(tensor)

        def size(tensor: str) -> int:
            return self.shapes.of(tensor).num_elements() or 0

        return {
            origin
            for origin, tensors in derived.items()
            if self.shapes.of(f"{origin}:0").is_fully_defined() and size(f"{origin}:0") <= sum(map(size, tensors))
        }

    def _origin(self, tensor: str) -> str:
        """The op that makes the one sum, or mean, over examples that `tensor` is computed of; "": there are several."""
        op = op_of(tensor)
        while True:
            reads = reads_of(self.graph.nodes[op])
            if self.layout(f"{op}:0") not in (PARTIAL_SUM, PARTIAL_MEAN) or len(self.found[op]) > 1:
                return ""
            parts = {op_of(name) for at, name in enumerate(reads) if self._is_part(op, at, name)}
            if not parts:
                return op
            if len(parts) > 1:
                return ""
            (op,) = parts

    def _is_part(self, op: str, index: int, tensor: str) -> bool:
        """Whether `op` reads a part of a sum, or mean, as such."""
        return self.layout(tensor) in _PARTS and (op, index) not in self.edges

    def _all_combined(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> tuple[BatchLayout, ...]:
        """Let `node` be computed of the whole batch."""
        for index, tensor in enumerate(reads):
            self.combine(node.name, index, tensor)
        self.whole.add(node.name)
        return (REPLICATED,)

    def _note_whole(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> None:
        """Note whether what `node` returns is computed from what is whole."""
        if node.name in self._whole_turns or any(op_of(tensor) in self.whole for tensor in reads):
            self.whole.add(node.name)

    def _turned_whole(self) -> set[str]:
        """The ops of TensorFlow 1's loops and branches that are given what is whole by a turn before, or by a stack."""
        merges = self.graph.of_type({"Merge"})
        turned = {node.name for node in merges if any(op_of(read) in self.whole for read in reads_of(node))}
        return turned | {name for name, ops in self.graph.control_flow.unread.items() if ops & self.whole}

    def _operands(self, node: tf.compat.v1.NodeDef, reads: Sequence[str], layouts: tuple[BatchLayout, ...]) -> Operands:
        operands = self._blocks.operands(node, reads, layouts)
        constants = (
            self.values.get(str(parse(name)), one) for name, one in zip(reads, operands.constants, strict=True)
        )
        return replace(operands, constants=tuple(constants))

    def _of_own(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], layouts: tuple[BatchLayout, ...]
    ) -> tuple[BatchLayout, ...] | None:
        """The layouts of what `node` makes of a replica's own rows and parts; None: it is not known."""
        found = self._by_rule(node, reads, layouts)
        if found is None:
            return None
        (layout,) = set(found) if len(set(found)) == 1 else (None,)
        if layout is PARTIAL_SUM_PLUS:
            return self._with_shares(node, reads, layouts)
        if not set(found) <= _KNOWN or (SHARDED in found and self._has_row_of_batch(node, reads, layouts)):
            return None
        if SHARDED in found:
            self._combine_beside_rows(node, reads, layouts)
        return found

    def _has_row_of_batch(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], layouts: Sequence[BatchLayout]
    ) -> bool:
        """Whether each row that `node` returns may be as long as the batch, so that rows could not be gathered."""
        if self.shapes.of(f"{node.name}:0")[1:].is_fully_defined():
            return False
        return any(
            op_of(tensor) in self.whole or (layout in (COUNT, SHAPE) and not _is_shape(node, index, layout))
            for index, (tensor, layout) in enumerate(zip(reads, layouts, strict=True))
        )

    def _combine_beside_rows(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], layouts: Sequence[BatchLayout]
    ) -> None:
        """Let `node`, which returns rows, read as one device has it what says something of other replicas' examples.

        A shape does so where it is no shape to `node`, but numbers to compute with.
        """
        for index, (tensor, layout) in enumerate(zip(reads, layouts, strict=True)):
            if layout not in (SHARDED, REPLICATED) and not _is_shape(node, index, layout):
                self.combine(node.name, index, tensor)

    def _by_rule(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], layouts: tuple[BatchLayout, ...]
    ) -> tuple[BatchLayout, ...] | None:
        """What the rules say of `node`, given inputs of these layouts; None: nothing."""
        if node.op in FROM_SHAPES:
            return (REPLICATED,) if self._shapes.note(node, reads) else None
        if node.op == _CHECKS and _PARTS & set(layouts):
            return None  # A replica without examples has a mean that is no number.
        operands = self._operands(node, reads, layouts)
        found = layout_of(operands)
        if found is MIXED and node.op in BACK_PROPAGATION:
            found = BACK_PROPAGATION[node.op](operands)
        result = found if isinstance(found, tuple) else (found,)
        if node.op == "Sum":
            self.shapes.note_sum(node, operands.axes(1, operands.ranks[0]))
        if _PARTS & set(result) and not self.shapes.of(f"{node.name}:0").is_fully_defined():
            return None  # Its shape is that of the whole batch, as of a sum of columns of all pairs.
        return None if MIXED in result else result

    def _with_shares(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], layouts: tuple[BatchLayout, ...]
    ) -> tuple[BatchLayout, ...] | None:
        """A sum of parts and of what is the same everywhere, of which each replica adds its share."""
        if node.op not in ADDITIVE | {"Sub"} or not set(layouts) <= {PARTIAL_SUM, COUNT, REPLICATED}:
            return None
        own = [index for index, layout in enumerate(layouts) if layout is REPLICATED]
        symbols = [self.tensor_of(reads[index]) for index in own]
        if not all(one.shape.is_fully_defined() and one.dtype.is_floating for one in symbols):
            return None
        self.edges |= dict.fromkeys([(node.name, index) for index in own], "part")
        return (PARTIAL_SUM,)

    def _beside_whole(
        self,
        node: tf.compat.v1.NodeDef,
        reads: Sequence[str],
        layouts: tuple[BatchLayout, ...],
        whole: Sequence[int],
    ) -> tuple[BatchLayout, ...] | None:
        """The layout of what `node` makes of own rows, and own ones of whole rows; None: it is computed whole."""
        if SHARDED not in layouts or not all(self.has_whole_rows(reads[index]) for index in whole):
            return None
        taken = tuple(SHARDED if index in whole else layout for index, layout in enumerate(layouts))
        found = self._by_rule(node, reads, taken)
        if found is None or not set(found) <= {SHARDED, PARTIAL_SUM, PARTIAL_MEAN}:
            return None
        if SHARDED in found and self._is_lighter(reads, layouts, whole):
            return None
        if SHARDED in found:
            self._combine_beside_rows(node, reads, taken)
        elif not set(taken) <= _APART:
            return None
        self.edges |= dict.fromkeys([(node.name, index) for index in whole], "own")
        return found

    def _is_lighter(self, reads: Sequence[str], layouts: Sequence[BatchLayout], whole: Sequence[int]) -> bool:
        """Whether rows of the whole batch are better gathered: they are smaller than what they are paired with."""

        def row(tensor: str) -> float:
            size = self.tensor_of(tensor).shape[1:].num_elements()
            return float("inf") if size is None else size

        own = [row(tensor) for tensor, layout in zip(reads, layouts, strict=True) if layout is SHARDED]
        return sum(own) < min(row(reads[index]) for index in whole)


def _is_shape(node: tf.compat.v1.NodeDef, index: int, layout: BatchLayout) -> bool:
    """Whether `node` is told by its `index`-th input, of this layout, how many rows to return."""
    return layout in (SHAPE, COUNT) and TAKES_SHAPE.get(node.op) == index
