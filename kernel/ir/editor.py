"""A captured graph that is being changed: what is added to it, and what stands in the place of its ops."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from autodist_py.kernel.ir.fragment import TensorSpec, trace
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.ir.node import identity, node
from autodist_py.kernel.ir.tf_adapter import output_type
from autodist_py.proto.graph_item import GraphItem

_SCOPE = "AutoDist-Shards"


class Editor:
    """Collects changes; every op that is still needed keeps its name, whatever stands there."""

    def __init__(self, view: GraphView):
        self.view = view
        self._added: dict[str, tf.compat.v1.NodeDef] = {}
        self._replaced: dict[str, tf.compat.v1.NodeDef] = {}
        self._waits: dict[str, list[str]] = {}
        self._dropped: set[str] = set()
        self._redirected: dict[str, str] = {}
        self._count = 0

    def add(self, new: tf.compat.v1.NodeDef) -> str:
        """The op is new; its name."""
        self._added[new.name] = new
        return new.name

    def put(self, new: tf.compat.v1.NodeDef) -> None:
        """The op stands in the place of the captured one of its name."""
        self._replaced[new.name] = new

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
        self._redirected[tensor] = replacement

    def wait(self, op: str, other: str) -> None:
        """The op, captured or new, waits for another one more, wherever in loops of TensorFlow 1 the two stand."""
        for waiting, awaited in self.view.waits(op, other):
            self._waits.setdefault(waiting, []).append(f"^{awaited}")

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
        readers = self.view.dataflow_consumers(map(op_of, self._redirected))
        graph = self.view.changed(
            added=map(self._edited, self._added.values()),
            replaced=[
                self._edited(self._replaced.get(op, self.view.nodes[op]))
                for op in self._replaced.keys() | readers | self._waits.keys() - self._added.keys()
            ],
        )
        idle = graph.nodes.keys() - graph.ancestors(_ends(item))
        graph = graph.without(idle | self._dropped)
        return replace(item, graph_def=graph.graph_def().SerializeToString(deterministic=True))

    def _edited(self, original: tf.compat.v1.NodeDef) -> tf.compat.v1.NodeDef:
        if original.name not in self._waits and self._redirected.keys().isdisjoint(original.input):
            return original
        edited = copy.deepcopy(original)
        for position, name in enumerate(original.input):
            edited.input[position] = self._redirected.get(name, name)
        edited.input.extend(self._waits.get(original.name, ()))
        return edited


def _ends(item: GraphItem) -> set[str]:
    """The ops that `item` names: what a step is given, runs and returns, and what is combined over replicas."""
    tensors = [*(output.tensor for output in item.outputs), *(source.name for source in item.inputs)]
    tensors += (statistic.tensor for statistic in item.statistics)
    tensors += (tensor for gradient in item.gradients for tensor in gradient.tensors)
    updates = (op for variable in item.variables for op in variable.update_ops)
    return {*map(op_of, tensors), *item.run_ops, *updates}
