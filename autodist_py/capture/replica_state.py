"""State that each replica would have for itself, where one device has one: a step with such an op is refused."""

from collections.abc import Callable

import tensorflow as tf

from autodist_py.capture.recording.user_code import line_of
from autodist_py.kernel.ir.dataflow import standing_once
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.stateful import holding_state
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import GraphItem


def require_no_own_state(
    item: GraphItem, view: GraphView, captured: GraphView, tensor_of: Callable[[str], tf.Tensor]
) -> None:
    """Refuse a step of several replicas that may hold state of its own.

    Args:
        item: the program.
        view: its graph, in canonical form, where the ops of functions have lost their names.
        captured: the graph that it is a part of.
        tensor_of: a tensor of this graph by its name.

    Raises:
        CaptureError: the op, the user's line and the op's type.
    """
    once = standing_once(item, view)
    for node, holder in holding_state(captured, [name for name in view.nodes if name not in once]):
        line = _line_of(node.name, view, tensor_of)
        runs = "" if holder is node else f" runs '{holder.name}', which"
        raise CaptureError(
            f"'{node.name}'{f' ({line})' if line else ''}{runs} is an op of type {holder.op}. It may hold state that "
            "is in no variable: each replica would have its own, where one device has one. Keep the state in a "
            "tf.Variable, take the op out of the step, or train on one device"
        )


def _line_of(op: str, view: GraphView, tensor_of: Callable[[str], tf.Tensor]) -> str:
    """The user's line that made `op`, which may have no result."""
    read = next((name for node in view.nodes.values() for name in node.input if not name.startswith("^")), None)
    return "" if read is None else line_of(tensor_of(read).graph.get_operation_by_name(op))
