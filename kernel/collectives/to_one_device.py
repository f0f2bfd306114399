"""Reductions within one worker that copy values to one device, and what such reductions have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist_py.kernel.collectives.base import Destinations, Reduction, Value
from autodist_py.kernel.collectives.buckets import reduce_in_num_packs
from autodist_py.kernel.collectives.values import (
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


class WithinWorker(ABC):
    """An operation between the devices of one worker: it says how it reduces, and what it reduces is looked at here.

    What only brings values somewhere is done by copies.
    """

    __slots__ = ()

    @property
    def num_packs(self) -> int:
        """How many packs a batch is reduced in at most; 0: values are not packed, as nothing is gained by it."""
        return 0

    @abstractmethod
    def reduced(
        self, values: Sequence[Value], devices: Sequence[str], places: Sequence[str], reduction: Reduction, number: int
    ) -> list[Value]:
        """As `reduce`, of values that go together, the pack of that number in a batch, in all places."""

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
        return self.reduced(values, devices, places_of(devices, destinations), reduction, 0)

    def on_first(self, values: Sequence[tf.Tensor], devices: Sequence[str]) -> tf.Tensor:
        """The sum of tensors on the first of the devices alone."""
        return self.reduce(values, devices, destinations=devices[:1])[0]

    def batch_reduce(
        self,
        batch: Sequence[Sequence[Value]],
        devices: Sequence[str],
        *,
        reduction: Reduction = "sum",
        destinations: Destinations = None,
    ) -> list[list[Value]]:
        """For each value of the batch its sum or mean on each destination."""
        for values in batch:
            require_reducible(values, devices, reduction)
        places = places_of(devices, destinations)
        return reduce_in_num_packs(
            batch,
            devices,
            places,
            self.num_packs,
            lambda values, number: self.reduced(values, devices, places, reduction, number),
        )

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

    Attributes:
        reduce_to_device: where values are added up; None: on the first destination.
        accumulation_fn: makes one tensor of the replicas' tensors; None: `tf.add_n`.
    """

    reduce_to_device: str | None = None
    accumulation_fn: Accumulation | None = None

    def reduced(
        self, values: Sequence[Value], devices: Sequence[str], places: Sequence[str], reduction: Reduction, number: int
    ) -> list[Value]:
        """See WithinWorker."""
        if self.accumulation_fn is not None and is_sparse(values):
            raise StrategyError(
                "an accumulation_fn is for tensors, as sparse values are reduced to all their rows; got "
                "tf.IndexedSlices; reduce these by a ReductionToOneDevice without one"
            )
        device = self.reduce_to_device or places[0]
        total = added(values, device, self.accumulation_fn or tf.add_n)
        return delivered([averaged(total, len(values), device, reduction)], [device], places)
