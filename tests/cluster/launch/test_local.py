"""Local worker processes, their output, and the port held for TensorFlow's server."""

import os
import select
import socket
import subprocess
import sys
import threading
import time

import pytest

from autodist_py.cluster.last_words import LastWords
from autodist_py.cluster.launch.local import Command, LocalLauncher, stop_workers
from autodist_py.cluster.launch.told import Told
from autodist_py.cluster.ports import HeldPort, host_and_port
from autodist_py.proto.errors import ClusterError
from autodist_py.proto.resource_spec import NodeSpec
from tests.support.processes import ROOT, Lines, is_running

pytestmark = [pytest.mark.alone, pytest.mark.turns(3)]

NODE = NodeSpec("127.0.0.2")


class Launch:
    """launch(code, rank=1): a worker that runs Python code. `lines` is what it writes, `exits` how it ended."""

    def __init__(self, monkeypatch, *, brief=False):
        self.lines, self.exits, self.workers = Lines(brief=brief), [], []
        self._monkeypatch = monkeypatch

    def __call__(self, code, rank=1):
        self._monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", code])
        launcher = LocalLauncher(Command.of_process(), self.lines.output)
        worker = launcher.launch(rank, NODE, on_exit=lambda *ended: self.exits.append(ended))
        self.workers.append(worker)
        worker.tell(Told("s3cr3t", "127.0.0.1:9"))
        return worker


@pytest.fixture
def launch(monkeypatch):
    launch = Launch(monkeypatch)
    yield launch
    stop_workers(launch.workers, grace=0.0)


def test_a_worker_gets_its_rank_and_is_told_the_secret_and_the_coordinator(launch):
    code = (
        "import os, sys; print(os.environ['AUTODIST_RANK'], sys.stdin.read().split('\\t'));"
        "print('s3c' + 'r3t' in str(os.environ))"
    )
    worker = launch(code)

    assert worker.wait(10) == 0
    assert launch.lines.all() == [r"[1] 1 ['s3cr3t', '127.0.0.1:9\n']", "[1] False"]


def test_a_worker_waits_for_what_it_is_told_and_may_have_ended_by_then(launch):
    waiting = LocalLauncher(Command([sys.executable, "-c", "print(input())"], ".", os.environ), launch.lines.output)
    worker = waiting.launch(1, NODE, on_exit=lambda *ended: launch.exits.append(ended))
    launch.workers.append(worker)
    assert worker.wait(0.5) is None
    worker.kill()
    assert worker.wait(10) == -9
    worker.tell(Told("s3cr3t", "127.0.0.1:9"))
    assert (launch.exits, launch.lines.all()) == ([(1, -9, "", False)], [])


def test_output_of_several_workers_is_whole_lines(launch):
    code = "import sys\nfor i in range(300):\n  sys.stdout.write('ab' * 40); sys.stderr.write('cd' * 40 + '\\n')"
    for worker in [launch(code, rank) for rank in (1, 2, 3)]:
        assert worker.wait(20) == 0

    assert sorted(set(launch.lines.all())) == [f"[{rank}] {'ab' * 40}{'cd' * 40}" for rank in (1, 2, 3)]


def test_of_a_line_that_is_rewritten_the_last_state_is_shown(launch):
    assert launch(r"print('10%\r50%\r100%\r', flush=True); print('no newline', end='')").wait(10) == 0

    assert launch.lines.all() == ["[1] 100%", "[1] no newline"]


@pytest.fixture
def launch_in_brief(monkeypatch):
    launch = Launch(monkeypatch, brief=True)
    yield launch
    stop_workers(launch.workers, grace=0.0)


def test_in_brief_a_worker_is_seen_when_something_is_wrong(launch_in_brief):
    code = "import warnings; print('Epoch 1'); warnings.warn('old data'); print('Epoch 2', flush=True); {}"
    assert launch_in_brief(code.format("")).wait(20) == 0
    assert launch_in_brief(code.format("1 / 0"), 2).wait(20) == 1
    assert launch_in_brief("print('no licence'); raise SystemExit(3)", 3).wait(20) == 3

    lines = launch_in_brief.lines.all()
    assert [line for line in lines if line.startswith("[1]")] == ["[1] <string>:1: UserWarning: old data"]
    assert [line for line in lines if line.startswith("[2]")][1:] == [
        "[2] Traceback (most recent call last):",
        '[2]   File "<string>", line 1, in <module>',
        "[2] ZeroDivisionError: division by zero",
    ]
    assert [line for line in lines if line.startswith("[3]")] == ["[3] no licence"]


def test_the_end_of_a_worker_is_reported_with_its_exit_code(launch):
    launch("raise SystemExit(3)").wait(10)
    launch("print('no licence'); raise SystemExit(4)", 2).wait(10)

    assert launch.exits == [(1, 3, "", False), (2, 4, "", True)]


def test_in_brief_noise_that_is_not_shown_is_nothing_to_look_at(launch_in_brief):
    noise = "I0000 00:00:1795505485.742237    8615 port.cc:153] oneDNN custom operations are on."
    launch_in_brief(f"print({noise!r}); raise SystemExit(3)").wait(10)

    assert launch_in_brief.exits == [(1, 3, "", False)]
    assert launch_in_brief.lines.all() == []


def test_a_worker_that_ignores_termination_is_killed_with_what_it_started(launch):
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True); time.sleep(60)"
    )
    worker = launch(code)
    deadline = time.monotonic() + 10
    while not launch.lines.text and time.monotonic() < deadline:
        time.sleep(0.05)

    stop_workers([worker], grace=0.0)

    assert worker.wait(0) == -9
    child = int(launch.lines.all()[0].removeprefix("[1] "))
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def test_an_interactive_session_cannot_start_workers():
    code = (
        "import sys; sys.orig_argv = ['python']\n"
        "from autodist_py.cluster.launch.local import own_command\n"
        "try: own_command()\nexcept Exception as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=os.getcwd(), check=True
    )

    assert "starts from one: `python train.py`" in done.stdout


def test_a_held_port_is_refused_to_others_until_it_is_released():
    held = HeldPort()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("0.0.0.0", held.number))
    with pytest.raises(ClusterError, match=f"TensorFlow's server cannot have port {held.number}: EADDRINUSE"):
        HeldPort(held.number)

    held.release()

    HeldPort(held.number).release()


def test_a_server_that_shares_its_port_counts_as_in_use():
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        with pytest.raises(ClusterError, match="choose another AUTODIST_SERVER_PORT"):
            HeldPort(server.getsockname()[1])


def test_an_ipv6_address_stands_in_brackets_before_its_port():
    assert [host_and_port(address, 4000) for address in ("host", "10.0.0.1", "fd00::1")] == [
        "host:4000",
        "10.0.0.1:4000",
        "[fd00::1]:4000",
    ]


def test_a_worker_starts_where_the_script_did_though_that_has_gone_elsewhere(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "scripts/train.py").write_text(
        "import os\n"
        "os.chdir('data')\n"
        "if 'AUTODIST_RANK' in os.environ:\n"
        "    print('here', os.getcwd()); raise SystemExit\n"
        "from autodist_py.proto.resource_spec import NodeSpec\n"
        "from autodist_py.cluster.launch.local import Command, LineOutput, LocalLauncher\n"
        "launcher = LocalLauncher(Command.of_process(), LineOutput(1))\n"
        "print(launcher.launch(1, NodeSpec('127.0.0.2'), on_exit=lambda *ended: None).wait(20))\n"
    )
    done = subprocess.run(
        [sys.executable, "-u", "scripts/train.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=True,
    )

    assert done.stdout.splitlines() == [f"[1] here {tmp_path / 'data'}", "0"]


@pytest.fixture
def pipe():
    """Both ends of a pipe; what a test has closed is left alone."""
    ends = list(os.pipe())
    yield ends
    for end in ends:
        os.close(end)


def test_last_words_are_said_once_and_without_waiting_for_who_reads_them(pipe):
    read_end, write_end = pipe
    words = LastWords(write_end)
    words.say("lost")
    words.say("lost again")
    assert os.read(read_end, 100) == b"lost\n"

    os.set_blocking(write_end, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(write_end, bytes(1 << 16))
    os.set_blocking(write_end, True)
    full = threading.Thread(target=LastWords(write_end).say, args=["lost"], daemon=True)
    full.start()
    full.join(20)
    stood_still = full.is_alive()
    os.read(read_end, 1 << 16)
    assert not stood_still


def test_long_last_words_fit_what_a_pipe_takes_at_once(pipe):
    LastWords(pipe[1]).say("x" * 100_000)
    assert os.read(pipe[0], 1 << 16) == b"x" * (select.PIPE_BUF - 1) + b"\n"


def test_last_words_are_not_written_to_what_a_script_has_opened_instead(pipe, tmp_path):
    words = LastWords(pipe[1])
    with open(tmp_path / "own", "wb") as file:
        os.dup2(file.fileno(), pipe[1])
    words.say("lost")
    assert (tmp_path / "own").read_bytes() == b""
