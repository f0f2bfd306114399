"""Separates the terms of a sum's gradient that depend on no example (a regularizer's) from those that do.

The replicas' gradients of a sum over examples are added. A term that depends on no example is the same on each of them,
and must be counted once. Back-propagation is linear in the gradients that it passes on, so the two kinds of terms are
followed back, apart, through the ops that are known to be linear, to where they were added.
"""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from autodist_py.capture.batch.insertion import Insertion
from autodist_py.capture.batch.layouts.solution import Solution
from autodist_py.capture.batch.layouts.table import Edge
from autodist_py.capture.batch.linearity import linear_groups
from autodist_py.kernel.analysis.batch_layout.arithmetic import ADDITIVE
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout
from autodist_py.kernel.ir.graph import GraphView, has_function_attribute
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.proto.graph_item import Gradient

_OF_ONE_SHAPE = frozenset({"AddN", "Cast", "CheckNumerics", "Identity", "Neg", "PreventGradient", "StopGradient"})
"""Op types whose result has the shape of each of their inputs."""
_BROADCASTS = frozenset({"Add", "AddV2", "Sub"})
_ALONE = frozenset({BatchLayout.REPLICATED, BatchLayout.PARTIAL_SUM_PLUS})
"""Layouts of what may have terms that depend on no example."""


class _Terms(NamedTuple):
    """Which terms a tensor is the sum of; neither: it is zero."""

    of_examples: bool
    of_none: bool


Parts = tuple[str | None, str | None]
"""Two tensors whose sum is a third: what of it depends on examples, and the rest; None where there is nothing."""


class Separation:
    """Lets what depends on no example pass by the markers of gradients.

    Args:
        graph: the captured one.
        insertion: what edits it.
        solution: the layouts of its forward pass.
        tensor_of: a tensor by its name; only its shape and type are used.

    Attributes:
        inseparable: ops that read both kinds of terms together, and are not known to be linear.
    """

    def __init__(
        self,
        graph: GraphView,
        insertion: Insertion,
        solution: Solution,
        tensor_of: Callable[[str], tf.Tensor],
    ):
        self._graph, self._insertion, self._solution = graph, insertion, solution
        self._tensor_of = tensor_of
        self._is_through_functions = _gives_both(solution)
        self._terms: dict[str, _Terms] = {}
        self._parts: dict[str, Parts] = {}
        self._shapes: dict[str, tf.TensorShape] = {}
        self.inseparable: list[str] = []

    def separate(self, gradient: Gradient, shape: Sequence[int]) -> None:
        """Let a dense gradient's marker pass on what depends on examples; the rest is added after it, once.

        Args:
            gradient: one of a sum over examples.
            shape: its variable's.
        """
        marker = op_of(gradient.tensors[0])
        self._note_shape(self._graph.nodes[marker].input[0], shape)
        own, others = self.parts_of(marker, 0)
        if others is None or not self._solution.reads_differing(marker, 0):
            return
        own = own or self._zeros(marker, 0)
        total = self._insertion.sum(
            f"{marker}/with_terms_of_no_example", [marker, others], self._symbol(marker, 0).dtype
        )
        self._insertion.pass_by(marker, own, total)

    def _zeros(self, op: str, index: int) -> str:
        """Zeros, in the place of what `op` reads."""
        shape, dtype = self._shape(op, index), self._symbol(op, index).dtype
        sizes = [
            1 if size is None else size for size in shape.as_list()
        ]  # The others give what is not known: see below.
        return self._insertion.zeros(f"{op}/nothing_{index}", sizes, dtype)

    def _note_shape(self, tensor: str, shape: Sequence[int]) -> None:
        """Note that `tensor`, and what it is made of by ops that keep shapes, has this shape: it is a variable's."""
        pending = [str(parse(tensor))]
        while pending:
            name = pending.pop()
            if name in self._shapes:
                continue
            self._shapes[name] = tf.TensorShape(shape)
            node = self._graph.nodes[op_of(name)]
            if node.op in _OF_ONE_SHAPE:
                pending += [str(parse(read)) for read in node.input if not read.startswith("^")]

    def _shape(self, op: str, index: int) -> tf.TensorShape:
        """The static shape of what `op` read as it was captured, as far as its readers and siblings show it."""
        node = self._graph.nodes[op]
        reads = node.input if node.op == "AddN" else [node.input[index]]
        shape = self._shapes.get(str(parse(node.input[index])), tf.TensorShape(None))
        for read in reads:
            if not read.startswith("^"):
                shape = shape.merge_with(self._tensor_of(read).shape)
        return shape

    def _read(self, op: str, index: int) -> str:
        """What `op` reads now: maybe a statistic."""
        return self._insertion.nodes[op].input[index]

    def _symbol(self, op: str, index: int) -> tf.Tensor:
        """What `op` read as it was captured: for its shape and type."""
        return self._tensor_of(self._graph.nodes[op].input[index])

    def parts_of(self, op: str, index: int) -> Parts:
        """The parts of what `op` reads: that of examples, and the other."""
        tensor, terms = self._read(op, index), self._terms_of(op, index)
        if not all(terms):
            return tensor if terms.of_examples else None, tensor if terms.of_none else None
        pending = [] if tensor in self._parts else [tensor]
        while pending:  # Each after what it is of: chains of ops may be longer than Python's stack.
            name = pending[-1]
            mixed = [self._read(*edge) for edge in self._linear_reads(name) if all(self._terms_of(*edge))]
            ahead = [read for read in mixed if read not in self._parts]
            if not ahead:
                if name not in self._parts:
                    self._parts[name] = self._separated(name)
                pending.pop()
            pending += ahead
        return self._parts[tensor]

    def _terms_of(self, op: str, index: int) -> _Terms:
        """Which terms the `index`-th input of `op` has."""
        if (simple := self._simple_terms(op, index)) is not None:
            return simple
        tensor = self._read(op, index)
        pending = [] if tensor in self._terms else [tensor]
        while pending:
            name = pending[-1]
            reads = [edge for edge in self._differing_reads(name) if self._simple_terms(*edge) is None]
            ahead = [read for read in (self._read(*edge) for edge in reads) if read not in self._terms]
            if not ahead:
                if name not in self._terms:
                    self._terms[name] = self._found_terms(name)
                pending.pop()
            pending += ahead
        return self._terms[tensor]

    def _simple_terms(self, op: str, index: int) -> _Terms | None:
        """Which terms the input has, where no other op need be asked."""
        if self._is_zero(self._read(op, index)):
            return _Terms(of_examples=False, of_none=False)
        if not self._solution.reads_differing(op, index):
            return _Terms(of_examples=False, of_none=True)
        is_whole = (op, index) in self._solution.edges or self._solution.has_rows(self._read(op, index))
        dtype = self._symbol(op, index).dtype
        # A size or an index is no gradient, and a list may be.
        if is_whole or not (dtype.is_floating or dtype.is_complex or dtype == tf.variant):
            return _Terms(of_examples=True, of_none=False)
        return None

    def _found_terms(self, tensor: str) -> _Terms:
        """The terms of `tensor`, those of what it is computed from being known."""
        linear = self._linear_reads(tensor)
        if linear:
            terms = [self._terms_of(*edge) for edge in linear]
            return _Terms(any(one.of_examples for one in terms), any(one.of_none for one in terms))
        mixing = [op for op, index in self._differing_reads(tensor) if all(self._terms_of(op, index))]
        node = self._graph.nodes[op_of(tensor)]
        if node.op == "Exit":  # What goes round is not followed.
            mixing += [one.name for one in self._loop_of(node)[1] if self._adds_both(one)]
        if self._is_through_functions and (node.op == "Exit" or has_function_attribute(node)):
            mixing.append(node.name)
        self.inseparable += [op for op in dict.fromkeys(mixing) if op not in self.inseparable]
        return _Terms(of_examples=True, of_none=False)

    def _adds_both(self, node: tf.compat.v1.NodeDef) -> bool:
        """Whether an op of a loop adds numbers that differ between replicas to others that do not, and are not 0."""
        if node.op not in ADDITIVE or not self._tensor_of(f"{node.name}:0").dtype.is_floating:
            return False
        edges = [(node.name, index) for index, name in enumerate(node.input) if not name.startswith("^")]
        alike = [edge for edge in edges if not self._solution.reads_differing(*edge)]
        return len(alike) < len(edges) and not all(self._is_zero(self._read(*edge)) for edge in alike)

    def _differing_reads(self, tensor: str) -> list[Edge]:
        node = self._graph.nodes[op_of(tensor)]
        entries = self._loop_of(node)[0] if node.op == "Exit" else [node]
        edges = [(one.name, index) for one in entries for index in range(len(one.input)) if one.input[index][0] != "^"]
        return [edge for edge in edges if self._solution.reads_differing(*edge)]

    def _loop_of(self, leaving: tf.compat.v1.NodeDef) -> tuple[list[tf.compat.v1.NodeDef], list[tf.compat.v1.NodeDef]]:
        """Of the loop of TensorFlow 1 that an op leads out of, the ops that lead in, and all that stand in it."""
        flow = self._graph.control_flow
        ways = flow.ways_in(op_of(leaving.input[0]))
        inside = [node for name, node in self._graph.nodes.items() if flow.ways_in(name)[: len(ways)] == ways]
        return [node for node in inside if node.op == "Enter" and flow.ways_in(node.name) == ways], inside

    def _linear_reads(self, tensor: str) -> list[Edge]:
        """What `tensor` is a linear function of, all else that it reads being the same everywhere; none: it is not."""
        node = self._graph.nodes[op_of(tensor)]
        differing = set(self._differing_reads(tensor))
        for group in linear_groups(node):
            edges = [(node.name, index) for index in group]
            if differing <= set(edges) and (len(edges) == 1 or self._has_zeros(node, tensor, edges)):
                return edges
        return []

    def _has_zeros(self, node: tf.compat.v1.NodeDef, tensor: str, edges: Sequence[Edge]) -> bool:
        """Whether zeros may stand in the place of one of several: not where they must have the size of a batch."""
        shapes = [self._shape(*edge) for edge in edges]
        if node.op in _BROADCASTS and all(shape.rank is not None for shape in shapes):
            return bool(self._tensor_of(tensor).shape.is_fully_defined())  # What is not known of one the other gives.
        return all(shape.is_fully_defined() for shape in shapes)

    def _separated(self, tensor: str) -> Parts:
        """The parts of `tensor`, which has both, those of what it is computed from being known."""
        edges = self._linear_reads(tensor)
        own, others = zip(*(self.parts_of(*edge) for edge in edges), strict=True)
        return self._of_parts(tensor, edges, own, "of_examples"), self._of_parts(tensor, edges, others, "of_no_example")

    def _of_parts(self, tensor: str, edges: Sequence[Edge], parts: Sequence[str | None], suffix: str) -> str:
        """What `tensor` would be if its op read `parts`, and zeros for None."""
        name = parse(tensor)
        original, dtype = self._graph.nodes[name.op], self._tensor_of(tensor).dtype
        if original.op in ADDITIVE and len({str(self._shape(*edge)) for edge in edges}) == 1:
            terms = [part for part in parts if part is not None]
            return self._insertion.sum(f"{name.op}/terms_{suffix}", terms, dtype)
        node = copy.deepcopy(self._insertion.nodes[name.op])
        node.name = f"{name.op}/{suffix}"
        for (_, index), part in zip(edges, parts, strict=True):
            node.input[index] = self._zeros(name.op, index) if part is None else part
        return str(name._replace(op=self._insertion.put(node)))

    def _is_zero(self, tensor: str) -> bool:
        """Whether it is seen that `tensor` has zeros only."""
        node = self._insertion.nodes[op_of(tensor)]
        if node.op in ("BroadcastTo", "Fill"):
            return self._is_zero(node.input[1 if node.op == "Fill" else 0])
        return node.op == "ZerosLike" or (
            node.op == "Const"
            and tf.as_dtype(node.attr["dtype"].type).is_floating
            and not tf.make_ndarray(node.attr["value"].tensor).any()
        )


def _gives_both(solution: Solution) -> bool:
    """Whether a loop or branch gives losses a value that depends on no example, and others.

    Its back-propagation may add up terms of both kinds: it is one op, and reads the gradients of all together. Those of
    a value that depends on no example are of examples where it is paired with these, and of none in a regularizer.
    """
    regions = solution.regions
    differing: dict[str, bool] = {}
    alone: list[str] = []
    for name in regions.losses:
        node = regions.graph.nodes[name]
        if node.op != "Exit" and not has_function_attribute(node):
            continue
        loop = "/".join(regions.graph.control_flow.ways_in(op_of(node.input[0]))) if node.op == "Exit" else name
        for symbol in regions.tensor_of(f"{name}:0").op.outputs:
            layout = solution.layout(symbol.name)
            differing[loop] = differing.get(loop, False) or layout is not BatchLayout.REPLICATED
            passes_back = symbol.dtype.is_floating or symbol.dtype.is_complex or symbol.dtype == tf.variant
            if layout in _ALONE and passes_back and regions.is_read(symbol.name, regions.losses):
                alone.append(loop)
    return any(differing[loop] or alone.count(loop) > 1 for loop in alone)
