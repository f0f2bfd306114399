"""Reductions within one worker along a tree of its devices."""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist_py.kernel.collectives.base import Reduction, Value
from autodist_py.kernel.collectives.buckets import require_packs
from autodist_py.kernel.collectives.to_one_device import WithinWorker
from autodist_py.kernel.collectives.values import added, averaged, delivered


@dataclass(frozen=True, slots=True)
class HierarchicalCopyAllReduce(WithinWorker):
    """Adds values up along a binary tree of the devices, and copies the sum back along the same edges.

    The devices stand in a circle. On each level half of those left take the sum of their neighbour: of eight, the first
    takes the second's, the third the fourth's, and so on; then the first the third's; then the first the fifth's. So n
    devices take log2(n) levels down and as many back, no device adds or sends more than one value per level, and a sum
    of n terms is rounded log2(n) times, not n times. To other destinations than the devices the root's sum is copied.

    A batch's values of one type are laid into one buffer, which is cut into as many packs as are asked for, where it
    has so many elements. Each pack has another device as the root of its tree, so that all devices have a part in it.

    Attributes:
        num_packs: how many packs a batch is reduced in at most; 0: values are not packed.
    """

    num_packs: int = 1

    def __post_init__(self) -> None:
        require_packs(self.num_packs, "HierarchicalCopyAllReduce")

    def reduced(
        self, values: Sequence[Value], devices: Sequence[str], places: Sequence[str], reduction: Reduction, number: int
    ) -> list[Value]:
        """See WithinWorker; with the number 0, rows of sparse values keep the replicas' order."""
        root = number % len(devices)
        levels = _levels(len(devices), root)
        sums = list(values)
        for level in levels:
            for parent, child in level:
                sums[parent] = added([sums[parent], sums[child]], devices[parent])
        total = averaged(sums[root], len(values), devices[root], reduction)
        if list(places) != list(devices):
            return delivered([total], [devices[root]], places)
        sums[root] = total
        for level in reversed(levels):
            for parent, child in level:
                with tf.device(devices[child]):
                    sums[child] = tf.identity(sums[parent])
        return sums


def _levels(count: int, root: int) -> list[list[tuple[int, int]]]:
    """The tree's edges of each level, as positions of parent and child: neighbours first."""
    circle = [(root + topology) % count for topology in range(count)]
    distances = [2**level for level in range((count - 1).bit_length())]
    return [
        [(circle[topology], circle[topology + distance]) for topology in range(0, count - distance, 2 * distance)]
        for distance in distances
    ]
