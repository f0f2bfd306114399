"""Workers that are started by hand, each with the run's secret on its standard input."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from autodist_py.cluster.chief import Chief
from autodist_py.config.settings import Settings
from autodist_py.proto.errors import ClusterError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from tests.support.processes import ROOT

pytestmark = pytest.mark.alone

SCRIPT = """
import sys, time
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.cluster.cluster import join_cluster
from autodist_py.config.settings import Settings

spec = ResourceSpec((NodeSpec("127.0.0.1", chief=True), NodeSpec("127.0.0.2")))
cluster = join_cluster(spec, Settings.from_environment())
print(cluster.rank, cluster.compare("ranks", b"%d" % cluster.rank), sys.stdin.read().strip())
"""


def start(folder: Path, secret: str, **environment: str) -> "subprocess.Popen[str]":
    (folder / "train.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(folder / "train.py")],
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "AUTODIST_LAUNCH": "none"}
        | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if process.stdin is not None:
        process.stdin.write(f"{secret}\nmore\n")
        process.stdin.close()
    return process


@pytest.fixture
def started():
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait(10)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def printed(process: "subprocess.Popen[str]") -> str:
    process.wait(90)
    return process.stdout.read().strip().splitlines()[-1] if process.stdout is not None else ""


def test_workers_started_by_hand_are_one_run(tmp_path, started):
    port = free_port()
    worker = {"AUTODIST_RANK": "1", "AUTODIST_COORDINATOR": f"127.0.0.1:{port}"}
    started.append(start(tmp_path, "our secret", **worker))
    started.append(start(tmp_path, "our secret", AUTODIST_COORDINATOR_PORT=port))

    assert [printed(process) for process in started] == ["1 {0: b'0', 1: b'1'} more", "0 {0: b'0', 1: b'1'} more"]
    assert [process.returncode for process in started] == [0, 0]


TWO = ResourceSpec((NodeSpec("127.0.0.1", chief=True), NodeSpec("127.0.0.2")))


def test_a_chief_whose_workers_are_started_by_hand_has_a_port_that_they_know():
    with pytest.raises(ClusterError, match="Received: AUTODIST_LAUNCH=none without AUTODIST_COORDINATOR_PORT"):
        Chief.start(TWO, Settings(launch="none"))
