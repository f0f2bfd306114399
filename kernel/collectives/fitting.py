"""Which operation is used where the one that was asked for does not fit the devices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

from autodist_py.kernel.collectives.base import CrossDeviceOps
from autodist_py.kernel.collectives.collective_all_reduce import CollectiveAllReduce
from autodist_py.kernel.collectives.nccl import NcclAllReduce
from autodist_py.kernel.collectives.to_one_device import ReductionToOneDevice
from autodist_py.kernel.topology import is_gpu
from autodist_py.proto.errors import StrategyError


@dataclass(frozen=True, slots=True)
class Choice:
    """The operation that is used, and why it is not the one that was asked for; "": it is."""

    op: CrossDeviceOps
    reason: str = ""


def fitting(requested: CrossDeviceOps, devices: Sequence[str], *, strict: bool = False) -> Choice:
    """What is used on `devices`, those of all replicas of all workers, so that all workers choose alike.

    Raises:
        StrategyError: with `strict`, where that is not what was asked for.
    """
    others = [device for device in dict.fromkeys(devices) if not is_gpu(device)]
    used = without_nccl(requested) if others else requested
    if used is requested:
        return Choice(requested)
    rule = f"{requested} needs NCCL, which runs on GPUs only, not on {', '.join(others)}"
    if strict:
        raise StrategyError(f"{rule}; use {used}")
    return Choice(used, f"{used} is used: {rule}")


@singledispatch
def without_nccl(op: CrossDeviceOps) -> CrossDeviceOps:
    """An operation that does the same without NCCL: as it is where it needs none."""
    return op


@without_nccl.register
def _(op: NcclAllReduce) -> CrossDeviceOps:
    return ReductionToOneDevice()


@without_nccl.register
def _(op: CollectiveAllReduce) -> CrossDeviceOps:
    local = op.local and without_nccl(op.local)
    if op.implementation != "NCCL" and local is op.local:
        return op
    return replace(op, implementation="RING" if op.implementation == "NCCL" else op.implementation, local=local)
