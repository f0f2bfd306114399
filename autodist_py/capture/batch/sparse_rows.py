"""Sparse gradients by their indices: rows that are one replica's after the other's, and rows that all replicas have.

A lookup of the batch's own ids gives each replica rows of its own: one device has them all. A lookup of what does not
depend on the batch (positions, constants), or a dense gradient that TensorFlow joins with rows (of a table that is an
output layer, too), gives every replica the same indices: one device has them once, and the sum of the values. So what
TensorFlow has joined is recorded as several gradients of the one variable, each combined by itself, and joined after
that.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import tensorflow as tf

from autodist_py.capture.batch.insertion import Insertion
from autodist_py.capture.batch.layouts.solution import Solution
from autodist_py.capture.batch.layouts.table import Edge
from autodist_py.capture.batch.regularizers import Separation
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout
from autodist_py.kernel.analysis.batch_layout.rules import layout_of
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.proto.graph_item import Gradient

_INDICES = {BatchLayout.REPLICATED: "same", BatchLayout.UNIQUE: "distinct"}
"""By layout, as a GraphItem's gradients say; all others are gathered as they are."""

_JOIN = "ConcatV2"
_PASSES = frozenset({"Identity", "Reshape", "StopGradient"})


class Rows:
    """Records sparse gradients whose rows were joined apart, by what their indices are for the whole batch."""

    def __init__(
        self,
        graph: GraphView,
        whole: GraphView,
        insertion: Insertion,
        solution: Solution,
        tensor_of: Callable[[str], tf.Tensor],
    ):
        self._graph, self._whole, self._insertion, self._solution = graph, whole, insertion, solution
        self._tensor_of = tensor_of
        self._layouts: dict[str, tuple[BatchLayout, ...]] = {}

    def apart(self, gradient: Gradient, separation: Separation | None) -> list[Gradient]:
        """The gradients in the place of a sparse one; all that reads it reads their rows, one after the other.

        Args:
            gradient: the gradient.
            separation: of a sum over examples, tells values that depend on no example; their rows come last, once.
        """
        pieces: dict[str, list[tuple[str, str]]] = {}
        once: list[tuple[str, str]] = []
        sizes: list[int | None] = []
        for indices, values in self._joined(gradient):
            if (tail := self._tail(self._captured(indices))) is not None:
                of_rows, of_tail = self._cut(indices, values, tail)
                pieces.setdefault("", []).append(of_rows)
                pieces.setdefault("same", []).append(of_tail)
                sizes.append(tail)
                continue
            kind = _INDICES.get(self._layout(self._captured(indices)), "")
            kind = kind or ("distinct" if self._is_made_distinct(self._captured(indices)) else "")
            if kind == "same" and not self._solution.is_everyones(self._captured(indices)):
                kind = ""
            of_examples, of_none = (
                separation.parts_of(*values) if separation and kind == "same" else (self._read(values), None)
            )
            if of_examples is not None:
                pieces.setdefault(kind, []).append((self._read(indices), of_examples))
                sizes += [self._size(indices, values)] if kind == "same" else []
            if of_none is not None:
                once.append((self._read(indices), of_none))
        rows = None if None in sizes else sum(size for size in sizes if size is not None)
        found = [self._described(gradient, kind, rows) for kind in sorted(pieces)]
        if not found or (len(found) == 1 and not once):
            return found or [gradient]
        own = [list(zip(*pieces[kind], strict=True)) for kind in sorted(pieces)]
        for number, further in enumerate(found[1:], start=1):
            found[number] = self._with_markers(further, own[number])
        for position in (0, 1):
            marker = op_of(gradient.tensors[position])
            dtype = self._tensor_of(gradient.tensors[position]).dtype
            passed = self._insertion.join_rows(f"{marker}/rows_of_examples", own[0][position], dtype)
            others = [op_of(further.tensors[position]) for further in found[1:]]
            others += [piece[position] for piece in once]
            total = self._insertion.join_rows(f"{marker}/with_other_rows", [marker, *others], dtype)
            self._insertion.pass_by(marker, passed, total)
        return found

    def _described(self, gradient: Gradient, kind: str, rows: int | None) -> Gradient:
        return replace(gradient, indices=kind, rows=rows if kind == "same" else None)

    def _with_markers(self, gradient: Gradient, pieces: list[tuple[str, ...]]) -> Gradient:
        """`gradient`, with markers of its own that pass on `pieces`, indices and values, one after the other."""
        markers = []
        for position, tensor in enumerate(gradient.tensors):
            name, dtype = f"{op_of(tensor)}/{gradient.indices}", self._tensor_of(tensor).dtype
            raw = (
                self._insertion.join_rows(f"{name}_rows", pieces[position], dtype)
                if position < len(pieces)
                else self._read((op_of(tensor), 0))
            )
            markers.append(f"{self._insertion.pass_on(name, raw, dtype)}:0")
        return replace(gradient, tensors=tuple(markers))

    def _joined(self, gradient: Gradient) -> Iterator[tuple[Edge, Edge]]:
        """What indices and values are read by, of each of the gradients that TensorFlow has joined to this one."""
        pending = [tuple((op_of(tensor), 0) for tensor in gradient.tensors[:2])]
        while pending:
            indices, values = pending.pop()
            parts = [self._parts(edge) for edge in (indices, values)]
            if not all(parts) or len(parts[0]) != len(parts[1]):
                yield indices, values
                continue
            pending += reversed(list(zip(*parts, strict=True)))

    def _parts(self, edge: Edge) -> list[Edge]:
        """What the rows that are read there are joined from; none: they are not."""
        node = self._graph.nodes[op_of(self._captured(edge))]
        if node.op != _JOIN or self._graph.constant(node.input[-1]) != 0:
            return []
        return [(node.name, index) for index in range(node.attr["N"].i)]

    def _captured(self, edge: Edge) -> str:
        """What is read there, as it was captured."""
        op, index = edge
        return self._graph.nodes[op].input[index]

    def _read(self, edge: Edge) -> str:
        """What is read there now: maybe a statistic."""
        op, index = edge
        return self._insertion.nodes[op].input[index]

    def _size(self, indices: Edge, values: Edge) -> int | None:
        """How many rows there are; None: that is not known before a step."""
        shapes = [self._tensor_of(self._captured(edge)).shape for edge in (indices, values)]
        sizes = [shape[0] for shape in shapes if shape.rank and shape[0] is not None]
        return sizes[0] if sizes else None

    def _tail(self, tensor: str) -> int | None:
        """How many of these indices, the last ones, are the same everywhere, the others being the replicas' own."""
        node = self._whole.nodes[op_of(tensor)]
        if self._layout(tensor) is not BatchLayout.TAILED:
            return None
        while node.op in {*_PASSES, "Cast"}:
            node = self._whole.nodes[op_of(node.input[0])]
        tails = node.input[1 : node.attr["N"].i]
        shapes = [self._tensor_of(name).shape for name in tails]
        is_known = all(shape.rank == 1 and shape[0] is not None for shape in shapes)
        if node.op != _JOIN or not is_known or not all(map(self._solution.is_everyones, tails)):
            return None
        return sum(int(shape[0]) for shape in shapes)

    def _cut(self, indices: Edge, values: Edge, tail: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """The rows of replicas, and the last `tail` ones: of each the indices and values."""
        cuts = [
            self._insertion.cut_rows(f"{edge[0]}/cut_{edge[1]}", self._read(edge), tail, self._dtype(edge))
            for edge in (indices, values)
        ]
        (own, tailing), (own_values, tailing_values) = cuts
        return (own, own_values), (tailing, tailing_values)

    def _dtype(self, edge: Edge) -> tf.DType:
        return self._tensor_of(self._captured(edge)).dtype

    def _is_made_distinct(self, tensor: str) -> bool:
        """Whether each element is there once, whatever it is made of: so it is for the whole batch, too."""
        node = self._whole.nodes[op_of(tensor)]
        while node.op in _PASSES:
            tensor = node.input[0]
            node = self._whole.nodes[op_of(tensor)]
        return node.op in ("Unique", "UniqueWithCounts") and parse(tensor).output == 0

    # -- Layouts of indices -------------------------------------------------------------------------------------------

    def _layout(self, tensor: str) -> BatchLayout:
        """What `tensor`, which back-propagation may have made beside gradients, is for the whole batch."""
        for op in self._whole.dataflow_order(self._unseen(op_of(tensor))):
            self._layouts[op] = self._visit(self._whole.nodes[op])
        return self._known(tensor)

    def _unseen(self, op: str) -> set[str]:
        """`op`, and what it is computed from, as far as it is not known what that is for the whole batch."""
        found, pending = set(), [op]
        while pending:
            name = pending.pop()
            if name in found or name in self._layouts or self._solution.seen(name) is not None:
                continue
            found.add(name)
            if self._solution.of_source(self._whole.nodes[name]) is not None:
                continue
            pending += [op_of(read) for read in self._whole.nodes[name].input if not read.startswith("^")]
        return found

    def _known(self, tensor: str) -> BatchLayout:
        name = parse(tensor)
        layouts = self._layouts.get(name.op)
        if layouts is None:
            return self._solution.seen(tensor) or BatchLayout.MIXED
        return layouts[name.output if len(layouts) > 1 else 0]

    def _visit(self, node: tf.compat.v1.NodeDef) -> tuple[BatchLayout, ...]:
        given = self._solution.of_source(node)
        if given is not None:
            return given
        if any(
            self._known(op) is not BatchLayout.REPLICATED for op in self._whole.control_flow.unread.get(node.name, ())
        ):
            return (BatchLayout.MIXED,)
        reads = [name for name in node.input if not name.startswith("^")]
        layouts = tuple(map(self._known, reads))
        if all(layout is BatchLayout.REPLICATED for layout in layouts):
            return (BatchLayout.MIXED if self._solution.is_random(node.name) else BatchLayout.REPLICATED,)
        result = layout_of(self._solution.operands(node, reads, layouts))
        return result if isinstance(result, tuple) else (result,)
