"""Of which values of a captured step it is promised that they are as on one device: of all but those warned of."""

from collections.abc import Iterable, Sequence

import tensorflow as tf

from autodist_py.capture.doors.function import CapturedFunction
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of


class Unpromised:
    """What docs/exactness.md leaves open of a step: what depends on an op, loss or result that is warned of.

    Attributes:
        variables: names of the variables that may differ from one device's, after several steps.
        leaves: the positions of such results among the leaves of what the step returns.
    """

    def __init__(self, captured: CapturedFunction, losses: Sequence[str]):
        """Follow what `captured` warns of.

        Args:
            captured: the step.
            losses: the names of all losses in its traced graph.
        """
        item = captured.item
        graph = GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def))
        warned = {*item.local_ops, *item.normalizing_ops}
        is_open = _reach(captured.graph, warned, losses)  # What a linear op returned, its gradient does not read.
        for gradient in item.gradients:
            if is_open or not gradient.reduction:
                warned |= set(map(op_of, gradient.tensors))
        self.variables: set[str] = set()
        while True:
            reached = graph.dataflow_descendants((warned | self.variables) & graph.nodes.keys()) | warned
            found = {variable.name for variable in item.variables if reached & set(variable.update_ops)}
            if found <= self.variables:
                break
            self.variables |= found
        is_open_result = [not output.reduction or op_of(output.tensor) in reached for output in item.outputs]
        self.leaves = [
            position
            for position, index in enumerate(captured.result.leaves)
            if index is not None and is_open_result[index]
        ]


def _reach(graph: tf.Graph | None, ops: Iterable[str], losses: Sequence[str]) -> bool:
    """Whether any of the losses is computed by one of the ops."""
    if graph is None:
        return True
    whole = GraphView(graph.as_graph_def())
    return not whole.dataflow_ancestors(map(op_of, losses)).isdisjoint(ops)
