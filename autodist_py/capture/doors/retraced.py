"""Whether a step that is traced again, as its program was let go, is what it was: one device traces it once."""

import hashlib
import weakref
from dataclasses import dataclass

import tensorflow as tf

from autodist_py.capture.doors.function import CapturedFunction
from autodist_py.kernel.ir.names import parse
from autodist_py.proto.graph_item import GraphItem

_DIGESTED_BYTES = 1 << 26
"""Of a larger tensor it is remembered which one it is, not what is in it."""

_NAMED_ATTRIBUTES = ("frame_name", "tensor_array_name")
"""Names that TensorFlow makes of the names of scopes."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What is remembered of a captured step that was let go.

    Attributes:
        form: a digest of what was captured, whatever its ops are named.
        variables: those that it uses, in order.
        state: what else it closes over, in order: a digest of the value, or the tensor where that has none.
    """

    form: bytes
    variables: tuple[weakref.ref[tf.Variable], ...]
    state: tuple[bytes | weakref.ref[tf.Tensor], ...]

    @classmethod
    def of(cls, captured: CapturedFunction) -> "Trace":
        """What to remember of `captured`."""
        return cls(
            _form(captured.item),
            tuple(weakref.ref(variable) for variable in captured.variables.values()),
            tuple(_value(tensor) for tensor in captured.state.values()),
        )

    def other_than(self, captured: CapturedFunction) -> str:
        """What of `captured` is another than it was; "": nothing."""
        if self.form != _form(captured.item):
            return "its graph"
        for before, (name, variable) in zip(self.variables, captured.variables.items(), strict=True):
            if before() is not variable:
                return f"variable '{name}'"
        for value, (name, tensor) in zip(self.state, captured.state.items(), strict=True):
            is_same = value == _value(tensor) if isinstance(value, bytes) else value() is tensor
            if not is_same:
                return f"the tensor '{name}' that it closes over"
        return ""


def _form(item: GraphItem) -> bytes:
    """A digest of the graph and of what is said of it, in which ops are named by their positions.

    Their names hold counts of the process: Keras counts the losses without a name, also those that a step makes.
    """
    graph = tf.compat.v1.GraphDef.FromString(item.graph_def)
    kept = {variable.name for variable in item.variables} | {source.name for source in item.inputs}
    names = {node.name: node.name if node.name in kept else f"op_{at}" for at, node in enumerate(graph.node)}

    def renamed(name: str) -> str:
        read = parse(name)
        return str(read._replace(op=names[read.op]))

    for node in graph.node:
        inputs = [renamed(name) for name in node.input]
        node.name = names[node.name]
        for index, name in enumerate([*filter(_is_data, inputs), *sorted(one for one in inputs if not _is_data(one))]):
            node.input[index] = name
        for attribute in _NAMED_ATTRIBUTES:
            if attribute in node.attr:
                del node.attr[attribute]
    tensors = [*(one for gradient in item.gradients for one in gradient.tensors), *(one.tensor for one in item.outputs)]
    told = "\n".join(map(renamed, [*tensors, *item.run_ops]))
    return hashlib.sha256(graph.SerializeToString(deterministic=True) + told.encode()).digest()


def _is_data(name: str) -> bool:
    return not name.startswith("^")


def _value(tensor: tf.Tensor) -> bytes | weakref.ref[tf.Tensor]:
    has_value = tensor.dtype not in (tf.resource, tf.variant)
    if not has_value or tensor.shape.num_elements() * max(tensor.dtype.size, 1) > _DIGESTED_BYTES:
        return weakref.ref(tensor)
    return hashlib.sha256(tf.io.serialize_tensor(tensor).numpy()).digest()
