"""The process between another host's sshd and the worker there: `python -m autodist_py.cluster.launch.agent`.

It runs this Python with the arguments after the first. It is told over standard input what to do, and the end of that
is the end of the chief, or of the connection; so the worker is ended by who knows its process id, on its own machine.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO, cast

STARTED = b"autodist: this Python runs\n"
"""What is written to standard error first: nothing on the way there has failed. Afterwards nothing is written to it."""

TOLD, SIGNAL = b"told ", b"signal "
"""How a line of standard input begins that is the worker's own, and one with the name of a signal."""

ALIVE = b"alive\n"
"""A line that says nothing but that its sender is there: there is one now and then until the worker is told."""

_TERMINATE_SECONDS = 1.0
_TICKS = 4
"""How often it is looked, within the seconds of silence that are allowed, whether a line has come."""


def main(arguments: Sequence[str]) -> int:
    """Runs a worker; its exit code, 128 + n when signal n ended it.

    A line of standard input is the worker's own (see `told.py`), or names a signal for the worker and all that it
    started. When the input ends, the worker has as many seconds as the first argument says. Before it is told, no line
    for the seconds of the second argument ends it, as sshd does not see that a network is cut. Afterwards the worker
    itself sees that the chief does not answer.
    """
    grace, silence, *options = arguments
    sys.stderr.buffer.write(STARTED)
    sys.stderr.flush()
    os.dup2(1, 2)  # One pipe, so that lines stay in order.
    told = open(0, "rb", buffering=0)  # noqa: SIM115 - open to the end; a buffer's lock would outlive its thread.
    process = subprocess.Popen([sys.executable, *options], stdin=subprocess.PIPE, start_new_session=True)
    worker = _Group(process)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, worker.pass_on)
    sender = _Sender()
    threading.Thread(target=_obey, args=(worker, told, float(grace), sender), daemon=True).start()
    threading.Thread(target=_watch, args=(worker, float(silence), sender), daemon=True).start()
    code = worker.wait()
    return code if code >= 0 else 128 - code


class _Group:
    """The worker's process, and all in its process group."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._lock = threading.RLock()

    def wait(self) -> int:
        """The worker's exit code; what it started and left behind is ended, as it would hold the connection open."""
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self.send(signal.SIGKILL)  # Its id is still its own: the process is not reaped yet.
            return self._process.wait()

    def tell(self, line: bytes) -> None:
        """The worker's standard input is this line, and ends, if it has not ended before."""
        stdin = cast(IO[bytes], self._process.stdin)
        if not stdin.closed:
            with suppress(BrokenPipeError), stdin:
                stdin.write(line)

    def send(self, number: signal.Signals) -> None:
        """All get the signal, if the worker has not ended."""
        with self._lock, suppress(ProcessLookupError, PermissionError):
            if self._process.returncode is None:
                os.killpg(self._process.pid, number)

    def pass_on(self, number: int, _: FrameType | None) -> None:
        """A signal for this process is one for the worker."""
        self.send(signal.Signals(number))


@dataclass
class _Sender:
    """What is known of who writes to standard input.

    Attributes:
        lines: how many have come.
        has_told: whether the worker has its own one, or no line can come any more.
    """

    lines: int = 0
    has_told: bool = False


def _watch(worker: _Group, silence: float, sender: _Sender) -> None:
    """Ends the worker if nothing comes for so many seconds before it is told; while this machine sleeps none pass."""
    heard, ticks = 0, 0
    while not sender.has_told:
        time.sleep(silence / _TICKS)
        heard, ticks = sender.lines, 0 if sender.lines > heard else ticks + 1
        if ticks == _TICKS and not sender.has_told:
            said = (
                f"autodist: nothing came for {silence:g} s from who started this worker and has told it nothing yet\n"
            )
            with suppress(OSError):
                os.write(1, said.encode())
            _end(worker)
            return


def _end(worker: _Group) -> None:
    worker.send(signal.SIGTERM)
    time.sleep(_TERMINATE_SECONDS)
    worker.send(signal.SIGKILL)


def _obey(worker: _Group, told: IO[bytes], grace: float, sender: _Sender) -> None:
    for line in told:
        if not line.endswith(b"\n"):
            break  # Who wrote it was killed meanwhile.
        sender.lines += 1
        if line == ALIVE:
            continue
        if line.startswith(TOLD):
            sender.has_told = True
            worker.tell(line.removeprefix(TOLD))
        elif (name := line.removeprefix(SIGNAL).strip().decode(errors="replace")) in signal.Signals.__members__:
            worker.send(signal.Signals[name])
        else:
            break  # Whatever this is, what comes behind it is not understood either.
    sender.has_told = True
    worker.tell(b"")
    time.sleep(grace)
    _end(worker)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
