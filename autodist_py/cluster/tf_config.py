"""`Task`: the worker that this process is, in a cluster that TF_CONFIG or a `tf.distribute.cluster_resolver` describes.

A scheduler starts all of its processes, and each knows every address. Such an address is the port of a task's
TensorFlow server. The chief's is the coordinator's here, as others must know that one; its server takes another port.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autodist_py.cluster.cluster import Cluster, join_cluster
from autodist_py.cluster.ports import host_and_port
from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.config.settings import Settings
from autodist_py.proto.errors import ClusterError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.proto.text import first_repeated

_WORKERS = ("chief", "worker")
"""The jobs whose tasks are workers, in the order of ranks."""
_EVALUATOR = "evaluator"
_MOST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Task:
    """A worker among those of a cluster.

    Attributes:
        addresses: of all workers by rank, as host and port.
        rank: this one's.
    """

    addresses: tuple[tuple[str, int], ...]
    rank: int

    @classmethod
    def of(cls, jobs: Mapping[str, Sequence[str | None]], job: str | None, index: int | None) -> "Task":
        """The task of that index of `job`, where `jobs` has the addresses of each job's tasks.

        The chief is the task of the job "chief", or else the first worker. An evaluator is a cluster of its own.

        Raises:
            ClusterError: there is no such worker, or an address is no host and port, or is not one machine's alone.
        """
        if job == _EVALUATOR:
            return cls((("127.0.0.1", 0),), 0)
        tasks = [(name, number) for name in _WORKERS for number in range(len(jobs.get(name, ())))]
        if (job, index) not in tasks:
            known = ", ".join(f"{name} {number}" for name, number in tasks)
            raise ClusterError(
                f"a process of a cluster is one of its workers: {known or 'it has none'}. Received: {job} "
                f'{index}. Give each process its own, such as "task": {{"type": "worker", "index": 1}}'
            )
        if len(jobs.get("chief", ())) > 1:
            raise ClusterError(
                f"a cluster has one chief at most. Received: {', '.join(map(str, jobs['chief']))}. Make the others "
                "workers"
            )
        addresses = tuple(_parsed(jobs[name][number]) for name, number in tasks)
        task = cls(addresses, tasks.index((job or "", index or 0)))
        if not task._is_local and (repeated := first_repeated(host for host, _ in addresses)) is not None:
            raise ClusterError(
                f"each worker has a machine of its own, with all its GPUs. Received: a cluster with {repeated} in "
                "several of its addresses. Start one worker there, or give all workers loopback addresses"
            )
        return task

    @property
    def _is_local(self) -> bool:
        return all(NodeSpec(host).is_loopback for host, _ in self.addresses)

    def resources(self, machine: NodeSpec) -> ResourceSpec:
        """The nodes, each with the devices of `machine`, which is this one: all have the same, or do not join.

        Of local workers each has a loopback address of its own.
        """
        hosts = [host for host, _ in self.addresses]
        if self._is_local:
            hosts = [node.address for node in local_resource_spec(len(hosts)).nodes]
        return ResourceSpec(
            tuple(replace(machine, address=host, chief=rank == 0) for rank, host in enumerate(hosts)),
        )

    def join(self, machine: NodeSpec, settings: Settings) -> Cluster:
        """The cluster, joined by this process; see `join_cluster`.

        Args:
            machine: the devices of this machine.
            settings: the environment of this process.

        Raises:
            ClusterError: see `join_cluster`.
        """
        resources = self.resources(machine)
        if len(self.addresses) == 1:
            return join_cluster(resources, settings)
        (_, chief_port), (_, own_port) = self.addresses[0], self.addresses[self.rank]
        known = replace(settings, launch="none")
        if self.rank == 0:
            known = replace(known, coordinator_port=chief_port)
        else:
            own = settings.server_port or max(0, own_port - self.rank)
            coordinator = host_and_port(resources.chief.address, chief_port)
            known = replace(known, rank=self.rank, coordinator=coordinator, server_port=own)
        return join_cluster(resources, known, secret=self._shared_word)

    @property
    def _shared_word(self) -> str:
        """What the workers of this cluster have, and those of others have not; it is no secret.

        A local host may be written in several ways.
        """
        addresses = [port for _, port in self.addresses] if self._is_local else self.addresses
        return hashlib.sha256(json.dumps(addresses).encode()).hexdigest()


def _parsed(address: str | None) -> tuple[str, int]:
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) <= _MOST_PORT:
        raise ClusterError(
            f"an address of a cluster is host:port, with a port from 1 to {_MOST_PORT}. Received: "
            f"{address!r}. Write one such as 'worker-0:2222'"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)
