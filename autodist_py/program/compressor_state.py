"""What compressors keep from step to step, as variables that people see, and that checkpoints can have."""

import weakref
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from autodist_py import tf_adapter
from autodist_py.kernel.ir.names import unique_names
from autodist_py.kernel.ir.state import CompressorState
from autodist_py.proto.errors import StrategyError
from autodist_py.servers.weak_map import WeakIdentityMap


def _forget(compressor_states: "weakref.ref[CompressorStates]", name: str) -> None:
    kept = compressor_states()
    if kept is not None:
        delattr(kept, name)


class CompressorStates(tf.Module):
    """The memories of an AutoDist's programs: each a variable with the values of all workers, in rank order.

    As an object of a `tf.train.Checkpoint` it is saved and restored with the rest. It may be restored before the first
    step, which makes the variables. A worker's part of them lives on that worker: it is asked for when somebody looks.
    """

    def __init__(self) -> None:
        """Nothing is remembered yet."""
        super().__init__(name="compressor_state")
        self._made: WeakIdentityMap[dict[str, str]] = WeakIdentityMap()
        """For each of the user's variables the names of what is kept for it, by the names in programs."""

    def of(
        self, compressor_states: Sequence[CompressorState], variables: Mapping[str, tf.Variable], workers: int
    ) -> dict[str, tf.Variable]:
        """The variables of a program's memories, by name; those that other programs of the same variables have, too."""
        found = {}
        for memory in compressor_states:
            owner = variables[memory.owner]
            if owner not in self._made:
                self._made[owner] = {}
            names = self._made[owner]
            if memory.name not in names:
                names[memory.name] = self._make(memory, owner, workers)
            variable = found[memory.name] = getattr(self, names[memory.name])
            slot = memory.slot
            if (tuple(variable.shape[1:]), variable.dtype) != (slot.shape, slot.dtype):
                raise StrategyError(
                    "what a compressor keeps for a variable is the same in all programs of an AutoDist; "
                    f"'{memory.name}' is {variable.dtype.name} {tuple(variable.shape[1:])} in one, and "
                    f"{slot.dtype.name} {slot.shape} in another. Give the variable the same compressor in both"
                )
        return found

    def _make(self, memory: CompressorState, owner: tf.Variable, workers: int) -> str:
        """The name of the new variable, which goes when its owner does."""
        (name,) = unique_names([memory.name], vars(self))
        slot = memory.slot
        with tf_adapter.eagerly(), tf.device("/device:CPU:0"):
            initial = np.zeros(slot.shape, slot.dtype.as_numpy_dtype) if slot.initial is None else slot.initial()
            every = np.broadcast_to(initial, (workers, *slot.shape))
            variable = tf_adapter.variable_of_no_strategy(every, slot.dtype, name.replace("/", "_"))
            setattr(self, name, variable)
        weakref.finalize(owner, _forget, weakref.ref(self), name).atexit = False
        return name
