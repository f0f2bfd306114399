"""How a worker's replicas are added up: `LOCAL_REDUCTIONS`, by what `AllReduceSynchronizer.local` calls them.

They know tensors and devices, no variable and no strategy. They are called while a fragment is traced, and add ops to
it: a tensor of one type and shape per device goes in, in the order of the devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf

from autodist_py.proto.errors import StrategyError

_CARRIED_BY_NCCL = frozenset({tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})


class LocalReduction(Protocol):
    """A way to add up tensors of several devices of one worker."""

    def on_first(self, values: Sequence[tf.Tensor], devices: Sequence[str]) -> tf.Tensor:
        """The sum on the first device alone."""
        ...

    def on_each(self, values: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
        """The sum on each device."""
        ...


@dataclass(frozen=True, slots=True)
class OneDevice:
    """Copies all values to the first device, adds them up there, and copies the sum to the others."""

    def on_first(self, values: Sequence[tf.Tensor], devices: Sequence[str]) -> tf.Tensor:
        """See LocalReduction."""
        with tf.device(devices[0]):
            return tf.add_n(list(values))

    def on_each(self, values: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
        """See LocalReduction."""
        return copied(self.on_first(values, devices), devices)


@dataclass(frozen=True, slots=True)
class Hierarchical:
    """Adds values up along a binary tree of the devices, and copies the sum back along the same edges.

    On each level half of the devices left take the sum of their neighbour: of eight, the first takes the second's, the
    third the fourth's, and so on; then the first the third's; then the first the fifth's. So n devices take log2(n)
    levels, no device adds or sends more than one value per level, and a sum of n terms is rounded log2(n) times.
    """

    def on_first(self, values: Sequence[tf.Tensor], devices: Sequence[str]) -> tf.Tensor:
        """See LocalReduction."""
        sums = list(values)
        for level in _levels(len(devices)):
            for parent, child in level:
                with tf.device(devices[parent]):
                    sums[parent] = tf.add_n([sums[parent], sums[child]])
        return sums[0]

    def on_each(self, values: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
        """See LocalReduction."""
        copies = [self.on_first(values, devices)] * len(devices)
        for level in reversed(_levels(len(devices))):
            for parent, child in level:
                with tf.device(devices[child]):
                    copies[child] = tf.identity(copies[parent])
        return copies


def _levels(count: int) -> list[list[tuple[int, int]]]:
    """The tree's edges of each level, as positions of parent and child: neighbours first."""
    distances = [2**level for level in range((count - 1).bit_length())]
    return [
        [(parent, parent + distance) for parent in range(0, count - distance, 2 * distance)] for distance in distances
    ]


@dataclass(frozen=True, slots=True)
class Nccl:
    """NCCL's all-reduce between the GPUs of one worker.

    All results have to be used: where one device's is not computed, the others wait for ever.

    Raises:
        StrategyError: NCCL does not carry the type.
    """

    def on_first(self, values: Sequence[tf.Tensor], devices: Sequence[str]) -> tf.Tensor:
        """See LocalReduction."""
        totals = self.on_each(values, devices)
        with tf.control_dependencies(totals), tf.device(devices[0]):
            return tf.identity(totals[0])

    def on_each(self, values: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
        """See LocalReduction."""
        dtype = values[0].dtype
        if dtype not in _CARRIED_BY_NCCL:
            raise StrategyError(
                f"NCCL's all-reduce carries {', '.join(sorted(kind.name for kind in _CARRIED_BY_NCCL))}; got "
                f"{dtype.name}; train the variable in one of these, or use local='hierarchical'"
            )
        name = tf.compat.v1.get_default_graph().unique_name("nccl")
        totals = []
        for value, device in zip(values, devices, strict=True):
            with tf.device(device):
                totals.append(
                    tf.raw_ops.NcclAllReduce(input=value, reduction="sum", num_devices=len(devices), shared_name=name)
                )
        return totals


def copied(value: tf.Tensor, devices: Sequence[str]) -> list[tf.Tensor]:
    """The value, which is on the first of the devices, on each of them."""
    copies = [value]
    for device in devices[1:]:
        with tf.device(device):
            copies.append(tf.identity(value))
    return copies


LOCAL_REDUCTIONS: Mapping[str, LocalReduction] = {
    "one_device": OneDevice(),
    "hierarchical": Hierarchical(),
    "nccl": Nccl(),
}
