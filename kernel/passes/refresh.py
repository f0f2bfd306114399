"""Refresh: further replicas begin each step from the first one's variables, which are the user's own."""

from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist_py.kernel.ir.edits import Edits
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import KERNEL_SCOPE, captured_name, on_replica, op_of
from autodist_py.kernel.ir.node import node
from autodist_py.kernel.program import Invariant, Program
from autodist_py.kernel.runner import Contract


@dataclass(frozen=True, slots=True)
class Refresh:
    """Further replicas begin each step from the first one's variables, which are the user's own.

    Ensures: each variable of a further replica is assigned the first replica's value before anything on its replica
        uses it, and the first replica writes that variable only afterwards. So whatever the user, or a function of the
        user's, wrote since the last step counts on every replica. On CPU devices values share memory until updated.
        A variable that is `per_replica` is left out, as every replica's is the user's own; with the option
        `keeps_copies` all are.
        A lookup stays a lookup, after that assignment and before the update, whatever TensorFlow makes of it.

    Example, on one worker of two replicas: `w -= mean(x)`.

        - 0/update = AssignSubVariableOp(0/w, 0/gradient/w)
        - 1/update = AssignSubVariableOp(1/w, 1/gradient/w)
        + Refresh/w/read = ReadVariableOp(0/w)
        + 0/update = AssignSubVariableOp(0/w, 0/gradient/w, ^Refresh/w/read)
        + Refresh/w/assign_1 = AssignVariableOp(1/w, Refresh/w/read)
        + 1/update = AssignSubVariableOp(1/w, 1/gradient/w, ^Refresh/w/assign_1)
    """

    name: ClassVar[str] = "refresh"
    contract: ClassVar[Contract] = Contract(requires={Invariant.REPLICATED}, ensures={Invariant.REFRESHED})

    def __call__(self, program: Program) -> Program:
        edits = Edits()
        for gather in program.graph.of_type({"ResourceGather"}):
            # What an update reads may be read on a server, whose graph has the captured ops alone.
            is_forward = program.analysis.level.get(captured_name(gather.name), 0) == 0
            if is_forward and _is_distinct(program.graph, gather.input[1]):
                edits.add([_shown(gather)])
                edits.set_input(gather.name, 1, _shown(gather).name)
        if program.num_local_replicas == 1:
            return replace(program, graph=edits.apply(program.graph))
        variables = program.copied
        further = range(1, program.num_local_replicas)
        handles = {on_replica(position, name) for position in further for name in variables}
        view = program.graph
        users = view.users(handles)
        for variable in variables:
            first = view.nodes[on_replica(0, variable)]
            read = node("ReadVariableOp", _read(variable), [first.name], like=first)
            edits.add([read])
            for writer in program.analysis.writes[variable]:
                edits.add_control(on_replica(0, writer), read.name)
            for position in further:
                handle = on_replica(position, variable)
                inputs = [handle, read.name]
                assign = node("AssignVariableOp", _assign(variable, position), inputs, like=view.nodes[handle])
                for user in users[handle]:
                    edits.add_control(user, assign.name)
                edits.add([assign])
        return replace(program, graph=edits.apply(view))


def without_idle_copies(program: Program, graph: GraphView) -> GraphView:
    """`graph`, where no copy is assigned that nothing else on its replica uses any more."""
    further = range(1, program.num_local_replicas)
    variables = program.copied
    users = graph.users({on_replica(position, variable) for variable in variables for position in further})
    idle: set[str] = set()
    for variable in variables:
        unused = {
            _assign(variable, position)
            for position in further
            if users[on_replica(position, variable)] == [_assign(variable, position)]
        }
        idle |= unused
        if len(unused) == len(further):
            idle.add(_read(variable))
    return graph.without(idle)


def _is_distinct(view: GraphView, tensor: str) -> bool:
    """Whether `tensor` comes from an op that makes elements distinct."""
    producer = view.nodes[op_of(tensor)]
    while producer.op == "Identity":
        producer = view.nodes[op_of(producer.input[0])]
    return producer.op == "Unique"


def _shown(gather: tf.compat.v1.NodeDef) -> tf.compat.v1.NodeDef:
    """An op that passes on the indices of `gather`, so that it does not read `Unique` any more.

    TensorFlow's graph optimizer makes of `Unique`, `ResourceGather` and a sum over segments one op at a new read of the
    variable, which waits for nothing, and which nothing waits for: it may come before a copy is assigned, or after the
    update.
    """
    inputs, dtype, shape = [gather.input[1]], gather.attr["Tindices"], tf.TensorShape([None])
    return node("EnsureShape", f"{gather.name}/indices", inputs, like=gather, T=dtype, shape=shape)


def _read(variable: str) -> str:
    return f"{KERNEL_SCOPE}/Refresh/{variable}/read"


def _assign(variable: str, position: int) -> str:
    return f"{KERNEL_SCOPE}/Refresh/{variable}/assign_{position}"
