"""What a pass is, how passes are run, and how a graph is edited: collect the edits, apply them in one walk."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

import tensorflow as tf

from autodist_py.kernel.program import Program
from autodist_py.kernel.verify import verify
from autodist_py.proto.errors import InvalidGraphError


class Pass(Protocol):
    """One rewriting step: a frozen dataclass whose fields are its options.

    Its docstring states what it requires of the program it is given, and what it ensures of the one it returns.
    """

    name: ClassVar[str]

    def __call__(self, program: Program) -> Program:
        """The rewritten program; `program` itself stays as it is."""
        ...


class Observer(Protocol):
    """Sees the program after each pass (a dump, a count of ops); changes nothing."""

    def __call__(self, position: int, name: str, program: Program) -> None: ...


def run_passes(program: Program, passes: Sequence[Pass], observers: Sequence[Observer] = ()) -> Program:
    """The program after all `passes`, verified after each.

    Raises:
        InvalidGraphError: a pass left an invalid graph, or edited the one it was given; the message names the pass
            and those that ran before it.
    """
    done: list[str] = []
    before = _digest(program.graph)
    for position, step in enumerate(passes, start=1):
        try:
            result = step(program)
            if _digest(program.graph) != before:
                raise InvalidGraphError("a pass must not edit the graph that it is given")
            before = before if result.graph is program.graph else _digest(result.graph)
            verify(result)
        except Exception as error:
            error.add_note(f"in pass '{step.name}', after {', '.join(done) or 'no other pass'}")
            raise
        for observer in observers:
            observer(position, step.name, result)
        program = result
        done.append(step.name)
    return program


def _digest(graph: tf.compat.v1.GraphDef) -> bytes:
    return hashlib.blake2b(graph.SerializeToString(deterministic=True)).digest()


class Edits:
    """Changes to a graph, collected first and applied together."""

    def __init__(self) -> None:
        self._inputs: dict[tuple[str, int], str] = {}
        self._controls: dict[str, list[str]] = {}
        self._devices: dict[str, str] = {}
        self._tensors: dict[str, dict[str, str]] = {}
        self._added: list[tf.compat.v1.NodeDef] = []

    def set_input(self, op: str, index: int, tensor: str) -> None:
        """Make `tensor` the `index`-th data input of `op`."""
        self._inputs[op, index] = tensor

    def redirect(self, op: str, tensor: str, replacement: str) -> None:
        """Make `op` read `replacement` wherever it reads `tensor`."""
        self._tensors.setdefault(op, {})[tensor] = replacement

    def add_control(self, op: str, dependency: str) -> None:
        """Make `op` wait for the op `dependency`."""
        self._controls.setdefault(op, []).append(f"^{dependency}")

    def set_device(self, op: str, device: str) -> None:
        """Put `op` on `device`."""
        self._devices[op] = device

    def add(self, nodes: Iterable[tf.compat.v1.NodeDef]) -> None:
        """Append new ops."""
        self._added.extend(nodes)

    def apply(self, graph: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
        """A new graph: `graph` with all edits in it. Edits may name the added ops too."""
        result = tf.compat.v1.GraphDef()
        result.CopyFrom(graph)
        result.node.extend(self._added)
        touched = {op for op, _ in self._inputs} | self._controls.keys() | self._devices.keys() | self._tensors.keys()
        for node in result.node:
            if node.name in touched:
                self._edit(node)
        return result

    def _edit(self, node: tf.compat.v1.NodeDef) -> None:
        redirected = self._tensors.get(node.name, {})
        for index, name in enumerate(node.input):
            replacement = self._inputs.get((node.name, index), redirected.get(name))
            if replacement is not None:
                node.input[index] = replacement
        node.input.extend(self._controls.get(node.name, ()))
        if node.name in self._devices:
            node.device = self._devices[node.name]
