"""What ends with this process, and in which order: `Ending` lists it, and one `atexit` callback does all of it.

What a script registers with `atexit` after `AutoDist(...)` runs before: it can still look at every variable.
A `weakref.finalize` of ours has `atexit = False`: else it would run before, and take what others still ask for.
"""

import atexit
import logging
import os
import threading
from collections.abc import Callable
from enum import Enum
from typing import ClassVar

_log = logging.getLogger(__name__)


class Ending(Enum):
    """What ends with the process, in this order. Of one kind, the one that came last ends first."""

    STEPS_OF_OTHERS = "the wait for workers that still take steps, or ask for values"
    MESSAGES = "the threads that serve, and carry messages"
    VALUES = "the thread that answers who asks for values"
    HOROVOD = "Horovod's own thread"
    TIMELINE = "TensorFlow's profiler"
    SCRIPT = "this worker's part in the run"


class ExitStack:
    """The callbacks of one process. A process that the script forks has none of them."""

    _of_process: ClassVar["ExitStack | None"] = None

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._callbacks: dict[Ending, list[Callable[[], None]]] = {ending: [] for ending in Ending}

    @classmethod
    def of_process(cls) -> "ExitStack":
        """The one that runs when this process's script has ended."""
        found = cls._of_process
        if found is None or found._owner != os.getpid():
            found = cls._of_process = cls()
            atexit.register(found.run)
        return found

    def add(self, ending: Ending, callback: Callable[[], None]) -> Callable[[], None]:
        """From now on `callback` is called when the script has ended. Returns what takes that back."""

        def call() -> None:  # Of this `add` alone: the same callback may be added twice.
            callback()

        with self._lock:
            self._callbacks[ending].append(call)

        def take_back() -> None:
            with self._lock:
                if call in self._callbacks[ending]:
                    self._callbacks[ending].remove(call)

        return take_back

    def run(self) -> None:
        """All callbacks are called, each once, whatever another raises."""
        if os.getpid() != self._owner:
            return
        while (found := self._next()) is not None:
            ending, callback = found
            try:
                callback()
            except BaseException:  # Such as a signal's: what stands below it has to end all the same.
                _log.exception("%s did not end well", ending.value)

    def _next(self) -> tuple[Ending, Callable[[], None]] | None:
        with self._lock:
            return next(((ending, added.pop()) for ending, added in self._callbacks.items() if added), None)


def at_exit(ending: Ending, callback: Callable[[], None]) -> Callable[[], None]:
    """From now on `callback` is called when this process's script has ended. Returns what takes that back."""
    return ExitStack.of_process().add(ending, callback)
