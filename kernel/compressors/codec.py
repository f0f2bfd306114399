"""`Codec`: what codes the gradients of a group on their way between workers, as functions called while tracing."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import tensorflow as tf

from autodist_py.kernel.ir import flat_buffers
from autodist_py.kernel.ir.state import Slot as Slot

State = Mapping[str, tf.Tensor]
"""The slots of one gradient, by name."""


class Dense(NamedTuple):
    """A dense gradient: the name of its variable, its shape and type."""

    variable: str
    shape: tuple[int, ...]
    dtype: tf.DType

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Wire:
    """What stands between the workers.

    Attributes:
        rank: this worker's.
        workers: how many there are.
        total: the sum over workers of a tensor of a static shape, before what is compressed travels.
    """

    rank: int
    workers: int
    total: Callable[[tf.Tensor], tf.Tensor]


@runtime_checkable
class Codec(Protocol):
    """Codes the gradients of one group; each worker's is the sum of its replicas' gradients, weighted.

    Each worker sends one flat tensor; all zeros stand for a worker without gradients.
    """

    def init(self, gradients: Sequence[Dense]) -> list[dict[str, Slot]]:
        """The state of each of the gradients."""
        ...

    def compress(
        self, gradients: Sequence[tf.Tensor], states: Sequence[State], wire: Wire
    ) -> tuple[tf.Tensor, list[State]]:
        """What travels, and the new states, or what `decompress` makes them of."""
        ...

    def decompress(
        self, travelled: tf.Tensor, gradients: Sequence[Dense], states: Sequence[State], wire: Wire
    ) -> tuple[list[tf.Tensor], Sequence[State]]:
        """The sums of all workers' gradients, and the new states.

        Args:
            travelled: what all workers have sent, by the compressor's `gathers` stacked in rank order, or summed. The
                sums are made of it alone, so that they are the same on every worker.
            gradients: which ones they are.
            states: what `compress` has given. A server, which has no states, gives empty ones.
            wire: as for `compress`.
        """
        ...


def working(dtype: tf.DType) -> tf.DType:
    """The type to compute in, for gradients of a type: float32, or what is wider."""
    return dtype if dtype.size >= tf.float32.size else tf.float32


def flat(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """All numbers of the tensors, one after the other."""
    return tf.reshape(flat_buffers.pack(tensors), [-1])


def apart(numbers: tf.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[tf.Tensor]:
    """The tensors of these shapes that `flat` has laid one after the other."""
    if len(shapes) == 1:
        return [tf.reshape(numbers, shapes[0])]
    return flat_buffers.unpack(numbers, shapes)


def chosen(condition: tf.Tensor, new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """The new state, where what it was made of was finite; the old one else: NaN would stay for ever."""
    return tf.where(condition, new, old)
