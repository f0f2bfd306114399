"""What tests of processes share: a command that runs, a pipe for what workers write, a wait for what others do."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from autodist_py.cluster.launch.local import LineOutput

ROOT = Path(__file__).resolve().parents[2]

AUTODIST = [sys.executable, "-c", "from autodist_py.cli import main; main(prog_name='autodist')"]
"""The command, by this Python's own path: what it starts has the same."""

STEP_OF_A_WEIGHT = """
import numpy as np
from autodist_py import AutoDist
autodist = AutoDist()
import tensorflow as tf

weight = tf.Variable(np.ones([3]))

@autodist.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.linalg.matvec(tf.reduce_mean(x, 1), weight) ** 2)
    weight.assign_sub(0.01 * tape.gradient(loss, weight))
    return loss
"""
"""The beginning of a script whose step takes `x` of shape (rows, columns, 3), with any number of columns."""


def ended(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None, *, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """A command that ran in `folder` with the project on its path, and what it printed.

    Its `environment` is added to that of the tests; the timeout is in seconds.
    """
    return subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


NOTES_ITS_PROCESS = """
import os, sys, time
from pathlib import Path
rank = int(os.environ.get("AUTODIST_RANK", 0))
Path(f"new-{rank}").write_text(str(os.getpid()))
os.rename(f"new-{rank}", f"pid-{rank}")

def wait_for(*files):
    while not all(Path(file).exists() for file in files):
        time.sleep(0.01)

"""
"""The beginning of a script of several workers: the file pid-RANK has its process id, and it can wait for files."""


class Command:
    """A command that runs in a session of its own, and what it prints."""

    def __init__(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]):
        self.process = subprocess.Popen(
            arguments,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._note(line.rstrip("\n"))

    def _note(self, line: str) -> None:
        self.lines.append(line)

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return "\n".join(self.lines)

    def wait_for(self, text: str, count: int = 1, seconds: float = 90.0) -> None:
        """Returns when as many lines have the text."""
        deadline = time.monotonic() + seconds
        while sum(text in line for line in list(self.lines)) < count:
            assert time.monotonic() < deadline, f"not {count} times {text!r} in:\n{self.text}"
            assert self.process.poll() is None or self._reader.is_alive(), self.text
            time.sleep(0.02)

    def end(self, seconds: float) -> int:
        """The exit code, when it has ended and all of its output is read."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it still runs after {seconds} s:\n{self.text}")
        self._reader.join(5)
        return code

    def close(self) -> None:
        """It is ended, if it runs."""
        self.process.kill()
        self.process.wait(10)


class Lines:
    """A pipe that a LineOutput writes to, read to its end in the background."""

    def __init__(self, *, brief: bool = False) -> None:
        self._read, self.descriptor = os.pipe()
        self.output = LineOutput(self.descriptor, brief=brief)
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


def is_running(process: int | psutil.Process) -> bool:
    """Whether there is such a process (or one of this id), other than a zombie."""
    try:
        known = psutil.Process(process) if isinstance(process, int) else process
        return known.is_running() and known.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def noted(file: Path) -> list[psutil.Process]:
    """The processes that wrote their ids into the file and still run.

    Another process may have been given the id of one that has ended: it began after the file was written. (Linux gives
    the time of a process's begin by the second in which the machine began, so a second is between them.)
    """
    found = []
    for process_id in map(int, file.read_text().split()) if file.exists() else ():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(process_id)
            if process.create_time() < file.stat().st_mtime + 1 and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill(processes: Iterable[psutil.Process]) -> None:
    """Ends them, none that was given the id of one since."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Returns when the condition holds: when another thread or process is as far as a test needs it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"what this waits for has not happened within {seconds:g} s"
        time.sleep(0.01)
