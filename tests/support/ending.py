"""A script that something ends at a chosen place, on one of three workers; and what a run of it says at its end.

Tests of causes share it. Worker 1 is the server of the only variable.
"""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.support.processes import Command, noted

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
how, where, victim = sys.argv[1:]
rank = os.environ.get("AUTODIST_RANK", "0")
Path(f"new-{rank}").write_text(str(os.getpid()))
os.rename(f"new-{rank}", f"pid-{rank}")


def strike(here):
    if (here, rank) != (where, victim):
        return
    Path("struck").touch()
    if how == "cut":
        while not Path("cut").exists():
            time.sleep(0.01)
        return
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
        time.sleep(60)
    if how == "exception":
        raise ValueError("struck")
    if how == "exit":
        sys.exit(3)
    if how == "no memory":
        bytearray(1 << 60)
    if how == "full disk":
        with open("/dev/full", "w") as file:
            file.write("full")
    Path(how, "cgroup.procs").write_text(str(os.getpid()))  # A control group: the kernel kills what exceeds it.
    bytearray(1 << 30)[:: 1 << 12]


strike("start")
from autodist_py import AutoDist
from tests.support.served import Spread
autodist = AutoDist(strategy_builder=Spread((1,)))
import numpy as np, tensorflow as tf
weights = tf.Variable(np.ones([3, 2]), name="weights")


def loss_of(x):
    return tf.reduce_mean(tf.square(x @ weights))


@autodist.function
def step(x):
    strike("capture")
    with tf.GradientTape() as tape:
        loss = loss_of(x)
    weights.assign_sub(0.1 * tape.gradient(loss, weights))
    return loss


validate = autodist.function(loss_of)
x = np.ones([6, 3])
for number in range(1, 21):
    step(x)
    if number == 15:
        strike("step")
    if number == 16:
        validate(x)
        strike("validation")
    if number == 17:
        tf.train.Checkpoint(weights=weights).write("checkpoint")
        strike("checkpoint")
strike("close")
autodist.close()
"""

STEPS = {"start": 0, "capture": 0, "step": 15, "validation": 16, "checkpoint": 17, "close": 20}
"""The places, and at which step the victim is there."""

VICTIMS = {"chief": 0, "server": 1, "worker": 2}
"""Their ranks."""

WHILE = r"(, while worker \d \([\d.]+\) (waited for it to combine|was in a step that combines) .*)?"
"""How a cause goes on, as a regular expression, where others waited for the worker."""


class Ended:
    """A run of the script that has ended.

    Attributes:
        code: the exit code of the command.
        seconds: the time from `since` to the command's end.
        text: what was printed.
    """

    def __init__(self, command: Command, since: Path, left: Callable[[], object], seconds: float):
        """Fails unless the command ends, and all that is `left` of the run at most so many seconds later.

        Args:
            command: the run.
            since: a file that was made when the fault came.
            left: the processes that still run.
            seconds: how long those may take.
        """
        self.code = command.end(seconds + 60)
        self.seconds = time.time() - since.stat().st_mtime
        self.text = command.text
        deadline = time.monotonic() + seconds
        while processes := left():
            assert time.monotonic() < deadline, f"{processes} still run:\n{self.text}"
            time.sleep(0.02)

    @property
    def causes(self) -> list[tuple[int | None, str]]:
        """The sentences of ours, and the rank whose line it is; None: the command's own."""
        return [
            (rank, text.removeprefix("autodist: ")) for rank, text in self._lines() if text.startswith("autodist: ")
        ]

    @property
    def others(self) -> dict[int | None, list[str]]:
        """All else that is printed, by rank."""
        found: dict[int | None, list[str]] = {}
        for rank, text in self._lines():
            if not text.startswith("autodist: "):
                found.setdefault(rank, []).append(text)
        return found

    def _lines(self) -> Iterator[tuple[int | None, str]]:
        for line in self.text.splitlines():
            match = re.fullmatch(r"(?:\[(\d)\] )?(.*)", line)
            assert match is not None
            yield (None if match[1] is None else int(match[1])), match[2]


def running(folder: Path) -> dict[int, psutil.Process]:
    """The local workers' processes that run, by rank, of those that have noted their ids in `folder`."""
    return {int(file.name[-1]): process for file in folder.glob("pid-?") for process in noted(file)}
