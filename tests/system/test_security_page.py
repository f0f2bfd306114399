"""docs/security.md: each sentence has its line in the page's last table, each test there is one, and some are here."""

import ast
import os
import re
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from autodist_py.cluster.chief import Chief
from autodist_py.cluster.cluster import join_cluster
from autodist_py.cluster.server_probe import answers
from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.config.settings import Settings
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from tests.support.cluster_pool import TWO_WORKERS, Cluster
from tests.support.processes import AUTODIST, ROOT

PAGE = (ROOT / "docs/security.md").read_text()
CLAIMS, CHECKS = PAGE.split("## What checks each sentence")
MAKE = (ROOT / "Makefile").read_text()


def sentences() -> list[str]:
    """Of the page's text, and the first cells of its rows."""
    blocks = [" ".join(block.split()) for block in re.split(r"\n\n|\n- |\n(?=\|)", CLAIMS) if block.strip()]
    found = [block.split("|")[1].strip() for block in blocks if block.startswith("|")][2:]
    for block in blocks:
        if not block.startswith(("|", "#")):
            found += re.split(r"(?<=[.]) (?=[A-Z`])", re.sub(r"^- |\*\*", "", block))
    return found


def rows() -> list[tuple[str, str]]:
    """How a sentence begins, and what checks it."""
    lines = [line for line in CHECKS.splitlines() if line.startswith("|")][2:]
    return [(begin.strip(), check.strip()) for begin, check in (line.strip("|").split("|") for line in lines)]


def test_each_sentence_has_one_line_and_each_line_a_sentence() -> None:
    begins = [begin for begin, _ in rows()]
    assert len(sentences()) > 25
    assert [said for said in sentences() if sum(said.startswith(begin) for begin in begins) != 1] == []
    assert [begin for begin in begins if not any(said.startswith(begin) for said in sentences())] == []


@pytest.mark.parametrize(("begin", "check"), rows())
def test_what_checks_a_sentence_is_there(begin: str, check: str) -> None:
    if check == "advice":
        return
    command = check.strip("`")
    if command.startswith("tests/"):
        path, _, name = command.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert not name or name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    elif command.startswith("make "):
        assert f"\n{command.removeprefix('make ')}:" in MAKE
    else:
        assert subprocess.run(command.split(), cwd=ROOT, capture_output=True, timeout=20, check=False).returncode == 0


# -- What no other test checks ----------------------------------------------------------------------------------------


def listening() -> set[tuple[str, int]]:
    """Where this process listens."""
    found = psutil.Process().net_connections(kind="inet")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def own_address() -> str | None:
    """An address of this machine at which others may reach it."""
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if psutil.net_if_stats()[name].isup and one.family == socket.AF_INET and one.address[:4] != "127.":
                return one.address
    return None


def on_several_machines() -> ResourceSpec:
    address = own_address()
    if address is None:
        pytest.skip("this machine has loopback addresses only")
    return ResourceSpec((NodeSpec(address, chief=True), NodeSpec("198.51.100.7")))


@pytest.mark.parametrize(("is_local", "where"), [(True, {"127.0.0.1"}), (False, {"::"})])
def test_the_coordinator_listens_where_the_page_says(is_local: bool, where: set[str]) -> None:
    resources = local_resource_spec(2) if is_local else on_several_machines()
    before = listening()
    chief = Chief.start(resources, Settings())
    try:
        assert {address.removeprefix("::ffff:") for address, _ in listening() - before} == where
    finally:
        chief._server.stop(None).wait()


def test_each_run_draws_a_secret_of_256_bits() -> None:
    chiefs = [Chief.start(local_resource_spec(2), Settings()) for _ in range(2)]
    for chief in chiefs:
        chief._server.stop(None).wait()
    first, second = (int(chief._secret, 16) for chief in chiefs)
    assert [len(chief._secret) * 4 for chief in chiefs] == [256, 256] and first != second


def test_a_run_of_one_worker_listens_nowhere() -> None:
    before = listening()
    cluster = join_cluster(local_resource_spec(1), Settings())
    assert cluster.num_workers == 1 and listening() == before


def server_port() -> int:
    from autodist_py.cluster import tf_adapter

    return int(tf_adapter.server_target().rpartition(":")[2])


@pytest.mark.alone
@pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
def test_tensorflows_server_lets_in_who_has_no_secret(cluster: Cluster) -> None:
    for rank, port in enumerate(cluster.run(server_port)):
        assert answers(f"127.0.0.{rank + 1}:{port}", 10.0)


def test_the_folder_of_recorded_runs_is_the_users_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "folder = pathlib.Path(os.environ['AUTODIST_RECORD_DIR'])\n"
        "own = next(each for each in (folder, *folder.parents) if each.name.startswith('autodist-'))\n"
        "print('mode', oct(own.stat().st_mode & 0o777), own.stat().st_uid == os.getuid()); sys.exit(3)\n"
    )
    command = [*AUTODIST, "verify", str(script)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert "mode 0o700 True" in done.stdout + done.stderr
