"""LookUp: rows of a variable are looked up in the variable itself, not in a copy of it."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist_py.kernel.analysis import analyse
from autodist_py.kernel.editor import Editor
from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.names import op_of
from autodist_py.kernel.program import Program
from autodist_py.kernel.synchronizers.lookups import Lookup, lookups_of
from autodist_py.proto.graph_item import Variable

_READ = "ReadVariableOp"
_LOOKS_UP_IN_A_COPY = "GatherV2"


@dataclass(frozen=True, slots=True)
class LookUp:
    """Rows of a variable are looked up in the variable itself, not in a copy of it.

    TensorFlow has a variable copied by whoever reads it, once rows of it were written: a step of Keras's Embedding,
    which reads the whole table and gathers rows of what it has read, copies all of it.

    Requires: the captured graph.
    Ensures: where nothing but gathers along the first axis uses the values of a variable that the step reads, before
        all that writes it, those are `ResourceGather` ops of the same names, which all that writes it waits for.
    """

    name: ClassVar[str] = "look-up"

    def __call__(self, program: Program) -> Program:
        view, item = program.analysis.captured, program.item
        editor = Editor(view)
        in_graph = [variable for variable in item.variables if variable.name in program.analysis.writes]
        found = [variable for variable in in_graph if _look_up(program, editor, variable)]
        if not found:
            return program
        graph = editor.graph([*item.run_ops, *(op for one in found for op in program.analysis.writes[one.name])])
        rewritten = replace(item, graph_def=graph.graph_def().SerializeToString(deterministic=True))
        analysis = analyse(rewritten, batch=program.options.batch)
        return replace(program, item=rewritten, analysis=analysis, graph=analysis.captured)


def _look_up(program: Program, editor: Editor, variable: Variable) -> bool:
    """Whether anything was changed for the variable."""
    view, writers = program.analysis.captured, program.analysis.writes[variable.name]
    lookups = [
        lookup
        for lookup in lookups_of(program, variable.name, writers)
        if view.nodes[lookup.op].op == _LOOKS_UP_IN_A_COPY
    ]
    for lookup in lookups:
        editor.put(_gather(view, variable, lookup))
        for writer in writers:
            if f"^{lookup.op}" not in view.nodes[writer].input:
                editor.wait(writer, lookup.op)
    for read in sorted({op_of(view.nodes[lookup.op].input[0]) for lookup in lookups}):
        for shape in view.dataflow_consumers([read]) - {lookup.op for lookup in lookups}:
            editor.put(_shape(view, variable, shape))
        editor.put_wait(read, _waits(view, [read]))
    return bool(lookups)


def _gather(view: GraphView, variable: Variable, lookup: Lookup) -> tf.compat.v1.NodeDef:
    """The lookup, at the variable, when what it read was read."""
    before = view.nodes[lookup.op]
    node = tf.compat.v1.NodeDef(name=lookup.op, op="ResourceGather", device=before.device)
    waits = _waits(view, [lookup.op, op_of(before.input[0])])
    node.input.extend([variable.name, before.input[1], *(f"^{op}" for op in waits)])
    node.attr["dtype"].CopyFrom(before.attr["Tparams"])
    node.attr["Tindices"].CopyFrom(before.attr["Tindices"])
    return node


def _shape(view: GraphView, variable: Variable, op: str) -> tf.compat.v1.NodeDef:
    """The variable's shape, which does not change, in the place of that of what was read."""
    before = view.nodes[op]
    node = tf.compat.v1.NodeDef(name=op, op="Const", device=before.device)
    dtype = tf.as_dtype(before.attr["out_type"].type)
    node.attr["dtype"].CopyFrom(before.attr["out_type"])
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(variable.shape, dtype, [len(variable.shape)]))
    return node


def _waits(view: GraphView, ops: Collection[str]) -> list[str]:
    names = dict.fromkeys(name[1:] for op in ops for name in view.nodes[op].input if name.startswith("^"))
    return list(names)
