"""What a worker is told over its standard input."""

import base64
import os
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import pytest

from autodist_py.cluster.launch.told import Told
from autodist_py.cluster.member import WorkerCluster
from autodist_py.config.resource_spec import given_resource_spec
from autodist_py.config.settings import Settings
from autodist_py.proto.errors import ClusterError, ResourceSpecError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec, SSHConfig
from tests.support.processes import ROOT

RESOURCES = ResourceSpec(
    (
        NodeSpec("10.0.0.1", chief=True, gpus=(0, 1)),
        NodeSpec("h\u00f6st.example", ssh_config="lab", network_bandwidth=2.5),
    ),
    ssh=(("lab", SSHConfig("ada", 22, "~/.ssh/key", shared_envs=(("A", "x\ty\n"), ("B", "")))),),
)
LINE = Told("secret", "h:1", RESOURCES).line().split(b"\t")[2]


@pytest.fixture
def standard_input(tmp_path: Path):
    """Makes a content the standard input of this process."""
    kept = os.dup(0)

    def give(content: bytes) -> None:
        (tmp_path / "input").write_bytes(content)
        with (tmp_path / "input").open("rb") as file:
            os.dup2(file.fileno(), 0)

    yield give
    os.dup2(kept, 0)
    os.close(kept)


@pytest.mark.parametrize(
    "told",
    [Told("our secret"), Told("s3cr3t", "[fd00::1]:4000"), Told("s3cr3t", "h:1", RESOURCES), Told("s", "", RESOURCES)],
)
def test_a_worker_is_told_what_the_chief_says_and_the_rest_of_its_input_is_the_scripts(told, standard_input):
    standard_input(told.line() + b"more")
    assert Told.from_input() == told
    assert os.read(0, 10) == b"more"


def test_a_spec_of_a_thousand_nodes_fits_into_a_pipe_that_nobody_reads():
    nodes = [NodeSpec(f"10.0.{number // 250}.{number % 250}", gpus=tuple(range(8))) for number in range(1000)]
    line = Told("s" * 64, "10.1.0.1:4000", ResourceSpec((NodeSpec("10.1.0.1", chief=True), *nodes))).line()
    assert len(line) < 1 << 16 and line.count(b"\n") == 1


@pytest.mark.parametrize(
    ("given", "received"),
    [("", "no line"), ("\n", "no line"), ("schl\u00fcssel\n", "another line"), ("s" * 5000, "another line")],
)
def test_a_secret_that_is_none_is_refused(given, received):
    code = (
        "from autodist_py.cluster.launch.told import Told\n"
        "try: Told.from_input()\nexcept Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=given, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert done.stdout.startswith("ClusterError") and f"Received: {received}." in done.stdout


@pytest.mark.parametrize(
    "spec",
    [
        b"no base64",
        b"QUJD",
        base64.b64encode(zlib.compress(b"\xff\xff")),
        base64.b64encode(zlib.compress(b"\n\x00")),
        LINE[:-41],
        base64.b64encode(base64.b64decode(LINE) + b"more"),
    ],
    ids=["base64", "zlib", "message", "spec", "a-part", "more"],
)
def test_a_line_with_another_thing_than_a_spec_is_refused_by_its_rule(spec):
    with pytest.raises(ClusterError, match=rf"Received: {len(spec)} characters that are no spec \("):
        Told.parse(b"secret\th:1\t" + spec)


def test_a_spec_that_grows_without_end_is_read_up_to_a_limit():
    bomb = base64.b64encode(zlib.compress(b"\n" * (64 << 20)))
    tracemalloc.start()
    with pytest.raises(ClusterError):
        Told.parse(b"secret\th:1\t" + bomb)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 48 << 20


def test_a_worker_that_the_chief_started_reads_no_file_of_a_spec():
    assert given_resource_spec("/no/such/file.yml", Settings(rank=1, coordinator="told:0")) is None
    with pytest.raises(ResourceSpecError, match="there is no such resource spec file"):
        given_resource_spec("/no/such/file.yml", Settings(rank=1, coordinator="10.0.0.1:4000", launch="none"))


def test_a_worker_that_is_told_no_spec_says_how_it_is_started_by_hand(standard_input):
    standard_input(b"secret\n")
    with pytest.raises(ClusterError, match=r"Received: none, in the process of rank 1\..*has AUTODIST_LAUNCH=none"):
        WorkerCluster._of(1, None, Settings(rank=1, coordinator="told:0"))
