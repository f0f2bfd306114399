"""What a captured program keeps to itself from step to step, which nobody else has."""

import tensorflow as tf

from autodist_py.kernel.ir.dataflow import PYTHON_OPS
from autodist_py.kernel.ir.tf_adapter import keeps_state
from autodist_py.proto.graph_item import GraphItem

_KEEPS_NOTHING = frozenset(
    {
        *("Assert", "CheckNumerics", "CheckNumericsV2", "Print", "PrintV2", "Timestamp", "WriteFile"),
        *("Case", "If", "StatefulPartitionedCall", "While"),
        *("MergeV2Checkpoints", "RestoreV2", "SaveV2"),
        *("StackV2", "TensorArrayV3"),
        "VarHandleOp",
    }
)
"""Stateful op types whose state is of one step, or in files; or a variable, which is the user's."""


def own_state(item: GraphItem) -> frozenset[str]:
    """The types of the ops of `item` that keep something themselves: where a stream of random numbers is, a table.

    What is kept in a resource that an op is given (a variable, an iterator) is not the program's. A type without a
    definition, and Python code, may keep anything. Python code that has no state is named by a count, so it stays, too.
    """
    graph = tf.compat.v1.GraphDef.FromString(item.graph_def)
    functions = {function.signature.name for function in graph.library.function}
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    types = {node.op for node in nodes} - functions - _KEEPS_NOTHING
    return frozenset(filter(keeps_state, types)) | (types & PYTHON_OPS)
