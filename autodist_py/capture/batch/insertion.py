"""Puts the statistics that a `Solution` found into a captured graph, each behind an op of its own."""

import copy
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import tensorflow as tf

from autodist_py.capture.batch.layouts.solution import Solution
from autodist_py.capture.batch.layouts.table import AGAIN
from autodist_py.kernel.ir.fragment import TensorSpec, trace
from autodist_py.kernel.ir.graph import DRAWN_ALIKE, GraphView
from autodist_py.kernel.ir.names import op_of, parse, unique_names
from autodist_py.kernel.ir.node import Attribute, controls_of, node, reads_of
from autodist_py.proto.graph_item import Statistic


class Insertion:
    """Puts statistics into a captured graph."""

    def __init__(self, graph: GraphView, solution: Solution, tensor_of: Callable[[str], tf.Tensor]):
        self.nodes = dict(graph.nodes)
        self._own: set[str] = set()
        self._graph, self._solution, self._tensor_of = graph, solution, tensor_of
        self._again: dict[str, str] = {}
        self._markers: dict[tuple[str, str], str] = {}
        self._totals: dict[str, str] = {}
        self.statistics: list[Statistic] = []

    @property
    def is_needed(self) -> bool:
        """Whether anything was changed."""
        return bool(self._own)

    def _edit(self, op: str) -> tf.compat.v1.NodeDef:
        """The op, which may be changed."""
        if op not in self._own:
            self.nodes[op] = copy.deepcopy(self.nodes[op])
            self._own.add(op)
        return self.nodes[op]

    def graph_def(self) -> tf.compat.v1.GraphDef:
        """The graph as it is now."""
        return self._graph.made_of(self.nodes.values(), ()).graph_def()

    def combine(self, op: str, index: int, reduction: str, shape: tf.TensorShape | None = None) -> None:
        """Let `op` read its `index`-th input, of this `shape` if it is given, combined by `reduction`."""
        node = self._edit(op)
        node.input[index] = self.combined(node.input[index], reduction, shape)

    def combined(self, tensor: str, reduction: str, shape: tf.TensorShape | None = None) -> str:
        """`tensor` as one device has it; a "shape", whose first size is the number of a replica's rows, too."""
        return self._whole_shape(tensor) if reduction == "shape" else self._combined(tensor, reduction, shape)

    def _whole_shape(self, tensor: str) -> str:
        """A shape of the whole batch: its first size is the sum of the replicas'."""
        name, symbol = parse(tensor), self._tensor_of(tensor)
        key = (str(name), "shape")
        if key not in self._markers:
            prefix = f"{name.op}/whole_{name.output}"
            one = self._constant(f"{prefix}/one", np.array([1], np.int32))
            zero = self._constant(f"{prefix}/zero", np.array([0], np.int32))
            rest = self._constant(f"{prefix}/rest", np.array([-1], np.int32))
            axis = self._constant(f"{prefix}/axis", np.array(0, np.int32))
            types = {"T": symbol.dtype, "Index": tf.int32}
            first = self._add("Slice", f"{prefix}/first", [tensor, zero, one], **types)
            others = self._add("Slice", f"{prefix}/others", [tensor, one, rest], **types)
            total = self._marker(first, symbol.dtype, (1,), "count")
            others = f"{self._marker(others, symbol.dtype, (None,), 'same')}:0"
            self._markers[key] = self._add(
                "ConcatV2", f"{prefix}/shape", [total, others, axis], T=symbol.dtype, N=2, Tidx=tf.int32
            )
        return self._markers[key]

    def moments(
        self, mean: str, variance: str, of_mean: tf.TensorShape, of_variance: tf.TensorShape
    ) -> tuple[str, str]:
        """What one device has of the op `mean` of rows, and of `variance` about it; they have these shapes."""
        like, dtype = self._graph.nodes[mean], self._tensor_of(f"{mean}:0").dtype
        values, axes = like.input[:2]
        differences = self._add("SquaredDifference", f"{variance}/of_own", [values, mean], T=dtype)
        own = self.put(node("Mean", f"{variance}/own", [differences, axes], like=like))
        packed = self._add("Pack", f"{variance}/moments", [mean, own], N=2, T=dtype, axis=0)
        marker = self._marker(packed, dtype, (2, *of_mean.as_list()), "moments")
        parts = self._add("Unpack", f"{variance}/of_all", [marker], num=2, T=dtype, axis=0)
        if of_mean == of_variance:
            return parts, f"{parts}:1"
        sizes = self._constant(f"{variance}/shape", np.array(of_variance.as_list(), np.int32))
        return parts, self._add("Reshape", f"{variance}/reshaped", [f"{parts}:1", sizes], T=dtype, Tshape=tf.int32)

    def drop_unread(self, ops: Iterable[str], kept: Collection[str]) -> None:
        """Take out those of `ops`, and of what they alone read, that nothing reads; but none that is `kept`."""
        pending = list(ops)
        while pending:
            op = pending.pop()
            if op in self.nodes and op not in kept and not self.readers(op):
                pending += map(op_of, reads_of(self.nodes.pop(op)))

    def result(self, tensor: str) -> str:
        """The result `tensor`, or what is computed again for it; a gradient with all its terms."""
        if op_of(tensor) in self._totals:
            return self._totals[op_of(tensor)]
        if self._solution.is_again(tensor) and op_of(tensor) in self.nodes:
            return self._combined(tensor, AGAIN)
        return tensor

    def take_part(self, tensor: str) -> None:
        """Let all that reads `tensor`, which is the same on all replicas, read a replica's part of it."""
        readers = [name for name, node in self.nodes.items() if str(parse(tensor)) in map(_spelt, node.input)]
        marker = self._combined(tensor, "part")
        for reader in readers:
            for index, name in enumerate(self.nodes[reader].input):
                if _spelt(name) == str(parse(tensor)):
                    self.read(reader, index, marker)

    def read(self, op: str, index: int, tensor: str) -> None:
        """Let `op` read `tensor` as its `index`-th input."""
        self._edit(op).input[index] = tensor

    def read_value(self, tensor: str, value: np.ndarray) -> None:
        """Let all that reads `tensor` read this value of it, which it has whatever a replica's examples."""
        name = str(parse(tensor))
        readers = [
            (reader, index)
            for reader, one in self.nodes.items()
            for index, read in enumerate(one.input)
            if _spelt(read) == name
        ]
        if readers:
            dtype = self._tensor_of(tensor).dtype.as_numpy_dtype
            constant = self._constant(f"{op_of(tensor)}/value_{parse(tensor).output}", value.astype(dtype))
            for reader, index in readers:
                self.read(reader, index, constant)

    def draw_alike(self, op: str) -> None:
        """Let the random op draw the same on all replicas; of a loop, that it is or stands in, turns do not overlap."""
        self._edit(op).attr[DRAWN_ALIKE].b = True
        frames = set(self._graph.control_flow.ways_in(op))
        leads_in = (one for one in self._graph.of_type({"Enter"}) if one.attr["frame_name"].s.decode() in frames)
        for name in [op, *(one.name for one in leads_in)]:
            if "parallel_iterations" in self.nodes[name].attr:
                self._edit(name).attr["parallel_iterations"].i = 1

    def readers(self, op: str) -> int:
        """How many times a result of `op` is read, or its end waited for."""
        return sum(op_of(name) == op for node in self.nodes.values() for name in node.input)

    def pass_by(self, marker: str, own: str, total: str) -> None:
        """Let `marker` pass on `own`, and all that reads it read `total`, which is computed from it."""
        for reader in [name for name, one in self.nodes.items() if marker in map(op_of, one.input)]:
            if reader != op_of(total):
                for index, name in enumerate(self.nodes[reader].input):
                    if op_of(name) == marker and not name.startswith("^"):
                        self._edit(reader).input[index] = total
        self._edit(marker).input[0] = own
        self._totals[marker] = total

    def require_all_rows(self, op: str, whole: str, *, is_shape: bool, message: str) -> None:
        """Let all that reads `op` wait until it is known to return as many rows as there are; else the step fails.

        Args:
            op: whose first result has rows.
            whole: what has all of them, or a shape that begins with their number.
            is_shape: whether it is that.
            message: of the error.
        """

        def all_rows(rows: tf.Tensor, whole: tf.Tensor) -> tf.Tensor:
            wanted = tf.cast(whole[0] if is_shape else tf.shape(whole)[0], tf.int32)
            found = tf.shape(rows)[0]
            check = tf.raw_ops.Assert(condition=tf.equal(found, wanted), data=[message, found, wanted])
            with tf.control_dependencies([check]):
                return tf.identity(rows)

        specs = [TensorSpec(name, self._tensor_of(name).dtype) for name in (f"{op}:0", whole)]
        (scope,) = unique_names([f"{op}/all_rows"], self.nodes)
        fragment = trace(all_rows, specs, scope=scope)
        readers = [name for name, node in self.nodes.items() if op in map(_spelt, node.input)]
        for reader in readers:
            for index, name in enumerate(self.nodes[reader].input):
                if _spelt(name) == op:
                    self.read(reader, index, fragment.outputs)
        for made in fragment.nodes:
            made.device = self.nodes[op].device
            self.put(made)

    def put(self, made: tf.compat.v1.NodeDef) -> str:
        """Add an op, under a name that nothing has; returns the name."""
        (made.name,) = unique_names([made.name], self.nodes)
        self.nodes[made.name] = made
        self._own.add(made.name)
        return made.name

    def pass_on(self, name: str, tensor: str, dtype: tf.DType) -> str:
        """An op of its own that passes on `tensor`."""
        return self._add("Identity", name, [tensor], T=dtype)

    def cast(self, name: str, tensor: str, source: tf.DType, target: tf.DType) -> str:
        """An op that casts `tensor`."""
        return self._add("Cast", name, [tensor], SrcT=source, DstT=target)

    def sum(self, name: str, terms: Sequence[str], dtype: tf.DType) -> str:
        """The sum of `terms`, which have one shape."""
        if len(terms) == 1:
            return terms[0]
        return self._add("AddN", name, terms, T=dtype, N=len(terms))

    def join_rows(self, name: str, parts: Sequence[str], dtype: tf.DType) -> str:
        """The rows of `parts`, one after the other."""
        if len(parts) == 1:
            return parts[0]
        axis = self._constant(f"{name}/axis", np.array(0, np.int32))
        return self._add("ConcatV2", name, [*parts, axis], T=dtype, N=len(parts), Tidx=tf.int32)

    def cut_rows(self, name: str, tensor: str, tail: int, dtype: tf.DType) -> tuple[str, str]:
        """The rows of `tensor` but the last `tail` ones, and these."""
        sizes = self._constant(f"{name}/sizes", np.array([-1, tail], np.int32))
        axis = self._constant(f"{name}/axis", np.array(0, np.int32))
        parts = self._add("SplitV", name, [tensor, sizes, axis], T=dtype, Tlen=tf.int32, num_split=2)
        return parts, f"{parts}:1"

    def zeros(self, name: str, shape: Sequence[int], dtype: tf.DType) -> str:
        """Zeros: no constant of this size, and computed from nothing that differs between replicas."""
        sizes = self._constant(f"{name}/shape", np.array(shape, np.int32))
        zero = self._constant(f"{name}/zero", np.zeros([], dtype.as_numpy_dtype))
        return self._add("Fill", name, [sizes, zero], T=dtype, index_type=tf.int32)

    def _constant(self, name: str, value: np.ndarray) -> str:
        return self._add("Const", name, [], dtype=tf.as_dtype(value.dtype), value=value)

    def _combined(self, tensor: str, reduction: str, known: tf.TensorShape | None = None) -> str:
        if reduction == AGAIN:
            return self._computed_again(tensor)
        symbol = self._tensor_of(tensor)
        shape = tuple((symbol.shape if known is None else known).as_list())
        if reduction in ("rows", "own", "cut"):
            shape = (None, *shape[1:])
        return self._marker(tensor, symbol.dtype, shape, reduction)

    def _computed_again(self, tensor: str) -> str:
        """`tensor`, computed by copies of its ops from what is combined."""
        name = parse(tensor)
        if name.op not in self._again:
            node = copy.deepcopy(self._graph.nodes[name.op])
            (node.name,) = unique_names([f"{name.op}/of_all_examples"], self.nodes)
            for index, read in enumerate(node.input):
                if not read.startswith("^") and (reduction := self._solution.reduction_again(read)):
                    node.input[index] = self._combined(read, reduction)
            self.nodes[node.name] = node
            self._own.add(node.name)
            self._again[name.op] = node.name
        return str(name._replace(op=self._again[name.op]))

    def combine_change(self, op: str) -> None:
        """Let the assignment `op` write the value before, plus the sum of the changes that replicas would make."""
        assign = self._edit(op)
        handle, value = assign.input[0], assign.input[1]
        symbol = self._tensor_of(value)
        before = self._add("ReadVariableOp", f"{op}/before", [handle], controls_of(assign), dtype=symbol.dtype)
        change = self._add("Sub", f"{op}/change", [value, before], T=symbol.dtype)
        marker = self._marker(change, symbol.dtype, tuple(symbol.shape.as_list()), "sum")
        assign.input[1] = self._add("AddV2", f"{op}/after", [before, marker], T=symbol.dtype)

    def _marker(self, tensor: str, dtype: tf.DType, shape: tuple[int | None, ...], reduction: str) -> str:
        name = parse(tensor)
        key = (str(name), reduction)
        if key not in self._markers:
            suffix = f"_{name.output}" if name.output else ""
            marker = self.pass_on(f"{name.op}/statistic_{reduction}{suffix}", tensor, dtype)
            self._markers[key] = marker
            self.statistics.append(Statistic(f"{marker}:0", dtype.name, shape, reduction))
        return self._markers[key]

    def _add(
        self, op: str, name: str, inputs: Sequence[str], controls: Iterable[str] = (), **attributes: Attribute
    ) -> str:
        """The name of an op of its own, where the last of what it reads is."""
        made = node(op, name, inputs, controls=controls, **attributes)
        made.device = self.nodes[op_of(inputs[-1])].device if inputs else ""
        return self.put(made)


def _spelt(name: str) -> str:
    """The tensor that an input names; "" for one that is only waited for."""
    return "" if name.startswith("^") else str(parse(name))
