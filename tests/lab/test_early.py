"""`autodist run` over SSH: all workers start at once, and end with the chief whatever it has come to."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab.conftest import ENDED_SECONDS, HOSTS, SPEC, SSH, THREE_HOSTS, Lab, Run
from tests.support.processes import AUTODIST, NOTES_ITS_PROCESS, STEP_OF_A_WEIGHT, until

pytestmark = [pytest.mark.alone, pytest.mark.turns(4)]

WAIT = 'wait_for("pid-0", "pid-1", "pid-2")'
TRAIN = f"""
{WAIT}
{STEP_OF_A_WEIGHT}
step(np.ones([6, 1, 3]))
print("trained by", autodist.num_workers, flush=True)
"""

Start = Callable[[str, str], Run]


@pytest.fixture
def start(lab: Lab, tmp_path: Path) -> Iterator[Start]:
    """start(body, spec): `autodist run` on host 0."""
    runs: list[Run] = []

    def start(body: str, spec: str) -> Run:
        (tmp_path / "spec.yml").write_text(spec)
        (tmp_path / "train.py").write_text(NOTES_ITS_PROCESS + body)
        command = [*AUTODIST, "run", "--spec", "spec.yml", f"{tmp_path}/train.py"]
        runs.append(lab.start(0, command, tmp_path))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
    lab.kill(f"{tmp_path}/train.py")


def test_scripts_of_all_hosts_begin_at_once(start: Start, lab: Lab, tmp_path: Path) -> None:
    run = start(TRAIN, THREE_HOSTS)
    assert run.end(90) == 0, run.text
    assert {f"[{rank}] trained by {HOSTS}" for rank in range(HOSTS)} <= set(run.lines)
    lab.wait_until_gone(f"{tmp_path}/train.py", ENDED_SECONDS)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_stopped_before_the_autodist_leaves_no_process_on_any_host(
    start: Start, lab: Lab, tmp_path: Path, number: signal.Signals
) -> None:
    run = start("print('begins', flush=True)\nwait_for('ends' if rank == 0 else 'never')\n", THREE_HOSTS)
    until(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in range(HOSTS)), 30)
    run.send(number)
    if number == signal.SIGKILL:
        (tmp_path / "ends").touch()  # Nobody tells the chief.
    run.end(30)
    lab.wait_until_gone(f"{tmp_path}/train.py", ENDED_SECONDS)


def test_a_host_that_cannot_be_reached_is_the_cause_of_the_runs_end(start: Start, tmp_path: Path) -> None:
    run = start(TRAIN.replace(WAIT, ""), (SPEC + SSH).replace("0.2", "0.99"))
    assert run.end(60) == 1
    said = (
        "[0] autodist: worker 1 (10.77.0.99) ended before it joined: it could not be started over SSH: ssh: connect to"
    )
    assert run.lines[-1].startswith(said), run.text


def test_a_key_that_is_not_there_is_told_by_the_chief(start: Start, tmp_path: Path) -> None:
    run = start(TRAIN.replace(WAIT, ""), f"{SPEC}ssh: {{lab: {{key_file: none}}}}\n")
    assert run.end(60) == 1
    assert "the key_file of an ssh group is a file of the chief's machine. Received: none" in run.text
    assert not (tmp_path / "pid-1").exists()
