"""`ScriptEnd`: how a worker's script ends, and with it the process: with the others, or with the run's one cause."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress

from autodist_py.cluster import tf_adapter
from autodist_py.cluster.chief import Chief
from autodist_py.cluster.coordinator_link import MARGIN_SECONDS, CoordinatorLink
from autodist_py.cluster.exit_hooks import may_be_in_tensorflow, one_line
from autodist_py.cluster.failure import FAILED, INTERRUPTED, TERMINATED
from autodist_py.cluster.heartbeat import Heartbeat
from autodist_py.cluster.run_failure import RunFailure, cause_seconds
from autodist_py.proto.errors import ClusterError, WorkerFailedError


class ScriptEnd:
    """One worker's. It implements ScriptObserver.

    A failed run gives the script a grace period to end by itself: its collectives and `check` raise. Then the process
    is ended, with the cause as its last line.
    """

    def __init__(
        self, link: CoordinatorLink, failure: RunFailure, heartbeat: Heartbeat, *, chief: Chief | None, grace: float
    ) -> None:
        """The script runs.

        Args:
            link: what is told how the script ends.
            failure: the run's.
            heartbeat: the worker's, which sees the run's end.
            chief: what this process has as the chief; None where it is another worker.
            grace: for how many seconds the script of a failed run may go on.
        """
        self._link, self._failure, self._heartbeat, self._chief, self._grace = link, failure, heartbeat, chief, grace
        self._has_raised = False
        self._signal: signal.Signals | None = None
        self._is_over = threading.Event()

    # -- The script, see ScriptObserver -------------------------------------------------------------------------------

    def raised(self, error: BaseException) -> bool:
        """See ScriptObserver. An error that follows from a signal, or from another worker's failure, is no news."""
        self._has_raised |= threading.current_thread() is threading.main_thread()
        if isinstance(error, KeyboardInterrupt):
            self.signalled(signal.SIGINT)
        if self._signal is not None or isinstance(error, WorkerFailedError):
            return False
        if tf_adapter.is_tensorflow_error(error):
            seconds = cause_seconds(error, self._heartbeat.timeout)
            if self._failure.error(wait=seconds) is not None:
                return False
        self._link.abort(FAILED, one_line(error))
        return True

    def signalled(self, number: signal.Signals) -> None:
        """See ScriptObserver."""
        self._signal = number
        if number == signal.SIGINT:
            self._link.abort(INTERRUPTED, "KeyboardInterrupt (Ctrl-C)")
        else:
            self._link.abort(TERMINATED, number.name)

    def ended(self) -> None:
        """See ScriptObserver. The chief waits here for all others, so that none loses its coordinator."""
        self._is_over.set()
        try:
            if self._failure.cause is None:
                self._end_together()
        except (ClusterError, KeyboardInterrupt, SystemExit):
            self._failure.error()
        if self._failure.cause is None:
            return
        self._stop_workers()
        self._show_cause()
        # Else Python exits with 1 by itself; a thread that closes a session meanwhile would crash the process.
        ends_by_itself = self._signal is None and self._has_raised
        if not ends_by_itself or not self._failure.wait_for_listeners(MARGIN_SECONDS) or may_be_in_tensorflow():
            self._exit()

    def _end_together(self) -> None:
        self._link.leave()
        self._heartbeat.wait_for_last(MARGIN_SECONDS)
        if self._chief is not None:
            self._chief.wait_for_workers()
            self._failure.fail_untold(self._chief.coordinator.cause)

    # -- The process --------------------------------------------------------------------------------------------------

    def begin_grace(self) -> None:
        """The run has failed: a script that goes on for longer than its grace period is ended."""
        threading.Thread(target=self._end_after_grace, name="autodist-end", daemon=True).start()

    def _end_after_grace(self) -> None:
        if not self._is_over.wait(self._grace):
            self._stop_workers()
            self._show_cause()
            self._exit()

    def _stop_workers(self) -> None:
        if self._chief is not None:
            deadline = self._failure.since + self._grace + MARGIN_SECONDS
            self._chief.stop_workers(grace=max(0.0, deadline - time.monotonic()))

    def _show_cause(self) -> None:
        if self._link.has_lost_chief and self._link.say_last_words():
            return
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"autodist: {self._failure.cause}\n")

    def _exit(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(1 if self._signal is None else 128 + self._signal)
