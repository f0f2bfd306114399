"""A captured graph that is being changed: what is added to it, and what stands in the place of its ops."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from autodist_py.kernel.ir.edits import Edits
from autodist_py.kernel.ir.fragment import TensorSpec, trace
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.ir.node import identity, node
from autodist_py.kernel.ir.tf_adapter import output_type
from autodist_py.proto.graph_item import GraphItem

_SCOPE = "AutoDist-Shards"


class Editor:
    """Collects edits; every op that is still needed keeps its name, whatever stands there."""

    def __init__(self, view: GraphView):
        self.view = view
        self._edits = Edits()
        self._dropped: set[str] = set()
        self._count = 0

    def add(self, new: tf.compat.v1.NodeDef) -> str:
        """The op is new; its name."""
        self._edits.add([new])
        return new.name

    def put(self, new: tf.compat.v1.NodeDef) -> None:
        """The op stands in the place of the captured one of its name."""
        self._edits.put(new)

    def put_wait(self, op: str, others: Sequence[str]) -> None:
        """In the place of the captured op stands one that only waits for others."""
        self.put(node("NoOp", op, controls=others, like=self.view.nodes[op]))

    def put_identity(self, op: str, tensor: str) -> None:
        """In the place of the captured op, which has one result, stands one that passes on `tensor`."""
        self.put(identity(op, tensor, output_type(self.view.nodes[op], 0), self.view.nodes[op]))

    def drop(self, op: str) -> None:
        """The captured op is gone; nothing reads it any more."""
        self._dropped.add(op)

    def redirect(self, tensor: str, replacement: str) -> None:
        """Whatever reads the tensor of the captured graph reads another one; what the item names stays."""
        self._edits.redirect_all(tensor, replacement)

    def wait(self, op: str, other: str) -> None:
        """The op, captured or new, waits for another one more, wherever in loops of TensorFlow 1 the two stand."""
        self._edits.add_control(op, other)

    def trace(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The names of what `function` makes of tensors."""
        self._count += 1
        fragment = trace(function, arguments, scope=f"{_SCOPE}/{self._count}")
        for new in fragment.nodes:
            self.add(new)
        return fragment.outputs

    def spec(self, tensor: str) -> TensorSpec:
        """What is known of a tensor of the captured graph."""
        name = parse(tensor)
        shape = self.view.shapes[name.op][name.output]
        dtype = output_type(self.view.nodes[name.op], name.output)
        return TensorSpec(tensor, dtype, None if shape.rank is None else tuple(shape.as_list()))

    def rewritten(self, item: GraphItem) -> GraphItem:
        """`item`, with the graph of all changes: of its ops those that are needed.

        What the changes leave without a use (what joins shards for nobody) would else count as a use of what it reads.
        """
        graph = self._edits.apply(self.view)
        idle = graph.nodes.keys() - graph.ancestors(_ends(item))
        graph = graph.without(idle | self._dropped)
        return replace(item, graph_def=graph.graph_def().SerializeToString(deterministic=True))


def _ends(item: GraphItem) -> set[str]:
    """The ops that `item` names: what a step is given, runs and returns, and what is combined over replicas."""
    tensors = [*(output.tensor for output in item.outputs), *(source.name for source in item.inputs)]
    tensors += (statistic.tensor for statistic in item.statistics)
    tensors += (tensor for gradient in item.gradients for tensor in gradient.tensors)
    updates = (op for variable in item.variables for op in variable.update_ops)
    return {*map(op_of, tensors), *item.run_ops, *updates}
