"""What a program keeps from step to step beside the user's variables: on each worker its own, by itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from autodist_py.proto.strategy import shard_name


@dataclass(frozen=True, slots=True)
class Slot:
    """A part of the state that a codec keeps from step to step, for one gradient on each worker.

    Attributes:
        shape: its shape.
        dtype: its type.
        initial: makes its first value, the same on every worker; None: zeros.
    """

    shape: tuple[int, ...]
    dtype: tf.DType
    initial: Callable[[], np.ndarray] | None = None


@dataclass(frozen=True, slots=True)
class CompressorState:
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
    """Makes the ops that read and write compressors' states while a fragment is traced, and notes them."""

    def __init__(self) -> None:
        """Nothing is remembered yet."""
        self.compressor_states: list[CompressorState] = []
        self.writers: list[str] = []

    def read(self, slot: Slot, *, name: str, owner: str) -> tuple[tf.Tensor, tf.Tensor]:
        """A state's handle, and this worker's value."""
        handle = tf.raw_ops.VarHandleOp(dtype=slot.dtype, shape=[1, *slot.shape], shared_name=name, name="memory")
        self.compressor_states.append(CompressorState(name, owner, handle.op.name, slot))
        # Squeeze and Pack, unlike their like, need no constant beside them: there are thousands of variables.
        return handle, tf.raw_ops.Squeeze(input=tf.raw_ops.ReadVariableOp(resource=handle, dtype=slot.dtype), axis=[0])

    def write(self, handle: tf.Tensor, value: tf.Tensor, *, after: Sequence[tf.Tensor]) -> None:
        """The state's new value, which it has when `after` are computed: together with all other workers."""
        with tf.control_dependencies(list(after)):
            op = tf.raw_ops.AssignVariableOp(resource=handle, value=tf.raw_ops.Pack(values=[value]))
        self.writers.append(op.name)
