"""Who takes part in the collectives of an event, and by which engine these go: questions about a plan."""

from collections.abc import Iterable

from autodist_py.kernel.compressors.coding import compressor_for
from autodist_py.kernel.events import LOCAL, AllReduceBucket, GatherFactors, GatherRows, ReduceGradients
from autodist_py.kernel.program import Program
from autodist_py.kernel.topology import is_gpu
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient
from autodist_py.proto.synchronizers import LOCAL_FIRST, AllReduceSynchronizer


def is_coded(program: Program, gradients: Iterable[Gradient]) -> bool:
    """Whether gradients that travel together are coded: if one of them is."""
    return any(compressor_for(program, gradient) is not None for gradient in gradients)


def is_local_first(synchronizer: AllReduceSynchronizer, *, coded: bool) -> bool:
    """Whether a worker's replicas are added up before they are sent, as what is coded is."""
    return coded or synchronizer.spec in LOCAL_FIRST


def members_of(program: Program, synchronizer: AllReduceSynchronizer, *, coded: bool) -> int:
    """How many members a collective of dense gradients has: the workers, or all replicas."""
    is_workers = is_local_first(synchronizer, coded=coded)
    return len(program.topology.workers) if is_workers else program.topology.num_replicas


def local_of(program: Program, synchronizer: AllReduceSynchronizer) -> str:
    """How a worker's replicas are added up.

    Raises:
        StrategyError: by NCCL, on devices that it does not run on, and nothing else may be used.
    """
    others = sorted({one.device for one in program.topology.everyone if not is_gpu(one.device)})
    if synchronizer.local != "nccl" or not others:
        return synchronizer.local
    if program.options.strict:
        raise StrategyError(
            f"local='nccl' of AllReduce needs NCCL, which runs on GPUs only, not on {', '.join(others)}; use "
            "local='one_device', or AutoDist(strict=False), which does"
        )
    return "one_device"


def engine_of(program: Program, event: ReduceGradients) -> str:
    """What carries the event's gradients between its members; LOCAL where it has one alone.

    Raises:
        StrategyError: the engine that is asked for does not fit the devices, and nothing else may be used.
    """
    if isinstance(event, GatherRows | GatherFactors):
        return LOCAL if event.members == 1 else "RING"
    requested = event.synchronizer.spec
    others = sorted({one.device for one in program.topology.everyone if not is_gpu(one.device)})
    if requested == "NCCL" and others and program.options.strict:
        raise StrategyError(
            f"{event.what}: all_reduce_spec='NCCL' needs NCCL, which runs on GPUs only, not on {', '.join(others)}; "
            "use all_reduce_spec='RING', or AutoDist(strict=False), which does"
        )
    if event.members == 1:
        return LOCAL
    is_ring = requested in ("AUTO", "RING") or (requested == "NCCL" and others)
    is_gathered = isinstance(event, AllReduceBucket) and event.is_coded and event.compressor.gathers
    return "RING" if is_ring or is_gathered else requested
