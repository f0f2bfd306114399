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

from collections.abc import Collection, Sequence
from dataclasses import replace

import tensorflow as tf

from autodist_py.capture.batch.layouts.loops import RUNS, Function
from autodist_py.capture.batch.layouts.regions import Sources
from autodist_py.capture.batch.whole_batch.drawn import why_not_alike
from autodist_py.capture.batch.whole_batch.early import Early
from autodist_py.capture.batch.whole_batch.held import Held
from autodist_py.capture.batch.whole_batch.shapes import FROM_SHAPES
from autodist_py.capture.batch.whole_batch.values import NotFollowedError, Values
from autodist_py.kernel.analysis.batch_layout.arithmetic import ADDITIVE
from autodist_py.kernel.analysis.batch_layout.back_propagation import BACK_PROPAGATION
from autodist_py.kernel.analysis.batch_layout.layouts import (
    COUNT,
    FIXED,
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
from autodist_py.kernel.ir.control_flow import CONTROL_FLOW
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.ir.node import reads_of

_KNOWN = frozenset({REPLICATED, SHARDED, PARTIAL_SUM, PARTIAL_MEAN, COUNT, SHAPE})
_CHECKS = "CheckNumerics"
_LEADS_IN = frozenset({"Enter", "Switch"})
"""Op types that lead into loops and branches of TensorFlow 1's control flow, which are computed of the whole batch."""
_APART = frozenset({SHARDED, REPLICATED, SHAPE})
"""Layouts of inputs that, where the result has rows, say nothing of other replicas' examples."""


class WholeBatch(Values):
    """Finds the layouts, and what is combined: op by op in the order of the data, until a pass learns nothing new."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._early: set[str] = set()
        self._whole_turns: set[str] = set()

    def solve(self, live: Collection[str] = ()) -> None:
        """Find all layouts, or those of the ops `live` if there are any.

        Raises:
            NotFollowedError: an op cannot be followed.
        """
        order = list(self.graph.dataflow_order(live or self.graph.nodes))
        num_found = -1
        while num_found < self._num_learnt:
            num_found = self._num_learnt
            for known in (self.found, self.whole, self.edges, self.drawn, self.own):
                known.clear()
            self._constants.forget_given()
            self.shapes.forget()
            self._elsewhere.begin()
            for name in order:
                node = self.graph.nodes[name]
                self.shapes.infer(node, self._sizes.sizes)
                self.found[name] = self._visit(node)
                self._blocks.note(node)
                if node.op == "Reshape" and {self.layout(f"{name}:0"), self.layout(node.input[0])} == {SHARDED}:
                    self.shapes.note_rows(node, self._blocks.of(node.input[0]), self._blocks.of(name))
            self._early |= Early(self.graph, self.found, self.layout, self.edges, self.shapes).made_by()
            self._whole_turns |= self._turned_whole()
            if self.arguments is None:
                self._elsewhere.give_up(tensor for tensor in self.results if self.layout(tensor) is MIXED)

    @property
    def _num_learnt(self) -> int:
        return len(self._early) + len(self._whole_turns) + len(self._elsewhere.kept_whole)

    # -- One op -------------------------------------------------------------------------------------------------------

    def _visit(self, node: tf.compat.v1.NodeDef) -> tuple[BatchLayout, ...]:
        if self.arguments is not None and node.name in self.arguments:
            self._elsewhere.note(node.name, [self.arguments[node.name]])
            return (self.arguments[node.name].layout,)
        given = self.sources.of_source(node)
        if given is not None:
            if not set(given) <= _KNOWN:
                self.refuse(node.name, "gives each worker something of its own, of which it is not known what")
            return given
        reads = reads_of(node)
        if self._is_of_replica(node, reads):
            found = self._of_replica(node, reads)
            if found is not None:
                return found
        if own := [read for read in reads if op_of(read) in self.own]:
            self.refuse(node.name, f"reads '{own[0]}', of which batch_statistics says that each replica has its own")
        layouts = self._as_read(node, reads)
        is_drawn = node.name in self.sources.random
        if set(layouts) <= {REPLICATED}:
            if is_drawn:
                self._draw_alike(node)
            self._note_whole(node, reads)
            return (REPLICATED,)
        if is_drawn and self.draws_of_all:
            return self._drawn_of_all(node, reads, layouts)
        if MIXED in layouts:
            return self._followed(node, reads, layouts) or self._given_up(node, reads)
        if node.op in CONTROL_FLOW - _LEADS_IN:
            self.refuse(node.name, "passes on what differs between replicas, in TensorFlow 1's control flow")
        if node.op in _LEADS_IN or (node.name in self.writers and not is_drawn):
            return self._all_combined(node, reads)
        whole = [index for index, read in enumerate(reads) if self.is_whole(read)]
        found = self._beside_whole(node, reads, layouts, whole) if whole else self._of_own(node, reads, layouts)
        if found is None and not whole and node.name not in self._elsewhere.kept_whole:
            found = self._followed(node, reads, layouts)
        if found is not None:
            return found
        if is_drawn:
            self._draw_alike(node)
        return self._all_combined(node, reads)

    def _is_of_replica(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> bool:
        """Whether `node` is an op of a layer whose statistics are each replica's own, or adds up what such ops return.

        Back-propagation adds up, outside of all scopes, what several ops pass back to one.
        """
        if node.op == "AddN":
            return all(op_of(read) in self.of_replicas | self.own for read in reads)
        return node.name in self.of_replicas and node.name not in self.writers

    def _of_replica(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> tuple[BatchLayout, ...] | None:
        """The layouts of what `node` makes of each replica's own sums and means; None: it reads none, or whole rows."""
        layouts = tuple(map(self.layout, reads))
        reads_own = any(op_of(read) in self.own for read in reads)
        if not (reads_own or FIXED & set(layouts)) or any(map(self.is_whole, reads)):
            return None
        found = self._by_rule(node, reads, layouts)
        if found is None or not set(found) <= _KNOWN:
            taken = tuple(REPLICATED if layout in FIXED else layout for layout in layouts)
            found = (REPLICATED,) if set(taken) <= {REPLICATED} else self._by_rule(node, reads, taken)
        if found is None or not set(found) <= _KNOWN:
            return None
        if REPLICATED in found:
            self.own.add(node.name)
        return found

    def _followed(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], layouts: tuple[BatchLayout, ...]
    ) -> tuple[BatchLayout, ...] | None:
        """The layouts of what `node` makes of examples that do not stand along axis 0; None: it is not known."""
        is_read = node.name in self._ends or self.graph.dataflow_consumers([node.name])
        if not is_read or node.name in self.writers or node.op in CONTROL_FLOW or any(map(self.is_whole, reads)):
            return None
        if node.op in RUNS and any(map(self._may_tell_whole_sizes, reads)):
            return None
        found = self._elsewhere.follow(node, reads, self._operands(node, reads, layouts))
        parts = [index for index, layout in enumerate(layouts) if layout in (PARTIAL_SUM, PARTIAL_MEAN)]
        if found is None and node.op in RUNS and parts:
            taken = tuple(REPLICATED if index in parts else layout for index, layout in enumerate(layouts))
            found = self._elsewhere.follow(node, reads, self._operands(node, reads, taken))
            for index in parts if found is not None else ():
                self.combine(node.name, index, reads[index])
        return found

    def _may_tell_whole_sizes(self, tensor: str) -> bool:
        """Whether `tensor` is a number that a function might make rows of the whole batch with."""
        return op_of(tensor) in self.whole and self.tensor_of(tensor).dtype.is_integer

    def _given_up(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> tuple[BatchLayout, ...]:
        """Not known, so that what began its examples is computed of the whole batch."""
        if self.arguments is not None:
            self.refuse(node.name, "is given examples along another axis than 0, in a function")
        mixed = [read for read in reads if self.layout(read) is MIXED]
        if all(self.held(read).is_known for read in mixed):  # Else it is to be seen again, when more is known.
            self._elsewhere.give_up(mixed)
        return (MIXED,)

    def of_function(self, function: Function, arguments: Sequence[Held]) -> list[Held] | None:
        """See Values."""
        sources = Sources(function.view, set(), {}, function.random, set(), is_local=False)
        given = dict(zip((symbol.op.name for symbol in function.graph.inputs), arguments, strict=True))
        results = [symbol.name for symbol in function.graph.outputs]
        inner = WholeBatch(
            function.view, sources, function.tensor, (), {}, results, self.draws_of_all, given, self.functions
        )
        try:
            inner.solve(function.live)
        except NotFollowedError:
            return None
        return list(map(inner.held, results))

    def _draw_alike(self, node: tf.compat.v1.NodeDef) -> None:
        """Let `node` draw the same numbers on all replicas: they are of the whole batch, or of none of its examples."""
        reason = why_not_alike(node, self.graph.library)
        if self.arguments is not None:
            reason = "draws what is the same for all examples, in a function"
        if reason is not None:
            self.refuse(node.name, reason)
        self.drawn.add(node.name)

    def _drawn_of_all(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], layouts: Sequence[BatchLayout]
    ) -> tuple[BatchLayout, ...]:
        """The numbers that one device draws; what reads them beside a replica's rows takes those of these rows."""
        if MIXED in layouts:
            return self._given_up(node, reads)
        self._draw_alike(node)
        return self._all_combined(node, reads)

    def _as_read(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> tuple[BatchLayout, ...]:
        """The layouts of what `node` reads, when what is combined early is."""
        layouts = list(map(self.layout, reads))
        for index, tensor in enumerate(reads):
            if op_of(tensor) in self._early and layouts[index] in (PARTIAL_SUM, PARTIAL_MEAN):
                self.combine(node.name, index, tensor)
                layouts[index] = REPLICATED
        return tuple(layouts)

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
        shapes = [self.shapes.of(read) for read in reads]
        row = shapes[0][1:] if shapes and shapes[0].rank else tf.TensorShape(None)
        operands = replace(
            operands,
            ranks=tuple(shape.rank for shape in shapes),
            leading=tuple(shape[0] if shape.rank else None for shape in shapes),
            row=tuple(row.as_list()) if row.rank is not None else None,
            shapes=tuple(shapes),
        )
        if node.op == "Sum":
            self.shapes.note_sum(node, operands.axes(1, operands.ranks[0]))
        return operands

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
            return (REPLICATED,) if self._sizes.note(node, reads) else None
        if node.op == "Sub" and self._is_beside_slice(reads) and self._sizes.note(node, reads):
            return (REPLICATED,)
        if node.op == _CHECKS and FIXED & set(layouts):
            return None  # A replica without examples has a mean that is no number.
        operands = self._operands(node, reads, layouts)
        found = layout_of(operands)
        if found is MIXED and node.op in BACK_PROPAGATION:
            found = BACK_PROPAGATION[node.op](operands)
        result = found if isinstance(found, tuple) else (found,)
        if FIXED & set(result) and not self.shapes.is_fixed(node, self._sizes.sizes):
            return None  # Its shape is that of the whole batch, as of a sum of columns of all pairs.
        return None if MIXED in result else result

    def _is_beside_slice(self, reads: Sequence[str]) -> bool:
        """Whether these are the shapes of a tensor and of a slice of it, which has as many rows for each example."""
        whole, part = (self.graph.nodes[op_of(read)] for read in reads)
        if (whole.op, part.op) != ("Shape", "Shape"):
            return False
        cut = self.graph.nodes[op_of(part.input[0])]
        is_of_it = cut.op == "Slice" and parse(cut.input[0]) == parse(whole.input[0])
        return is_of_it and self._blocks.of(cut.name) == self._blocks.of(whole.input[0]) is not None

    def _with_shares(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], layouts: tuple[BatchLayout, ...]
    ) -> tuple[BatchLayout, ...] | None:
        """A sum of parts and of what is the same everywhere, of which each replica adds its share."""
        if node.op not in ADDITIVE | {"Sub"} or not set(layouts) <= {PARTIAL_SUM, COUNT, REPLICATED}:
            return None
        if self.arguments is not None:
            return (PARTIAL_SUM_PLUS,)  # What is added may be the 0 that a loop begins with: see `held.after_turn`.
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
