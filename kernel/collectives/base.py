"""What every cross-device operation does: combine one value per replica, and deliver the result.

A value is a tensor, or sparse: `tf.IndexedSlices`. Operations are frozen values whose fields are their options; their
methods are called while a fragment is traced, and add ops to it. A value per local replica goes in, in the order of
`devices`, on which they are; a value per destination comes out.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import tensorflow as tf

Value: TypeAlias = tf.Tensor | tf.IndexedSlices
Reduction: TypeAlias = Literal["sum", "mean"]
"""The sum over replicas, or that divided by the number of replicas, whatever rows a sparse value of theirs has."""
Destinations: TypeAlias = str | Sequence[str] | None
"""The device, or the devices, to which results are delivered; None: all those of the replicas."""


class CrossDeviceOps(Protocol):
    """A way to combine the values of replicas.

    Without `destinations`, results are delivered to all of `devices`: that is an all-reduce, or an all-gather.
    """

    def reduce(
        self,
        values: Sequence[Value],
        devices: Sequence[str],
        *,
        reduction: Reduction = "sum",
        destinations: Destinations = None,
    ) -> list[Value]:
        """The sum or mean of one value per replica, on each destination.

        Of sparse values it has all rows, in replica order; what several rows of one index mean is the reader's matter.

        Raises:
            StrategyError: the values do not go together, are no floats and to be averaged, or this way cannot serve
                the devices.
        """

    def batch_reduce(
        self,
        batch: Sequence[Sequence[Value]],
        devices: Sequence[str],
        *,
        reduction: Reduction = "sum",
        destinations: Destinations = None,
    ) -> list[list[Value]]:
        """As `reduce`, of several values at once: for each of them the results."""

    def broadcast(self, value: tf.Tensor, destinations: str | Sequence[str]) -> list[tf.Tensor]:
        """The value on each destination; where there are several workers, that of the first one."""

    def gather(
        self,
        values: Sequence[tf.Tensor],
        devices: Sequence[str],
        *,
        axis: int = 0,
        destinations: Destinations = None,
    ) -> list[tf.Tensor]:
        """The tensors of all replicas one after the other along `axis`, in replica order, on each destination.

        Along `axis` they may be of different lengths, and of none.

        Raises:
            StrategyError: the values do not go together, or have no such axis.
        """
