"""`CoordinatorLink`: this worker's calls of the coordinator, and what follows where an answer says that the run failed.

Its other end is `coordinator/`. Without an answer the chief is lost, and with it the run.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from autodist_py.cluster import tf_adapter
from autodist_py.cluster.coordinator.api import CoordinatorCalls, Membership
from autodist_py.cluster.coordinator.service import ChiefLostError
from autodist_py.cluster.failure import chief_lost
from autodist_py.cluster.last_words import LastWords
from autodist_py.cluster.progress import Progress
from autodist_py.cluster.run_failure import RunFailure
from autodist_py.cluster.seat import Seat
from autodist_py.cluster.step_status import NO_STATUS, OwnStepStatus
from autodist_py.config.resource_spec import spec_lines
from autodist_py.proto.errors import AutoDistError, WorkerFailedError

MARGIN_SECONDS = 1.0
"""How long an answer may still be on its way when the chief has all that it waited for."""

T = TypeVar("T")


class CoordinatorLink:
    """The calls of one worker, which may come from several threads.

    Attributes:
        has_lost_chief: whether the coordinator does not answer any more.
    """

    def __init__(
        self,
        seat: Seat,
        calls: CoordinatorCalls,
        failure: RunFailure,
        *,
        status: OwnStepStatus,
        progress: Progress,
        last_words: LastWords,
        hang_up: Callable[[], None],
    ) -> None:
        """Nothing is asked yet.

        Args:
            seat: the worker.
            calls: the coordinator itself, or a client of it.
            failure: what is told a cause that an answer has.
            status: what the worker's step waits in.
            progress: which step the worker is at.
            last_words: what is told to `autodist run` when the chief is lost, which may have shown this worker's lines.
            hang_up: ends the calls that wait.
        """
        self.has_lost_chief = False
        self._seat, self._calls, self._failure = seat, calls, failure
        self._status, self._progress, self._last_words = status, progress, last_words
        self._hang_up = hang_up
        self._is_leaving = False
        self._left = threading.Event()

    # -- Calls --------------------------------------------------------------------------------------------------------

    def ask(self, call: Callable[[CoordinatorCalls], T]) -> T:
        """The answer to the call; a failure of the run that it tells is noted.

        Raises:
            WorkerFailedError: the run has failed, or the chief is lost.
            ClusterError: what is asked for is wrong, or time is up.
        """
        try:
            return call(self._calls)
        except WorkerFailedError as error:
            self._failure.fail(str(error))
            raise
        except ChiefLostError as error:
            if self._is_leaving and self.has_left(MARGIN_SECONDS):
                raise
            self.lose_chief()
            raise WorkerFailedError(self._failure.cause) from error

    def join(self, server: str, timeout: float) -> Membership:
        """The run, when every worker has joined; this one's TensorFlow server is at `server`."""
        spec = spec_lines(self._seat.resources)
        return self.ask(lambda calls: calls.join(self._seat.rank, server, spec=spec, timeout=timeout))

    def abort(self, event: str, reason: str) -> None:
        """The run ends, with this worker as the cause, unless it has failed before."""
        detail, step = " ".join(reason.split()), self._progress.step
        with suppress(AutoDistError):
            self._failure.fail(self.ask(lambda calls: calls.abort(self._seat.rank, event, detail=detail, step=step)))

    def leave(self) -> None:
        """Every worker has left."""
        if self.has_left():
            return
        self._is_leaving = True
        self.ask(lambda calls: calls.leave(self._seat.rank, self._progress.step))
        self._left.set()

    def has_left(self, seconds: float = 0.0) -> bool:
        """Whether the worker has left, or has so within so many seconds."""
        return self._left.wait(seconds)

    # -- Failing ------------------------------------------------------------------------------------------------------

    def lose_chief(self) -> None:
        """The coordinator does not answer: the run has failed, for that if nothing else is known."""
        chief, own = self._seat.chief, self._seat.worker
        self.stop_step(str(chief_lost(chief, own, NO_STATUS)))
        self.has_lost_chief = True
        self._failure.fail(str(chief_lost(chief, own, self._status.now)))
        self.say_last_words()
        self._hang_up()  # Other calls may have no deadline, and their connection may be dead, not broken.

    def stop_step(self, why: str) -> None:
        """A step that waits in a collective has raised, and it is known in which, if that does not take too long."""
        if self._failure.cause is None:
            tf_adapter.abort_collectives(why)
            self._status.find_out()

    def say_last_words(self) -> bool:
        """`autodist run` is told the cause, as nobody may show this worker's lines any more. Whether it was, or is."""
        step = self._progress.step
        where = f"in step {step}" if step else "before its first step"
        self._last_words.say(f"[{self._seat.rank}] autodist: {where}: {self._failure.cause}")
        return self._last_words.are_said
