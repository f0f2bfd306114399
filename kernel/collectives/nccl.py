"""Reductions between the GPUs of one worker by NVIDIA's NCCL."""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist_py.kernel.collectives.base import Reduction, Value
from autodist_py.kernel.collectives.buckets import require_packs
from autodist_py.kernel.collectives.to_one_device import ReductionToOneDevice, WithinWorker
from autodist_py.kernel.collectives.values import averaged, is_sparse
from autodist_py.kernel.topology import is_gpu
from autodist_py.proto.errors import StrategyError

_CARRIED = frozenset({tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})


@dataclass(frozen=True, slots=True)
class NcclAllReduce(WithinWorker):
    """NCCL's all-reduce between the GPUs of one worker; what is no all-reduce of tensors is done by copies.

    That is: sparse values, and results for other destinations than all the devices. All results of an all-reduce have
    to be used: where one device's is not computed, the others wait for ever.

    Attributes:
        num_packs: how many packs a batch is reduced in at most; 0: values are not packed.
    """

    num_packs: int = 1

    def __post_init__(self) -> None:
        require_packs(self.num_packs, "NcclAllReduce")

    def on_first(self, values: Sequence[tf.Tensor], devices: Sequence[str]) -> tf.Tensor:
        """See WithinWorker; it is an all-reduce, so all of its results are waited for."""
        totals = self.reduce(values, devices)
        with tf.control_dependencies(totals), tf.device(devices[0]):
            return tf.identity(totals[0])

    def reduced(
        self, values: Sequence[Value], devices: Sequence[str], places: Sequence[str], reduction: Reduction, number: int
    ) -> list[Value]:
        """See WithinWorker."""
        require_gpus(devices, "NcclAllReduce", "use ReductionToOneDevice or HierarchicalCopyAllReduce")
        if is_sparse(values) or list(places) != list(devices):
            return ReductionToOneDevice().reduced(values, devices, places, reduction, number)
        if len(values) == 1:
            return list(values)
        dtype = values[0].dtype
        if dtype not in _CARRIED:
            raise StrategyError(
                f"NCCL's all-reduce carries {', '.join(sorted(kind.name for kind in _CARRIED))}; got {dtype.name}; "
                "cast the values, or use HierarchicalCopyAllReduce"
            )
        name = tf.compat.v1.get_default_graph().unique_name("nccl")
        means = []
        for value, device in zip(values, devices, strict=True):
            with tf.device(device):
                total = tf.raw_ops.NcclAllReduce(
                    input=value, reduction="sum", num_devices=len(devices), shared_name=name
                )
            means.append(averaged(total, len(values), device, reduction))
        return means


def require_gpus(devices: Sequence[str], what: str, way_out: str) -> None:
    """Check that NCCL can run on the devices.

    Raises:
        StrategyError: one is no GPU; `what` asked for it, and `way_out` says what to do instead.
    """
    others = [device for device in devices if not is_gpu(device)]
    if others:
        raise StrategyError(f"{what} runs on GPUs only; got {', '.join(others)}; {way_out}")
