"""`Heartbeat`: the threads by which a worker and its chief notice each other's end.

What the chief makes of all heartbeats is `coordinator/liveness.py`'s.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from autodist_py.cluster.coordinator.api import CoordinatorCalls, HeartbeatReply
from autodist_py.cluster.coordinator.service import ChiefSilentError
from autodist_py.cluster.coordinator_link import MARGIN_SECONDS, CoordinatorLink
from autodist_py.cluster.progress import Progress
from autodist_py.cluster.run_failure import Losses, RunFailure
from autodist_py.cluster.seat import Seat
from autodist_py.cluster.server_probe import STILL_SECONDS, answers, ask_seconds
from autodist_py.cluster.step_status import PROMPT_SECONDS, OwnStepStatus
from autodist_py.proto.errors import ClusterError


class Heartbeat:
    """One worker's, from when it has joined until the run ends.

    Attributes:
        timeout: for how many seconds a worker may be silent before it is lost.
    """

    def __init__(
        self,
        seat: Seat,
        link: CoordinatorLink,
        *,
        timeout: float,
        status: OwnStepStatus,
        progress: Progress,
        failure: RunFailure,
        losses: Losses,
        look: Callable[[], None],
    ) -> None:
        """It does not beat yet.

        Args:
            seat: the worker.
            link: to the coordinator, which answers each beat.
            timeout: see the class.
            status: what a beat tells of the worker's step; it is told of each answer.
            progress: which step the worker is at.
            failure: what is told the cause that an answer has.
            losses: what is told the workers that the run goes on without.
            look: on the chief, ends the workers that are silent; called before each beat.
        """
        self.timeout = timeout
        self._seat, self._link, self._status, self._progress = seat, link, status, progress
        self._failure, self._losses, self._look = failure, losses, look
        self._beats: threading.Thread | None = None

    def start(self, chief_server: str) -> None:
        """From now on this worker reports; the chief's TensorFlow server is at `chief_server`."""
        self._beats = threading.Thread(target=self.beat, args=[chief_server], name="autodist-heartbeat", daemon=True)
        self._beats.start()
        if not self._seat.is_chief:
            threading.Thread(target=self.listen, name="autodist-listener", daemon=True).start()

    def wait_for_last(self, seconds: float) -> None:
        """The run's end is known to this worker's heartbeat, or so many seconds have passed."""
        if self._beats is not None:
            self._beats.join(seconds)

    def beat(self, chief_server: str) -> None:
        """Reports that this process is alive, until the run ends; the chief looks for those that do not."""
        with suppress(ClusterError):
            while not self._failure.wait(0.0):
                self._look()
                reply = self._link.ask(lambda calls: self._report(calls, chief_server))
                self._status.answered()
                if reply.suspicion is not None:
                    self._link.stop_step(reply.suspicion)
                    self._status.answered()  # While it found out it asked nothing.
                if reply.cause is not None:
                    self._failure.fail(reply.cause)
                for rank in reply.lost:
                    self._losses.lose(rank)
                if reply.finished and self._link.has_left(MARGIN_SECONDS):
                    return  # Else the answer to leaving may never come: go on, to notice a chief that is lost.

    def _report(self, calls: CoordinatorCalls, chief_server: str) -> HeartbeatReply:
        """What the chief answers to a heartbeat.

        It is asked again while its process lives, but its Python stands still; so it is, too, after this process's own
        has stood still for as long as an answer may take.
        """
        begun = time.monotonic()
        while True:
            try:
                return calls.heartbeat(self._seat.rank, self._progress.step, self._status.now)
            except ChiefSilentError:
                is_over = time.monotonic() - begun > STILL_SECONDS
                if is_over or not answers(chief_server, ask_seconds(self.timeout)):
                    raise

    def listen(self) -> None:
        """Looks whether the chief answers, while a step waits that has a timeout; a heartbeat may wait for longer."""
        while not (self._failure.wait(PROMPT_SECONDS) or self._link.has_left()):
            if self._status.hears_nothing():
                self._link.lose_chief()
