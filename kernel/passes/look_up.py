"""LookUp: rows of a variable are looked up in the variable itself, not in a copy of it."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import networkx as nx
import numpy as np
import tensorflow as tf

from autodist_py.kernel.analysis.row_access import is_written_by_rows, lookups_of
from autodist_py.kernel.events import Lookup
from autodist_py.kernel.ir.editor import Editor
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of
from autodist_py.kernel.ir.node import node
from autodist_py.kernel.program import Invariant, Program
from autodist_py.kernel.runner import Contract
from autodist_py.proto.graph_item import Variable

_LOOKS_UP_IN_A_COPY = "GatherV2"


@dataclass(frozen=True, slots=True)
class LookUp:
    """Rows of a variable are looked up in the variable itself, not in a copy of it.

    A variable whose rows are written is copied for whoever reads all of it: a step of SGD through Keras's Embedding,
    which reads the whole table and gathers rows of what it has read, copies all of it.

    Ensures: where a step writes rows of a variable, and before that does nothing with its value but gather rows along
        the first axis, those gathers are `ResourceGather` ops of the same names, which all that writes it waits for.

    Example, on worker 0 of two: rows of a table that is read whole are looked up, and written.

        - table/Read = ReadVariableOp(table)
        - axis = Const()
        - rows = GatherV2(table/Read, ids, axis)
        - update = ResourceScatterSub(table, gradient/table/indices, gradient/table/values)
        + rows = ResourceGather(table, ids)
        + update = ResourceScatterSub(table, gradient/table/indices, gradient/table/values, ^rows)
    """

    name: ClassVar[str] = "look-up"
    contract: ClassVar[Contract] = Contract(requires={Invariant.CAPTURED})

    def __call__(self, program: Program) -> Program:
        view, item = program.analysis.captured, program.item
        editor = Editor(view)
        in_graph = [variable for variable in item.variables if variable.name in program.analysis.writes]
        by_rows = [variable for variable in in_graph if is_written_by_rows(program, variable.name)]
        if not by_rows:
            return program
        graph = nx.DiGraph(view.digraph)
        found = [variable for variable in by_rows if _look_up(program, editor, graph, variable)]
        if not found:
            return program
        return program.of_item(editor.rewritten(item))


def _look_up(program: Program, editor: Editor, graph: "nx.DiGraph[str]", variable: Variable) -> bool:
    """Whether anything was changed for the variable; `graph` is of the ops, with the edges that this adds."""
    view, writers = program.analysis.captured, program.analysis.writes[variable.name]
    lookups = [
        lookup
        for lookup in lookups_of(program, variable.name, writers)
        if view.nodes[lookup.op].op == _LOOKS_UP_IN_A_COPY
    ]
    behind = {op for writer in writers for op in nx.descendants(graph, writer)}
    if behind.intersection(lookup.op for lookup in lookups):
        return False  # It would wait for itself, through what another variable's writers wait for.
    graph.add_edges_from((lookup.op, writer) for lookup in lookups for writer in writers)
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
    inputs, waits = [variable.name, before.input[1]], _waits(view, [lookup.op, op_of(before.input[0])])
    return node("ResourceGather", lookup.op, inputs, controls=waits, like=before, dtype=before.attr["Tparams"])


def _shape(view: GraphView, variable: Variable, op: str) -> tf.compat.v1.NodeDef:
    """The variable's shape, which does not change, in the place of that of what was read."""
    before = view.nodes[op]
    dtype = tf.as_dtype(before.attr["out_type"].type)
    return node("Const", op, like=before, dtype=dtype, value=np.array(variable.shape, dtype.as_numpy_dtype))


def _waits(view: GraphView, ops: Collection[str]) -> list[str]:
    names = dict.fromkeys(name[1:] for op in ops for name in view.nodes[op].input if name.startswith("^"))
    return list(names)
