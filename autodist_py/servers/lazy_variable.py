"""Variables of the user's whose values may be elsewhere: it is known before eager code reads or writes one.

A watched variable's class is one made of its own, in which the handle, by which TensorFlow reads and writes, says so
first. A function that the user's code traces captures the handle once, and reads the variable unseen ever after: that
is said, too.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple, cast

import tensorflow as tf

from autodist_py import tf_adapter

_WATCHES = "_autodist_watches"
_OWN = "_autodist_own_class"


class AccessObserver(NamedTuple):
    """Whom a variable tells.

    Attributes:
        look: eager code is about to read or write it.
        captured: a function of the user's, which is being traced, may read or write it whenever it runs.
    """

    look: Callable[[tf.Variable], None]
    captured: Callable[[tf.Variable], None]


def observe_access(variable: tf.Variable, owner: object, observe_access: AccessObserver) -> None:
    """Tell `watch` of what is about to happen to the variable, until its owner lets go of it."""
    vars(variable).setdefault(_WATCHES, {})[id(owner)] = observe_access
    if not hasattr(type(variable), _OWN):
        variable.__class__ = _watched(cast(Any, type(variable)))


def stop_observing(variable: tf.Variable, owner: object) -> None:
    """The owner is told no more; without any, the variable is of its own class again."""
    watches = vars(variable).get(_WATCHES, {})
    watches.pop(id(owner), None)
    if not watches and hasattr(type(variable), _OWN):
        variable.__class__ = _own_class(variable)
        vars(variable).pop(_WATCHES, None)


def is_shared(variable: tf.Variable) -> bool:
    """Whether several owners watch the variable."""
    return hasattr(type(variable), _OWN) and len(vars(variable).get(_WATCHES, {})) > 1


def look_for(owner: object, variables: Iterable[tf.Variable]) -> None:
    """A program of the owner's is about to use these: others who watch them are told, as of eager code."""
    for variable in variables:
        if hasattr(type(variable), _OWN):
            for other, observe_access in tuple(vars(variable).get(_WATCHES, {}).items()):
                if other != id(owner):
                    observe_access.look(variable)


def fill(variable: tf.Variable, value: tf.Tensor) -> None:
    """Give the variable a value, without a look."""
    handle = _handle(variable)
    with tf_adapter.eagerly(), tf.device(handle.device):
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def empty(variable: tf.Variable) -> None:
    """Let go of the memory of the variable's value, without a look; who reads it must fill it before."""
    handle = _handle(variable)
    with tf_adapter.eagerly(), tf.device(handle.device):
        nothing = tf.zeros([0], variable.dtype.base_dtype)
        tf.raw_ops.AssignVariableOp(resource=handle, value=nothing, validate_shape=False)


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
    own = kind.handle

    def handle(self: tf.Variable) -> tf.Tensor:
        for observe_access in tuple(vars(self).get(_WATCHES, {}).values()):
            if tf.executing_eagerly():
                observe_access.look(self)
            elif kind.handle is own:  # While we capture, a property of ours is there.
                observe_access.captured(self)
        return kind.handle.fget(self)

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**names, "handle": property(handle), _OWN: kind})
