"""Refresh: further replicas begin each step from the first one's variables, which are the user's own."""

from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist_py.kernel.graph_view import VARIABLE_OP, GraphView
from autodist_py.kernel.names import KERNEL_SCOPE, on_replica, replica_of
from autodist_py.kernel.program import Program
from autodist_py.kernel.rewrite import Edits


@dataclass(frozen=True, slots=True)
class Refresh:
    """Further replicas begin each step from the first one's variables, which are the user's own.

    Requires: a replicated graph.
    Ensures: each variable of a further replica is assigned the first replica's value before anything on its replica
        uses it, and the first replica writes that variable only afterwards. So whatever the user, or a function of the
        user's, wrote since the last step counts on every replica. On CPU devices values share memory until updated.
    """

    name: ClassVar[str] = "refresh"

    def __call__(self, program: Program) -> Program:
        if program.num_local_replicas == 1:
            return program
        view = GraphView(program.graph)
        edits = Edits()
        first, *further = program.place.local_replicas
        for node in view.of_type({VARIABLE_OP}):
            if replica_of(node.name) != 0:
                continue
            variable = node.name.removeprefix(on_replica(0, ""))
            read = _node("ReadVariableOp", f"{KERNEL_SCOPE}/Refresh/{variable}/read", first.device, node.attr["dtype"])
            read.input.append(node.name)
            edits.add([read])
            for writer in view.writes[node.name]:
                edits.add_control(writer, read.name)
            for position, replica in enumerate(further, start=1):
                handle = on_replica(position, variable)
                name = f"{KERNEL_SCOPE}/Refresh/{variable}/assign_{position}"
                assign = _node("AssignVariableOp", name, replica.device, node.attr["dtype"])
                assign.input.extend([handle, read.name])
                for user in view.digraph.succ[handle]:
                    edits.add_control(user, assign.name)
                edits.add([assign])
        return replace(program, graph=edits.apply(program.graph))


def _node(op: str, name: str, device: str, dtype: tf.compat.v1.AttrValue) -> tf.compat.v1.NodeDef:
    node = tf.compat.v1.NodeDef(name=name, op=op, device=device)
    node.attr["dtype"].CopyFrom(dtype)
    return node
