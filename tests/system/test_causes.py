"""Each way to end a process, on each kind of worker, at each place of a script: one true sentence, and nothing else.

`make test` runs some, others for each commit (`CORPUS_TURN`); `make test-all` runs all, in about half an hour.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ending import SCRIPT, STEPS, VICTIMS, WHILE, Ended, running
from tests.support.processes import AUTODIST, ROOT, Command, kill

pytestmark = [pytest.mark.alone, pytest.mark.turns(1)]

ENDED_SECONDS = 15.0
HOW = (
    "SIGKILL",
    "SIGSEGV",
    "SIGTERM",
    "SIGINT",
    "exception",
    "exit",
    "no memory",
    "full disk",
    "killed for lack of memory",
)
LATE_SECONDS = 5.0
"""How much later than a fault the end of the chief is seen."""

PARTS = 41
"""In so many turns all cells are run."""

TURN = int(os.environ.get("CORPUS_TURN", "0")) % PARTS
CELLS = [(how, who, where) for where in STEPS for who in VICTIMS for how in HOW]
RAISED = {
    "exception": "ValueError: (in user code: .*ValueError: )?struck",
    "no memory": "(MemoryError|StagingError: in user code: .*MemoryError:)",
    "full disk": r"(OSError|StagingError: in user code): .*No space left on device",
}
NEEDED = r"worker \d .*, and a synchronous run needs every worker to the end"
LIMITS = ("memory.limit_in_bytes", "memory.max")
"""The files that say how much memory a control group may have, of versions 1 and 2."""


def cells() -> Iterator[object]:
    for number, cell in enumerate(CELLS):
        marks = () if number % PARTS == TURN else pytest.mark.slow
        yield pytest.param(*cell, id="-".join(cell).replace(" ", "_"), marks=marks)


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of 256 MB, which is empty."""
    for root in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        group = root / f"autodist-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        limits = [group / name for name in LIMITS if (group / name).exists()]
        try:
            if limits:
                limits[0].write_text(str(256 << 20))
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("no control group can be made here that limits memory")


def when(where: str, *, is_told: bool) -> str:
    """At which step a worker was, as a regular expression: as it says itself, or as of its last heartbeat."""
    if where == "start":
        return " before it joined"
    if not is_told:
        return r", last heard of (before its first step|at step \d+)(, when the chief is at step \d+)?"
    return f" at step {STEPS[where]}" if STEPS[where] else " before its first step"


def cause(how: str, rank: int, where: str) -> str:
    """The sentence of a worker other than the chief, as a regular expression."""
    name = rf"worker {rank} \(127\.0\.0\.{rank + 1}\)"
    ended = f"{name} ended{when(where, is_told=False)}: {{}}"
    if how in ("SIGKILL", "SIGSEGV", "killed for lack of memory"):
        return ended.format(f"killed by {how if how.startswith('SIG') else 'SIGKILL'}")
    if how == "exit":
        # Where the exit code is long in coming, the cause is that it has left.
        early = rf"{name} ended its script{when(where, is_told=True)}: {NEEDED}"
        return f"({ended.format('exit code 3')}|{early})"
    if where == "start":
        said = "killed by SIGINT; see its output above" if how == "SIGINT" else "exit code 1; see its output above"
        return ended.format("killed by SIGTERM" if how == "SIGTERM" else said)
    told = when(where, is_told=True)
    if how == "SIGINT":
        return rf"{name} was interrupted{told}: KeyboardInterrupt \(Ctrl-C\)"
    return f"{name} was terminated{told}: SIGTERM" if how == "SIGTERM" else f"{name} failed{told}: {RAISED[how]}"


def chiefs(how: str, where: str) -> tuple[int, str | None]:
    """The exit code of a run whose chief is the victim, and its sentence, if there is one to say."""
    killed = "SIGKILL" if how == "killed for lack of memory" else how
    if killed in ("SIGKILL", "SIGSEGV") or (killed in ("SIGTERM", "SIGINT") and where == "start"):
        number = signal.Signals[killed].value
        at = f"at step {STEPS[where]}" if STEPS[where] else "before its first step"
        memory = r"; since its start .*\(oom_kill\)|; whether .*`dmesg` tells" if number == 9 else ""
        said = rf"was ended by signal {number} \({killed}\) at [\d:]{{8}}, [\d.]+ s after its start, {at}"
        return 128 + number, rf"worker 0, the chief \(process \d+\), {said}({memory})"
    if where == "start":
        return (3 if how == "exit" else 1), None
    name, told = r"worker 0 \(127\.0\.0\.1\)", when(where, is_told=True)
    if how == "SIGTERM":
        return 143, f"{name} was terminated{told}: SIGTERM"
    if how == "SIGINT":
        return 130, rf"{name} was interrupted{told}: KeyboardInterrupt \(Ctrl-C\)"
    if how == "exit":
        if where == "close":
            return 3, None
        return 1, f"{name} ended its script{told}: {NEEDED}"
    return 1, f"{name} failed{told}: {RAISED[how]}"


def says_when(sentence: str, begun: float, struck: float) -> bool:
    """Whether the time of day, and the seconds since the start, are those of the fault, and a little more at most."""
    match = re.search(r"at ([\d:]{8}), ([\d.]+) s after its start", sentence)
    assert match is not None
    times = {time.strftime("%H:%M:%S", time.localtime(struck + late)) for late in range(int(LATE_SECONDS) + 1)}
    return match[1] in times and 0.0 < float(match[2]) < struck - begun + LATE_SECONDS


@pytest.mark.parametrize(("how", "who", "where"), list(cells()))
def test_the_cause_is_one_true_sentence_and_nothing_else_is_printed(
    how: str, who: str, where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rank = VICTIMS[who]
    (tmp_path / "train.py").write_text(SCRIPT)
    strike = str(request.getfixturevalue("memory_group")) if how.startswith("killed") else how
    own = {name: value for name, value in os.environ.items() if not name.startswith("AUTODIST_")}
    begun = time.time()
    command = Command(
        [*AUTODIST, "run", "--local", "3", "train.py", strike, where, str(rank)],
        tmp_path,
        own | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"},
    )
    try:
        run = Ended(command, tmp_path / "struck", lambda: running(tmp_path), ENDED_SECONDS)
    finally:
        command.close()
        kill(running(tmp_path).values())
    code, wanted = chiefs(how, where) if rank == 0 else (1, cause(how, rank, where))
    assert run.code == code, run.text
    said = [text for _, text in run.causes]
    must_say = wanted is not None
    if rank == 0 and wanted is not None and "was ended by signal" in wanted:
        *said, last = said
        assert re.fullmatch(wanted, last), run.text
        assert says_when(last, begun, (tmp_path / "struck").stat().st_mtime), run.text
        lost = r"worker 0 \(127\.0\.0\.1\), the chief, is lost: its coordinator does not answer"
        wanted, must_say = rf"(in step \d+|before its first step): {lost}", False  # Other workers, if there are any.
    assert all(wanted is not None and re.fullmatch(wanted + WHILE, text) for text in said), run.text
    assert said or not must_say, run.text
    shows = {rank} if how in RAISED or (how, where) == ("SIGINT", "start") else set()
    assert set(run.others) == shows, run.text
    assert all(any("Traceback" in line for line in lines) for lines in run.others.values()), run.text
    assert run.seconds < ENDED_SECONDS, run.text
