"""New ops are ordinary TensorFlow functions: trace one in a scratch graph, splice its ops in by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tensorflow as tf

from autodist_py.kernel.ir.names import producers_of
from autodist_py.proto.errors import InvalidGraphError

_ARGUMENT = "AutoDist-Argument-"

Shape: TypeAlias = tuple[int | None, ...]
"""A shape whose rank is known."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the graph that is being rewritten: its name there, type, and shape as far as it is known."""

    name: str
    dtype: tf.DType
    shape: Shape | None = None


@dataclass(frozen=True, slots=True)
class Fragment:
    """Ops to add to a graph, and the tensors among them that stand for the traced function's results."""

    nodes: tuple[tf.compat.v1.NodeDef, ...]
    outputs: Any


def _mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    """The structure of lists, tuples and dicts, with what the function makes of each leaf in its place, in order.

    `tf.nest` does so, too, and asks each leaf for many protocols.
    """
    if isinstance(structure, list | tuple):
        made = [_mapped(function, one) for one in structure]
        return type(structure)(*made) if hasattr(structure, "_fields") else type(structure)(made)
    if isinstance(structure, dict):
        return {key: _mapped(function, structure[key]) for key in sorted(structure)}
    return function(structure)


def _placeholders(specs: Sequence[TensorSpec]) -> list[tf.Tensor]:
    """A placeholder for each, in the current graph: imported together, which takes a third of the time."""
    definition = tf.compat.v1.GraphDef()
    definition.versions.producer = tf.version.GRAPH_DEF_VERSION  # To older ones a scalar's shape was any.
    for position, spec in enumerate(specs):
        node = definition.node.add(name=f"{_ARGUMENT}{position}", op="Placeholder")
        node.attr["dtype"].type = spec.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tf.TensorShape(spec.shape).as_proto())
    return list(
        tf.graph_util.import_graph_def(
            definition, name="", return_elements=[f"{one.name}:0" for one in definition.node]
        )
        if specs
        else ()
    )


def trace(function: Callable[..., Any], arguments: Sequence[Any], *, scope: str) -> Fragment:
    """Trace `function` on `arguments` into ops named `scope/...`.

    Args:
        function: a function of tensors, written with TensorFlow's ops; it may set devices, and creates no variable.
        arguments: any structure of `TensorSpec`, passed to `function` as tensors of the same structure.
        scope: the name scope of the new ops; must be unused in the graph they go to.

    Returns:
        The ops, and the structure of `function`'s results with tensor names in the place of tensors.
    """
    specs: list[TensorSpec] = []
    _mapped(specs.append, arguments)
    with tf.Graph().as_default() as scratch:
        tensors = _placeholders(specs)
        with tf.name_scope(scope):
            given = iter(tensors)
            results = function(*_mapped(lambda _: next(given), arguments))
    names = {f"{_ARGUMENT}{position}": spec.name for position, spec in enumerate(specs)}
    spelt = {spelling: name for own, name in names.items() for spelling in (own, f"{own}:0")}
    producers = producers_of({own: [name] for own, name in names.items()})
    spelt |= {f"^{own}": f"^{op}" for own, (op,) in producers.items()}

    definition = scratch.as_graph_def()
    if definition.library.function:
        raise InvalidGraphError(f"a fragment may call no library function; '{scope}' does")
    nodes = []
    for node in definition.node:
        if node.name in names:
            continue
        for position, name in enumerate(node.input):
            if name in spelt:
                node.input[position] = spelt[name]
        nodes.append(node)
    outputs = _mapped(lambda tensor: spelt.get(tensor.name, tensor.name.removesuffix(":0")), results)
    return Fragment(tuple(nodes), outputs)
