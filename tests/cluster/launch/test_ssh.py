"""Workers behind an `ssh` that does what it is told on this machine: what it is asked, given and told, and its words.

Real hosts are in tests/lab.
"""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autodist_py.cluster.launch.local import Command, stop_workers
from autodist_py.cluster.launch.ssh import SshLauncher, remote_environment, shell_script, ssh_command
from autodist_py.cluster.launch.told import Told
from autodist_py.config.settings import Settings
from autodist_py.proto.errors import ClusterError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec, SSHConfig
from tests.support.processes import ROOT, Lines, is_running, until

pytestmark = [pytest.mark.alone, pytest.mark.turns(3)]

SECRET = "s3cr3t" * 4
SSH = """#!/bin/sh
for last in "$@"; do :; done
exec /bin/sh -c "$last"
"""


def spec(config: SSHConfig) -> ResourceSpec:
    nodes = (NodeSpec("10.0.0.1", chief=True), NodeSpec("10.0.0.2", ssh_config="lab"))
    return ResourceSpec(nodes, ssh=(("lab", config),))


class Launch:
    """launch(code): a worker behind ssh that runs Python code. `lines` is what it writes, `exits` how it ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.lines = Lines()
        self.exits: list[tuple[int, int, str]] = []
        self.workers: list = []
        self._monkeypatch = monkeypatch

    def __call__(self, code: str, config: SSHConfig | None = None, **settings):
        self._monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", code])
        resources = spec(config or SSHConfig())
        launcher = SshLauncher(Command.of_process(), self.lines.output, resources, Settings(**settings))
        worker = launcher.launch(1, resources.workers[1], on_exit=lambda *ended: self.exits.append(ended[:3]))
        self.workers.append(worker)
        worker.tell(Told(SECRET, "10.0.0.1:9"))
        return worker


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """A folder with a program `ssh`, first on the PATH; tests may write another."""
    folder = tmp_path / "bin"
    folder.mkdir()
    write_program(folder / "ssh", SSH)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder / "ssh"


@pytest.fixture
def launch(ssh, monkeypatch):
    launch = Launch(monkeypatch)
    yield launch
    stop_workers(launch.workers, grace=0.0)


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_worker_gets_the_secret_on_its_input_and_nowhere_else(launch):
    code = (
        "import os, sys; print(os.environ['AUTODIST_RANK'], sys.stdin.read().split())\n"
        "for of in (os.getpid(), os.getppid()):\n"
        "  for name in ('cmdline', 'environ'):\n"
        "    print(of == os.getpid(), name, sys.argv[0], ('s3cr3t' * 4) in open(f'/proc/{of}/{name}').read())"
    )
    worker = launch(code)

    assert worker.wait(20) == 0, launch.lines.text
    seen = launch.lines.all()
    assert seen[0] == f"[1] 1 ['{SECRET}', '10.0.0.1:9']"
    assert [line.split()[-1] for line in seen[1:]] == ["False"] * 4


def test_nothing_of_what_a_worker_is_told_is_an_argument_of_ssh(ssh, launch, monkeypatch):
    write_program(ssh, f'#!/bin/sh\necho "$@"\n{SSH}')
    monkeypatch.setenv("AUTODIST_SEED", "77777")

    assert launch("print('hello')", SSHConfig(shared_envs=(("TOKEN", "88888"),))).wait(20) == 0

    shown = "\n".join(launch.lines.all())
    assert "BatchMode=yes" in shown and "[1] hello" in shown
    assert not any(word in shown for word in (SECRET, "77777", "88888"))


def test_a_worker_runs_the_chiefs_command_in_the_chiefs_folder(launch, tmp_path, monkeypatch):
    folder = tmp_path / "it's a $folder; really"
    folder.mkdir()
    monkeypatch.chdir(folder)

    assert launch("import os, sys; print([os.getcwd(), *sys.orig_argv])").wait(20) == 0

    (line,) = launch.lines.all()
    assert line.startswith(f"[1] {[str(folder), sys.executable, '-c']}"[:-1])


@pytest.mark.parametrize("value", ["it's", 'a "b"', "$HOME `id` $(id)", "a\nb\n\nc", "\\n", "; exit 3", "ü *", ""])
def test_any_value_of_a_variable_arrives_as_it_is(value, tmp_path):
    script = shell_script(
        str(tmp_path),
        {"VALUE": value},
        venv=None,
        command=[sys.executable, "-c", "import os, sys; print(ascii([os.environ['VALUE'], sys.argv[1]]))", value],
    )
    told = subprocess.run(
        ["sh", "-c", 'IFS= read -r line && eval "$line"'],
        input=script + "\n",
        capture_output=True,
        text=True,
        timeout=9,
    )
    assert told.stdout.strip() == ascii([value, value]), told.stderr


def test_a_venv_is_active_and_its_python_runs_the_worker(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my venv" / "bin").mkdir(parents=True)
    (tmp_path / "my venv" / "bin" / "python").symlink_to(sys.executable)
    code = "import os; print(os.environ['VIRTUAL_ENV'], os.environ['PATH'].split(':')[0])"

    worker = launch(
        code, SSHConfig(python_venv="~/my venv", shared_envs=(("PYTHONPATH", os.pathsep.join([*sys.path, str(ROOT)])),))
    )

    assert worker.wait(20) == 0, launch.lines.text
    assert launch.lines.all() == [f"[1] {tmp_path}/my venv {tmp_path}/my venv/bin"]


def test_the_chiefs_settings_are_passed_and_what_is_of_its_machine_is_not():
    environment = {
        "AUTODIST_SEED": "3",
        "AUTODIST_WORKER_OUTPUT": "5",
        "AUTODIST_SSH_CONFIG": "ssh_config",
        "AUTODIST_RANK": "7",
        "AUTODIST_RESOURCE_SPEC": "/tmp/spec.yml",
        "TF_NUM_INTEROP_THREADS": "2",
        "TF_CONFIG": "{}",
        "KERAS_BACKEND": "tensorflow",
        "PYTHONPATH": "/src",
        "CUDA_VISIBLE_DEVICES": "0",
        "LD_LIBRARY_PATH": "/opt/lib",
        "HOME": "/home/ada",
    }
    config = SSHConfig(shared_envs=(("LD_LIBRARY_PATH", "/remote/lib"), ("KERAS_BACKEND", "jax")))

    assert remote_environment(environment, 1, config) == {
        "AUTODIST_SEED": "3",
        "TF_NUM_INTEROP_THREADS": "2",
        "PYTHONPATH": "/src",
        "KERAS_BACKEND": "jax",
        "LD_LIBRARY_PATH": "/remote/lib",
        "AUTODIST_RANK": "1",
        "AUTODIST_COORDINATOR": "told:0",
        "PYTHONUNBUFFERED": "1",
    }


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs an ssh client")
def test_an_ssh_group_is_what_ssh_is_asked_for(tmp_path):
    (tmp_path / "key").touch()
    (tmp_path / "config").write_text("Host 10.*\n  Port 2200\n  User bob\n  BatchMode no\n  LocalForward 80 h:80\n")
    settings = Settings(ssh_config=tmp_path / "config", heartbeat_timeout=7)
    config = SSHConfig(username="ada", port=2222, key_file=str(tmp_path / "key"))

    asked = asked_of_ssh(config, settings)

    wanted = {"user": "ada", "port": "2222", "hostname": "10.0.0.2", "batchmode": "yes", "requesttty": "false"}
    wanted |= {"identityfile": str(tmp_path / "key"), "identitiesonly": "yes", "serveraliveinterval": "7"}
    wanted |= {"loglevel": "INFO", "serveralivecountmax": "1"}  # A dead link is known after 14 s, and said.
    assert wanted.items() <= asked.items()
    assert "localforward" not in asked
    assert {"user": "bob", "port": "2200"}.items() <= asked_of_ssh(SSHConfig(), settings).items()


def asked_of_ssh(config: SSHConfig, settings: Settings) -> dict[str, str]:
    command = ssh_command(NodeSpec("10.0.0.2"), config, settings)
    printed = subprocess.run([command[0], "-G", *command[1:]], capture_output=True, text=True, timeout=20, check=True)
    return dict(line.split(" ", 1) for line in printed.stdout.splitlines() if " " in line)


def test_a_key_file_that_is_not_there_is_refused_by_its_name():
    with pytest.raises(ClusterError, match=r"Received: /no/key for 10.0.0.2, which is not there"):
        ssh_command(NodeSpec("10.0.0.2"), SSHConfig(key_file="/no/key"), Settings())


def test_a_machine_without_an_ssh_client_says_so(launch, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterError, match=r"10.0.0.2 as the node of rank 1, and no `ssh` on the PATH"):
        launch("pass")


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("echo 'root@h: Permission denied (publickey).' >&2; exit 255", 255, "root@h: Permission denied (publickey)."),
        ("exec /bin/sh -c 'cd /no/where'", 2, "/no/where"),
        ("exit 1", 1, "exit code 1"),
    ],
)
def test_what_ssh_and_the_hosts_shell_say_is_the_reason(ssh, launch, body, code, said):
    write_program(ssh, f"#!/bin/sh\n{body}\n")

    launch("pass").wait(20)

    ((rank, ended, reason),) = launch.exits
    assert (rank, ended) == (1, code)
    assert reason.startswith("it could not be started over SSH: ") and said in reason
    assert "`ssh -T -o BatchMode=yes " in reason and f"must be the folder {os.getcwd()} and {sys.executable}" in reason


def test_a_python_that_is_not_there_is_named(launch):
    launch("pass", SSHConfig(python_venv="/no/venv")).wait(20)

    ((_, code, reason),) = launch.exits
    assert code == 127 and "/no/venv/bin/python: not found" in reason


def test_a_python_without_autodist_py_is_told_of(launch, tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], timeout=60, check=True)
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(tmp_path)

    launch("pass", SSHConfig(python_venv=str(tmp_path / "bare"))).wait(20)

    ((_, code, reason),) = launch.exits
    assert code == 1 and "No module named 'autodist_py'" in reason


def test_a_connection_that_breaks_is_told_from_a_script_that_fails(ssh, launch):
    write_program(ssh, SSH.replace("exec ", "") + "echo 'Timeout, server 10.0.0.2 not responding.' >&2; exit 255")
    launch("print('began')").wait(20)
    write_program(ssh, SSH)
    launch("import sys; print('no data', file=sys.stderr); raise SystemExit(255)").wait(20)

    assert launch.exits == [
        (1, 255, "its SSH connection broke: Timeout, server 10.0.0.2 not responding."),
        (1, 255, ""),
    ]


def test_what_a_host_greets_with_is_shown_if_no_worker_starts(ssh, launch):
    greeting = "echo 'ERROR: private property' >&2\n"
    write_program(ssh, SSH.replace("exec ", f"{greeting}exec "))
    launch("print('began')").wait(20)
    write_program(ssh, f"#!/bin/sh\n{greeting}exit 1\n")
    launch("print('began')").wait(20)
    assert launch.lines.all() == ["[1] began", "[1] ERROR: private property"]


def test_what_a_host_greets_with_is_no_reason_and_is_shown_though_its_stream_does_not_end(
    ssh, launch, tmp_path, monkeypatch
):
    said = "printf '*****\\nAuthorized users only\\n\\n*****\\nERROR: no key\\nPermission denied\\n' >&2"
    until_told = f"while ! test -e {tmp_path}/go; do sleep 0.05; done"
    write_program(ssh, f"#!/bin/sh\nsleep 60 >&2 &\necho $!\n{said}\n{until_told}\nexit 255\n")
    monkeypatch.setattr("autodist_py.cluster.launch.local._DRAIN_SECONDS", 0.0)

    worker = launch("pass")
    until(lambda: launch.lines.text and "Permission denied" in worker._said, 30)
    (tmp_path / "go").touch()
    assert worker.wait(20) == 255

    lines = launch.lines.all()
    os.kill(int(lines[0].removeprefix("[1] ")), signal.SIGKILL)
    ((_, _, reason),) = launch.exits
    assert reason.startswith("it could not be started over SSH: ERROR: no key / Permission denied. `ssh ")
    assert lines[1:] == [
        f"[1] {line}" for line in ("*****", "Authorized users only", "", "*****", "ERROR: no key", "Permission denied")
    ]


def test_a_signal_that_ended_the_worker_is_told_as_of_a_local_one(launch):
    worker = launch("import os; os.kill(os.getpid(), 9)")

    assert worker.wait(20) == -9
    assert launch.exits == [(1, -9, "")]


SLEEPS = (
    "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, %s);"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    "print(os.getpid(), os.getppid(), child.pid, flush=True); time.sleep(60)"
)


def processes_of(launch) -> list[int]:
    deadline = time.monotonic() + 20
    while not launch.lines.text:
        assert time.monotonic() < deadline, launch.exits
        time.sleep(0.02)
    return [int(number) for number in launch.lines.text.removeprefix("[1] ").split()]


def assert_gone(process_ids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while running := [process_id for process_id in process_ids if is_running(process_id)]:
        assert time.monotonic() < deadline, f"{running} of {process_ids} still run"
        time.sleep(0.02)


@pytest.mark.parametrize(("handler", "code"), [("signal.SIG_DFL", -15), ("signal.SIG_IGN", -9)])
def test_ending_a_worker_ends_what_it_started_on_its_host(launch, handler, code):
    worker = launch(SLEEPS % handler)
    process_ids = processes_of(launch)

    stop_workers([worker], grace=0.0)

    assert worker.wait(0) == code
    assert_gone(process_ids, 1.0)


def test_a_client_whose_host_does_not_answer_is_ended_itself(ssh, launch):
    write_program(ssh, "#!/bin/sh\nexec sleep 60\n")
    worker = launch("pass")

    stop_workers([worker], grace=0.0)

    assert worker.wait(0) == -9


def test_a_worker_ends_with_its_connection_after_the_grace_it_has(ssh, launch):
    # The client is killed; what it started on the host lives on, as behind a real one.
    write_program(
        ssh,
        f"#!{sys.executable}\nimport subprocess, sys\n"
        "host = subprocess.Popen(['/bin/sh', '-c', sys.argv[-1]], stdin=subprocess.PIPE)\n"
        "while True:\n  line = sys.stdin.buffer.readline()\n  host.stdin.write(line); host.stdin.flush()\n",
    )
    worker = launch(SLEEPS % "signal.SIG_IGN", heartbeat_timeout=2.0, exit_grace=0.1)
    process_ids = processes_of(launch)
    started = time.monotonic()

    os.kill(worker._process.pid, signal.SIGKILL)

    assert worker.wait(20) == -9
    assert launch.exits == [(1, -9, "its ssh client, on the chief's machine, was killed by SIGKILL")]
    assert is_running(process_ids[0])
    assert_gone(process_ids, 10.0)
    assert time.monotonic() - started > 3.0


def test_a_worker_that_has_ended_takes_along_what_it_left_behind(launch):
    code = (
        "import subprocess, sys;"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)"
    )
    assert launch(code).wait(20) == 0

    assert_gone(processes_of(launch), 1.0)
