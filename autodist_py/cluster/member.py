"""`WorkerCluster`: this process as one of several workers. It implements `cluster.Cluster`.

It joins the run, and puts together what a worker has there: its seat, its link to the coordinator, its heartbeat, the
run's failure, and the end of its script. Each is a module of its own.
"""

import logging
import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from autodist_py.cluster import tf_adapter
from autodist_py.cluster.chief import Chief
from autodist_py.cluster.coordinator.announcements import NO_STEP, Places
from autodist_py.cluster.coordinator.api import CoordinatorCalls, Membership
from autodist_py.cluster.coordinator.service import CoordinatorClient
from autodist_py.cluster.coordinator_link import CoordinatorLink
from autodist_py.cluster.exit_hooks import observe_script
from autodist_py.cluster.failure import FAILED
from autodist_py.cluster.heartbeat import Heartbeat
from autodist_py.cluster.last_words import LastWords
from autodist_py.cluster.launch.told import Told
from autodist_py.cluster.loopback import closed_to_others
from autodist_py.cluster.ports import HeldPort, host_and_port
from autodist_py.cluster.progress import Progress
from autodist_py.cluster.run_failure import CAUSE_SECONDS, Losses, RunFailure
from autodist_py.cluster.script_end import ScriptEnd
from autodist_py.cluster.seat import Seat
from autodist_py.cluster.step_status import OwnStepStatus
from autodist_py.config.resource_spec import first_difference, spec_lines
from autodist_py.config.settings import LAUNCH_VARIABLE, Settings
from autodist_py.proto.errors import ClusterError, WorkerFailedError
from autodist_py.proto.resource_spec import ResourceSpec

_log = logging.getLogger(__name__)

EXCHANGE_SECONDS = 600.0
"""How long workers wait for each other, if not told otherwise: one may still trace a large model."""

HEAR_SECONDS = 24 * 3600.0
"""What the chief does between two steps is its own matter; that it lives is seen by its heartbeats."""

_NO_RUN = Membership("", 0, ())
"""Of a worker that has not joined."""


class WorkerCluster:
    """This process as one of several workers. It implements Cluster.

    Attributes:
        next_instance_key: see Cluster.
    """

    of_process: ClassVar["WorkerCluster | None"] = None
    """The one of this process, from the moment it tries to join."""

    def __init__(
        self,
        seat: Seat,
        calls: CoordinatorCalls,
        settings: Settings,
        *,
        chief: Chief | None = None,
        hang_up: Callable[[], None] = lambda: None,
    ) -> None:
        """A worker that has not joined.

        Args:
            seat: the worker.
            calls: the coordinator itself, or a client of it.
            settings: the environment of this process.
            chief: what this process has as the chief; None where it is another worker.
            hang_up: ends the calls that wait.
        """
        self.next_instance_key = 1
        self._seat, self._chief, self._membership = seat, chief, _NO_RUN
        self._progress = Progress(settings.progress if settings.rank is None else None)
        self._places = Places()
        self._status = OwnStepStatus()
        self._failure, self._losses = RunFailure(), Losses()
        self._link = CoordinatorLink(
            seat,
            calls,
            self._failure,
            status=self._status,
            progress=self._progress,
            last_words=LastWords(None if settings.rank is None else settings.worker_output),
            hang_up=hang_up,
        )
        self._heartbeat = Heartbeat(
            seat,
            self._link,
            timeout=settings.heartbeat_timeout,
            status=self._status,
            progress=self._progress,
            failure=self._failure,
            losses=self._losses,
            look=(lambda: None) if chief is None else chief.stop_silent,
        )
        self._script_end = ScriptEnd(self._link, self._failure, self._heartbeat, chief=chief, grace=settings.exit_grace)
        # First of all listeners, so that a script that waits in a collective goes on, and ends in time.
        self._failure.listeners.add(lambda cause: self._script_end.begin_grace())
        self._failure.listeners.add(lambda cause: tf_adapter.abort_collectives(cause))

    # -- Joining ------------------------------------------------------------------------------------------------------

    @classmethod
    def join(cls, resources: ResourceSpec | None, settings: Settings, timeout: float, secret: str) -> "WorkerCluster":
        """See join_cluster."""
        tf_adapter.require_no_eager_context()
        rank = settings.rank or 0
        port = HeldPort(settings.server_port + rank if settings.server_port else 0)
        try:
            cluster = cls._of(rank, resources, settings, secret)
            cls.of_process = cluster
            observe_script(cluster._script_end)
            cluster._join(port, timeout)
        finally:
            port.release()
        return cluster

    @classmethod
    def _of(cls, rank: int, resources: ResourceSpec | None, settings: Settings, secret: str = "") -> "WorkerCluster":
        if settings.rank is None and resources is not None:
            chief = Chief.start(resources, settings, secret)
            return cls(Seat(rank, resources), chief.coordinator, settings, chief=chief)
        told = Told(secret) if secret else Told.from_input()
        resources = told.resources if resources is None else resources
        coordinator = told.coordinator or settings.coordinator
        if resources is None or not coordinator:
            raise ClusterError(
                f"a worker is told the resource spec by the chief that starts it. Received: none, in the process of "
                f"rank {rank}. A worker that you start has {LAUNCH_VARIABLE}=none, as its chief has, and reads the "
                "spec itself."
            )
        if rank >= len(resources.workers):
            raise ClusterError(
                f"every worker reads the same resource spec. Received: {len(resources.workers)} nodes, in the process "
                f"of rank {rank}. Give all workers the same file."
            )
        client = CoordinatorClient(
            coordinator,
            told.secret,
            heartbeat_timeout=settings.heartbeat_timeout,
            awaits_chief=settings.launch == "none",
        )
        return cls(Seat(rank, resources), client, settings, hang_up=client.close)

    def _join(self, port: HeldPort, timeout: float) -> None:
        if self._chief is not None:
            self._chief.launch_workers()
        seat = self._seat
        tf_adapter.set_local_devices(seat.num_cpus, seat.node.gpus)  # Imports TensorFlow, while the others do, too.
        self._membership = self._link.join(host_and_port(seat.node.address, port.number), timeout)
        servers = self._membership.servers
        self._heartbeat.start(servers[0])
        is_local = seat.resources.is_local
        with port.shared_with_server(), closed_to_others(port.number) if is_local else nullcontext():
            tf_adapter.start_server(servers, seat.rank, cpus=seat.num_cpus)
        self.barrier("autodist/servers-started", timeout=timeout)
        _log.info("worker %d of %d joined run %s", seat.rank, seat.num_workers, self.run_id)

    def require(self, resources: ResourceSpec | None) -> None:
        """This cluster can serve another `AutoDist` of `resources`; None: those of the run.

        Raises:
            ClusterError: it is another cluster, or it has ended.
        """
        if resources is not None and resources != self.resources:
            was, now = first_difference(spec_lines(self.resources), spec_lines(resources))
            raise ClusterError(
                f"another resource spec than before: {now}, where it was {was}. A process belongs to one cluster for "
                "its whole life, as TensorFlow's server cannot be stopped. Use the same spec for every AutoDist of a "
                "script, or another process."
            )
        self._require_member()
        if self._chief is not None:
            self._chief.coordinator.counts_on()

    # -- Which worker of which run ------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """See Cluster."""
        return self._seat.rank

    @property
    def num_workers(self) -> int:
        """See Cluster."""
        return self._seat.num_workers

    @property
    def is_chief(self) -> bool:
        """See Cluster."""
        return self._seat.is_chief

    @property
    def resources(self) -> ResourceSpec:
        """See Cluster."""
        return self._seat.resources

    @property
    def run_id(self) -> str:
        """See Cluster."""
        return self._membership.run_id

    @property
    def seed(self) -> int:
        """See Cluster."""
        return self._membership.seed

    @property
    def heartbeat_timeout(self) -> float:
        """See Cluster."""
        return self._heartbeat.timeout

    # -- Together with the others -------------------------------------------------------------------------------------

    def broadcast(self, key: str, value: bytes, *, timeout: float = EXCHANGE_SECONDS) -> bytes:
        """See Cluster."""
        return self._exchange(key, value if self.is_chief else b"", everyone=False, timeout=timeout)[0]

    def compare(self, key: str, value: bytes, *, timeout: float = EXCHANGE_SECONDS) -> dict[int, bytes]:
        """See Cluster."""
        return self._exchange(key, value, everyone=True, timeout=timeout)

    def barrier(self, key: str, *, timeout: float = EXCHANGE_SECONDS) -> None:
        """See Cluster."""
        self._exchange(key, b"", everyone=True, timeout=timeout)

    @property
    def step(self) -> int:
        """See Cluster. Who hears what the chief announces is told at once where it is."""
        return self._progress.step

    @step.setter
    def step(self, step: int) -> None:
        self._progress.note(step)
        if self._chief is not None:
            self._chief.coordinator.begins(step)

    def add_steps(self, counter: Callable[[], int]) -> None:
        """See Cluster."""
        self._progress.add(counter)

    def announce(self, key: str, make: Callable[[], bytes]) -> None:
        """See Cluster."""
        if self._chief is None:
            raise ClusterError(f"the chief announces, and worker {self.rank} is not the chief; at {key!r}")
        step = self._step_of_caller
        with self._chief.coordinator.preparing(key, step=step):
            value = make()
            self._chief.coordinator.announce(key, value, step=step)

    @property
    def _step_of_caller(self) -> int:
        """At which step the script is; a thread of its own is at none."""
        return self.step if threading.current_thread() is threading.main_thread() else NO_STEP

    def hear(self, key: str, *, timeout: float = HEAR_SECONDS) -> bytes | None:
        """See Cluster."""
        self._require_member()
        step = self._step_of_caller
        position = self._places.next_position(step, key)
        return self._link.ask(lambda calls: calls.hear(self.rank, key, step=step, position=position, timeout=timeout))

    def step_apart(self, expendable: Collection[int]) -> None:
        """See Cluster."""
        if self._chief is not None:
            self._chief.coordinator.step_apart(expendable)

    def together(self, seconds: float, what: str) -> AbstractContextManager[None]:
        """See Cluster."""
        return self._status.together(seconds, what)

    def stopped_in(self, what: str) -> None:
        """See Cluster."""
        self._status.stopped_in(what)

    def leave(self) -> None:
        """See Cluster."""
        self._link.leave()

    def _exchange(self, key: str, value: bytes, *, everyone: bool, timeout: float) -> dict[int, bytes]:
        self._require_member()
        return self._link.ask(
            lambda calls: calls.exchange(self.rank, key, value=value, everyone=everyone, timeout=timeout)
        )

    def _require_member(self) -> None:
        self.check()
        if self._link.has_left():
            raise ClusterError("this worker has left the cluster, which ends with that. Call leave() last.")

    # -- Failing ------------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """See Cluster."""
        self._link.abort(FAILED, reason)

    def check(self) -> None:
        """See Cluster."""
        self._failure.check()

    def failure(self, *, wait: float = CAUSE_SECONDS) -> WorkerFailedError | None:
        """See Cluster."""
        return self._failure.error(wait=wait)

    def on_failure(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """See Cluster."""
        return self._failure.listeners.add(callback)

    def on_loss(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """See Cluster."""
        return self._losses.listeners.add(callback)
