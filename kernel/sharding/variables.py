"""A variable in shards, with its optimizer's state and its update: each shard is a variable like any other."""

import copy
from collections.abc import Collection, Sequence
from dataclasses import replace

import networkx as nx
import tensorflow as tf

from autodist_py.kernel.analysis.row_access import SHAPES
from autodist_py.kernel.analysis.shard_plan import Cut
from autodist_py.kernel.analysis.shard_rules import REDUCTIONS, Rule
from autodist_py.kernel.ir.editor import Editor
from autodist_py.kernel.ir.fragment import TensorSpec
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.ir.node import controls_of, node
from autodist_py.kernel.ir.tf_adapter import output_type
from autodist_py.kernel.sharding.gradients import owners
from autodist_py.proto.graph_item import Variable
from autodist_py.proto.strategy import shard_name


def cut_variable(editor: Editor, cut: Cut) -> dict[str, list[Variable]]:
    """Rewrite what uses the variable, whose gradients are cut already.

    Returns:
        For each variable that is cut, those in its place: itself, if others read it whole, and its shards.
    """
    return _Cutting(editor, cut).variables()


class _Cutting:
    def __init__(self, editor: Editor, cut: Cut):
        self._editor, self._cut = editor, cut
        self._view = editor.view
        self._shards = range(len(cut.sizes))
        self._pieces: dict[tuple[str, int], list[str]] = {}
        self._row_counts: dict[tf.DType, list[str]] = {}

    def variables(self) -> dict[str, list[Variable]]:
        for op, rule in self._cut.rules.items():
            self._clone(op, rule)
        for lookup in self._cut.lookups:
            self._route(lookup.op)
        return {variable.name: self._cut_handle(variable) for variable in self._cut.variables}

    # -- The update ---------------------------------------------------------------------------------------------------

    def _clone(self, op: str, rule: Rule) -> None:
        """The op stands once for each shard; in its own place, what others need of it."""
        node = self._view.nodes[op]
        names = [self._editor.add(self._copy(node, rule, shard)) for shard in self._shards]
        if rule.reduces:
            parts = [TensorSpec(name, output_type(node, 0)) for name in names]
            self._editor.put_identity(op, self._editor.trace(lambda *own: REDUCTIONS[node.op](own), *parts))
        elif op in self._cut.joined:
            parts = [TensorSpec(name, output_type(node, 0)) for name in names]
            joined = self._editor.trace(lambda *own: tf.concat(own, axis=self._cut.axis), *parts)
            self._editor.put_identity(op, joined)
        elif op not in self._cut.repeated:
            self._editor.put_wait(op, names)

    def _copy(self, original: tf.compat.v1.NodeDef, rule: Rule, shard: int) -> tf.compat.v1.NodeDef:
        node = copy.deepcopy(original)
        node.name = shard_name(original.name, shard)
        node.attr.pop("_output_shapes", None)
        for position, name in enumerate(original.input):
            if name.startswith("^"):
                own = name[1:] in self._cut.rules and not self._cut.rules[name[1:]].reduces
                node.input[position] = f"^{shard_name(name[1:], shard)}" if own else name
            else:
                node.input[position] = self._input(name, position, rule, shard)
        return node

    def _input(self, name: str, position: int, rule: Rule, shard: int) -> str:
        tensor = parse(name)
        if position in rule.cut:
            return self._piece(name, rule.cut[position], shard)
        if position == rule.sized:
            return self._row_count(output_type(self._view.nodes[tensor.op], tensor.output), shard)
        if str(tensor) in self._cut.kinds or tensor.op in self._cut.handles:
            return str(tensor._replace(op=shard_name(tensor.op, shard)))
        return name

    def _piece(self, tensor: str, axis: int, shard: int) -> str:
        """The shard's part of a tensor that is not computed shard by shard."""
        if (tensor, axis) not in self._pieces:
            sizes = list(self._cut.sizes)
            cut = self._editor.trace(lambda whole: tf.split(whole, sizes, axis=axis), self._editor.spec(tensor))
            self._pieces[tensor, axis] = cut
        return self._pieces[tensor, axis][shard]

    def _row_count(self, dtype: tf.DType, shard: int) -> str:
        if dtype not in self._row_counts:
            sizes = self._cut.sizes
            self._row_counts[dtype] = self._editor.trace(lambda: [tf.constant(size, dtype) for size in sizes])
        return self._row_counts[dtype][shard]

    # -- Readers ------------------------------------------------------------------------------------------------------

    def _route(self, op: str) -> None:
        """The lookup reads each row in the shard that has it."""
        lookup = self._view.nodes[op]
        table, sizes = self._cut.variables[0], self._cut.sizes
        dtype = tf.as_dtype(table.dtype)

        def places(ids: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            flat = tf.reshape(ids, [-1])
            shards, begins = owners(flat, sizes)
            local = tf.dynamic_partition(flat - begins, shards, len(sizes))
            return local, tf.dynamic_partition(tf.range(tf.size(flat)), shards, len(sizes))

        def together(ids: tf.Tensor, positions: list[tf.Tensor], rows: list[tf.Tensor]) -> tf.Tensor:
            shape = tf.concat([tf.shape(ids), tf.constant(table.shape[1:], tf.int32)], axis=0)
            return tf.reshape(tf.dynamic_stitch(positions, rows), shape)

        waits = controls_of(lookup)
        if lookup.op == "GatherV2":  # What it reads was read when that was allowed.
            waits += controls_of(self._view.nodes[op_of(lookup.input[0])])
        ids = self._editor.spec(lookup.input[1])
        local, positions = self._editor.trace(places, ids)
        rows = []
        for shard, own in enumerate(local):
            inputs, types = [shard_name(table.name, shard), own], {"dtype": dtype, "Tindices": ids.dtype}
            gather = node("ResourceGather", shard_name(op, shard), inputs, controls=waits, like=lookup, **types)
            rows.append(TensorSpec(self._editor.add(gather), dtype, (None, *table.shape[1:])))
        found = [TensorSpec(one, tf.int32, (None,)) for one in positions]
        self._editor.put_identity(op, self._editor.trace(together, ids, found, rows))

    # -- Variables ----------------------------------------------------------------------------------------------------

    def _cut_handle(self, variable: Variable) -> list[Variable]:
        """The shards' handles; the variable itself is given its new values after its writes, or is there no more."""
        shards = []
        writers = self._view.writes[variable.name]
        for shard, shape in enumerate(self._cut.node.shapes(variable.shape)):
            name = shard_name(variable.name, shard)
            node = copy.deepcopy(self._view.nodes[variable.name])
            node.name, node.attr["shared_name"].s = name, name.encode()
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
            self._editor.add(node)
            own = tuple(shard_name(op, shard) for op in writers)
            shards.append(Variable(name, variable.dtype, shape, variable.trainable, variable.aggregation, own))
        if variable.name in self._cut.whole:
            return [self._joined(variable, writers), *shards]
        self._forget(variable)
        return shards

    def _joined(self, variable: Variable, writers: Sequence[str]) -> Variable:
        """The variable is given what its shards hold when all of them are written, or so far as it is read between."""
        renewals = self._cut.whole[variable.name]
        behind = {op: nx.descendants(self._view.digraph, op) for op in writers}
        readers: list[set[str]] = [set() for _ in range(len(renewals) + 1)]
        for op in self._cut.readers(self._view, variable.name):
            before = {writer for writer, those in behind.items() if op in those}
            readers[next((1 + at for at, those in enumerate(renewals) if before <= those), 0) if before else 0].add(op)
        assigns: list[str] = []
        for at, written in enumerate(renewals):
            last = at == len(renewals) - 1
            value = self._value(variable, written, writers, "new" if last else f"new_{at}")
            name = f"{variable.name}/joined" if last else f"{variable.name}/joined_{at}"
            assign = node("AssignVariableOp", name, [variable.name, value], dtype=tf.as_dtype(variable.dtype))
            # What the update itself reads comes before it without waiting for it to be said.
            earlier = set().union(*readers[: at + 1])
            waits = [*(op for op in writers if op in written), *assigns[-1:], *sorted(earlier)]
            assigns.append(self._editor.add(assign))
            for op in waits:
                self._editor.wait(name, op)
            for op in sorted(readers[at + 1]):
                self._editor.wait(op, name)
        return replace(variable, update_ops=tuple(assigns))

    def _value(self, variable: Variable, written: Collection[str], writers: Sequence[str], name: str) -> str:
        """What the shards hold after some of their writes, and before the others."""
        dtype, parts = tf.as_dtype(variable.dtype), []
        for shard in self._shards:
            own = shard_name(variable.name, shard)
            waits = [shard_name(op, shard) for op in writers if op in written]
            read = node("ReadVariableOp", f"{own}/{name}", [own], controls=waits, dtype=dtype)
            parts.append(TensorSpec(self._editor.add(read), dtype))
            for op in writers:
                if op not in written:
                    self._editor.wait(shard_name(op, shard), read.name)
        return self._editor.trace(lambda *own: tf.concat(own, axis=self._cut.axis), *parts)

    def _forget(self, variable: Variable) -> None:
        """Nothing uses the variable as a whole any more: of what does, only its shape is asked."""
        for op in sorted(self._view.dataflow_consumers([variable.name]) - self._cut.rules.keys()):
            node = self._view.nodes[op]
            if node.op == "ReadVariableOp":
                consumers = self._view.dataflow_consumers([op])
                for consumer in consumers:
                    self._put_shape(variable, consumer)
                # Who waits for the read, to write, waits for what is read in its place.
                lookups = sorted(lookup.op for lookup in self._cut.lookups if lookup.op in consumers)
                waits = [name[1:] for name in node.input if name.startswith("^")]
                waits += [shard_name(lookup, shard) for lookup in lookups for shard in self._shards]
                self._editor.put_wait(op, waits)
            self._put_shape(variable, op)
        self._editor.drop(variable.name)

    def _put_shape(self, variable: Variable, op: str) -> None:
        node = self._view.nodes[op]
        if node.op in SHAPES:
            dtype = output_type(node, 0)
            self._editor.put_identity(op, self._editor.trace(lambda: tf.constant(variable.shape, dtype)))
