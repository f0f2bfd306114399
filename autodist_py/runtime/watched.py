"""Variables of the user's whose values may be elsewhere: it is known before eager code reads or writes one.

A watched variable's class is one made of its own, in which the handle, by which TensorFlow reads and writes, says so
first. While a function is traced nothing is said: it reads the variable when it runs, as it is then.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import tensorflow as tf

from autodist_py import tf_adapter

_LOOKS = "_autodist_looks"
_OWN = "_autodist_own_class"


def watch(variable: tf.Variable, owner: object, look: Callable[[tf.Variable], None]) -> None:
    """Call `look(variable)` before eager code reads or writes the variable, until its owner lets go of it."""
    vars(variable).setdefault(_LOOKS, {})[id(owner)] = look
    if not hasattr(type(variable), _OWN):
        variable.__class__ = _watched(cast(Any, type(variable)))


def unwatch(variable: tf.Variable, owner: object) -> None:
    """The owner's look is gone; without any, the variable is of its own class again."""
    looks = vars(variable).get(_LOOKS, {})
    looks.pop(id(owner), None)
    if not looks and hasattr(type(variable), _OWN):
        variable.__class__ = _own_class(variable)
        vars(variable).pop(_LOOKS, None)


def fill(variable: tf.Variable, value: tf.Tensor) -> None:
    """Give the variable a value, without a look."""
    handle = _handle(variable)
    with tf_adapter.eagerly(), tf.device(handle.device):
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def peek(variable: tf.Variable) -> tf.Tensor:
    """What the variable holds here, without a look."""
    handle = _handle(variable)
    with tf_adapter.eagerly(), tf.device(handle.device):
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype.base_dtype)


def _handle(variable: tf.Variable) -> tf.Tensor:
    return _own_class(variable).handle.fget(variable)


def _own_class(variable: tf.Variable) -> Any:
    return getattr(type(variable), _OWN, type(variable))


@cache
def _watched(kind: Any) -> type:
    def handle(self: tf.Variable) -> tf.Tensor:
        if tf.executing_eagerly():
            for look in tuple(vars(self).get(_LOOKS, {}).values()):
                look(self)
        return kind.handle.fget(self)  # Asked anew each time: capture puts a property of its own there for a while.

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**names, "handle": property(handle), _OWN: kind})
