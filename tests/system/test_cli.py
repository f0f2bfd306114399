"""The command line, as real processes: `autodist run` with scripts that need no TensorFlow, and `autodist inspect`.

One module, though long: all of it starts the same command with scripts of a few lines.
"""

import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.proto.graph_item import Gradient, GraphItem, Variable
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.proto.strategy import Strategy
from tests.support.processes import AUTODIST, Command, is_running, kill, noted
from tests.support.runs import PREAMBLE

WAITS_FOR_LAST_WORDS = [
    sys.executable,
    "-c",
    "from autodist_py.cluster.launch import foreground; foreground._LAST_WORDS_SECONDS = 600.0\n"
    "from autodist_py.cli import main; main(prog_name='autodist')",
]
TIMEOUT = 60


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen]]:
    processes = []

    def start(*arguments: object, command: list[str] = AUTODIST, **options) -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        processes.append(subprocess.Popen([*command, *map(str, arguments)], **pipes))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def autodist(*arguments: object, **options) -> subprocess.CompletedProcess:
    command = [*AUTODIST, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, **options)


# -- run: output ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["autodist_py", "autodist_py.cli"])
def test_the_command_runs_as_a_module_of_this_python(module, script):
    command = [sys.executable, "-m", module]
    path = script("import sys; print('ran', *sys.argv[1:]); sys.exit(3)")
    done = subprocess.run(
        [*command, "run", "--local", "1", path, "--local", "x"], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert (done.returncode, done.stdout) == (3, "[0] ran --local x\n"), done.stderr
    wrong = subprocess.run([*command, "run"], capture_output=True, text=True, timeout=TIMEOUT)
    assert wrong.returncode == 2 and wrong.stderr.startswith("Usage: autodist run"), wrong.stderr


def test_each_line_of_the_chief_starts_with_its_rank_on_the_stream_it_came_from(script):
    done = autodist(
        "run", "--local", 1, script("import sys\nprint('one\\ntwo')\nprint('three', file=sys.stderr, end='')")
    )
    assert done.stdout == "[0] one\n[0] two\n"
    assert done.stderr == "[0] three\n"


def test_lines_of_other_workers_arrive_through_the_pipe_that_the_chief_is_given(script):
    done = autodist(
        "run",
        "--local",
        1,
        script(
            """
            import os
            with open(int(os.environ["AUTODIST_WORKER_OUTPUT"]), "w") as pipe:
                pipe.write("[1] hello\\n")
            print("bye")
            """
        ),
    )
    assert sorted(done.stdout.splitlines()) == ["[0] bye", "[1] hello"]


NOISE = "I0000 00:00:1795395273.757099   18716 port.cc:153] oneDNN custom operations are on."


@pytest.mark.parametrize(
    ("options", "level", "shown"),
    [
        ([], None, ["[0] level 1"]),
        (["--all-output"], None, [f"[0] {NOISE}", "[0] level None"]),
        ([], "0", [f"[0] {NOISE}", "[0] level 0"]),
        ([], "2", ["[0] level 2"]),
    ],
)
def test_what_tensorflow_says_at_its_start_is_shown_if_asked_for(script, options, level, shown):
    path = script(
        f"import os, sys; print({NOISE!r}, file=sys.stderr);"
        "print('level', os.environ.get('TF_CPP_MIN_LOG_LEVEL'), file=sys.stderr)"
    )
    own = {name: text for name, text in os.environ.items() if name not in ("AUTODIST_OUTPUT", "TF_CPP_MIN_LOG_LEVEL")}
    own |= {"TF_CPP_MIN_LOG_LEVEL": level} if level is not None else {}
    done = autodist("run", "--local", 1, *options, path, env=own)
    assert done.stderr.splitlines() == shown


def test_lines_arrive_while_the_script_runs(script, started):
    process = started("run", "--local", 1, script("import time\nprint('now')\ntime.sleep(60)"))
    assert process.stdout.readline() == "[0] now\n"
    assert process.poll() is None


def test_of_a_rewritten_line_the_last_state_is_printed(script):
    done = autodist("run", "--local", 1, script(r"print('10%\r50%\r100%'); print('\rdone', end='\r\n')"))
    assert done.stdout == "[0] 100%\n[0] done\n"


def test_bytes_that_are_not_utf8_do_not_end_the_run(script):
    done = autodist("run", "--local", 1, script(r"import sys; sys.stdout.buffer.write(b'\xff\n')"))
    assert (done.returncode, done.stdout) == (0, "[0] �\n")


@pytest.mark.alone
def test_on_a_terminal_ranks_are_coloured_and_an_unfinished_line_is_shown(script):
    shown = on_a_terminal(
        "run", "--local", 1, script(r"import time; print('text'); print('\r50%', end=''); time.sleep(1); print()")
    )
    assert "\x1b[36m[0] \x1b[0mtext" in shown
    # The last "text": its line may have been shown once before it was finished.
    assert "\x1b[36m[0] \x1b[0m50%" in shown.rpartition("text")[2].partition("\n")[2].partition("\n")[0]


@pytest.mark.alone
def test_on_a_terminal_other_workers_lines_come_above_the_chiefs_unfinished_line(script):
    shown = on_a_terminal(
        "run",
        "--local",
        1,
        script(
            """
            import os, time
            print("50%", end="")
            time.sleep(0.5)
            os.write(int(os.environ["AUTODIST_WORKER_OUTPUT"]), b"[1] hello\\n")
            time.sleep(0.5)
            """
        ),
    )
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert plain == "[0] 50%\r\x1b[2K[1] hello\r\n[0] 50%\r\x1b[2K[0] 50%\r\n"


def on_a_terminal(*arguments: object) -> str:
    """What the command shows on a terminal of its own."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen([*AUTODIST, *map(str, arguments)], env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:
        pass  # Linux's way to say that the other end is closed.
    finally:
        os.close(ours)
        process.kill()
        process.wait(TIMEOUT)
    return shown.decode()


# -- run: what the script gets ----------------------------------------------------------------------------------------


def test_arguments_after_the_script_are_the_scripts_even_when_they_look_like_options(script):
    path = script("import sys; print(sys.argv[1:])")
    done = autodist("run", "--local", 1, path, "--local", "3", "--help", "x y")
    assert done.stdout == "[0] ['--local', '3', '--help', 'x y']\n"


def test_the_script_gets_a_spec_of_the_local_workers_that_is_gone_afterwards(script):
    path = script("import os; name = os.environ['AUTODIST_RESOURCE_SPEC']; print(name); print(open(name).read())")
    done = autodist("run", "--local", 2, "--cpus", 3, path)
    spec_file, *text = [line.removeprefix("[0] ") for line in done.stdout.splitlines()]
    assert "\n".join(text).strip() == local_resource_spec(2, 3).to_yaml().strip()
    assert not Path(spec_file).parent.exists()


def test_the_script_gets_the_spec_file_it_was_run_with(script, tmp_path):
    local_resource_spec(2).save(tmp_path / "spec.yaml")
    path = script("import os; print(os.environ['AUTODIST_RESOURCE_SPEC'])")
    assert autodist("run", "--spec", "spec.yaml", path, cwd=tmp_path).stdout == f"[0] {tmp_path / 'spec.yaml'}\n"


def test_a_run_started_by_a_worker_of_another_run_has_a_chief_of_its_own(script):
    path = script("import os; print(sorted({'AUTODIST_RANK', 'AUTODIST_COORDINATOR'} & set(os.environ)))")
    environment = {**os.environ, "AUTODIST_RANK": "1", "AUTODIST_COORDINATOR": "127.0.0.1:1"}
    assert autodist("run", "--local", 1, path, env=environment).stdout == "[0] []\n"


def test_the_scripts_input_is_empty(script):
    assert autodist("run", "--local", 1, script("import sys; print(repr(sys.stdin.read()))")).stdout == "[0] ''\n"


# -- run: how it ends -------------------------------------------------------------------------------------------------


def test_the_exit_code_is_the_chiefs(script):
    assert autodist("run", "--local", 1, script("raise SystemExit(7)")).returncode == 7


def test_the_exit_code_tells_the_signal_that_ended_the_chief(script):
    path = script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    ended = autodist("run", "--local", 1, path)
    assert ended.returncode == 128 + signal.SIGKILL
    (line,) = ended.stderr.splitlines()
    wanted = r"autodist: worker 0, the chief \(process \d+\), was ended by signal 9 \(SIGKILL\) at [\d:]{8}, [\d.]+ s"
    assert re.match(wanted, line), line
    assert " s after its start, before its first step; " in line
    assert "memory" in line


def test_other_workers_have_the_last_word_at_once_when_the_chief_is_killed_and_none_is_left(script, tmp_path):
    # Worker 1 lives on for long. What each has left behind does not count.
    body = """
        join()
        os.system("sleep 600 >/dev/null 2>&1 </dev/null & echo $! >>left_behind")
        with open(f"worker_{cluster.rank}", "w") as file:
            file.write(str(os.getpid()))
        cluster.step = 7
        if cluster.rank == 1:
            os.mkdir("ready")
            threading.Event().wait()
        while not os.path.exists("ready"):
            cluster.check()
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    arguments = ["run", "--all-output", "--local", 2, script(PREAMBLE + textwrap.dedent(body))]
    command = Command(
        [*WAITS_FOR_LAST_WORDS, *map(str, arguments)], tmp_path, {**os.environ, "AUTODIST_EXIT_GRACE": "600"}
    )
    lost = "[1] autodist: in step 7: worker 0 (127.0.0.1), the chief, is lost: its coordinator does not answer"
    try:
        command.wait_for(lost)
        worker = int((tmp_path / "worker_1").read_text())
        assert is_running(worker) and command.process.poll() is None
        os.kill(worker, signal.SIGKILL)
        assert command.end(TIMEOUT) == 128 + signal.SIGKILL
        left_behind = [int(pid) for pid in (tmp_path / "left_behind").read_text().split()]
        assert [is_running(pid) for pid in left_behind] == [True, True]
    finally:
        for name in ("worker_0", "worker_1", "left_behind"):
            kill(noted(tmp_path / name))
        command.close()
    assert command.lines[-2] == lost
    assert command.lines[-1].startswith("autodist: worker 0, the chief (process ")
    assert " s after its start, at step 7; " in command.lines[-1]


@pytest.mark.parametrize(("number", "is_said"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_stop_signal_ends_the_wait_for_last_words_and_one_that_came_to_both_is_not_told(
    script, started, number, is_said
):
    # A worker stays that has the pipe for its lines. It sends the signal when `autodist run` has seen the chief's end.
    worker = f"""
        import os, time
        while os.path.exists("/proc/{{}}"):
            time.sleep(0.01)
        os.write({{}}, b"[1] unfinished")
        os.kill({{}}, {int(number)})
        time.sleep(60)
    """
    path = script(
        f"""
        import os, signal, subprocess, sys, textwrap
        pipe = int(os.environ["AUTODIST_WORKER_OUTPUT"])
        worker = textwrap.dedent({worker!r}).format(os.getpid(), pipe, os.getppid())
        silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        print(subprocess.Popen([sys.executable, "-c", worker], pass_fds=[pipe], **silent).pid)
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGTERM)
        """
    )
    process = started("run", "--local", 1, path, command=WAITS_FOR_LAST_WORDS)
    stays = int(process.stdout.readline().removeprefix("[0] "))
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    finally:
        os.kill(stays, signal.SIGKILL)
    assert (process.returncode, output) == (128 + signal.SIGTERM, "[1] unfinished\n")
    assert ("was ended by signal 15 (SIGTERM)" in errors) is is_said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_the_chief_and_then_the_command(script, started, number):
    process = started("run", "--local", 1, script("import os, time\nprint(os.getpid())\ntime.sleep(60)"))
    chief = int(process.stdout.readline().removeprefix("[0] "))
    process.send_signal(number)
    assert process.wait(10) == 128 + number
    assert not is_running(chief)
    assert "was ended by" not in process.stderr.read()


def test_the_chief_may_clean_up_after_ctrl_c(script, started):
    process = started(
        "run",
        "--local",
        1,
        script(
            """
            import time
            try:
                print("ready")
                time.sleep(60)
            except KeyboardInterrupt:
                time.sleep(1)
                print("clean")
                raise SystemExit(3)
            """
        ),
    )
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[0] == "[0] clean\n"
    assert process.returncode == 3


def test_a_chief_that_ignores_ctrl_c_is_killed_after_the_grace_time(script, started):
    process = started(
        "run",
        "--local",
        1,
        script("import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready')\ntime.sleep(60)"),
    )
    process.stdout.readline()
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT) == 128 + signal.SIGKILL
    assert 14 < time.monotonic() - start < 25


def test_the_run_ends_when_nobody_reads_its_output_any_more(script, started):
    process = started("run", "--local", 1, script("import os\nprint(os.getpid())\nwhile True: print('more')"))
    chief = int(process.stdout.readline().removeprefix("[0] "))
    process.stdout.close()
    assert process.wait(10) != 0
    assert not is_running(chief)


@pytest.mark.alone
def test_a_process_that_the_script_leaves_behind_does_not_hold_the_run(script):
    path = script("import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(5)'])")
    start = time.monotonic()
    assert autodist("run", "--local", 1, path).returncode == 0
    assert time.monotonic() - start < 4


# -- run: bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--local", 2, "missing.py"], "File 'missing.py' does not exist"),
        (["--spec", "missing.yaml", "script.py"], "File 'missing.yaml' does not exist"),
        (["--spec", "wrong.yaml", "script.py"], "wrong.yaml: nodes"),
        (["script.py"], "Exactly one of --local and --spec"),
        (["--local", 2, "--spec", "good.yaml", "script.py"], "Exactly one of --local and --spec"),
        (["--spec", "good.yaml", "--cpus", 2, "script.py"], "--cpus goes with --local"),
        (["--local", 0, "script.py"], "0 is not in the range"),
        (["--local", 1000, "script.py"], "1000"),
        (["--local", 2], "Missing argument 'SCRIPT'"),
    ],
)
def test_wrong_usage_is_told_before_anything_starts(script, tmp_path, arguments, message):
    script("print('started')")
    (tmp_path / "wrong.yaml").write_text("nodes: [{address: 127.0.0.1, gpu: [0]}]\n")
    local_resource_spec(2).save(tmp_path / "good.yaml")
    done = autodist("run", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


# -- inspect ----------------------------------------------------------------------------------------------------------


def graph_item() -> GraphItem:
    return GraphItem(
        graph_def=b"",
        variables=(Variable(name="table", dtype="float32", shape=(4, 2)),),
        gradients=(Gradient(variable="table", tensors=("gradient:0",)),),
    )


def strategy() -> Strategy:
    return Strategy(node_config=(), replicas=("127.0.0.1:CPU:0",))


def resource_spec() -> ResourceSpec:
    return ResourceSpec(nodes=(NodeSpec(address="10.0.0.1", gpus=(0, 1)),))


@pytest.mark.parametrize("make", [graph_item, strategy, resource_spec])
@pytest.mark.parametrize("suffix", [".pb", ".json"])
def test_inspect_prints_the_text_of_a_saved_value(tmp_path, make, suffix):
    value = make()
    file = tmp_path / f"value{suffix}"
    value.save(file)
    done = autodist("inspect", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{type(value).load(file)}\n"


def test_inspect_prints_a_resource_spec_in_yaml(tmp_path):
    resource_spec().save(tmp_path / "spec.yaml")
    assert autodist("inspect", tmp_path / "spec.yaml").stdout == f"{resource_spec()}\n"


def test_inspect_says_of_another_file_what_it_is_not(tmp_path):
    (tmp_path / "value.json").write_text('{"colour": 1}')
    done = autodist("inspect", tmp_path / "value.json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "value.json holds no saved value" in done.stderr


def test_inspect_says_that_a_file_does_not_exist(tmp_path):
    done = autodist("inspect", tmp_path / "none.pb")
    assert done.returncode == 2
    assert "does not exist" in done.stderr
