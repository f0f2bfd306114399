"""What tests of processes share: whether one runs, a pipe for what workers write, and a wait for what others do."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from autodist_py.runtime.launcher import LineOutput

ROOT = Path(__file__).resolve().parent.parent


class Lines:
    """A pipe that a LineOutput writes to, read to its end in the background."""

    def __init__(self) -> None:
        self._read, self.descriptor = os.pipe()
        self.output = LineOutput(self.descriptor)
        self._text = b""
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    def _collect(self) -> None:
        while chunk := os.read(self._read, 1 << 16):
            self._text += chunk

    @property
    def text(self) -> str:
        """What was written so far."""
        return self._text.decode()

    def all(self) -> list[str]:
        """All lines; nothing may be written afterwards."""
        os.close(self.descriptor)
        self._reader.join(10)
        os.close(self._read)
        return self.text.splitlines()


def is_running(process_id: int) -> bool:
    """Whether there is such a process, other than a zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Returns when the condition holds: when another thread or process is as far as a test needs it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"what this waits for has not happened within {seconds:g} s"
        time.sleep(0.01)
