"""The one way in which passes make an op by hand: `node`. What is more than a few ops is a fragment."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from autodist_py.kernel.ir.tf_adapter import attribute_names

Attribute: TypeAlias = tf.compat.v1.AttrValue | tf.DType | Sequence[tf.DType] | tf.TensorShape | np.ndarray | int


def node(
    op: str,
    name: str,
    inputs: Iterable[str] = (),
    *,
    controls: Iterable[str] = (),
    like: tf.compat.v1.NodeDef | None = None,
    **attributes: Attribute,
) -> tf.compat.v1.NodeDef:
    """An op of a graph.

    Args:
        op: its type.
        name: its name.
        inputs: the tensors that it reads.
        controls: the ops that it waits for, each once.
        like: an op that stands on the same device, and has the same attributes, as far as both types have them.
        attributes: its other attributes: types, shapes, numbers, a constant's value, or as an op has them.
    """
    made = tf.compat.v1.NodeDef(op=op, name=name)
    made.input.extend(inputs)
    made.input.extend(dict.fromkeys(f"^{other.removeprefix('^')}" for other in controls))
    if like is not None:
        made.device = like.device
        for key in attribute_names(op) & like.attr.keys() - attributes.keys():
            made.attr[key].CopyFrom(like.attr[key])
    for key, value in attributes.items():
        made.attr[key].CopyFrom(_value(value))
    return made


def identity(name: str, tensor: str, dtype: tf.DType, like: tf.compat.v1.NodeDef | None = None) -> tf.compat.v1.NodeDef:
    """An op that passes on a tensor under a name."""
    return node("Identity", name, [tensor], like=like, T=dtype)


def reads_of(node: tf.compat.v1.NodeDef) -> list[str]:
    """The tensors that `node` reads, in order, as it spells them."""
    return [name for name in node.input if not name.startswith("^")]


def controls_of(of: tf.compat.v1.NodeDef) -> list[str]:
    """What the op waits for, as an input says it."""
    return [name for name in of.input if name[0] == "^"]


def _value(given: Attribute) -> tf.compat.v1.AttrValue:
    if isinstance(given, tf.compat.v1.AttrValue):
        return given
    if isinstance(given, tf.DType):
        return tf.compat.v1.AttrValue(type=given.as_datatype_enum)
    if isinstance(given, tf.TensorShape):
        return tf.compat.v1.AttrValue(shape=given.as_proto())
    if isinstance(given, int):
        return tf.compat.v1.AttrValue(i=given)
    if isinstance(given, np.ndarray):
        return tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(given))
    types = [one.as_datatype_enum for one in given]
    return tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(type=types))
