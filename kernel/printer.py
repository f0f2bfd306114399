"""Graphs as text: one op a line, for goldens, dumps and errors."""

import hashlib
import re

import tensorflow as tf

from autodist_py.kernel.events import Schedule
from autodist_py.kernel.ir.graph import GraphView, functions_of
from autodist_py.kernel.ir.names import op_of, parse

_PLAIN = re.compile(r"[\w./:;+@%-]*")
_SHOWN_NUMBERS = 4
_HIDDEN_ATTRIBUTES = frozenset({"T", "Tidx", "Tparams", "Tindices", "dtype", "out_type", "output_types", "N", "_class"})


def format_node(node: tf.compat.v1.NodeDef) -> str:
    """`name = Op(input, ^control) {attribute} @device`; attributes that only repeat types are left out."""
    inputs = ", ".join(short_name(name) for name in node.input)
    shown = {key: format_attribute(value) for key, value in sorted(node.attr.items()) if key not in _HIDDEN_ATTRIBUTES}
    if node.op not in {"Const", "Placeholder", "VarHandleOp"} and not list(functions_of(node)):
        shown = {key: value for key, value in shown.items() if key in {"value", "seed", "seed2", "merge_op"}}
    attributes = " {" + ", ".join(f"{key}={value}" for key, value in shown.items()) + "}" if shown else ""
    device = f" @{node.device}" if node.device else ""
    return f"{node.name} = {node.op}({inputs}){attributes}{device}"


def format_graph(graph: GraphView) -> str:
    """Every op on a line, producers before consumers where the graph allows it, else in graph order."""
    return "\n".join(format_node(graph.nodes[name]) for name in printed_order(graph))


def printed_order(graph: GraphView) -> list[str]:
    """The ops, producers before consumers where the graph allows it, else in graph order."""
    nodes = graph.nodes
    printed: dict[str, None] = {}
    for name in nodes:
        pending = [name]
        entered: set[str] = set()
        while pending:
            current = pending[-1]
            missing = [
                producer
                for producer in map(op_of, nodes[current].input)
                if producer in nodes and producer not in printed and producer not in entered
            ]
            entered.add(current)
            if missing:
                pending.append(missing[0])
                continue
            printed.setdefault(pending.pop())
    return list(printed)


def format_schedule(schedule: Schedule) -> str:
    """The events of a step's communication, one a line, in the order in which they are issued."""
    return "\n".join(f"event {event}" for event in schedule.events)


def short_name(name: str) -> str:
    """A tensor's name in its one spelling."""
    return str(parse(name))


def format_attribute(value: tf.compat.v1.AttrValue) -> str:
    """An attribute's value; of a large tensor its type, its shape, and a digest of its numbers."""
    kind = value.WhichOneof("value")
    if kind == "tensor":
        array = tf.make_ndarray(value.tensor)
        if 0 < array.size <= _SHOWN_NUMBERS:
            return str(array.tolist())
        digest = f" {hashlib.sha256(array.tobytes()).hexdigest()[:8]}" if array.size and array.dtype != object else ""
        return f"<{array.dtype} {list(array.shape)}{digest}>"
    if kind == "shape":
        if value.shape.unknown_rank:
            return "?"
        return "[" + ",".join("?" if size.size < 0 else str(size.size) for size in value.shape.dim) + "]"
    if kind == "s":
        return _shown(value.s)
    if kind == "func":
        return value.func.name
    if kind == "type":
        return tf.as_dtype(value.type).name
    if kind == "list":
        shown = [function.name for function in value.list.func]
        shown += [tf.as_dtype(each).name for each in value.list.type]
        shown += [format_attribute(tf.compat.v1.AttrValue(shape=each)) for each in value.list.shape]
        shown += map(_shown, value.list.s)
        shown += [str(each) for each in (*value.list.i, *value.list.f, *value.list.b)]
        return "[" + ", ".join(shown) + "]"
    return str(getattr(value, kind)) if kind else ""


def _shown(text: bytes) -> str:
    """A text as it is, or as Python writes it: where it would be taken for more than one."""
    plain = text.decode(errors="replace")
    return plain if _PLAIN.fullmatch(plain) else repr(text)
