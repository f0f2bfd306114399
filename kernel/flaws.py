"""Whether a graph item is at fault where the compiler failed: one that was read from a file may hold any bytes.

It is asked only then, so that a program costs nothing more to compile.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf
from google.protobuf.message import DecodeError

from autodist_py.kernel.ir.tf_adapter import require_importable
from autodist_py.proto.errors import AutoDistError, GraphItemError
from autodist_py.proto.graph_item import GraphItem


@contextmanager
def blamed(item: GraphItem) -> Iterator[None]:
    """What fails within because `item` has no graph that TensorFlow takes, or names no op of it, says so.

    Raises:
        GraphItemError: what is wrong with the item.
    """
    try:
        yield
    except AutoDistError:
        raise
    except Exception as error:
        flaw = flaw_of(item)
        if flaw:
            raise GraphItemError(f"the graph item cannot be compiled, as {flaw}") from error
        raise


def flaw_of(item: GraphItem) -> str:
    """Why no program can be made of `item`; "": nothing is wrong with its graph, and with what it names of that."""
    try:
        graph = tf.compat.v1.GraphDef.FromString(item.graph_def)
    except DecodeError as error:
        return f"its graph is no GraphDef: {error}"
    try:
        require_importable(graph)
        with tf.Graph().as_default() as imported:
            tf.import_graph_def(graph, name="")
    except Exception as error:  # TensorFlow's own, of any kind.
        return f"TensorFlow does not take its graph: {error}"
    missing = sorted(name for name in _named(item) if not _is_in(imported, name))
    if missing:
        return f"it names {', '.join(map(repr, missing[:3]))}, which its graph lacks"
    unknown = sorted(name for name in _dtypes(item) if not _is_type(name))
    return f"it names the types {', '.join(map(repr, unknown[:3]))}, which TensorFlow lacks" if unknown else ""


def _is_in(graph: tf.Graph, name: str) -> bool:
    """Whether the graph has the op, or the tensor, of that name."""
    try:
        graph.as_graph_element(name)
    except (KeyError, ValueError):
        return False
    return True


def _dtypes(item: GraphItem) -> set[str]:
    variables, inputs = {each.dtype for each in item.variables}, {each.dtype for each in item.inputs}
    return variables | inputs | {each.dtype for each in item.outputs}


def _is_type(name: str) -> bool:
    try:
        tf.as_dtype(name)
    except TypeError:
        return False
    return True


def _named(item: GraphItem) -> Iterator[str]:
    """The ops and tensors that the item says something of."""
    for variable in item.variables:
        yield from (variable.name, *variable.update_ops)
    for gradient in item.gradients:
        yield from gradient.tensors
    yield from (each.name for each in item.inputs)
    yield from (each.tensor for each in item.outputs)
    yield from (each.tensor for each in item.statistics)
    yield from item.run_ops
