"""The process between another host's sshd and the worker there, whose standard input says what its sender says."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autodist_py.cluster.launch.agent import ALIVE, TOLD
from tests.support.processes import ROOT

pytestmark = pytest.mark.alone

SILENCE = 2.0
"""Seconds."""


@contextmanager
def agent() -> Iterator["subprocess.Popen[bytes]"]:
    """One whose worker waits for its own line, and then goes on."""
    waits = "import sys, time; sys.stdin.readline(); time.sleep(60)"
    line = [sys.executable, "-m", "autodist_py.cluster.launch.agent", "1", f"{SILENCE:g}", "-c", waits]
    process = subprocess.Popen(line, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(20)


def send(process: "subprocess.Popen[bytes]", line: bytes, seconds: float) -> None:
    """Send the line several times in so many seconds."""
    assert process.stdin is not None
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        process.stdin.write(line)
        process.stdin.flush()
        time.sleep(SILENCE / 8)


def test_a_worker_that_is_not_told_ends_where_nothing_comes() -> None:
    with agent() as process:
        assert process.wait(SILENCE * 10) == 128 + signal.SIGTERM


def test_a_worker_waits_as_long_as_its_sender_is_there() -> None:
    with agent() as process:
        send(process, ALIVE, SILENCE * 3)
        assert process.poll() is None
        assert process.wait(SILENCE * 10) == 128 + signal.SIGTERM


def test_a_worker_that_has_been_told_sees_for_itself_that_nobody_answers() -> None:
    with agent() as process:
        send(process, TOLD + b"secret\n", SILENCE / 8)
        time.sleep(SILENCE * 3)
        assert process.poll() is None
