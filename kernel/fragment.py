"""New ops are ordinary TensorFlow functions: trace one in a scratch graph, splice its ops in by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist_py.kernel.names import parse
from autodist_py.proto.errors import InvalidGraphError

_ARGUMENT = "AutoDist-Argument-"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the graph that is being rewritten: its name there, type, and shape as far as it is known."""

    name: str
    dtype: tf.DType
    shape: tuple[int | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class Fragment:
    """Ops to add to a graph, and the tensors among them that stand for the traced function's results."""

    nodes: tuple[tf.compat.v1.NodeDef, ...]
    outputs: Any


def trace(function: Callable[..., Any], arguments: Sequence[Any], *, scope: str) -> Fragment:
    """Trace `function` on `arguments` into ops named `scope/...`.

    Args:
        function: a function of tensors, written with TensorFlow's ops; it may set devices, and creates no variable.
        arguments: any structure of `TensorSpec`, passed to `function` as tensors of the same structure.
        scope: the name scope of the new ops; must be unused in the graph they go to.

    Returns:
        The ops, and the structure of `function`'s results with tensor names in the place of tensors.
    """
    specs = tf.nest.flatten(arguments)
    with tf.Graph().as_default() as scratch:
        tensors = [
            tf.compat.v1.placeholder(spec.dtype, spec.shape, name=f"{_ARGUMENT}{position}")
            for position, spec in enumerate(specs)
        ]
        with tf.name_scope(scope):
            results = function(*tf.nest.pack_sequence_as(list(arguments), tensors))
    names = {f"{_ARGUMENT}{position}": spec.name for position, spec in enumerate(specs)}

    def seam(name: str) -> str:
        tensor = parse(name)
        if tensor.op not in names:
            return name
        if tensor.is_control:
            return f"^{parse(names[tensor.op]).op}"
        return names[tensor.op]

    definition = scratch.as_graph_def()
    if definition.library.function:
        raise InvalidGraphError(f"a fragment may call no library function; '{scope}' does")
    nodes = []
    for node in definition.node:
        if node.name in names:
            continue
        for position, name in enumerate(node.input):
            node.input[position] = seam(name)
        nodes.append(node)
    outputs = tf.nest.map_structure(lambda tensor: seam(str(parse(tensor.name))), results)
    return Fragment(tuple(nodes), outputs)
