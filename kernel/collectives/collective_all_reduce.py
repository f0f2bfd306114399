"""Reductions over all workers by TensorFlow's collectives."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import tensorflow as tf

from autodist_py.kernel.collectives.base import CrossDeviceOps, Destinations, Reduction, Value
from autodist_py.kernel.collectives.buckets import by_size, reduce_in_packs
from autodist_py.kernel.collectives.collectives import CARRIED, ENGINES, REDUCIBLE, Collectives, most_elements
from autodist_py.kernel.collectives.nccl import require_gpus
from autodist_py.kernel.collectives.rows import TRAVELS, gathered_rows
from autodist_py.kernel.collectives.to_one_device import ReductionToOneDevice
from autodist_py.kernel.collectives.values import (
    averaged,
    delivered,
    is_sparse,
    places_of,
    require_axis,
    require_reducible,
)
from autodist_py.proto.errors import StrategyError


@dataclass(frozen=True, slots=True)
class CollectiveAllReduce:
    """Collectives over the replicas of all workers. Every worker reduces the same values, in the same order.

    A batch's values of one type that follow one another are laid into buffers; what is larger than a buffer is reduced
    in pieces, as many collectives, but whole by Horovod, which cuts what it sends itself. Rows of sparse values are put
    together on each worker, then gathered from all.

    There is no timeout: TensorFlow keeps two threads per collective for as long as its timeout lasts, even when the
    collective is done. Who waits for a lost worker is freed by aborting its collectives.

    Attributes:
        collectives: those of the fragment that is being traced; they say who takes part.
        implementation: the engine of sums; HOROVOD needs a `local` reduction. Gathers and broadcasts are rings.
        local: how a worker's replicas are reduced before, on the first one's device: each worker is then one member of
            the collective, and its result is copied to the destinations. None: every replica is a member.
        bytes_per_pack: the size of buffers; 0: `AUTOMATIC_PACK_BYTES`.
    """

    collectives: Collectives = field(repr=False)
    implementation: Literal["RING", "NCCL", "HOROVOD"] = "RING"
    local: CrossDeviceOps | None = None
    bytes_per_pack: int = 0

    def __post_init__(self) -> None:
        if self.implementation not in ENGINES:
            raise StrategyError(
                f"the implementation of CollectiveAllReduce is {', '.join(ENGINES)}; got '{self.implementation}'"
            )
        if self.implementation == "HOROVOD" and self.local is None:
            raise StrategyError(
                "to Horovod each worker is one member; got CollectiveAllReduce(implementation='HOROVOD', local=None); "
                "give a local reduction, such as ReductionToOneDevice()"
            )
        if self.bytes_per_pack < 0:
            raise StrategyError(
                f"bytes_per_pack of CollectiveAllReduce is 0 (automatic) or more; got {self.bytes_per_pack}; use 0"
            )

    @property
    def num_members(self) -> int:
        """How many members of all workers a collective has."""
        return self.collectives.topology.num_replicas if self.local is None else self.collectives.num_workers

    def reduce(
        self,
        values: Sequence[Value],
        devices: Sequence[str],
        *,
        reduction: Reduction = "sum",
        destinations: Destinations = None,
    ) -> list[Value]:
        """The sum or mean over all replicas on each destination; of sparse values all rows, in replica order.

        Raises:
            StrategyError: also where a shape is not static, or collectives do not carry the type.
        """
        return self.batch_reduce([values], devices, reduction=reduction, destinations=destinations)[0]

    def batch_reduce(
        self,
        batch: Sequence[Sequence[Value]],
        devices: Sequence[str],
        *,
        reduction: Reduction = "sum",
        destinations: Destinations = None,
    ) -> list[list[Value]]:
        """For each value of the batch its sum or mean over all replicas on each destination."""
        self._require_devices(devices)
        for values in batch:
            require_reducible(values, devices, reduction)
            self._require_carried(values)
        places = places_of(devices, destinations)

        def reduce(values: Sequence[Value]) -> list[Value]:
            sums = self._all_rows(values, devices) if is_sparse(values) else self.sums(self.members(values, devices))
            return self.deliver(sums, devices, reduction=reduction, destinations=places)

        return reduce_in_packs(
            batch, devices, places, by_size(lambda dtype: most_elements(self.bytes_per_pack, dtype)), reduce
        )

    def members(self, values: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
        """This worker's members of the collective, on the first of the devices: the values, or their sum by `local`."""
        if self.local is None or len(values) == 1:
            return list(values)
        return self.local.reduce(values, devices, destinations=devices[:1])

    def sums(self, members: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sum over the members of all workers, of one static shape, on each of this worker's."""
        if self.num_members == 1:
            return list(members)
        return self.collectives.sum_of_members(
            members,
            [replica.device for replica in self.collectives.topology.local_replicas][: len(members)],
            hint=ENGINES[self.implementation],
            is_each=self.local is None,
            most=most_elements(self.bytes_per_pack, members[0].dtype),
        )

    def deliver(
        self, sums: Sequence[Value], devices: Sequence[str], *, reduction: Reduction, destinations: Sequence[str]
    ) -> list[Value]:
        """What the members' sums, on the first of the devices, are for the reduction, on each destination."""
        devices = devices[: len(sums)]
        if not set(devices) <= set(destinations):  # A collective waits for ever for a member that nothing needs.
            with tf.control_dependencies(tf.nest.flatten(list(sums), expand_composites=True)):
                sums = [_identity(value, device) for value, device in zip(sums, devices, strict=True)]
        count = self.collectives.topology.num_replicas
        results = [averaged(value, count, device, reduction) for value, device in zip(sums, devices, strict=True)]
        return delivered(results, devices, destinations)

    def broadcast(self, value: tf.Tensor, destinations: str | Sequence[str]) -> list[tf.Tensor]:
        """The first worker's value, of one static shape, on each destination."""
        if value.dtype not in CARRIED or not value.shape.is_fully_defined():
            raise StrategyError(
                f"a broadcast carries {_names(CARRIED)}, of static shapes; got {value.dtype.name}, {value.shape}; cast "
                "the value, or set its shape"
            )
        device = self.collectives.topology.local_replicas[0].device
        with tf.device(device):
            value = self.collectives.broadcast(tf.identity(value))
        return delivered([value], [device], places_of([], destinations))

    def gather(
        self,
        values: Sequence[tf.Tensor],
        devices: Sequence[str],
        *,
        axis: int = 0,
        destinations: Destinations = None,
    ) -> list[tf.Tensor]:
        """The tensors of all replicas of all workers one after the other along `axis`, on each destination."""
        axis = require_axis(values, devices, axis)
        self._require_devices(devices)
        with tf.device(devices[0]):
            together = tf.concat(values, axis=axis)
            rank = together.shape.rank
            order = [axis, *(dimension for dimension in range(rank) if dimension != axis)]
            if together.dtype not in TRAVELS or None in [together.shape[dimension] for dimension in order[1:]]:
                raise StrategyError(
                    f"a gather carries {_names(TRAVELS)}, of shapes that are static but for the axis; got "
                    f"{together.dtype.name}, {together.shape}, axis {axis}; cast the values, or set their shapes"
                )
            rows = gathered_rows(tf.transpose(together, order) if axis else together, self.collectives)
            gathered = tf.transpose(rows, [order.index(dimension) for dimension in range(rank)]) if axis else rows
        return delivered([gathered], devices[:1], places_of(devices, destinations))

    def _all_rows(self, values: Sequence[tf.IndexedSlices], devices: Sequence[str]) -> list[tf.IndexedSlices]:
        (own,) = (self.local or ReductionToOneDevice()).reduce(values, devices, destinations=devices[:1])
        with tf.device(devices[0]):
            indices, rows = self.collectives.gather_rows([own.indices, own.values])
        return [tf.IndexedSlices(rows, indices, own.dense_shape)]

    def _require_devices(self, devices: Sequence[str]) -> None:
        topology = self.collectives.topology
        own = [replica.device for replica in topology.local_replicas]
        if list(devices) != own:
            raise StrategyError(
                f"CollectiveAllReduce reduces over the replicas of its topology, here on {', '.join(own)}; got values "
                f"on {', '.join(devices)}; give one for each of these replicas"
            )
        if self.implementation == "NCCL":
            everyone = [replica.device for replica in topology.replicas]
            require_gpus(everyone, "CollectiveAllReduce(implementation='NCCL')", "use implementation='RING'")

    def _require_carried(self, values: Sequence[Value]) -> None:
        if values[0].dtype not in REDUCIBLE:
            raise StrategyError(f"collectives carry {_names(REDUCIBLE)}; got {values[0].dtype.name}; cast the values")
        shapes = [value.values.shape[1:] if is_sparse(values) else value.shape for value in values]
        if not all(shape.is_fully_defined() for shape in shapes):
            raise StrategyError(
                "collectives are of static shapes, but for the rows of sparse values; got "
                f"{', '.join(map(str, shapes))}; set the shapes"
            )


def _names(dtypes: frozenset[tf.DType] | dict[tf.DType, tf.DType]) -> str:
    return ", ".join(sorted(dtype.name for dtype in dtypes))


def _identity(value: Value, device: str) -> Value:
    with tf.device(device):
        return tf.identity(value)
