"""A host that is cut off, whichever it is, and wherever its script is: all end soon, with one true sentence.

`make test` runs two of these, others for each commit (`CORPUS_TURN`); `make test-all` runs all.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.conftest import THREE_HOSTS, Lab
from tests.support.ending import SCRIPT, STEPS, VICTIMS, WHILE, Ended
from tests.support.processes import AUTODIST, ROOT, until

pytestmark = [pytest.mark.alone, pytest.mark.turns(1)]

HEARTBEAT_SECONDS = 3.0
ENDED_SECONDS = 15.0
LEFT_SECONDS = 20.0
"""How much longer a host that is cut off may have processes: they find out for themselves."""

CHIEF_SECONDS = 30.0
"""Where the chief is cut off at its start: it imports TensorFlow first."""

START_SECONDS = 90.0
SSH_SAYS = (
    r"(Timeout, server [\d.]+ not responding\.|ssh: connect to host [\d.]+ port 22: "
    r"|Connection to [\d.]+ port 22 timed out)"
)
PARTS = 9
"""In so many turns all cells are run."""

TURN = int(os.environ.get("CORPUS_TURN", "0")) % PARTS
CELLS = [(who, where) for where in STEPS for who in VICTIMS]


def cells() -> Iterator[object]:
    for number, cell in enumerate(CELLS):
        yield pytest.param(*cell, id="-".join(cell), marks=() if number % PARTS == TURN else pytest.mark.slow)


def cause(rank: int, where: str) -> str:
    """What the chief says, as a regular expression: the others' lines do not reach it where it is cut off itself."""
    missing = str(rank) if rank else "[12]"
    name = rf"worker {missing} \(10\.77\.0\.\d\)"
    if where == "start":
        return rf"{name} ended before it joined: (it could not be started over SSH|its SSH connection broke): .*"
    at = r"(before its first step|at step \d+)(, when the chief is at step \d+)?"
    silent = rf"stopped answering, last heard of {at}: no heartbeat for 3 s"
    broken = rf"ended, last heard of {at}: its SSH connection broke: {SSH_SAYS}"  # A busy machine hears of it first.
    return rf"{name} ({silent}|{broken}){WHILE}"


@pytest.mark.parametrize(("who", "where"), list(cells()))
def test_a_cut_is_told_in_one_true_sentence(who: str, where: str, lab: Lab, tmp_path: Path) -> None:
    rank = VICTIMS[who]
    limit = CHIEF_SECONDS if (who, where) == ("chief", "start") else ENDED_SECONDS
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "spec.yaml").write_text(THREE_HOSTS)
    command = lab.start(
        0,
        [*AUTODIST, "run", "--spec", "spec.yaml", str(tmp_path / "train.py"), "cut", where, str(rank)],
        tmp_path,
        AUTODIST_HEARTBEAT_TIMEOUT=str(HEARTBEAT_SECONDS),
        AUTODIST_OUTPUT="brief",
        PYTHONPATH=str(ROOT),
    )
    try:
        until((tmp_path / "struck").exists, START_SECONDS)
        lab.do("cut", str(rank))
        (tmp_path / "cut").touch()
        run = Ended(command, tmp_path / "cut", lambda: lab.left(str(tmp_path)), LEFT_SECONDS)
    finally:
        lab.do("heal", str(rank))
        command.close()
        lab.kill(str(tmp_path))
    print(f"{run.seconds:.1f} s after the cut:\n{run.text}")
    assert run.code == 1, run.text
    assert run.causes and all(re.fullmatch(cause(rank, where), text) for _, text in run.causes), run.text
    assert all(re.match(SSH_SAYS, line) for lines in run.others.values() for line in lines), run.text
    assert run.seconds < limit, run.text
