"""Kills and cuts from outside, drawn by a seed: of local runs and of runs over SSH, at any time, of any worker.

`make test` draws two, others for each commit (`CORPUS_TURN`). `make kills` draws a hundred and prints what they took.
"""

import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.lab.conftest import HOSTS, THREE_HOSTS, Lab
from tests.support import ending
from tests.support.processes import AUTODIST, NOTES_ITS_PROCESS, ROOT, Command, kill

pytestmark = [pytest.mark.alone, pytest.mark.turns(1)]

ENDED_SECONDS = 15.0
MEDIAN_SECONDS = 5.0
ENOUGH = 20
START_SECONDS = 8.0
NUMBER = int(os.environ.get("KILLS", "2"))
SEED = int(os.environ.get("KILLS_SEED", os.environ.get("CORPUS_TURN", "0")))

SCRIPT = (
    NOTES_ITS_PROCESS
    + """
from autodist_py import AutoDist
autodist = AutoDist()
import numpy as np, tensorflow as tf

weights = tf.Variable(np.ones([64, 1]), name="weights")
bias = tf.Variable(np.zeros([1]), name="bias")

@autodist.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ weights + bias))
    for variable, gradient in zip((weights, bias), tape.gradient(loss, (weights, bias))):
        variable.assign_sub(0.001 * gradient)
    return loss

number = 0
while True:
    step(np.ones([8, 64]))
    number += 1
    if number == 20:
        Path(f"trains-{rank}").touch()
"""
)

BUILDERS = (
    "AllReduce()",
    "AllReduce(timeout_seconds=3)",
    "PS()",
    "PSLoadBalancing()",
    "PS(sync=False)",
    "PS(staleness=2)",
    "PartitionedPS()",
    "ShardedOptimizer()",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to which worker.

    Attributes:
        seconds: when it does, after the first step; where it is negative, so long before START_SECONDS after the start.
    """

    over_ssh: bool
    how: str
    victim: int
    builder: str
    seconds: float

    @classmethod
    def drawn(cls, seed: int) -> "Fault":
        draw = random.Random(seed)
        over_ssh = draw.random() < 0.5
        how = draw.choice(("SIGKILL", "SIGTERM", "SIGINT", "cut") if over_ssh else ("SIGKILL", "SIGTERM", "SIGINT"))
        return cls(over_ssh, how, draw.randrange(HOSTS), draw.choice(BUILDERS), draw.uniform(-START_SECONDS, 4.0))

    def __str__(self) -> str:
        place = f"{self.seconds:.1f} s after the first steps" if self.seconds >= 0 else "during the start"
        return f"{'SSH' if self.over_ssh else 'local'}, {self.how} of worker {self.victim} {place}, {self.builder}"


FAULTS = {seed: Fault.drawn(seed) for seed in range(SEED * NUMBER, (SEED + 1) * NUMBER)}
took: dict[int, float] = {}


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Command]]:
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.close()
    processes = psutil.process_iter(["cmdline"])
    kill(process for process in processes if str(tmp_path) in " ".join(process.info["cmdline"] or ()))


def start(fault: Fault, lab: Lab, folder: Path) -> Command:
    """A run of three workers, as a user starts it."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "spec.yaml").write_text(THREE_HOSTS)
    where = ["--spec", str(folder / "spec.yaml")] if fault.over_ssh else ["--local", str(HOSTS)]
    command = [*AUTODIST, "run", *where, "--strategy", fault.builder, str(folder / "train.py")]
    if fault.over_ssh:
        return lab.start(0, command, folder, AUTODIST_HEARTBEAT_TIMEOUT="3", PYTHONPATH=str(ROOT))
    own = {name: value for name, value in os.environ.items() if not name.startswith("AUTODIST_")}
    return Command(command, folder, own | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"})


def wait(fault: Fault, command: Command, folder: Path) -> None:
    """Returns when the fault is due: the victim has a process by then."""
    begin = time.monotonic()
    awaited = [folder / f"trains-{rank}" for rank in range(HOSTS)] if fault.seconds >= 0 else []
    while not all(file.exists() for file in (*awaited, folder / f"pid-{fault.victim}")):
        waits = time.monotonic() - begin < 90 and command.process.poll() is None
        assert waits, f"{fault}: {', '.join(path.name for path in folder.iterdir())}\n{command.text}"
        time.sleep(0.01)
    if fault.seconds >= 0:
        time.sleep(fault.seconds)
    else:
        time.sleep(max(0.0, begin + START_SECONDS + fault.seconds - time.monotonic()))


def running(fault: Fault, lab: Lab, folder: Path) -> dict[int, int]:
    """The ids of the workers' processes that run, by rank, as this machine has them: a host of the lab has others."""
    if not fault.over_ssh:
        return {rank: process.pid for rank, process in ending.running(folder).items()}
    own = f"{sys.executable} {folder / 'train.py'}"
    hosts = {rank: lab.processes(rank, str(folder)) for rank in range(HOSTS)}
    return {rank: pid for rank, found in hosts.items() for pid, line in found.items() if line.strip() == own}


def strike(fault: Fault, lab: Lab, folder: Path) -> None:
    if fault.how == "cut":
        lab.do("cut", str(fault.victim))
    else:
        os.kill(running(fault, lab, folder)[fault.victim], signal.Signals[fault.how])


def wanted(fault: Fault) -> str:
    """What the causes say, as a regular expression."""
    lost = r"worker 0 \([\d.]+\), the chief, is lost: its coordinator does not answer.*"
    if fault.how == "cut":
        missing = "[12]" if fault.victim == 0 else str(fault.victim)
        return rf"worker {missing} \(.*\) (stopped answering|ended|kept others waiting).*|{lost}"
    name = rf"worker {fault.victim} \([\d.]+\)"
    signalled = {
        "SIGKILL": "ended.*: killed by SIGKILL.*",
        "SIGTERM": "was terminated .*SIGTERM|ended.*: killed by SIGTERM.*",
        "SIGINT": r"was interrupted .*Ctrl-C\)|ended.*: (killed by SIGINT|exit code \d+).*",
    }[fault.how]
    if fault.victim == 0:
        return rf"{name} ({signalled})|worker 0, the chief \(process \d+\), was ended by signal .*|{lost}"
    return rf"{name} ({signalled})"


@pytest.mark.parametrize("seed", FAULTS)
def test_a_kill_or_a_cut_ends_all_soon_with_its_one_cause(
    seed: int, lab: Lab, tmp_path: Path, started: list[Command]
) -> None:
    fault = FAULTS[seed]
    started.append(command := start(fault, lab, tmp_path))
    wait(fault, command, tmp_path)
    begin = time.monotonic()
    strike(fault, lab, tmp_path)
    try:
        code = command.end(2 * ENDED_SECONDS)
        took[seed] = time.monotonic() - begin
        while left := lab.left(str(tmp_path)) if fault.over_ssh else running(fault, lab, tmp_path):
            assert time.monotonic() < begin + 3 * ENDED_SECONDS, f"{fault}: {left} still run\n{command.text}"
            time.sleep(0.02)
    finally:
        if fault.how == "cut":
            lab.do("heal", str(fault.victim))
    said = re.findall(
        r"^(?:\[\d\] )?autodist: (?:in step \d+: |before its first step: )?(.*)$", command.text, re.MULTILINE
    )
    print(f"{seed}: {fault}: {took[seed]:.1f} s, exit code {code}: {said[-1:]}")
    assert code != 0, f"{fault}\n{command.text}"
    is_alone = fault.victim == 0 and fault.seconds < 0 and fault.how == "SIGINT"  # Then Python says it.
    assert said or is_alone, f"{fault}\n{command.text}"
    assert all(re.fullmatch(wanted(fault), cause) for cause in said), f"{fault}\n{command.text}"
    assert took[seed] < ENDED_SECONDS, f"{fault}: {took[seed]:.1f} s\n{command.text}"


def test_they_end_soon_at_the_median() -> None:
    if len(took) < ENOUGH:
        pytest.skip(f"{len(took)} runs have no median to speak of")
    print(f"{len(took)} runs: median {statistics.median(took.values()):.1f} s, worst {max(took.values()):.1f} s")
    assert statistics.median(took.values()) < MEDIAN_SECONDS
