"""What only the chief's process has: the coordinator, its server, and the workers that it launched."""

import secrets
import threading
from dataclasses import dataclass, field

import grpc

from autodist_py.proto.errors import ClusterError
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.runtime.coordinator import Coordinator
from autodist_py.runtime.launcher import Job, Launcher, LocalLauncher, Worker, chief_output, stop_workers
from autodist_py.runtime.service import serve
from autodist_py.settings import Settings

_REPLY_SECONDS = 2.0
_END_SECONDS = 30.0


@dataclass(slots=True)
class Chief:
    """A running coordinator and its workers."""

    coordinator: Coordinator
    _resources: ResourceSpec
    _launcher: Launcher
    _secret: str
    _server: grpc.Server
    _address: str
    _workers: list[Worker] = field(default_factory=list)

    @classmethod
    def start(cls, resources: ResourceSpec, settings: Settings) -> "Chief":
        """The coordinator answers; no worker is launched yet.

        Raises:
            ClusterError: there is no launcher for these nodes, or the coordinator's port is in use.
        """
        launcher = launcher_for(resources, settings)
        secret = secrets.token_hex(32)
        coordinator = Coordinator(
            [node.address for node in resources.workers],
            run_id=secrets.token_hex(6),
            seed=secrets.randbits(31),
            fingerprint=resources.fingerprint,
            heartbeat_timeout=settings.heartbeat_timeout,
            goes_on=settings.lost_workers == "continue",
        )
        server, address = serve(coordinator, secret, host=resources.chief.address, port=settings.coordinator_port)
        return cls(coordinator, resources, launcher, secret, server, address)

    def launch_workers(self) -> None:
        """Every other worker's script has started; their ends are reported to the coordinator."""
        for rank, node in enumerate(self._resources.workers):
            if rank:
                job = Job(rank, node, self._address, self._secret)
                self._workers.append(self._launcher.launch(job, on_exit=self.coordinator.process_ended))

    def stop_silent(self) -> None:
        """The workers whose heartbeat is missing, if any, are being ended: they cannot end by themselves."""
        silent = self.coordinator.check_heartbeats()
        if silent:
            workers = [worker for worker in self._workers if worker.rank in silent]
            threading.Thread(target=stop_workers, args=[workers], kwargs={"grace": 0.0}, daemon=True).start()

    def wait_for_workers(self) -> None:
        """All workers have left, and their processes have ended; one that does not end is made to."""
        self._server.stop(_REPLY_SECONDS).wait(_REPLY_SECONDS)
        stop_workers(self._workers, grace=_END_SECONDS)

    def stop_workers(self, *, grace: float) -> None:
        """The run has failed, and no worker is left: they have `grace` seconds to end by themselves."""
        stop_workers(self._workers, grace=grace)


def launcher_for(resources: ResourceSpec, settings: Settings) -> Launcher:
    """What starts workers on these nodes.

    Raises:
        ClusterError: the nodes are other machines.
    """
    if resources.is_local:
        return LocalLauncher(chief_output(settings.worker_output))
    remote = [node.address for node in resources.workers if not node.is_loopback]
    raise ClusterError(
        f"workers can be started on this machine only, at loopback addresses. Received: {', '.join(remote)}. "
        "Use 127.0.0.1, 127.0.0.2, ... in the resource spec, or `autodist run --local N`."
    )
