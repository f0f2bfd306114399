"""What both sides of an exchange ask of a program."""

from collections.abc import Sequence

import tensorflow as tf

from autodist_py.kernel.events import Exchange
from autodist_py.kernel.ir.graph import VARIABLE_OP, GraphView
from autodist_py.kernel.ir.names import on_replica, op_of, parse
from autodist_py.kernel.ir.node import node
from autodist_py.kernel.ir.tf_adapter import output_type
from autodist_py.kernel.program import Program


def writers_in(program: Program, exchange: Exchange, handle: str) -> list[str]:
    """The ops of the captured graph that write the variable in the exchange."""
    return [op for op in program.analysis.writes[handle] if op in exchange.ops]


def first_writers(program: Program, exchange: Exchange) -> list[str]:
    """All that write a variable in the exchange, on the first replica."""
    writers = {op: None for handle in program.analysis.writes for op in writers_in(program, exchange, handle)}
    return [on_replica(0, op) for op in writers]


def read_of(program: Program, handle: str, name: str, *, waits: Sequence[str]) -> tf.compat.v1.NodeDef:
    """An op that reads the first replica's variable after `waits`."""
    own = on_replica(0, handle)
    return node("ReadVariableOp", name, [own], controls=waits, like=program.graph.nodes[own])


def type_of(view: GraphView, tensor: str) -> tf.DType:
    """The type of a tensor of the graph."""
    name = parse(tensor)
    return output_type(view.nodes[name.op], name.output)


def spelt(tensor: str) -> str:
    """The one way in which a tensor's name is written here."""
    return str(parse(tensor))


def with_variables(program: Program, nodes: Sequence[tf.compat.v1.NodeDef]) -> GraphView:
    """A graph of `nodes` and the variables that they use."""
    handles = {op_of(name) for one in nodes for name in one.input}
    handles &= {one.name for one in program.graph.of_type({VARIABLE_OP})}
    return program.graph.made_of([*nodes, *(program.graph.nodes[handle] for handle in sorted(handles))], ())
