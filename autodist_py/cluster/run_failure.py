"""What this process knows of the run's health, and whom it tells: `RunFailure`, and `Losses` that a run survives."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from autodist_py.cluster import tf_adapter
from autodist_py.proto.errors import WorkerFailedError

_log = logging.getLogger(__name__)

CAUSE_SECONDS = 2.0
"""How long an error that may follow from another worker's failure waits for that failure to be known."""


def cause_seconds(error: BaseException, heartbeat_timeout: float) -> float:
    """How long an error waits for the failure that it may follow from.

    A broken connection may be seen first. Of a worker that nobody started for this run, a missing heartbeat alone
    tells that it is gone.
    """
    return CAUSE_SECONDS + (heartbeat_timeout if tf_adapter.is_broken_connection(error) else 0.0)


T = TypeVar("T")


class Listeners(Generic[T]):
    """Callbacks, in the order in which they were added. One that raises keeps nothing from the others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[object, Callable[[T], None]] = {}

    def add(self, callback: Callable[[T], None]) -> Callable[[], None]:
        """`callback` is called with each value that is told. Returns what takes that back."""
        key = object()
        with self._lock:
            self._callbacks[key] = callback

        def take_back() -> None:
            with self._lock:
                self._callbacks.pop(key, None)

        return take_back

    def tell(self, value: T) -> None:
        """All are called, in this thread."""
        with self._lock:
            callbacks = list(self._callbacks.values())
        for callback in callbacks:
            try:
                callback(value)
            except Exception:
                _log.exception("a callback of on_failure or on_loss raised")


class RunFailure:
    """The run's one cause, from when this process knows it.

    Attributes:
        cause: why the run has failed; None: it has not, as far as is known here.
        since: when that became known, by the monotonic clock.
        listeners: who is told the cause.
    """

    def __init__(self) -> None:
        self.cause: str | None = None
        self.since = 0.0
        self.listeners: Listeners[str] = Listeners()
        self._lock = threading.Lock()
        self._is_known = threading.Event()
        self._all_told = threading.Event()
        self._all_told.set()

    def fail(self, cause: str) -> None:
        """The run has failed, for that cause if it is the first."""
        with self._lock:
            if self.cause is not None:
                return
            self.cause, self.since = cause, time.monotonic()
            self._all_told.clear()
        self._is_known.set()
        try:
            self.listeners.tell(cause)
        finally:
            self._all_told.set()

    def fail_untold(self, cause: str | None) -> None:
        """The run has failed, if there is a cause, after all that would be told has ended."""
        with self._lock:
            self.cause = self.cause or cause

    def check(self) -> None:
        """Raises WorkerFailedError, with the cause, if the run has failed."""
        if self.cause is not None:
            raise WorkerFailedError(self.cause)

    def error(self, *, wait: float = CAUSE_SECONDS) -> WorkerFailedError | None:
        """What to raise, if the run has failed, or does within `wait` seconds."""
        self.wait(wait)
        return None if self.cause is None else WorkerFailedError(self.cause)

    def wait(self, seconds: float) -> bool:
        """Whether the run has failed, or does within so many seconds."""
        return self._is_known.wait(seconds)

    def wait_for_listeners(self, seconds: float) -> bool:
        """Whether no listener is being told, or that is over within so many seconds."""
        return self._all_told.wait(seconds)


class Losses:
    """The workers that the run goes on without.

    Attributes:
        listeners: who is told the rank of each, once.
    """

    def __init__(self) -> None:
        self.listeners: Listeners[int] = Listeners()
        self._lock = threading.Lock()
        self._ranks: set[int] = set()

    def lose(self, rank: int) -> None:
        """That worker is lost; it may have been before."""
        with self._lock:
            if rank in self._ranks:
                return
            self._ranks.add(rank)
        self.listeners.tell(rank)
