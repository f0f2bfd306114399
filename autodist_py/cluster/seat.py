"""`Seat`: which of the run's workers this process is."""

from dataclasses import dataclass

from autodist_py.cluster.failure import Worker
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec


@dataclass(frozen=True, slots=True)
class Seat:
    """The worker of that rank, among those of the resource spec's nodes."""

    rank: int
    resources: ResourceSpec

    @property
    def is_chief(self) -> bool:
        """Whether it is the chief's."""
        return self.rank == 0

    @property
    def num_workers(self) -> int:
        """How many there are."""
        return len(self.resources.workers)

    @property
    def node(self) -> NodeSpec:
        """Its machine, with the devices that it has there."""
        return self.resources.workers[self.rank]

    @property
    def num_cpus(self) -> int:
        """How many CPU devices it has; TensorFlow needs one."""
        return max(1, len(self.node.cpus))

    @property
    def worker(self) -> Worker:
        """The worker, as messages name it."""
        return Worker(self.rank, self.node.address)

    @property
    def chief(self) -> Worker:
        """The chief, as messages name it."""
        return Worker(0, self.resources.chief.address)
