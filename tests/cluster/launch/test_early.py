"""Workers that `autodist run` starts with the chief: when they start, what is shown of them, and how each way ends."""

import os
import signal
import socket
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autodist_py.cluster.launch.early import _digest, early_launcher
from autodist_py.cluster.launch.local import LineOutput
from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from tests.support.processes import (
    AUTODIST,
    NOTES_ITS_PROCESS,
    ROOT,
    STEP_OF_A_WEIGHT,
    Command,
    Lines,
    ended,
    kill,
    noted,
    until,
)

pytestmark = [pytest.mark.alone, pytest.mark.turns(4)]

TRAIN = f"""
wait_for(f"pid-{{int(not rank)}}")  # Both are here before either makes its AutoDist.
{STEP_OF_A_WEIGHT.replace("AutoDist()", "AutoDist(OF)")}
step(np.ones([4, 1, 3]))
print("trained by", autodist.num_workers)
"""
TRAIN_BY_THE_COMMANDS_SPEC = TRAIN.replace("OF", "")

Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(body, ...): `autodist run --local 2` of a script, or with other options, in a folder of its own."""
    runs: list[Command] = []

    def start(body: str, *options: str, **environment: str) -> Command:
        (tmp_path / "train.py").write_text(NOTES_ITS_PROCESS + textwrap.dedent(body))
        command = [*AUTODIST, "run", *(options or ("--local", "2")), "train.py"]
        runs.append(Command(command, tmp_path, {**os.environ, "PYTHONPATH": str(ROOT), **environment}))
        return runs[-1]

    yield start
    for run in runs:
        run.close()
    for file in tmp_path.glob("pid-*"):
        kill(noted(file))


def left(folder: Path) -> list[int]:
    """The processes of scripts that still run."""
    return [process.pid for file in folder.glob("pid-*") for process in noted(file)]


def test_scripts_begin_at_once_and_what_others_print_before_is_shown_with_the_rest(
    start: Start, tmp_path: Path
) -> None:
    run = start("print('begins', rank)" + TRAIN_BY_THE_COMMANDS_SPEC, "--all-output", "--local", "2")
    assert run.end(90) == 0, run.text
    for rank in (0, 1):
        own = [line for line in run.lines if line in (f"[{rank}] begins {rank}", f"[{rank}] trained by 2")]
        assert own == [f"[{rank}] begins {rank}", f"[{rank}] trained by 2"], run.text
    assert not left(tmp_path)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_script_that_names_other_nodes_trains_on_those(start: Start, tmp_path: Path, workers: int) -> None:
    nodes = ", ".join(
        f"{{address: 127.0.0.{number + 1}, chief: {str(not number).lower()}}}" for number in range(workers)
    )
    (tmp_path / "own.yml").write_text(f"nodes: [{nodes}]\n")
    early = "early = Path('pid-1').read_text()\nfrom autodist_py import AutoDist\n"
    train = TRAIN.replace("from autodist_py import AutoDist\n", early)
    train += "print('early one runs:', Path(f'/proc/{early}').exists())\n"
    run = start(train.replace("OF", "'own.yml'"))
    assert run.end(90) == 0, run.text
    assert f"[0] trained by {workers}" in run.lines
    assert "[0] early one runs: False" in run.lines
    assert not left(tmp_path)


def test_a_script_that_names_the_same_nodes_trains_on_the_workers_that_there_are(start: Start, tmp_path: Path) -> None:
    (tmp_path / "own.yml").write_text("nodes: [{address: 127.0.0.1, chief: true}, {address: 127.0.0.2}]\n")
    body = TRAIN.replace("OF", "'own.yml'") + "print('process', Path('pid-1').read_text())\n"
    run = start(f"first = Path('first').open('a') if rank else None\nprint('begins', file=first)\n{body}")
    assert run.end(90) == 0, run.text
    assert "[0] trained by 2" in run.lines
    assert (tmp_path / "first").read_text() == "begins\n"


def test_a_script_that_fails_before_its_autodist_says_so_once(start: Start, tmp_path: Path) -> None:
    run = start("wait_for('pid-0'), wait_for('pid-1')\n1 / 0\n")
    assert run.end(60) == 1
    assert sum("ZeroDivisionError" in line for line in run.lines) == 1, run.text
    assert not left(tmp_path)


def test_what_a_worker_says_that_has_failed_before_the_chief_comes_is_shown_and_is_the_cause(
    start: Start, tmp_path: Path
) -> None:
    run = start(
        f"""
        if rank == 1:
            raise ValueError("no data here")
        wait_for("pid-1")
        while Path(f"/proc/{{Path('pid-1').read_text()}}").exists():
            time.sleep(0.01)
        {TRAIN_BY_THE_COMMANDS_SPEC.replace(chr(10), chr(10) + " " * 8)}
        """
    )
    assert run.end(60) == 1
    assert "[1] ValueError: no data here" in run.lines
    assert run.lines[-1].startswith("[0] autodist: worker 1 (127.0.0.2) ended before it joined: exit code 1"), run.text
    assert not left(tmp_path)


def test_a_script_without_an_autodist_is_told_of_and_its_other_workers_are_ended(start: Start, tmp_path: Path) -> None:
    run = start("wait_for('pid-1')\nprint('done') if rank == 0 else time.sleep(600)\n", "--all-output", "--local", "2")
    assert run.end(60) == 0
    assert run.lines[0] == "[0] done" and "without an AutoDist(...) for its 2 workers" in run.lines[-1]
    assert not left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_before_the_autodist_ends_all(start: Start, tmp_path: Path, number: int) -> None:
    run = start("wait_for('never')\n")
    until(lambda: (tmp_path / "pid-0").exists() and (tmp_path / "pid-1").exists(), 30)
    run.process.send_signal(number)
    assert run.end(20) == 128 + number
    assert not left(tmp_path)


def test_a_chief_that_is_killed_before_its_autodist_takes_the_others_along(start: Start, tmp_path: Path) -> None:
    run = start("wait_for('never')\n")
    until(lambda: (tmp_path / "pid-0").exists() and (tmp_path / "pid-1").exists(), 30)
    kill(noted(tmp_path / "pid-0"))
    assert run.end(20) == 128 + signal.SIGKILL
    assert "was ended by signal 9 (SIGKILL)" in run.lines[-1]
    assert not left(tmp_path)


def test_a_chief_that_leaves_without_a_word_after_training_leaves_nobody_behind(start: Start, tmp_path: Path) -> None:
    goes_on = "time.sleep(1), print('goes on', flush=True), time.sleep(600)"
    body = f"{TRAIN_BY_THE_COMMANDS_SPEC}sys.stdout.flush()\nos._exit(3) if rank == 0 else ({goes_on})\n"
    run = start(body, "--all-output", "--local", "2")
    assert run.end(90) == 3
    assert any("worker 0 (127.0.0.1), the chief, is lost" in line for line in run.lines), run.text
    assert "[1] goes on" in run.lines, run.text
    assert not left(tmp_path)


@pytest.mark.parametrize("waiting", [0, 1], ids=["chief-first", "chief-last"])
def test_a_command_that_is_killed_takes_all_along_and_the_chief_says_why(
    start: Start, tmp_path: Path, waiting: int
) -> None:
    # One waits in its AutoDist when the command is killed; the other comes to it then.
    run = start(
        f"""
        from autodist_py import AutoDist
        if rank != {waiting}:
            wait_for("killed")
        Path(f"comes-{{rank}}").touch()
        try:
            AutoDist()
        except Exception as error:
            Path(f"error-{{rank}}").write_text(str(error))
        """
    )
    until((tmp_path / f"comes-{waiting}").exists, 60)
    run.close()
    (tmp_path / "killed").touch()
    until(lambda: not left(tmp_path), 30)
    assert "`autodist run`, whose process it was, has ended" in (tmp_path / "error-0").read_text()


def test_a_command_that_is_killed_while_all_train_takes_them_along(start: Start, tmp_path: Path) -> None:
    run = start(f"{TRAIN_BY_THE_COMMANDS_SPEC}Path('trained').touch()\nwhile True:\n    step(np.ones([4, 1, 3]))\n")
    until((tmp_path / "trained").exists, 60)
    run.close()
    until(lambda: not left(tmp_path), 30)


def test_a_worker_that_keeps_printing_does_not_keep_a_command_whose_chief_was_killed(
    start: Start, tmp_path: Path
) -> None:
    prints = "while True:\n    print('x', flush=True)\n    time.sleep(0.01)\n"
    body = f"{TRAIN_BY_THE_COMMANDS_SPEC}Path('trained').touch()\nsignal.pause() if rank == 0 else None\n{prints}"
    run = start(f"import signal\n{body}", "--all-output", "--local", "2", AUTODIST_EXIT_GRACE="600")
    until((tmp_path / "trained").exists, 60)
    kill(noted(tmp_path / "pid-0"))
    assert run.end(40) == 128 + signal.SIGKILL
    assert not left(tmp_path)
    assert any("was ended by signal 9 (SIGKILL)" in line for line in run.lines[-3:]), run.text[-900:]


def test_a_default_timeout_of_a_scripts_sockets_does_not_matter(start: Start, tmp_path: Path) -> None:
    run = start(
        f"""
        import signal, socket
        socket.setdefaulttimeout(0.5)
        {TRAIN_BY_THE_COMMANDS_SPEC.replace(chr(10), chr(10) + " " * 8)}
        time.sleep(2)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            step(np.ones([4, 1, 3]))
        """
    )
    assert run.end(60) == 1
    assert "killed by SIGKILL" in run.lines[-1], run.text
    assert not left(tmp_path)


def test_a_spec_of_thousands_of_nodes_is_no_longer_message_than_one_of_two(tmp_path: Path) -> None:
    nodes = tuple(NodeSpec(f"10.{number // 250}.0.{number % 250}", chief=not number) for number in range(4000))
    assert len(_digest(ResourceSpec(nodes))) == len(_digest(local_resource_spec(2)))


def test_a_worker_that_failed_where_nobody_asked_is_told_of(start: Start, tmp_path: Path) -> None:
    run = start(
        """
        if rank == 1:
            raise ValueError("no data here")
        wait_for("pid-1")
        while Path(f"/proc/{Path('pid-1').read_text()}").exists():
            time.sleep(0.01)
        """
    )
    assert run.end(60) == 0
    assert "[1] ValueError: no data here" in run.lines
    assert "without an AutoDist(...) for its 2 workers" in run.text


@pytest.mark.usefixtures("start")
def test_a_command_whose_output_is_closed_ends_though_much_waits_to_be_shown(tmp_path: Path) -> None:
    line = "'WARNING: ' + 'x' * 100 + chr(10)"
    prints = f"print(({line}) * 9000, flush=True)\n    Path('printed').touch()\n"
    body = f"if rank == 1:\n    {prints}wait_for('printed')\nprint('chief', flush=True)\ntime.sleep(1)"
    (tmp_path / "train.py").write_text(f"{NOTES_ITS_PROCESS}{body}{TRAIN_BY_THE_COMMANDS_SPEC}")
    command = [*AUTODIST, "run", "--local", "2", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline() == b"[0] chief\n"
        process.wait(60)
    finally:
        process.kill()
        process.wait(10)
    until(lambda: not left(tmp_path), 20)


def test_a_worker_that_failed_is_told_of_where_the_chief_is_stopped(start: Start, tmp_path: Path) -> None:
    run = start("os._exit(4) if rank == 1 else wait_for('never')\n")
    until(lambda: (tmp_path / "pid-0").exists() and (tmp_path / "pid-1").exists() and len(left(tmp_path)) == 1, 30)
    run.process.send_signal(signal.SIGINT)
    assert run.end(20) == 128 + signal.SIGINT
    assert "[1] autodist: it has ended: exit code 4" in run.lines, run.text


def test_a_chief_that_tries_again_starts_workers_of_its_own(start: Start, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        tries = """
try:
    autodist = AutoDist()
except Exception as error:
    print("refused:", error)
    del os.environ["AUTODIST_COORDINATOR_PORT"]
    autodist = AutoDist()
"""
        body = TRAIN_BY_THE_COMMANDS_SPEC.replace("autodist = AutoDist()\n", tries)
        run = start(body, AUTODIST_COORDINATOR_PORT=str(taken.getsockname()[1]))
        assert run.end(90) == 0, run.text
    assert any("refused:" in line for line in run.lines) and "[0] trained by 2" in run.lines, run.text
    assert "without an AutoDist" not in run.text
    assert not left(tmp_path)


def test_settings_that_are_wrong_are_the_scripts_to_tell(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from autodist_py import AutoDist\nAutoDist()\n")
    done = ended([*AUTODIST, "run", "--local", "2", "train.py"], tmp_path, {"AUTODIST_EXIT_GRACE": "soon"})
    assert done.returncode == 1 and "AUTODIST_EXIT_GRACE is a number of seconds" in done.stderr


def test_a_descriptor_that_is_something_else_has_no_workers(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    closed = os.dup(ours.fileno())
    os.close(closed)
    with ours, theirs, (tmp_path / "file").open("w") as file:
        theirs.sendall(b'{"another": "protocol", "of": "the script"}')
        resources = local_resource_spec(2)
        socket.setdefaulttimeout(1.0)
        try:
            found = [early_launcher(one, resources) for one in (ours.fileno(), file.fileno(), closed, None)]
        finally:
            socket.setdefaulttimeout(None)
        assert found == [None] * 4 and os.get_blocking(ours.fileno())
        assert ours.recv(9) == b'{"another'
        file.write("still open")


def test_lines_that_are_held_are_shown_when_they_are_released_in_their_order() -> None:
    lines = Lines(brief=True)
    output: LineOutput = lines.output
    output.hold(1)
    output.show(1, b"WARNING: one\n")
    output.show(2, b"WARNING: other\n")
    output.show(1, b"nothing\n")
    assert not output.ended(1, 1)
    output.release(1)
    output.show(1, b"WARNING: two\n")
    assert output.ended(1, 0)
    assert lines.all() == ["[2] WARNING: other", "[1] WARNING: one", "[1] WARNING: two"]


def test_how_many_lines_of_a_worker_were_too_many_to_be_held_is_said() -> None:
    lines = Lines()
    lines.output.hold(1)
    for number in range(10_003):
        lines.output.show(1, b"line %d\n" % number)
    lines.output.release(1)
    shown = lines.all()
    assert len(shown) == 10_001
    assert shown[:2] == ["[1] ... 3 lines that it printed before are left out", "[1] line 3"]


def test_the_last_lines_of_a_worker_that_ended_as_it_was_released_are_shown_once() -> None:
    lines = Lines(brief=True)
    lines.output.hold(1)
    lines.output.show(1, b"no licence\n")
    assert not lines.output.ended(1, 3)
    lines.output.release(1)
    assert lines.output.ended(1, 3) and lines.output.ended(1, 3)
    assert lines.all() == ["[1] no licence"]


def test_what_the_script_starts_has_no_part_in_it(start: Start, tmp_path: Path) -> None:
    run = start(
        f"""
        import subprocess
        {TRAIN_BY_THE_COMMANDS_SPEC.replace(chr(10), chr(10) + " " * 8)}
        if rank == 0:
            code = "import os; os.fstat(int(os.environ['AUTODIST_EARLY_WORKERS']))"
            print("open" if not subprocess.run([sys.executable, "-c", code], close_fds=False).returncode else "closed")
        """
    )
    assert run.end(90) == 0, run.text
    assert "[0] closed" in run.lines
    assert not left(tmp_path)
