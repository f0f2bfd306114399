"""Whether a step that is traced again, as its program was let go, is what it was: one device traces it once."""

import hashlib
import weakref
from dataclasses import dataclass

import tensorflow as tf

from autodist_py.capture.function import CapturedFunction


@dataclass(frozen=True, slots=True)
class Trace:
    """What is remembered of a captured step that was let go.

    Attributes:
        fingerprint: of what was captured.
        variables: those that it uses, by name.
        state: what else it closes over, by name: a digest of the value; of what has none, the handle.
    """

    fingerprint: str
    variables: dict[str, weakref.ref[tf.Variable]]
    state: dict[str, bytes | tf.Tensor]

    @classmethod
    def of(cls, captured: CapturedFunction) -> "Trace":
        """What to remember of `captured`."""
        return cls(
            captured.item.fingerprint,
            {name: weakref.ref(variable) for name, variable in captured.variables.items()},
            {name: _value(tensor) for name, tensor in captured.state.items()},
        )

    def other_than(self, captured: CapturedFunction) -> str:
        """What of `captured` is another than it was; "": nothing."""
        if captured.item.fingerprint != self.fingerprint:
            return "its graph"
        for name, variable in captured.variables.items():
            if self.variables[name]() is not variable:
                return f"variable '{name}'"
        for name, tensor in captured.state.items():
            before, now = self.state[name], _value(tensor)
            is_same = before == now if isinstance(before, bytes) and isinstance(now, bytes) else before is now
            if not is_same:
                return f"the tensor '{name}' that it closes over"
        return ""


def _value(tensor: tf.Tensor) -> bytes | tf.Tensor:
    if tensor.dtype in (tf.resource, tf.variant):
        return tensor
    return hashlib.sha256(tf.io.serialize_tensor(tensor).numpy()).digest()
