"""A lab of hosts in namespaces of this machine, each with its own address, processes and SSH server."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.processes import Command, is_running
from tools.netlab import NETLAB, why_there_is_no_lab

HOSTS = 3
_UP_SECONDS = 30

THREE_HOSTS = """
nodes:
  - {address: 10.77.0.1, chief: true}
  - {address: 10.77.0.2, ssh_config: lab}
  - {address: 10.77.0.3, ssh_config: lab}
ssh: {lab: {username: root}}
"""
"""A resource spec of all hosts."""
SPEC = """
nodes:
  - {address: 10.77.0.1, chief: true}
  - {address: 10.77.0.2, ssh_config: lab}
"""
SSH = "ssh: {lab: {username: root, shared_envs: {SHARED: it's shared}}}\n"
"""The rest of a resource spec that begins as SPEC does."""
ENDED_SECONDS = 15.0
"""How long a run of a few steps may take."""


class Lab:
    """Hosts 0, 1, ... at 10.77.0.1, 10.77.0.2, ..."""

    def __init__(self, folder: Path):
        self.state = folder / "netlab"
        self.ssh_config = self.state / "ssh_config"
        self.own_folder = folder / "own"
        """Of this name each host has another folder, empty at first; all others are shared."""

    def do(self, *arguments: str) -> None:
        """Runs netlab.sh."""
        environment = self._environment() | {"NETLAB_PRIVATE": str(self.own_folder)}
        done = subprocess.run(
            [NETLAB, *arguments], env=environment, capture_output=True, text=True, timeout=_UP_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr

    def start(self, host: int, command: list[str], folder: Path, **environment: str) -> "Run":
        """A command on a host, in the background."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("AUTODIST_")}
        own |= {"AUTODIST_SSH_CONFIG": str(self.ssh_config), "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        own |= {"AUTODIST_OUTPUT": "all"}
        return Run([NETLAB, "exec", str(host), *command], folder, self._environment() | own | environment)

    def processes(self, host: int, word: str, kind: str = "cmdline") -> dict[int, str]:
        """What the processes of a host have in a file of /proc, by id, where the word is in it."""
        pids = subprocess.run(
            ["ip", "netns", "pids", f"lab{host}"], capture_output=True, text=True, timeout=10, check=False
        )
        found = {int(pid): read(f"/proc/{pid}/{kind}") for pid in pids.stdout.split() if is_running(int(pid))}
        return {pid: text.replace("\0", " ") for pid, text in found.items() if word in text}

    def left(self, word: str) -> dict[int, dict[int, str]]:
        """The processes whose command line has the word, by host; what leads to a host does not count."""
        return {host: found for host in range(HOSTS) if (found := self.processes(host, word))}

    def kill(self, word: str) -> None:
        """Ends the processes whose command line has the word, on all hosts."""
        for pid in [pid for found in self.left(word).values() for pid in found]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_until_gone(self, word: str, seconds: float) -> None:
        """No host has a process whose command line has the word."""
        deadline = time.monotonic() + seconds
        while left := self.left(word):
            assert time.monotonic() < deadline, f"after {seconds} s there are still {left}"
            time.sleep(0.05)

    def _environment(self) -> dict[str, str]:
        return os.environ | {"NETLAB_DIR": str(self.state)}


class Run(Command):
    """A command that runs on a host."""

    def send(self, number: signal.Signals) -> None:
        """The command itself gets the signal, and nothing between it and this process."""
        (child,) = psutil.Process(self.process.pid).children()
        child.send_signal(number)

    def press_ctrl_c(self) -> None:
        """What a terminal does: all in the process group get SIGINT, but for what only leads to the host."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getpgid(child.pid) == self.process.pid:
                    child.send_signal(signal.SIGINT)


def read(path: str) -> str:
    """What is in a file of /proc; nothing, if its process has ended."""
    try:
        return Path(path).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The lab, up for all tests of it. There is one in a machine at a time."""
    lacking = why_there_is_no_lab()
    if lacking is not None:
        pytest.skip(lacking)
    up = Lab(tmp_path_factory.mktemp("lab"))
    try:
        up.do("up", str(HOSTS), "none")
        yield up
    finally:
        up.do("down")


@pytest.fixture
def start(lab, tmp_path):
    """start(host, command, **environment): a command on a host of the lab, ended with the test."""
    runs: list[Run] = []

    def start_run(host: int, command: list[str], *, folder: Path = tmp_path, **environment: str) -> Run:
        runs.append(lab.start(host, command, folder, **environment))
        return runs[-1]

    yield start_run
    for run in runs:
        run.close()
