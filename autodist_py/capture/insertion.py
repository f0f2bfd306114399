"""Puts the statistics that a `Combination` found into a captured graph, each behind an op of its own."""

import copy
from collections.abc import Callable, Sequence

import tensorflow as tf

from autodist_py.capture.combination import ADDITIVE, AGAIN, Combination
from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.names import op_of, parse, unique_names
from autodist_py.proto.graph_item import Gradient, Statistic

Parts = tuple[str | None, str | None]
"""Two tensors whose sum is a third: what of it depends on examples, and the rest; None where there is nothing."""


class Insertion:
    """Puts statistics into a captured graph."""

    def __init__(self, graph: GraphView, combination: Combination, tensor_of: Callable[[str], tf.Tensor]):
        self._nodes = dict(graph.nodes)
        self._own: set[str] = set()
        self._graph, self._combination, self._tensor_of = graph, combination, tensor_of
        self._again: dict[str, str] = {}
        self._seams: dict[tuple[str, str], str] = {}
        self._totals: dict[str, str] = {}
        self._parts: dict[str, Parts] = {}
        self.statistics: list[Statistic] = []

    @property
    def is_needed(self) -> bool:
        """Whether anything was changed."""
        return bool(self._own)

    def _edit(self, op: str) -> tf.compat.v1.NodeDef:
        """The op, which may be changed."""
        if op not in self._own:
            self._nodes[op] = copy.deepcopy(self._nodes[op])
            self._own.add(op)
        return self._nodes[op]

    def graph_def(self) -> tf.compat.v1.GraphDef:
        """The graph as it is now."""
        return self._graph.made_of(self._nodes.values(), ()).graph_def()

    def combine(self, op: str, index: int, reduction: str) -> None:
        """Let `op` read its `index`-th input combined by `reduction`."""
        node = self._edit(op)
        node.input[index] = self._combined(node.input[index], reduction)

    def result(self, tensor: str) -> str:
        """The result `tensor`, or what is computed again for it; a gradient with all its terms."""
        if op_of(tensor) in self._totals:
            return self._totals[op_of(tensor)]
        if self._combination.is_again(tensor) and op_of(tensor) in self._nodes:
            return self._combined(tensor, AGAIN)
        return tensor

    def separate_terms(self, gradient: Gradient) -> None:
        """Let the gradient's seam pass on the terms that depend on examples; the others are added after it, once."""
        if gradient.is_sparse:
            return
        seam = self._edit(op_of(gradient.tensors[0]))
        own, others = self._separated_input(seam.name, 0)
        if own is None or others is None:
            return
        dtype = tf.as_dtype(seam.attr["T"].type)
        readers = [name for name, node in self._nodes.items() if seam.name in map(op_of, node.input)]
        total = self._sum(f"{seam.name}/with_terms_of_no_example", [seam.name, others], dtype)
        for reader in readers:
            for index, name in enumerate(self._nodes[reader].input):
                if op_of(name) == seam.name and not name.startswith("^"):
                    self._edit(reader).input[index] = total
        seam.input[0] = own
        self._totals[seam.name] = total

    def _separated_input(self, op: str, index: int) -> Parts:
        tensor = self._nodes[op].input[index]
        if not self._combination.reads_differing(op, index):
            return None, tensor
        if (op, index) in self._combination.edges:
            return tensor, None
        pending = [tensor]
        while pending:  # Each after what it is of: chains of ops may be longer than Python's stack.
            name = pending[-1]
            ahead = [one for one in self._reads_to_separate(name).values() if one not in self._parts]
            if not ahead:
                self._parts[name] = self._separated(name)
                pending.pop()
            pending += ahead
        return self._parts[tensor]

    def _reads_to_separate(self, tensor: str) -> dict[int, str]:
        """The inputs of which `tensor` is a sum, or a linear function, that may have both kinds of terms."""
        op = op_of(tensor)
        return {
            index: self._nodes[op].input[index]
            for index in self._combination.linear_reads(tensor)
            if self._combination.reads_differing(op, index) and (op, index) not in self._combination.edges
        }

    def _separated(self, tensor: str) -> Parts:
        """The parts of `tensor`, those of what it is computed from being known."""
        node = self._nodes[op_of(tensor)]
        reads = self._reads_to_separate(tensor)
        parts = {
            index: self._parts[reads[index]] if index in reads else self._separated_input(node.name, index)
            for index in self._combination.linear_reads(tensor)
        }
        if all(others is None for _, others in parts.values()):
            return tensor, None
        if node.op in ADDITIVE:
            dtype = tf.as_dtype(node.attr["T"].type)
            own = self._sum(f"{node.name}/terms_of_examples", [one for one, _ in parts.values() if one], dtype)
            others = self._sum(f"{node.name}/terms_of_no_example", [one for _, one in parts.values() if one], dtype)
            return own, others
        ((position, (own_part, other_part)),) = parts.items()
        return (
            None if own_part is None else self._with_input(node, position, own_part, "of_examples"),
            None if other_part is None else self._with_input(node, position, other_part, "of_no_example"),
        )

    def _with_input(self, original: tf.compat.v1.NodeDef, index: int, tensor: str, suffix: str) -> str:
        """A copy of the op `original` that reads `tensor` instead."""
        node = copy.deepcopy(original)
        (node.name,) = unique_names([f"{original.name}/{suffix}"], self._nodes)
        node.input[index] = tensor
        self._nodes[node.name] = node
        self._own.add(node.name)
        return node.name

    def _sum(self, name: str, terms: Sequence[str], dtype: tf.DType) -> str:
        if len(terms) == 1:
            return terms[0]
        node = self._add("AddN", name, terms, "T", dtype)
        node.attr["N"].i = len(terms)
        return node.name

    def _combined(self, tensor: str, reduction: str) -> str:
        if reduction == AGAIN:
            return self._computed_again(tensor)
        symbol = self._tensor_of(tensor)
        shape = tuple(symbol.shape.as_list())
        if reduction == "rows":
            shape = (None, *shape[1:])
        return self._seam(tensor, symbol.dtype, shape, reduction)

    def _computed_again(self, tensor: str) -> str:
        """`tensor`, computed by copies of its ops from what is combined."""
        name = parse(tensor)
        if name.op not in self._again:
            node = copy.deepcopy(self._graph.nodes[name.op])
            (node.name,) = unique_names([f"{name.op}/of_all_examples"], self._nodes)
            for index, read in enumerate(node.input):
                if not read.startswith("^") and (reduction := self._combination.reduction_again(read)):
                    node.input[index] = self._combined(read, reduction)
            self._nodes[node.name] = node
            self._own.add(node.name)
            self._again[name.op] = node.name
        return str(name._replace(op=self._again[name.op]))

    def combine_change(self, op: str) -> None:
        """Let the assignment `op` write the value before, plus the sum of the changes that replicas would make."""
        assign = self._edit(op)
        handle, value = assign.input[0], assign.input[1]
        symbol = self._tensor_of(value)
        before = self._add("ReadVariableOp", f"{op}/before", [handle], "dtype", symbol.dtype)
        before.input.extend(name for name in assign.input if name.startswith("^"))
        change = self._add("Sub", f"{op}/change", [value, before.name], "T", symbol.dtype)
        seam = self._seam(change.name, symbol.dtype, tuple(symbol.shape.as_list()), "sum")
        assign.input[1] = self._add("AddV2", f"{op}/after", [before.name, seam], "T", symbol.dtype).name

    def _seam(self, tensor: str, dtype: tf.DType, shape: tuple[int | None, ...], reduction: str) -> str:
        name = parse(tensor)
        key = (str(name), reduction)
        if key not in self._seams:
            suffix = f"_{name.output}" if name.output else ""
            seam = self._add("Identity", f"{name.op}/statistic_{reduction}{suffix}", [tensor], "T", dtype)
            self._seams[key] = seam.name
            self.statistics.append(Statistic(f"{seam.name}:0", dtype.name, shape, reduction))
        return self._seams[key]

    def _add(
        self, kind: str, name: str, inputs: Sequence[str], attribute: str, dtype: tf.DType
    ) -> tf.compat.v1.NodeDef:
        (unused,) = unique_names([name], self._nodes)
        device = self._nodes[op_of(inputs[-1])].device
        node = tf.compat.v1.NodeDef(name=unused, op=kind, input=inputs, device=device)
        node.attr[attribute].type = dtype.as_datatype_enum
        self._nodes[unused] = node
        self._own.add(unused)
        return node
