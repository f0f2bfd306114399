"""Devices: from the resource spec's `address:CPU:0` to this worker's place in the cluster and TensorFlow's names."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autodist_py.proto.errors import StrategyError
from autodist_py.proto.resource_spec import ResourceSpec


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica: its number in the cluster, the worker that holds it, and its TensorFlow device there."""

    index: int
    worker: int
    device: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a program runs: all replicas of the cluster in rank order, and which worker this is."""

    worker: int
    replicas: tuple[Replica, ...]

    @property
    def local_replicas(self) -> tuple[Replica, ...]:
        """This worker's replicas; position in it is the `i` of `AutoDist-Replica-<i>`."""
        return tuple(replica for replica in self.replicas if replica.worker == self.worker)

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks of the workers that hold a replica, ascending."""
        return tuple(sorted({replica.worker for replica in self.replicas}))

    @property
    def num_replicas(self) -> int:
        """The number of replicas in the cluster."""
        return len(self.replicas)

    @property
    def host(self) -> str:
        """The device of what stands once on this worker."""
        return "/device:CPU:0"

    def alone(self) -> "Place":
        """This worker by itself: its own replicas, numbered from 0, and no other worker."""
        local = (replace(replica, index=index) for index, replica in enumerate(self.local_replicas))
        return Place(self.worker, tuple(local))


def resolve(replicas: Sequence[str], resources: ResourceSpec, *, worker: int) -> Place:
    """The place of `worker` among `replicas`, devices as a strategy names them (`address:CPU:1`).

    A CPU is numbered by its position in its node's `cpus`: TensorFlow's logical devices start at 0.

    Raises:
        StrategyError: a device that no node of `resources` has.
    """
    known = {
        f"{node.address}:{kind}:{number}": Replica(-1, rank, f"/device:{kind}:{position}")
        for rank, node in enumerate(resources.workers)
        for kind, numbers in (("GPU", node.gpus), ("CPU", node.cpus))
        for position, number in enumerate(numbers)
    }
    unknown = [device for device in replicas if device not in known]
    if unknown:
        raise StrategyError(
            f"the strategy replicates on devices that the resource spec does not have: {', '.join(unknown)}. "
            f"Devices of the spec: {', '.join(known)}. Build the strategy for this spec."
        )
    ordered = sorted((known[device] for device in replicas), key=lambda replica: replica.worker)
    return Place(worker, tuple(replace(replica, index=index) for index, replica in enumerate(ordered)))
