"""Devices: from the resource spec's `address:CPU:0` to this worker's place in the cluster and TensorFlow's names."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from autodist_py.proto.errors import StrategyError
from autodist_py.proto.resource_spec import ResourceSpec


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica: its number in the cluster, the worker that holds it, and its TensorFlow device there.

    One that does not `train` is given no examples: it stands on a worker that only serves.
    """

    index: int
    worker: int
    device: str
    trains: bool = True


@dataclass(frozen=True, slots=True)
class Topology:
    """Where a program runs.

    Attributes:
        worker: this worker's rank.
        replicas: those that take every step together, in rank order: all of the cluster, or this worker's.
        servers: for each device that may hold variables, as a strategy names it, the rank of its worker.
        cluster: all replicas, where those of the other workers take their steps by themselves.
    """

    host: ClassVar[str] = "/device:CPU:0"
    """The device of what stands once on a worker."""

    worker: int
    replicas: tuple[Replica, ...]
    servers: Mapping[str, int] = field(default_factory=dict)
    cluster: tuple[Replica, ...] = ()

    @property
    def local_replicas(self) -> tuple[Replica, ...]:
        """This worker's replicas; position in it is the `i` of `AutoDist-Replica-<i>`."""
        return tuple(replica for replica in self.replicas if replica.worker == self.worker)

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks of the workers that take every step together, ascending."""
        return _workers(self.replicas)

    @property
    def all_workers(self) -> tuple[int, ...]:
        """The ranks of the workers that hold a replica, ascending."""
        return _workers(self.everyone)

    @property
    def is_together(self) -> bool:
        """Whether all replicas of the cluster step together."""
        return self.replicas == self.everyone

    @property
    def everyone(self) -> tuple[Replica, ...]:
        """All replicas of the cluster."""
        return self.cluster or self.replicas

    @property
    def num_replicas(self) -> int:
        """The number of replicas that take every step together."""
        return len(self.replicas)

    @property
    def first(self) -> Replica:
        """The first of those that step together and train."""
        return next(replica for replica in self.replicas if replica.trains)

    def apart(self) -> "Topology":
        """The same topology, where each worker takes its steps by itself."""
        return replace(self, replicas=self.local_replicas, cluster=self.everyone)

    def alone(self) -> "Topology":
        """This worker by itself: its own replicas, numbered from 0, and no other worker."""
        local = (replace(replica, index=index) for index, replica in enumerate(self.local_replicas))
        return Topology(self.worker, tuple(local))


def is_gpu(device: str) -> bool:
    """Whether a TensorFlow device, as TensorFlow or a strategy names it, is a GPU."""
    return device.upper().split(":")[-2:][0].endswith("GPU")


def _workers(replicas: Iterable[Replica]) -> tuple[int, ...]:
    return tuple(sorted({replica.worker for replica in replicas}))


def resolve(replicas: Sequence[str], resources: ResourceSpec, *, worker: int) -> Topology:
    """The topology of `worker` among `replicas`, devices as a strategy names them (`address:CPU:1`).

    A worker with none of them has a replica that does not train, behind the others in number. A CPU is numbered by its
    position in its node's `cpus`: TensorFlow's logical devices start at 0.

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
    training = sorted((known[device] for device in replicas), key=lambda replica: replica.worker)
    idle = set(range(len(resources.workers))) - set(_workers(training))
    server_plans = [Replica(-1, rank, "/device:CPU:0", trains=False) for rank in sorted(idle)]
    numbered = [replace(replica, index=index) for index, replica in enumerate([*training, *server_plans])]
    servers = {device: rank for rank, node in enumerate(resources.workers) for device in node.devices}
    return Topology(worker, tuple(sorted(numbered, key=lambda replica: replica.worker)), servers)
