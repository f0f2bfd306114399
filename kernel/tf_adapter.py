"""All that the kernel uses of TensorFlow's private modules: collective ops as graph ops."""

from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.ops import collective_ops


class Group(NamedTuple):
    """Who takes part in a collective, and which one it is.

    Attributes:
        size: the number of members.
        key: names the group.
        instance: names the collective among those of the group; a number, or a scalar int32 tensor.
        hint: the engine, as TensorFlow names it ("ring", "nccl", "auto").
    """

    size: int
    key: int
    instance: int | tf.Tensor
    hint: str


def all_reduce(value: tf.Tensor, group: Group) -> tf.Tensor:
    """The sum of the members' values: the same shape, on every one of them."""
    return collective_ops.all_reduce_v2(
        value, group.size, group.key, group.instance, merge_op="Add", final_op="Id", communication_hint=group.hint
    )


def all_gather(value: tf.Tensor, group: Group) -> tf.Tensor:
    """The members' values, which have equal shapes, one after the other along axis 0, in rank order."""
    return collective_ops.all_gather_v2(value, group.size, group.key, group.instance, communication_hint=group.hint)
