"""What only the chief's process has: the coordinator, its server, and the workers that it launched."""

import logging
import secrets
import threading
from dataclasses import dataclass, field

import grpc

from autodist_py.cluster.coordinator.events import Probe, Stop
from autodist_py.cluster.coordinator.service import serve
from autodist_py.cluster.coordinator.shell import Coordinator
from autodist_py.cluster.launch.early import EarlyLauncher, early_launcher
from autodist_py.cluster.launch.local import (
    Command,
    LaunchedWorker,
    Launcher,
    chief_output,
    still_running,
    stop_workers,
)
from autodist_py.cluster.launch.ssh import launcher_on
from autodist_py.cluster.launch.told import Told
from autodist_py.cluster.ports import host_and_port, require_own_address
from autodist_py.cluster.server_probe import STILL_SECONDS, answers, ask_seconds
from autodist_py.config.resource_spec import spec_lines
from autodist_py.config.settings import COORDINATOR_PORT_VARIABLE, COORDINATOR_VARIABLE, LAUNCH_VARIABLE, Settings
from autodist_py.proto.errors import ClusterError
from autodist_py.proto.resource_spec import ResourceSpec

_ALL_ADDRESSES = "::"
"""Of IPv6 and IPv4."""

_REPLY_SECONDS = 2.0
SOON_SECONDS = 10.0
"""So long workers' processes are waited for at the end without a word."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Chief:
    """A running coordinator and its workers."""

    coordinator: Coordinator
    _resources: ResourceSpec
    _launcher: Launcher | None
    _secret: str
    _server: grpc.Server
    _address: str
    _ask_seconds: float
    _workers: list[LaunchedWorker] = field(default_factory=list)
    _asked: set[int] = field(default_factory=set)

    @classmethod
    def start(cls, resources: ResourceSpec, settings: Settings, secret: str = "") -> "Chief":
        """The coordinator answers; no worker is launched yet.

        Workers that are started by hand know the `secret`; "": the first line of standard input has it.

        Raises:
            ClusterError: there is no launcher for these nodes, or the coordinator's port is in use.
        """
        if not resources.is_local:
            require_own_address(resources.chief.address)
        launcher = launcher_for(resources, settings)
        if launcher is not None:
            secret = secrets.token_hex(32)
        secret = secret or Told.from_input().secret
        coordinator = Coordinator(
            [node.address for node in resources.workers],
            run_id=secrets.token_hex(6),
            seed=secrets.randbits(31),
            spec=spec_lines(resources),
            heartbeat_timeout=settings.heartbeat_timeout,
            goes_on=settings.lost_workers == "continue",
        )
        address = resources.chief.address
        # A host name may stand for another address here than elsewhere (127.0.1.1 on Debian).
        host = address if resources.is_local else _ALL_ADDRESSES
        try:
            server, port = serve(coordinator, secret, host=host, port=settings.coordinator_port)
        except ClusterError:
            if isinstance(launcher, EarlyLauncher):
                launcher.dismiss()  # A chief that tries again starts its own.
            raise
        patience = ask_seconds(settings.heartbeat_timeout)
        return cls(coordinator, resources, launcher, secret, server, host_and_port(address, port), patience)

    def launch_workers(self) -> None:
        """Every other worker's script has started, and its end is reported to the coordinator.

        Where workers are started by hand nothing happens.
        """
        if self._launcher is None:
            return
        for rank, node in enumerate(self._resources.workers):
            if rank:
                worker = self._launcher.launch(rank, node, on_exit=self.coordinator.process_ended)
                self._workers.append(worker)
                worker.tell(Told(self._secret, self._address, self._resources))

    def stop_silent(self) -> None:
        """The workers whose heartbeat is missing, if any, are being ended: they cannot end by themselves.

        One whose Python stands still is missing later: whether its process lives is asked before.
        """
        silent = set()
        for action in self.coordinator.look():
            match action:
                case Stop(rank):
                    silent.add(rank)
                case Probe(rank) if rank not in self._asked:
                    self._asked.add(rank)
                    threading.Thread(target=self._ask, args=[action], name="autodist-ask", daemon=True).start()
        if silent:
            workers = [worker for worker in self._workers if worker.rank in silent]
            threading.Thread(target=stop_workers, args=[workers], kwargs={"grace": 0.0}, daemon=True).start()

    def _ask(self, probe: Probe) -> None:
        try:
            if answers(probe.server, self._ask_seconds):
                self.coordinator.lives(probe.rank)
        finally:
            self._asked.discard(probe.rank)

    def wait_for_workers(self) -> None:
        """All workers have left, and their processes have ended; one that does not end is made to, and has failed.

        It has as much time as a process may stand still: TensorFlow destroys iterators at the end, too.
        """
        self._server.stop(_REPLY_SECONDS).wait(_REPLY_SECONDS)
        late = still_running(self._workers, SOON_SECONDS)
        if late:
            ranks = ", ".join(f"worker {worker.rank}" for worker in late)
            _log.warning("%s: the script has ended, the process has not; it is waited for", ranks)
        late = still_running(late, STILL_SECONDS)
        for worker in late:
            self.coordinator.did_not_end(worker.rank, SOON_SECONDS + STILL_SECONDS)
        stop_workers(late, grace=0.0)

    def stop_workers(self, *, grace: float) -> None:
        """The run has failed, and no worker is left: they have `grace` seconds to end by themselves.

        One that has not joined yet does not hear of it, so it is ended at once.
        """
        joined = self.coordinator.joined
        stop_workers([worker for worker in self._workers if worker.rank not in joined], grace=0.0)
        stop_workers(self._workers, grace=grace)


def launcher_for(resources: ResourceSpec, settings: Settings) -> Launcher | None:
    """What starts workers on these nodes, or has started them; None where they are started by hand.

    Raises:
        ClusterError: the nodes cannot be reached with these settings.
    """
    if settings.launch == "none":
        early_launcher(settings.early_workers, None)
        _require_known_port(settings)
        return None
    early = early_launcher(settings.early_workers, resources)
    if early is not None:
        return early
    output = chief_output(settings.worker_output, brief=settings.output == "brief")
    return launcher_on(resources, settings, Command.of_process(), output, last_words_descriptor=settings.worker_output)


def _require_known_port(settings: Settings) -> None:
    if not settings.coordinator_port:
        raise ClusterError(
            f"who starts workers by hand tells them where the chief is. Received: {LAUNCH_VARIABLE}=none without "
            f"{COORDINATOR_PORT_VARIABLE}. Give the chief {COORDINATOR_PORT_VARIABLE}=PORT, and the others "
            f"{COORDINATOR_VARIABLE}=ADDRESS:PORT."
        )
