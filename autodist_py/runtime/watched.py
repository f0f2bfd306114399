"""Variables of the user's whose values may be elsewhere: it is known before eager code reads or writes one.

A watched variable's class is one made of its own, in which the handle, by which TensorFlow reads and writes, says so
first. Functions that were traced before have the handle already: they see the variable as it is.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import tensorflow as tf

from autodist_py import tf_adapter

_LOOK = "_autodist_look"


def watch(variable: tf.Variable, look: Callable[[tf.Variable], None]) -> None:
    """Call `look(variable)` before eager code reads or writes the variable."""
    if _LOOK not in vars(variable):
        variable.__class__ = _watched(cast(Any, type(variable)))
    vars(variable)[_LOOK] = look


def unwatch(variable: tf.Variable) -> None:
    """The variable is of its own class again."""
    if vars(variable).pop(_LOOK, None) is not None:
        variable.__class__ = type(variable).__base__


def empty(variable: tf.Variable) -> None:
    """Let go of the variable's value and its memory: until it is filled, nothing can compute with it."""
    fill(variable, tf.zeros([0], variable.dtype.base_dtype))


def fill(variable: tf.Variable, value: tf.Tensor) -> None:
    """Give the variable a value, whether or not it is empty, without a look."""
    handle = _handle(variable)
    with tf_adapter.eagerly(), tf.device(handle.device):
        tf.raw_ops.AssignVariableOp(resource=handle, value=value, validate_shape=False)


def peek(variable: tf.Variable) -> tf.Tensor:
    """What the variable holds here, without a look."""
    handle = _handle(variable)
    with tf_adapter.eagerly(), tf.device(handle.device):
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype.base_dtype)


def _handle(variable: tf.Variable) -> tf.Tensor:
    kind: Any = type(variable)
    return (kind.__base__ if _LOOK in vars(variable) else kind).handle.fget(variable)


@cache
def _watched(kind: Any) -> type:
    def handle(self: tf.Variable) -> tf.Tensor:
        if tf.executing_eagerly():
            vars(self)[_LOOK](self)
        return kind.handle.fget(self)  # Asked anew each time: capture puts a property of its own there for a while.

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**names, "handle": property(handle)})
