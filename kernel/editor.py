"""A captured graph that is being changed: what is added to it, and what stands in the place of its ops."""

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from autodist_py.kernel.fragment import TensorSpec, trace
from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.names import parse
from autodist_py.kernel.tf_adapter import output_type

_SCOPE = "AutoDist-Shards"


class Editor:
    """Collects changes; every op keeps its name, whatever stands there."""

    def __init__(self, view: GraphView):
        self.view = view
        self._added: dict[str, tf.compat.v1.NodeDef] = {}
        self._replaced: dict[str, tf.compat.v1.NodeDef] = {}
        self._waits: dict[str, list[str]] = {}
        self._dropped: set[str] = set()
        self._count = 0

    def add(self, node: tf.compat.v1.NodeDef) -> str:
        """The op is new; its name."""
        self._added[node.name] = node
        return node.name

    def put(self, node: tf.compat.v1.NodeDef) -> None:
        """The op stands in the place of the captured one of its name."""
        self._replaced[node.name] = node

    def put_wait(self, op: str, others: Sequence[str]) -> None:
        """In the place of the captured op stands one that only waits for others."""
        waits = (f"^{other}" for other in others)
        self.put(tf.compat.v1.NodeDef(name=op, op="NoOp", device=self.view.nodes[op].device, input=waits))

    def put_identity(self, op: str, tensor: str) -> None:
        """In the place of the captured op, which has one result, stands one that passes on `tensor`."""
        self.put(identity(op, tensor, output_type(self.view.nodes[op], 0), self.view.nodes[op].device))

    def drop(self, op: str) -> None:
        """The captured op is gone; nothing reads it any more."""
        self._dropped.add(op)

    def wait(self, op: str, other: str) -> None:
        """The captured op waits for another one more."""
        self._waits.setdefault(op, []).append(f"^{other}")

    def trace(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The names of what `function` makes of tensors."""
        self._count += 1
        fragment = trace(function, arguments, scope=f"{_SCOPE}/{self._count}")
        for node in fragment.nodes:
            self.add(node)
        return fragment.outputs

    def spec(self, tensor: str) -> TensorSpec:
        """What is known of a tensor of the captured graph."""
        name = parse(tensor)
        shape = self.view.shapes[name.op][name.output]
        dtype = output_type(self.view.nodes[name.op], name.output)
        return TensorSpec(tensor, dtype, None if shape.rank is None else tuple(shape.as_list()))

    def graph(self, run_ops: Collection[str]) -> GraphView:
        """The graph with all changes; of ops that only wait, in the place of others, those that anyone waits for."""
        graph = self.view.changed(
            added=self._added.values(),
            replaced=[
                self._waiting(self._replaced.get(op, self.view.nodes[op])) for op in self._replaced.keys() | self._waits
            ],
        )
        graph = graph.without(self._dropped)
        while idle := self._idle(graph, run_ops):
            graph = graph.without(idle)
        return graph

    def _idle(self, graph: GraphView, run_ops: Collection[str]) -> list[str]:
        placeholders = {op for op, node in self._replaced.items() if node.op == "NoOp" and op in graph.nodes}
        users = graph.users(placeholders - set(run_ops))
        return [op for op, those in users.items() if not those]

    def _waiting(self, node: tf.compat.v1.NodeDef) -> tf.compat.v1.NodeDef:
        edited = copy.deepcopy(node)
        edited.input.extend(self._waits.get(node.name, ()))
        return edited


def identity(name: str, tensor: str, dtype: tf.DType, device: str = "") -> tf.compat.v1.NodeDef:
    """An op that passes on a tensor under a name."""
    node = tf.compat.v1.NodeDef(name=name, op="Identity", input=[tensor], device=device)
    node.attr["T"].type = dtype.as_datatype_enum
    return node
