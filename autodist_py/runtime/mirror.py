"""Copies of the user's variables on a worker's further devices.

The user's object stays the one to look at: it is the first device's copy. What the user writes to it, eagerly or in a
function traced later, is written to the copies too; the compiled step writes to all of them by itself.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

_WRITES = (
    "assign",
    "assign_add",
    "assign_sub",
    "batch_scatter_update",
    "scatter_add",
    "scatter_div",
    "scatter_max",
    "scatter_min",
    "scatter_mul",
    "scatter_nd_add",
    "scatter_nd_sub",
    "scatter_nd_update",
    "scatter_sub",
    "scatter_update",
    "_restore_from_tensors",
)
"""Methods of a variable that change its value."""


class Mirrors:
    """The copies that one AutoDist object keeps, and the classes of the variables that have them."""

    def __init__(self) -> None:
        # By id, as variables are not hashable; an entry goes with its variable.
        self._copies: dict[int, list[tf.Variable]] = {}
        self._originals: dict[int, tuple[weakref.ref[tf.Variable], type]] = {}
        self._paused = False

    def copies(self, variable: tf.Variable, devices: Sequence[str]) -> list[tf.Variable]:
        """`variable` itself for the first of `devices`, and its copy on each further one; made when first asked for."""
        if len(devices) == 1:
            return [variable]
        if id(variable) not in self._copies:
            self._copies[id(variable)] = [_copy(variable, device) for device in devices[1:]]
            self._originals[id(variable)] = (weakref.ref(variable, self._forget(id(variable))), type(variable))
            variable.__class__ = _writing_through(type(variable), self)
        return [variable, *self._copies[id(variable)]]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While a step is captured: what it writes is written by every replica, not through to the copies."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def refresh(self, variables: Iterable[tf.Variable]) -> None:
        """Write the values of `variables` to their copies."""
        for variable in variables:
            for copy in self._copies.get(id(variable), ()):
                copy.assign(variable.read_value())

    def _forget(self, key: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            self._copies.pop(key, None)
            self._originals.pop(key, None)

        return forget

    def close(self) -> None:
        """Give every variable its own class back, and let go of the copies."""
        for reference, original in self._originals.values():
            variable = reference()
            if variable is not None:
                variable.__class__ = original
        self._originals.clear()
        self._copies.clear()

    def write_through(self, variable: tf.Variable, write: Callable[[], Any]) -> Any:
        """Do `write`, and then the same to the copies of `variable`."""
        result = write()
        if not self._paused:
            self.refresh([variable])
        return result


def _copy(variable: tf.Variable, device: str) -> tf.Variable:
    with tf.init_scope(), tf.device(device):
        return tf.Variable(variable.read_value(), trainable=False, dtype=variable.dtype)


def _writing_through(original: type, mirrors: Mirrors) -> type:
    def method(name: str) -> Callable[..., Any]:
        own = getattr(original, name)

        def write(self: Any, *args: Any, **kwargs: Any) -> Any:
            return mirrors.write_through(self, lambda: own(self, *args, **kwargs))

        write.__name__, write.__doc__ = name, own.__doc__
        return write

    methods = {name: method(name) for name in _WRITES if hasattr(original, name)}
    return type(f"Mirrored{original.__name__}", (original,), methods)
