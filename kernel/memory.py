"""What a program keeps from step to step beside the user's variables: on each worker its own, by itself."""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist_py.kernel.compressors.codec import Slot
from autodist_py.proto.strategy import shard_name


@dataclass(frozen=True, slots=True)
class Memory:
    """A variable of the program's own, of which each worker has another value.

    For people, and in checkpoints, it is one variable of a new first axis, by workers in rank order.

    Attributes:
        name: the variable's.
        owner: the captured variable that it is kept for.
        op: the op that stands for this worker's value.
        slot: what one worker's value is.
    """

    name: str
    owner: str
    op: str
    slot: Slot

    def part(self, position: int) -> str:
        """The name of the value of the worker at that position."""
        return shard_name(self.name, position)


class Recorder:
    """Makes the ops that read and write memories while a fragment is traced, and notes them."""

    def __init__(self) -> None:
        """Nothing is remembered yet."""
        self.memories: list[Memory] = []
        self.writers: list[str] = []

    def read(self, slot: Slot, *, name: str, owner: str) -> tuple[tf.Tensor, tf.Tensor]:
        """A memory's handle, and this worker's value."""
        handle = tf.raw_ops.VarHandleOp(dtype=slot.dtype, shape=[1, *slot.shape], shared_name=name, name="memory")
        self.memories.append(Memory(name, owner, handle.op.name, slot))
        return handle, tf.reshape(tf.raw_ops.ReadVariableOp(resource=handle, dtype=slot.dtype), slot.shape)

    def write(self, handle: tf.Tensor, value: tf.Tensor, *, after: Sequence[tf.Tensor]) -> None:
        """The memory's new value, which it has when `after` are computed: together with all other workers."""
        with tf.control_dependencies(list(after)):
            op = tf.raw_ops.AssignVariableOp(resource=handle, value=tf.expand_dims(value, 0))
        self.writers.append(op.name)
