"""How a graph is edited: collect the edits, apply them in one walk."""

import copy
from collections.abc import Iterable, Sequence

import tensorflow as tf

from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of
from autodist_py.proto.errors import InvalidGraphError


class Edits:
    """Changes to a graph, collected first and applied together."""

    def __init__(self) -> None:
        self._inputs: dict[tuple[str, int], str] = {}
        self._waits: list[tuple[str, str]] = []
        self._devices: dict[str, str] = {}
        self._tensors: dict[str, dict[str, str]] = {}
        self._everywhere: dict[str, str] = {}
        self._added: list[tf.compat.v1.NodeDef] = []
        self._put: dict[str, tf.compat.v1.NodeDef] = {}

    def set_input(self, op: str, index: int, tensor: str) -> None:
        """Make `tensor` the `index`-th data input of `op`."""
        self._inputs[op, index] = tensor

    def redirect(self, op: str, tensor: str, replacement: str) -> None:
        """Make `op` read `replacement` wherever it reads `tensor`."""
        self._tensors.setdefault(op, {})[tensor] = replacement

    def redirect_all(self, tensor: str, replacement: str) -> None:
        """Make whatever reads `tensor` read `replacement`."""
        self._everywhere[tensor] = replacement

    def add_control(self, op: str, dependency: str) -> None:
        """Make `op` wait for the op `dependency`, wherever in loops of TensorFlow 1 the two stand."""
        self._waits.append((op, dependency))

    def set_device(self, op: str, device: str) -> None:
        """Put `op` on `device`."""
        self._devices[op] = device

    def add(self, nodes: Iterable[tf.compat.v1.NodeDef]) -> None:
        """Append new ops."""
        self._added.extend(nodes)

    def put(self, node: tf.compat.v1.NodeDef) -> None:
        """Put `node` in the place of the op of its name."""
        self._put[node.name] = node

    def apply(self, graph: GraphView) -> GraphView:
        """A new graph: `graph` with all edits in it. Edits may name the added ops too.

        Raises:
            InvalidGraphError: an added op has the name of another, or an edited one is not there.
        """
        added = {node.name: node for node in self._added}
        controls: dict[str, list[str]] = {}
        for waiting, awaited in (edge for wait in self._waits for edge in graph.waits(*wait)):
            controls.setdefault(waiting, []).append(f"^{awaited}")
        touched = {op for op, _ in self._inputs} | controls.keys() | self._devices.keys() | self._tensors.keys()
        touched |= self._put.keys() | graph.dataflow_consumers(map(op_of, self._everywhere))
        touched |= {name for name, node in added.items() if not self._everywhere.keys().isdisjoint(node.input)}
        missing = touched - added.keys() - graph.nodes.keys()
        if missing:
            raise InvalidGraphError(f"'{min(missing)}' is to be edited, but is no op of the graph")
        standing = added | self._put
        replaced = [
            self._edited(standing[op] if op in standing else graph.nodes[op], controls.get(op, ())) for op in touched
        ]
        return graph.changed(added=self._added, replaced=replaced)

    def _edited(self, original: tf.compat.v1.NodeDef, controls: Sequence[str]) -> tf.compat.v1.NodeDef:
        node = copy.deepcopy(original)
        redirected = self._everywhere | self._tensors.get(node.name, {})
        for index, name in enumerate(node.input):
            replacement = self._inputs.get((node.name, index), redirected.get(name))
            if replacement is not None:
                node.input[index] = replacement
        node.input.extend(dict.fromkeys(controls))
        if node.name in self._devices:
            node.device = self._devices[node.name]
        return node
