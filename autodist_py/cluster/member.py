"""`WorkerCluster`: this process as one of several workers. It implements `cluster.Cluster`.

It owns the life of the process in the run: joining, agreeing, failing with the one cause, leaving. It is long, as one
lock and one cause are shared by all of these.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import ClassVar, TypeVar

from autodist_py.cluster import tf_adapter
from autodist_py.cluster.chief import Chief
from autodist_py.cluster.coordinator.announcements import NO_STEP
from autodist_py.cluster.coordinator.api import CoordinatorCalls, HeartbeatReply
from autodist_py.cluster.coordinator.service import ChiefLostError, ChiefSilentError, CoordinatorClient
from autodist_py.cluster.exit_hooks import may_be_in_tensorflow, observe_script, one_line
from autodist_py.cluster.failure import FAILED, INTERRUPTED, TERMINATED, Worker, chief_lost
from autodist_py.cluster.last_words import LastWords
from autodist_py.cluster.launch.told import Told
from autodist_py.cluster.loopback import closed_to_others
from autodist_py.cluster.ports import HeldPort, host_and_port
from autodist_py.cluster.progress import Progress
from autodist_py.cluster.server_probe import STILL_SECONDS, answers, ask_seconds
from autodist_py.cluster.step_status import NO_STATUS, PROMPT_SECONDS, OwnStepStatus
from autodist_py.config.resource_spec import first_difference, spec_lines
from autodist_py.config.settings import LAUNCH_VARIABLE, Settings
from autodist_py.proto.errors import AutoDistError, ClusterError, WorkerFailedError
from autodist_py.proto.resource_spec import ResourceSpec

_log = logging.getLogger(__name__)

EXCHANGE_SECONDS = 600.0
"""How long workers wait for each other, if not told otherwise: one may still trace a large model."""

HEAR_SECONDS = 24 * 3600.0
"""What the chief does between two steps is its own matter; that it lives is seen by its heartbeats."""

CAUSE_SECONDS = 2.0
"""How long an error that may follow from another worker's failure waits for that failure to be known."""

MARGIN_SECONDS = 1.0

T = TypeVar("T")


class WorkerCluster:
    """This process as worker `rank` of several. It implements Cluster, and observes its script's end.

    A failed run gives the script `settings.exit_grace` seconds to end by itself (its collectives and `check` raise);
    then the process is ended, with the cause as its last line.
    """

    of_process: ClassVar["WorkerCluster | None"] = None
    """The one of this process, from the moment it tries to join."""

    def __init__(
        self,
        rank: int,
        resources: ResourceSpec,
        calls: CoordinatorCalls,
        settings: Settings,
        *,
        chief: Chief | None = None,
        client: CoordinatorClient | None = None,
    ) -> None:
        self.rank = rank
        self.num_workers = len(resources.workers)
        self.is_chief = chief is not None
        self.run_id = ""
        self.seed = 0
        self._servers: tuple[str, ...] = ()
        self._step = 0
        self._progress = Progress(settings.progress if settings.rank is None else None)
        self._heard_at = 0
        self._heard: Counter[tuple[int, str]] = Counter()
        self.next_instance_key = 1
        self.resources = resources
        self._calls = calls
        self._chief = chief
        self._client = client
        self._waits = OwnStepStatus()
        self._exit_grace = settings.exit_grace
        self._last_words = LastWords(None if settings.rank is None else settings.worker_output)
        self._has_lost_chief = False
        self.heartbeat_timeout = settings.heartbeat_timeout
        self._lock = threading.Lock()
        self._cause: str | None = None
        self._failed = threading.Event()
        self._all_told = threading.Event()
        """Whether no callback of on_failure runs."""
        self._all_told.set()
        self._failed_at = 0.0
        self._is_leaving = False
        self._left = threading.Event()
        self._exiting = threading.Event()
        self._callbacks: dict[object, Callable[[str], None]] = {}
        self._loss_callbacks: dict[object, Callable[[int], None]] = {}
        self._lost: set[int] = set()
        self._script_raised = False
        self._signal: signal.Signals | None = None
        self._heart = threading.Thread(target=self._beat, name="autodist-heartbeat", daemon=True)
        self._ear = threading.Thread(target=self._listen, name="autodist-listener", daemon=True)

    # -- Joining ------------------------------------------------------------------------------------------------------

    @classmethod
    def join(cls, resources: ResourceSpec | None, settings: Settings, timeout: float) -> "WorkerCluster":
        """See join_cluster."""
        tf_adapter.require_no_eager_context()
        rank = settings.rank or 0
        port = HeldPort(settings.server_port + rank if settings.server_port else 0)
        try:
            cluster = cls._of(rank, resources, settings)
            cls.of_process = cluster
            observe_script(cluster)
            cluster._join(port, timeout)
        finally:
            port.release()
        return cluster

    @classmethod
    def _of(cls, rank: int, resources: ResourceSpec | None, settings: Settings) -> "WorkerCluster":
        if settings.coordinator is None and resources is not None:
            chief = Chief.start(resources, settings)
            return cls(rank, resources, chief.coordinator, settings, chief=chief)
        told = Told.from_input()
        resources = told.resources if resources is None else resources
        if resources is None or settings.coordinator is None:
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
            settings.coordinator,
            told.secret,
            heartbeat_timeout=settings.heartbeat_timeout,
            awaits_chief=settings.launch == "none",
        )
        return cls(rank, resources, client, settings, client=client)

    def _join(self, port: HeldPort, timeout: float) -> None:
        if self._chief is not None:
            self._chief.launch_workers()
        node = self.resources.workers[self.rank]
        cpus = max(1, len(node.cpus))
        tf_adapter.set_local_devices(cpus, node.gpus)  # Imports TensorFlow, while the others do, too.
        membership = self._call(
            lambda: self._calls.join(
                self.rank,
                host_and_port(node.address, port.number),
                spec=spec_lines(self.resources),
                timeout=timeout,
            )
        )
        self.run_id, self.seed, self._servers = membership.run_id, membership.seed, membership.servers
        self._heart.start()
        if not self.is_chief:
            self._ear.start()
        is_local = all(each.is_loopback for each in self.resources.workers)
        with port.shared_with_server(), closed_to_others(port.number) if is_local else nullcontext():
            tf_adapter.start_server(membership.servers, self.rank, cpus=cpus)
        self.barrier("autodist/servers-started", timeout=timeout)
        _log.info("worker %d of %d joined run %s", self.rank, self.num_workers, self.run_id)

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
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self._progress.note(step)
        if self._chief is not None:
            self._chief.coordinator.begins(step)

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
        with self._lock:
            if step != NO_STEP and self._heard_at != step:
                self._heard_at = step
                self._heard = Counter(
                    {topology: count for topology, count in self._heard.items() if topology[0] == NO_STEP}
                )
            position = self._heard[step, key]
            self._heard[step, key] += 1
        return self._call(lambda: self._calls.hear(self.rank, key, step=step, position=position, timeout=timeout))

    def step_apart(self, expendable: Collection[int]) -> None:
        """See Cluster."""
        if self._chief is not None:
            self._chief.coordinator.step_apart(expendable)

    def together(self, seconds: float, what: str) -> AbstractContextManager[None]:
        """See Cluster."""
        return self._waits.together(seconds, what)

    def stopped_in(self, what: str) -> None:
        """See Cluster."""
        self._waits.stopped_in(what)

    def leave(self) -> None:
        """See Cluster."""
        if self._left.is_set():
            return
        self._is_leaving = True
        self._call(lambda: self._calls.leave(self.rank, self.step))
        self._left.set()

    def _exchange(self, key: str, value: bytes, *, everyone: bool, timeout: float) -> dict[int, bytes]:
        self._require_member()
        return self._call(lambda: self._calls.exchange(self.rank, key, value=value, everyone=everyone, timeout=timeout))

    def _require_member(self) -> None:
        self.check()
        if self._left.is_set():
            raise ClusterError("this worker has left the cluster, which ends with that. Call leave() last.")

    # -- Failing ------------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """See Cluster."""
        self._abort(FAILED, reason)

    def check(self) -> None:
        """See Cluster."""
        if self._cause is not None:
            raise WorkerFailedError(self._cause)

    def failure(self, *, wait: float = CAUSE_SECONDS) -> WorkerFailedError | None:
        """See Cluster."""
        self._failed.wait(wait)
        return None if self._cause is None else WorkerFailedError(self._cause)

    def on_failure(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """See Cluster."""
        key = object()
        with self._lock:
            self._callbacks[key] = callback

        def take_back() -> None:
            self._callbacks.pop(key, None)

        return take_back

    def on_loss(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """See Cluster."""
        key = object()
        with self._lock:
            self._loss_callbacks[key] = callback

        def take_back() -> None:
            self._loss_callbacks.pop(key, None)

        return take_back

    def _lose(self, rank: int) -> None:
        with self._lock:
            if rank in self._lost:
                return
            self._lost.add(rank)
            callbacks = list(self._loss_callbacks.values())
        for callback in callbacks:
            try:
                callback(rank)
            except Exception:
                _log.exception("a callback of on_loss raised")

    def _abort(self, event: str, reason: str) -> None:
        detail = " ".join(reason.split())
        with suppress(AutoDistError):
            self._fail(self._call(lambda: self._calls.abort(self.rank, event, detail=detail, step=self.step)))

    def _call(self, call: Callable[[], T]) -> T:
        """The call's result; what it tells about the run's failure is noted."""
        try:
            return call()
        except WorkerFailedError as error:
            self._fail(str(error))
            raise
        except ChiefLostError as error:
            if self._is_leaving and self._left.wait(MARGIN_SECONDS):
                raise
            self._lose_chief()
            raise WorkerFailedError(self._cause) from error

    def _lose_chief(self) -> None:
        chief, own = (Worker(rank, self.resources.workers[rank].address) for rank in (0, self.rank))
        self._stop_step(str(chief_lost(chief, own, NO_STATUS)))
        self._has_lost_chief = True
        self._fail(str(chief_lost(chief, own, self._waits.now)))
        self._say_last_words()
        if self._client is not None:
            self._client.close()  # Other calls may have no deadline, and their connection may be dead, not broken.

    def _say_last_words(self) -> None:
        where = f"in step {self.step}" if self.step else "before its first step"
        self._last_words.say(f"[{self.rank}] autodist: {where}: {self._cause}")

    def _stop_step(self, why: str) -> None:
        """A step that waits in a collective has raised, and it is known in which, if that does not take too long."""
        if self._cause is None:
            tf_adapter.abort_collectives(why)
            self._waits.find_out()

    def _fail(self, cause: str) -> None:
        with self._lock:
            if self._cause is not None:
                return
            self._cause = cause
            self._all_told.clear()
            callbacks = list(self._callbacks.values())
        self._failed_at = time.monotonic()
        self._failed.set()
        threading.Thread(target=self._end_after_grace, name="autodist-end", daemon=True).start()
        try:
            tf_adapter.abort_collectives(cause)
            for callback in callbacks:
                try:
                    callback(cause)
                except Exception:
                    _log.exception("a callback of on_failure raised")
        finally:
            self._all_told.set()

    def _beat(self) -> None:
        """Reports that this process is alive, until the run ends; the chief looks for those that do not."""
        with suppress(ClusterError):
            while not self._failed.is_set():
                if self._chief is not None:
                    self._chief.stop_silent()
                pulse = self._call(self._pulse)
                self._waits.answered()
                if pulse.suspicion is not None:
                    self._stop_step(pulse.suspicion)
                    self._waits.answered()  # While it found out it asked nothing.
                if pulse.cause is not None:
                    self._fail(pulse.cause)
                for rank in pulse.lost:
                    self._lose(rank)
                if pulse.finished and self._left.wait(MARGIN_SECONDS):
                    return  # Else the answer to leaving may never come: go on, to notice a chief that is lost.

    def _pulse(self) -> HeartbeatReply:
        """What the chief answers to a heartbeat.

        It is asked again while its process lives, but its Python stands still; so it is, too, after this process's own
        has stood still for as long as an answer may take.
        """
        begun = time.monotonic()
        while True:
            try:
                return self._calls.heartbeat(self.rank, self.step, self._waits.now)
            except ChiefSilentError:
                is_over = time.monotonic() - begun > STILL_SECONDS
                if is_over or not answers(self._servers[0], ask_seconds(self.heartbeat_timeout)):
                    raise

    def _listen(self) -> None:
        """Looks whether the chief answers, while a step waits that has a timeout; a heartbeat may wait for longer."""
        while not (self._failed.wait(PROMPT_SECONDS) or self._left.is_set()):
            if self._waits.hears_nothing():
                self._lose_chief()

    # -- The end of the process ---------------------------------------------------------------------------------------

    def raised(self, error: BaseException) -> bool:
        """See ScriptObserver. An error that follows from a signal, or from another worker's failure, is no news."""
        self._script_raised |= threading.current_thread() is threading.main_thread()
        if isinstance(error, KeyboardInterrupt):
            self.signalled(signal.SIGINT)
        if self._signal is not None or isinstance(error, WorkerFailedError):
            return False
        if tf_adapter.is_tensorflow_error(error) and self.failure() is not None:
            return False
        self._abort(FAILED, one_line(error))
        return True

    def signalled(self, number: signal.Signals) -> None:
        """See ScriptObserver."""
        self._signal = number
        if number == signal.SIGINT:
            self._abort(INTERRUPTED, "KeyboardInterrupt (Ctrl-C)")
        else:
            self._abort(TERMINATED, number.name)

    def ended(self) -> None:
        """See ScriptObserver. The chief waits here for all others, so that none loses its coordinator."""
        self._exiting.set()
        try:
            if self._cause is None:
                self._end_together()
        except (ClusterError, KeyboardInterrupt, SystemExit):
            self.failure()
        if self._cause is None:
            return
        self._stop_workers()
        self._show_cause()
        # Else Python exits with 1 by itself; a thread that closes a session meanwhile would crash the process.
        ends_by_itself = self._signal is None and self._script_raised
        if not ends_by_itself or not self._all_told.wait(MARGIN_SECONDS) or may_be_in_tensorflow():
            self._exit()

    def _end_together(self) -> None:
        self.leave()
        self._heart.join(MARGIN_SECONDS)
        if self._chief is not None:
            self._chief.wait_for_workers()
            self._cause = self._chief.coordinator.cause

    def _end_after_grace(self) -> None:
        if not self._exiting.wait(self._exit_grace):
            self._stop_workers()
            self._show_cause()
            self._exit()

    def _stop_workers(self) -> None:
        if self._chief is not None:
            deadline = self._failed_at + self._exit_grace + MARGIN_SECONDS
            self._chief.stop_workers(grace=max(0.0, deadline - time.monotonic()))

    def _show_cause(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"autodist: {self._cause}\n")
        if self._has_lost_chief:
            self._say_last_words()  # If this thread is the first to come here.

    def _exit(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(1 if self._signal is None else 128 + self._signal)
