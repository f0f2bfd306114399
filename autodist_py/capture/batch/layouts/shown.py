"""What `autodist verify` may compare beside results: the values of ops of which it is known what they are."""

from collections.abc import Callable, Iterator, Set

import tensorflow as tf

from autodist_py.capture.shapes import static_shape
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout
from autodist_py.kernel.collectives.collectives import CARRIED
from autodist_py.kernel.ir.control_flow import CONTROL_FLOW
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.proto.graph_item import Output

_RESULTS = {
    BatchLayout.REPLICATED: "same",
    BatchLayout.SHARDED: "rows",
    BatchLayout.PARTIAL_SUM: "sum",
    BatchLayout.COUNT: "sum",
    BatchLayout.PARTIAL_MEAN: "mean",
}


def known_values(
    graph: GraphView, known: Set[str], layout: Callable[[str], BatchLayout], tensor_of: Callable[[str], tf.Tensor]
) -> Iterator[Output]:
    """The tensors of `graph` of which it is known what they are for the whole batch, each after what it is of.

    Args:
        graph: the program's.
        known: the ops whose layouts were found.
        layout: the layout of a tensor.
        tensor_of: a tensor by its name; only its shape and type are used.
    """
    hidden = graph.dataflow_descendants(node.name for node in graph.of_type(CONTROL_FLOW))
    read = {str(parse(name)) for node in graph.nodes.values() for name in node.input if not name.startswith("^")}
    of_op: dict[str, list[str]] = {}
    for tensor in sorted(read):
        of_op.setdefault(op_of(tensor), []).append(tensor)
    for op in graph.dataflow_order(graph.nodes):
        if op in hidden or op not in known:
            continue
        for tensor in of_op.get(op, ()):
            symbol = tensor_of(tensor)
            reduction = _RESULTS.get(layout(tensor), "")
            shape = static_shape(symbol.shape)
            if symbol.dtype in CARRIED and reduction and _fits(shape, reduction):
                yield Output(f"{op}:{parse(tensor).output}", symbol.dtype.name, shape, reduction)


def _fits(shape: tuple[int | None, ...] | None, reduction: str) -> bool:
    """Whether a result of this static shape can be returned for the whole batch."""
    if reduction == "same":
        return True
    if reduction == "rows":
        return shape is not None and shape[:1] == (None,) and None not in shape[1:]
    return shape is not None and None not in shape
