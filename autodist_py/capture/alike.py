"""Programs without ops that compute again what another one has computed: common subexpressions, eliminated.

An optimizer reads its rate and its count of steps for each variable, and computes the same factors of them. Written out
for each variable and replica, such ops are a large part of a graph, which TensorFlow then takes long to prepare.
TensorFlow eliminates some of them, but only then, and leaves reads of variables.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import tensorflow as tf

from autodist_py.kernel.ir.graph import GraphView, functions_of
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.ir.tf_adapter import is_stateful
from autodist_py.proto.graph_item import GraphItem

_READ, _FED = "ReadVariableOp", "Placeholder"


def without_repeats(item: GraphItem) -> GraphItem:
    """`item`, where ops that compute the same single number of the same ones, and wait for the same, are one op.

    Ops with an effect stay as they are, and so do those that the item names. In a function each read of a variable
    waits for the last write before it, so no write stands between reads that wait for the same. These are made one, if
    the variable is a number that is not trained, such as a rate.

    If two ops on arrays would then read the same, the item is returned as it is. TensorFlow would make those two one,
    and multiply what reads it in another order, so that last bits would differ.
    """
    graph = tf.compat.v1.GraphDef.FromString(item.graph_def)
    kept, scalars = _named(item), GraphView(graph).scalars
    trained = {gradient.variable for gradient in item.gradients}
    numbers = {one.name for one in item.variables if one.shape == () and one.name not in trained}
    first_of: dict[tuple[object, ...], str] = {}
    merged: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        _read_from(node, merged)
        if node.name in scalars and node.name not in kept and _may_be_one(node, numbers):
            first = first_of.setdefault(_key(node), node.name)
            if first != node.name:
                merged[node.name] = first
                continue
        nodes.append(node)
    if not merged or _makes_arrays_alike(nodes, scalars, {*merged.values()}):
        return item
    result = tf.compat.v1.GraphDef(versions=graph.versions, library=graph.library)
    result.node.extend(nodes)
    return replace(item, graph_def=result.SerializeToString(deterministic=True))


def _makes_arrays_alike(
    nodes: Sequence[tf.compat.v1.NodeDef], scalars: Collection[str], firsts: Collection[str]
) -> bool:
    """Whether two ops on arrays may read the same, as far as they read numbers that are computed from merged reads.

    TensorFlow makes equal constants one by itself. It sorts what an op reads, and leaves identities out.

    Args:
        nodes: the ops that are left, in order.
        scalars: those whose results are single numbers.
        firsts: those that others were merged into.
    """
    sources: dict[str, frozenset[str]] = {}
    passes_on: dict[str, str] = {}
    seen = set()
    for node in nodes:
        reads = [name for name in node.input if not parse(name).is_control]
        own = frozenset[str]().union(*(sources.get(op_of(name), ()) for name in reads))
        if node.name in scalars:
            sources[node.name] = frozenset({node.name}) if node.op == _READ and node.name in firsts else own
        elif node.op == "Identity":
            passes_on[node.name] = passes_on.get(op_of(reads[0]), reads[0])
        elif own and not is_stateful(node):
            known = (sorted(sources.get(op_of(name), ())) or passes_on.get(op_of(name), name) for name in reads)
            key = (node.op, *sorted(map(str, known)))
            if key in seen:
                return True
            seen.add(key)
    return False


def _named(item: GraphItem) -> set[str]:
    """The ops that the item names."""
    names = {output.tensor for output in item.outputs} | {statistic.tensor for statistic in item.statistics}
    names |= {tensor for gradient in item.gradients for tensor in gradient.tensors}
    return {op_of(name) for name in names} | {*item.run_ops, *item.table_initializers}


def _read_from(node: tf.compat.v1.NodeDef, merged: dict[str, str]) -> None:
    """Let `node` read from the ops that others were merged into."""
    reads = list(map(parse, node.input))
    if any(read.op in merged for read in reads):
        reads = [read._replace(op=merged.get(read.op, read.op)) for read in reads]
        controls = {str(read) for read in reads if read.is_control}
        node.ClearField("input")
        node.input.extend([*(str(read) for read in reads if not read.is_control), *sorted(controls)])


def _may_be_one(node: tf.compat.v1.NodeDef, numbers: set[str]) -> bool:
    if node.op == _READ:
        return node.input[0] in numbers
    return node.op != _FED and not is_stateful(node) and not any(functions_of(node))


def _key(node: tf.compat.v1.NodeDef) -> tuple[object, ...]:
    """What ops have in common that compute the same."""
    attributes = sorted((name, value.SerializeToString(deterministic=True)) for name, value in node.attr.items())
    return node.op, node.device, tuple(node.input), tuple(attributes)
