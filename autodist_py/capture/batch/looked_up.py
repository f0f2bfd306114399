"""Arguments that were taken for batches, and are tables: rows of them are looked up by what another one says."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

import tensorflow as tf

from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of
from autodist_py.proto.graph_item import GraphItem

_PASSED = frozenset(
    {"ArgMax", "Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "StopGradient", "StridedSlice", "Sub"}
)
"""Op types that make labels of what they read first."""


class LookedUp(NamedTuple):
    """A vector of which each example takes elements, by labels of its own: names of inputs, and of the op."""

    table: str
    labels: str
    op: str


def looked_up(item: GraphItem) -> Iterator[LookedUp]:
    """The batched vectors that are looked up in by another batched input.

    Of a batch each example has its own rows. A vector of which an example takes another's element, as weights of
    classes are, is a table, and no part of it is enough.
    """
    fed = {one.name: one for one in item.inputs if one.kind == "feed" and one.batched}
    if len(fed) == 1:
        return
    view = GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def))
    vectors = {name for name, one in fed.items() if one.shape is not None and len(one.shape) == 1}
    for node in view.of_type(("GatherV2",)):
        table, labels = (_source(view, read, fed) for read in node.input[:2])
        axis = view.constant(node.input[2])
        is_lookup = axis is not None and axis == 0 and not node.attr["batch_dims"].i
        if is_lookup and table in vectors and labels in fed and labels != table:
            yield LookedUp(table, labels, node.name)


def _source(view: GraphView, tensor: str, inputs: Collection[str]) -> str:
    """The input that `tensor` passes on, or the op where it comes from."""
    name = op_of(tensor)
    while name not in inputs and view.nodes[name].op in _PASSED:
        name = op_of(view.nodes[name].input[0])
    return name
