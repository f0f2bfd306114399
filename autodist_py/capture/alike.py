"""Programs without ops that compute again what another one has computed.

An optimizer reads its rate and its count of steps for each variable, and computes the same factors of them. Written out
for each variable and replica, such ops are a large part of a graph, which TensorFlow then takes long to prepare.
"""

from dataclasses import replace

import tensorflow as tf

from autodist_py.kernel.ir.graph import GraphView, functions_of
from autodist_py.kernel.ir.names import op_of
from autodist_py.kernel.ir.tf_adapter import is_stateful
from autodist_py.proto.graph_item import GraphItem

_READ, _FED = "ReadVariableOp", "Placeholder"

_Key = tuple[object, ...]
"""What ops have in common that compute the same."""


def without_repeats(item: GraphItem) -> GraphItem:
    """`item`, where ops that compute the same single number of the same ones, and wait for the same, are one op.

    Ops with an effect stay as they are, and so do those that the item names. Two reads of a variable that wait for the
    same ops have no write between them, so that they may be one. They are, of numbers that are not trained, such as a
    rate. If thereby two ops on arrays would read the same, all stay as they are: TensorFlow would make these one, and
    what reads it is computed in another order, so that its last bit may differ.
    """
    graph = tf.compat.v1.GraphDef.FromString(item.graph_def)
    kept, scalars = _named(item), GraphView(graph).scalars
    trained = {gradient.variable for gradient in item.gradients}
    numbers = {one.name for one in item.variables if one.shape == () and one.name not in trained}
    first_of: dict[_Key, str] = {}
    merged: dict[str, str] = {}
    arrays: dict[_Key, _Key] = {}
    nodes = []
    for node in graph.node:
        before = _key(node)
        _read_from(node, merged)
        key = _key(node)
        if node.name not in scalars:
            if not is_stateful(node) and arrays.setdefault(key, before) != before:
                return item
        elif node.name not in kept and _may_be_one(node, numbers):
            first = first_of.setdefault(key, node.name)
            if first != node.name:
                merged[node.name] = first
                continue
        nodes.append(node)
    if not merged:
        return item
    result = tf.compat.v1.GraphDef(versions=graph.versions, library=graph.library)
    result.node.extend(nodes)
    return replace(item, graph_def=result.SerializeToString(deterministic=True))


def _named(item: GraphItem) -> set[str]:
    """The ops that the item names."""
    names = {output.tensor for output in item.outputs} | {statistic.tensor for statistic in item.statistics}
    names |= {tensor for gradient in item.gradients for tensor in gradient.tensors}
    return {op_of(name) for name in names} | {*item.run_ops, *item.table_initializers}


def _read_from(node: tf.compat.v1.NodeDef, merged: dict[str, str]) -> None:
    """Let `node` read from the ops that others were merged into."""
    if not any(op_of(name) in merged for name in node.input):
        return
    data, controls = [], set()
    for name in node.input:
        op = op_of(name)
        if name.startswith("^"):
            controls.add(f"^{merged.get(op, op)}")
        else:
            data.append(f"{merged.get(op, op)}{name[len(op) :]}")
    del node.input[:]
    node.input.extend([*data, *sorted(controls)])


def _may_be_one(node: tf.compat.v1.NodeDef, numbers: set[str]) -> bool:
    if node.op == _READ:
        return node.input[0] in numbers
    return node.op != _FED and not is_stateful(node) and not any(functions_of(node))


def _key(node: tf.compat.v1.NodeDef) -> _Key:
    attributes = sorted((name, value.SerializeToString(deterministic=True)) for name, value in node.attr.items())
    return node.op, node.device, tuple(node.input), tuple(attributes)
