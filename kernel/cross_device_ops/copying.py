"""Reductions within one worker that copy values to one device, and what such reductions have in common."""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist_py.kernel.cross_device_ops.base import Destinations, Reduction, Value
from autodist_py.kernel.cross_device_ops.values import (
    Accumulation,
    added,
    averaged,
    delivered,
    is_sparse,
    places_of,
    require_axis,
    require_reducible,
)
from autodist_py.proto.errors import StrategyError


class WithinWorker:
    """An operation between the devices of one worker: what only brings values somewhere is done by copies."""

    __slots__ = ()

    def broadcast(self, value: tf.Tensor, destinations: str | Sequence[str]) -> list[tf.Tensor]:
        """The value on each destination."""
        copies = []
        for destination in places_of([], destinations):
            with tf.device(destination):
                copies.append(tf.identity(value))
        return copies

    def gather(
        self,
        values: Sequence[tf.Tensor],
        devices: Sequence[str],
        *,
        axis: int = 0,
        destinations: Destinations = None,
    ) -> list[tf.Tensor]:
        """The replicas' tensors one after the other along `axis`, put together on the first destination."""
        axis = require_axis(values, devices, axis)
        places = places_of(devices, destinations)
        with tf.device(places[0]):
            together = tf.concat(values, axis=axis)
        return delivered([together], places[:1], places)


@dataclass(frozen=True, slots=True)
class ReductionToOneDevice(WithinWorker):
    """Copies all values to one device, adds them up there, and copies the result to the destinations.

    A batch is reduced value by value: nothing is gained by packing what is only copied.

    Attributes:
        reduce_to_device: where values are added up; None: on the first destination.
        accumulation_fn: makes one tensor of the replicas' tensors; None: `tf.add_n`.
    """

    reduce_to_device: str | None = None
    accumulation_fn: Accumulation | None = None

    def reduce(
        self,
        values: Sequence[Value],
        devices: Sequence[str],
        *,
        reduction: Reduction = "sum",
        destinations: Destinations = None,
    ) -> list[Value]:
        """The sum or mean of the values on each destination; of sparse ones all rows."""
        require_reducible(values, devices, reduction)
        if self.accumulation_fn is not None and is_sparse(values):
            raise StrategyError(
                "an accumulation_fn is for tensors, as sparse values are reduced to all their rows; got "
                "tf.IndexedSlices; reduce these by a ReductionToOneDevice without one"
            )
        places = places_of(devices, destinations)
        device = self.reduce_to_device or places[0]
        total = added(values, device, self.accumulation_fn or tf.add_n)
        return delivered([averaged(total, len(values), device, reduction)], [device], places)

    def batch_reduce(
        self,
        batch: Sequence[Sequence[Value]],
        devices: Sequence[str],
        *,
        reduction: Reduction = "sum",
        destinations: Destinations = None,
    ) -> list[list[Value]]:
        """For each value of the batch its sum or mean on each destination."""
        return [self.reduce(values, devices, reduction=reduction, destinations=destinations) for values in batch]
