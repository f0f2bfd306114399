"""What else replicas must exchange, beside gradients: found in the captured graph, before anything is rewritten.

A write that depends on the replica's own examples (a metric, batch-norm's averages), a result, or a normalizer of the
loss is traced back to *statistics*: values that are a sum or mean over examples, or rows of the batch, and so can be
combined exactly. Each is passed on through an op of its own (`Identity`), at which the kernel combines it; all that is
computed from it is then computed alike on every replica, as one device does.

In the computation of a loss, only what does not depend on trained variables is combined: back-propagation, and batch
statistics of activations, stay a replica's own.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import tensorflow as tf

from autodist_py.kernel.analysis import random_ops
from autodist_py.kernel.batch import batched_tensors
from autodist_py.kernel.cross_device_ops.collective import CARRIED
from autodist_py.kernel.extent import FIXED, Extent, Operands, constant_value, extent_of, is_known
from autodist_py.kernel.graph_view import ITERATOR_NEXT, SHOWS, GraphView
from autodist_py.kernel.names import op_of, parse, unique_names
from autodist_py.proto.graph_item import Gradient, GraphItem, Statistic, Variable

_QUOTIENTS = frozenset({"Div", "DivNoNan", "RealDiv"})
_ASSIGN = "AssignVariableOp"
_ADDS = frozenset({"AssignAddVariableOp", "AssignSubVariableOp"})
_PRODUCTS = frozenset({"BatchMatMulV2", "Einsum", "MatMul"})
_TERMS = frozenset({"Add", "AddN", "AddV2", "Identity"})
_AGAIN = "again"
"""Not combined by one reduction, but computed again, from what is combined."""
_REDUCTIONS = {
    Extent.SUM: "sum",
    Extent.COUNT: "sum",
    Extent.MEAN: "mean",
    Extent.ROWS: "rows",
    Extent.PLUS: _AGAIN,
    Extent.OTHER: _AGAIN,
}

Edge = tuple[str, int]
"""An op and the position of one of its inputs."""


def with_statistics(
    item: GraphItem,
    graph: GraphView,
    whole: GraphView,
    losses: Sequence[Sequence[str]],
    tensor_of: Callable[[str], tf.Tensor],
    *,
    batch: str,
) -> GraphItem:
    """`item` with its statistics, and what each gradient and output does with examples.

    Args:
        item: what was captured.
        graph: its graph.
        whole: the graph it was cut from, which has the losses too.
        losses: for each of its gradients, the tensors whose sum it is the gradient of; none: not known.
        tensor_of: a tensor of `whole` by its name; only its shape and type are used.
        batch: whether workers are given the same ("global"), or each its own part ("local").
    """
    plan = _Plan(item, whole, losses, tensor_of, batch)
    plan.make()
    if not plan.varies:
        return item
    surgery = _Surgery(graph, plan, tensor_of)
    for (op, index), reduction in plan.edges.items():
        if op in graph.nodes:
            surgery.combine(op, index, reduction)
    for op in plan.deltas:
        surgery.combine_change(op)
    gradients = tuple(
        replace(gradient, reduction=plan.reduction(targets, rows="sum"))
        for gradient, targets in zip(item.gradients, losses, strict=True)
    )
    for gradient in gradients:
        if (gradient.reduction or item.loss_reduction) == "sum":
            surgery.separate_terms(gradient)
    outputs = tuple(
        replace(output, tensor=surgery.result(output.tensor), reduction=plan.result_reduction(output.tensor))
        for output in item.outputs
    )
    return replace(
        item,
        graph_def=surgery.graph_def().SerializeToString(deterministic=True) if surgery.is_needed else item.graph_def,
        gradients=gradients,
        outputs=outputs,
        statistics=tuple(surgery.statistics),
        local_ops=tuple(plan.local),
    )


class _Plan:
    """The extents of all that a loss, a write or a result is computed from, and which edges must carry statistics."""

    def __init__(
        self,
        item: GraphItem,
        whole: GraphView,
        losses: Sequence[Sequence[str]],
        tensor_of: Callable[[str], tf.Tensor],
        batch: str,
    ):
        self._item, self._graph, self._tensor_of = item, whole, tensor_of
        self._seams = {op_of(tensor) for gradient in item.gradients for tensor in gradient.tensors}
        self._rows = {str(parse(tensor.name)) for tensor in batched_tensors(item, whole)}
        self._random = random_ops(whole)
        self._unknown: set[str] = set()
        if batch == "local":
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
        self._region = self._loss_region | whole.dataflow_ancestors(ends, blocked=self._seams)
        trained = {gradient.variable for gradient in item.gradients}
        self._trained = whole.dataflow_descendants(trained & whole.nodes.keys(), blocked=self._seams)
        raw = {op_of(name) for seam in self._seams for name in whole.nodes[seam].input if not name.startswith("^")}
        self._trains = self._loss_region | whole.dataflow_ancestors(raw, blocked=self._seams)
        self._sources = {op_of(tensor) for tensor in self._rows} | self._random | self._unknown
        self._extents: dict[str, tuple[Extent, ...]] = {}
        self._of_losses: dict[str, str] = {}
        """Tensors that the losses, and back-propagation, read combined."""
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
        for name in self._trains & self._graph.nodes.keys():
            for index, tensor in enumerate(self._graph.nodes[name].input):
                if not tensor.startswith("^") and str(parse(tensor)) in self._of_losses:
                    self.edges[name, index] = self._of_losses[str(parse(tensor))]
        self.edges = dict(sorted(self.edges.items()))  # Sets of names have another order in every process.

    @property
    def varies(self) -> bool:
        """Whether anything differs between replicas."""
        return any(extent is not Extent.SAME for extents in self._extents.values() for extent in extents)

    def reduction(self, tensors: Sequence[str], *, rows: str = "") -> str:
        """How the sum of `tensors` combines examples: "mean", "sum" or, where it is not known, ""; `rows` for rows."""
        kinds = {self._extent(tensor) for tensor in tensors}
        if Extent.MEAN in kinds and kinds <= {Extent.MEAN, Extent.SAME}:
            return "mean"
        if kinds & {Extent.SUM, Extent.COUNT, Extent.PLUS} and kinds <= {
            Extent.SUM,
            Extent.COUNT,
            Extent.PLUS,
            Extent.SAME,
        }:
            return "sum"
        return rows if kinds == {Extent.ROWS} else ""

    def result_reduction(self, tensor: str) -> str:
        """What the result `tensor` does with examples."""
        extent = self._extent(tensor)
        if extent is Extent.SAME or self.is_again(tensor):
            return "same"
        if extent is Extent.PLUS:
            return ""
        return self.reduction((tensor,), rows="rows")

    @cached_property
    def _differing(self) -> set[str]:
        """Ops whose results differ between replicas, when statistics are combined."""
        found: set[str] = set()
        for name in self._graph.dataflow_order(self._graph.nodes):
            reads = self._graph.nodes[name].input
            if name not in self._seams and (
                name in self._sources
                or any(
                    op_of(read) in found and self.edges.get((name, index), "share") == "share"
                    for index, read in enumerate(reads)
                    if not read.startswith("^")
                )
            ):
                found.add(name)
        return found

    def terms(self, tensor: str) -> tuple[list[str], list[str]]:
        """The terms that `tensor` is the sum of: those that depend on examples, and the others."""
        if op_of(tensor) not in self._differing:
            return [], [tensor]
        node = self._graph.nodes[op_of(tensor)]
        reads = [name for name in node.input if not name.startswith("^")]
        shape = self._tensor_of(tensor).shape
        alike = shape.is_fully_defined() and all(self._tensor_of(name).shape == shape for name in reads)
        if node.op not in _TERMS or not alike:
            return [tensor], []
        parts = [self.terms(name) for name in reads]
        return [one for own, _ in parts for one in own], [one for _, others in parts for one in others]

    def is_again(self, tensor: str) -> bool:
        """Whether the result `tensor` must be computed again for all examples."""
        extent = self._extent(tensor)
        return extent in (Extent.PLUS, Extent.OTHER) and self._can_combine("", tensor, extent)

    def reduction_again(self, tensor: str) -> str:
        """How `tensor` is combined before something is computed again from it; "": it is the same everywhere."""
        extent = self._extent(tensor)
        return "" if extent is Extent.SAME else _REDUCTIONS[extent]

    def _evaluate(self) -> None:
        self._extents.clear()
        self.edges.clear()
        self.deltas.clear()
        self.local.clear()
        for name in self._graph.dataflow_order(self._region):
            self._extents[name] = self._visit(self._graph.nodes[name])

    def _read(self, reader: str, tensor: str) -> Extent:
        """The extent of `tensor` as `reader` reads it."""
        combined = self._of_losses.get(str(parse(tensor))) if reader in self._trains else None
        if combined is not None:
            return Extent.COUNT if combined == "share" else Extent.SAME
        return self._extent(tensor)

    def _extent(self, tensor: str) -> Extent:
        name = parse(tensor)
        extents = self._extents.get(name.op, (Extent.SAME,))
        return extents[name.output if len(extents) > 1 else 0]

    def _visit(self, node: tf.compat.v1.NodeDef) -> tuple[Extent, ...]:
        own_rows = [str(parse(f"{node.name}:{index}")) in self._rows for index in range(_num_outputs(node, self._rows))]
        if any(own_rows):
            rest = Extent.OTHER if node.name in self._unknown else Extent.SAME
            return tuple(Extent.ROWS if has_rows else rest for has_rows in own_rows)
        if node.name in self._unknown:
            return (Extent.OTHER,)
        reads = [name for name in node.input if not name.startswith("^")]
        extents = tuple(self._read(node.name, tensor) for tensor in reads)
        if all(extent is Extent.SAME for extent in extents):
            return (Extent.OTHER if node.name in self._random else Extent.SAME,)
        operands = self._operands(node, reads, extents)
        result = extent_of(operands)
        if isinstance(result, tuple):
            if any(extent is Extent.OTHER for extent in result):
                self.local.append(node.name)
            return result
        if result is Extent.PLUS and node.name not in self._loss_region & self._trained:
            result = Extent.OTHER  # Its terms are combined by themselves.
        if result in FIXED and self._is_uncarried_cast(node.name):
            result = Extent.OTHER  # What cannot be combined after the cast is combined before it.
        return (self._combined_first(node, reads, operands, result),)

    def _combined_first(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], operands: Operands, result: Extent
    ) -> Extent:
        """The extent of `node` when what it reads is combined first where it must and can be."""
        extents = operands.extents
        mixes = result is Extent.ROWS and any(one not in (Extent.ROWS, Extent.SAME) for one in extents)
        if result is not Extent.OTHER and not mixes:
            return result
        wanted = [
            (index, tensor, extent)
            for index, (tensor, extent) in enumerate(zip(reads, extents, strict=True))
            if extent is not Extent.SAME and not (mixes and extent is Extent.ROWS)
        ]
        if node.name in self._random or not all(self._can_combine(node.name, name, one) for _, name, one in wanted):
            if result is Extent.OTHER and node.name in self._writers:
                self._fall_back(node, self._writers[node.name])
            pairs_rows = node.op in _PRODUCTS and extents[0] is Extent.ROWS
            is_ratio = node.op in _QUOTIENTS and set(extents) == {Extent.SUM}  # See `_normalizers`.
            if (
                node.name in self._loss_region
                and not is_ratio
                and (partly := self._partly_combined(node, reads, operands, wanted))
            ):
                return partly
            if mixes or pairs_rows or node.name in self._loss_region:
                self.local.append(node.name)
            is_rows = (mixes or pairs_rows) and self._tensor_of(f"{node.name}:0").shape[1:].is_fully_defined()
            return Extent.ROWS if is_rows else Extent.OTHER
        for index, tensor, extent in wanted:
            if node.name in self._loss_region:
                self._of_losses[str(parse(tensor))] = _REDUCTIONS[extent]
            else:
                self.edges[node.name, index] = _REDUCTIONS[extent]
        return Extent.ROWS if mixes else Extent.SAME

    def _partly_combined(
        self,
        node: tf.compat.v1.NodeDef,
        reads: Sequence[str],
        operands: Operands,
        wanted: Sequence[tuple[int, str, Extent]],
    ) -> Extent | None:
        """The extent of an op of a loss when only some of what it reads can be combined, if that is enough."""
        some = {index for index, tensor, extent in wanted if self._can_combine(node.name, tensor, extent)}
        extents = tuple(Extent.SAME if index in some else one for index, one in enumerate(operands.extents))
        result = extent_of(replace(operands, extents=extents)) if some else Extent.OTHER
        if isinstance(result, tuple) or result in (Extent.OTHER, Extent.ROWS):
            return None
        for index, tensor, extent in wanted:
            if index in some:
                self._of_losses[str(parse(tensor))] = _REDUCTIONS[extent]
        return result

    def _can_combine(self, reader: str, tensor: str, extent: Extent) -> bool:
        """Whether `reader` may be given the combined `tensor`, which is of this extent on each replica."""
        if reader in self._loss_region and (extent is Extent.ROWS or op_of(tensor) in self._trained):
            return False
        shape, dtype = self._tensor_of(tensor).shape, self._tensor_of(tensor).dtype
        if extent in (Extent.PLUS, Extent.OTHER):
            return reader not in self._loss_region and self._can_compute_again(op_of(tensor))
        if dtype not in CARRIED or shape.rank is None:
            return False
        if reader in self._loss_region and not dtype.is_floating and not self._is_uncarried_cast(reader):
            return False  # A size or an index: it is of the replica's own rows.
        if extent is Extent.ROWS:
            return bool(shape[1:].is_fully_defined())
        return extent in FIXED and bool(shape.is_fully_defined())

    def _is_uncarried_cast(self, op: str) -> bool:
        """A cast to a type that collectives do not carry, as of the number of random numbers that are drawn."""
        node = self._graph.nodes.get(op)
        return node is not None and node.op == "Cast" and tf.as_dtype(node.attr["DstT"].type) not in CARRIED

    def _can_compute_again(self, op: str) -> bool:
        """Whether what a loss is computed by can be computed of all examples too, beside the replica's own value."""
        node = self._graph.nodes[op]
        if op not in self._loss_region or op in self._random or not is_known(node.op):
            return False
        reads = [(tensor, self._extent(tensor)) for tensor in node.input if not tensor.startswith("^")]
        return all(
            extent is Extent.SAME or (extent is not Extent.ROWS and self._can_combine("", tensor, extent))
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
            of_rows = any(extent is Extent.ROWS for op in below for extent in self._extents.get(op, ()))
            if not of_rows and self._can_combine(name, under, Extent.SUM):
                yield str(parse(under))

    def _operands(self, node: tf.compat.v1.NodeDef, reads: Sequence[str], extents: tuple[Extent, ...]) -> Operands:
        shapes = [self._tensor_of(tensor).shape for tensor in reads]
        row = shapes[0][1:] if shapes[0].rank else tf.TensorShape(None)
        return Operands(
            node=node,
            extents=extents,
            ranks=tuple(shape.rank for shape in shapes),
            leading=tuple(shape[0] if shape.rank else None for shape in shapes),
            row_elements=math.prod(row.as_list()) if row.is_fully_defined() else None,
            constants=tuple(
                constant_value(self._graph, tensor) if extent is Extent.SAME else None
                for tensor, extent in zip(reads, extents, strict=True)
            ),
        )


def _num_outputs(node: tf.compat.v1.NodeDef, rows: Collection[str]) -> int:
    return len(node.attr["output_types"].list.type) if node.op in ITERATOR_NEXT else 1


class _Surgery:
    """Puts statistics into a captured graph."""

    def __init__(self, graph: GraphView, plan: _Plan, tensor_of: Callable[[str], tf.Tensor]):
        self._nodes = dict(graph.nodes)
        self._own: set[str] = set()
        self._graph, self._plan, self._tensor_of = graph, plan, tensor_of
        self._again: dict[str, str] = {}
        self._seams: dict[tuple[str, str], str] = {}
        self.statistics: list[Statistic] = []

    @property
    def is_needed(self) -> bool:
        """Whether anything was changed."""
        return bool(self._own)

    def _edit(self, op: str) -> tf.compat.v1.NodeDef:
        """The op, which may be changed."""
        if op not in self._own:
            self._nodes[op] = _copy(self._nodes[op])
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
        """The result `tensor`, or what is computed again for it."""
        if self._plan.is_again(tensor) and op_of(tensor) in self._nodes:
            return self._combined(tensor, _AGAIN)
        return tensor

    def separate_terms(self, gradient: Gradient) -> None:
        """Let the gradient's seam pass on the terms that depend on examples; the others are added after it, once."""
        if gradient.is_sparse:
            return
        own, others = self._plan.terms(self._nodes[op_of(gradient.tensors[0])].input[0])
        if not others or not own:
            return
        seam = self._edit(op_of(gradient.tensors[0]))
        dtype = tf.as_dtype(seam.attr["T"].type)
        readers = [name for name, node in self._nodes.items() if seam.name in map(op_of, node.input)]
        total = self._add_n(f"{seam.name}/with_terms_of_no_example", [seam.name, *others], dtype)
        for reader in readers:
            for index, name in enumerate(self._nodes[reader].input):
                if op_of(name) == seam.name and not name.startswith("^"):
                    self._edit(reader).input[index] = total
        seam.input[0] = self._add_n(f"{seam.name}/terms_of_examples", own, dtype)

    def _add_n(self, name: str, terms: Sequence[str], dtype: tf.DType) -> str:
        if len(terms) == 1:
            return terms[0]
        node = self._add("AddN", name, terms, "T", dtype)
        node.attr["N"].i = len(terms)
        return node.name

    def _combined(self, tensor: str, reduction: str) -> str:
        if reduction == _AGAIN:
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
            node = _copy(self._graph.nodes[name.op])
            (node.name,) = unique_names([f"{name.op}/of_all_examples"], self._nodes)
            for index, read in enumerate(node.input):
                if not read.startswith("^") and (reduction := self._plan.reduction_again(read)):
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


def _copy(node: tf.compat.v1.NodeDef) -> tf.compat.v1.NodeDef:
    copy = tf.compat.v1.NodeDef()
    copy.CopyFrom(node)
    return copy
