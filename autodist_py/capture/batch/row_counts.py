"""What reads rows of all examples beside rows of a replica's own: no number of rows fits both."""

from collections.abc import Callable, Iterator

import tensorflow as tf

from autodist_py.capture.batch.layouts.solution import Solution
from autodist_py.capture.recording.user_code import line_of
from autodist_py.kernel.analysis.batch_layout.arithmetic import ADDITIVE, ELEMENTWISE
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.proto.graph_item import GraphItem

_ROW_BY_ROW = frozenset(ELEMENTWISE) | ADDITIVE | {"Sub", "Mul", "RealDiv", "Maximum", "Minimum"}
"""Op types that take the rows of what they read in pairs."""


def rows_that_do_not_fit(
    item: GraphItem, captured: GraphView, solution: Solution, tensor_of: Callable[[str], tf.Tensor]
) -> Iterator[str]:
    """Of each op that pairs rows of the whole batch with those of a replica's own: what it reads, and the user's line.

    Replicas have combined the former for a result, or a write; the latter a loss reads. `captured` is the graph before
    anything was combined.
    """
    joined = {op_of(one.tensor) for one in item.statistics if one.reduction == "rows"}
    if not joined:
        return
    graph = GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def))
    made_of_all = graph.dataflow_descendants(joined)

    def has_rows(tensor: str) -> bool:
        shape = tensor_of(tensor).shape
        return shape.rank is None or shape[:1].as_list() == [None]

    def is_of_all(tensor: str) -> bool:
        is_made_of_all = op_of(tensor) in made_of_all and solution.layout(tensor) is BatchLayout.REPLICATED
        return op_of(tensor) in joined or (is_made_of_all and has_rows(tensor))

    def is_own(tensor: str) -> bool:
        return op_of(tensor) not in made_of_all and solution.layout(tensor) is BatchLayout.MIXED and has_rows(tensor)

    known = captured.nodes.keys() | joined
    for node in graph.of_type(_ROW_BY_ROW):
        if node.name not in captured.nodes:
            continue
        reads = [str(parse(name)) for name in node.input if not name.startswith("^") and op_of(name) in known]
        of_all, own = list(filter(is_of_all, reads)), list(filter(is_own, reads))
        if of_all and own:
            line = line_of(tensor_of(f"{node.name}:0").op)
            yield (
                f"'{node.name}'{f' ({line})' if line else ''} pairs rows of the whole batch ('{of_all[0]}') with a "
                f"replica's own ('{own[0]}', which a loss reads): return both, and pair them outside of the step"
            )
