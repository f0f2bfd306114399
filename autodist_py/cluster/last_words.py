"""`LastWords`: what a worker of this machine says at once when the chief is lost, which may have shown its lines.

`autodist run` has a pipe for the other workers' lines, which the chief and workers of its machine are given. For such
words of workers that the chief has started it waits until no process has the pipe: what a script starts must not.
"""

import os
import select
import stat
import threading
from contextlib import suppress


class LastWords:
    """A pipe to which one line can be written, once. Nothing waits for who reads it, which may stand still.

    Attributes:
        are_said: whether the line was written.
    """

    def __init__(self, descriptor: int | None) -> None:
        """The pipe is the descriptor's, if it is one; a script may have closed it and opened something else since."""
        self.are_said = False
        self._descriptor = descriptor
        self._pipe = None if descriptor is None else _pipe(descriptor)
        self._lock = threading.Lock()

    def say(self, line: str) -> None:
        """The line is written, if that can be done now, and nothing was said before."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is None or self._pipe is None or _pipe(descriptor) != self._pipe:
                return
            text = line.encode(errors="replace")[: select.PIPE_BUF - 1] + b"\n"  # So much is written at once, or none.
            with suppress(OSError):
                poll = select.poll()
                poll.register(descriptor, select.POLLOUT)
                if poll.poll(0):
                    os.write(descriptor, text)
                    self.are_said = True


def keep_from_children(descriptor: int | None) -> None:
    """Processes that the script starts, and that outlive it, do not get the pipe; who is to have it is given it."""
    if descriptor is not None and _pipe(descriptor) is not None:
        os.set_inheritable(descriptor, False)


def _pipe(descriptor: int) -> tuple[int, int] | None:
    """Which pipe the descriptor is; None: it is none."""
    with suppress(OSError):
        status = os.fstat(descriptor)
        if stat.S_ISFIFO(status.st_mode):
            return status.st_dev, status.st_ino
    return None
