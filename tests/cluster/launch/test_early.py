"""Workers that start together with the chief: what their scripts find, and that none is left behind."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from autodist_py.cluster.launch.local import Job, own_variables, stop_workers
from autodist_py.cluster.launch.ssh import SshLauncher, wait_over_ssh
from autodist_py.cluster.launch.told import Told
from autodist_py.cluster.launch.waiting import Waiting
from autodist_py.config.settings import Settings
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from tests.support.processes import AUTODIST, ROOT, Command, Lines, ended, is_running, noted, until

pytestmark = pytest.mark.alone

JOINS = """
import os, sys
found = ["tensorflow" in sys.modules, __name__, sys.argv[1:], os.environ.get("PYTHONPATH")]
{before}
import tensorflow as tf
{after}
from autodist_py import AutoDist
print("WARNING: found", AutoDist() and found, {shown}, flush=True)
"""
"""A script of two workers; the other's lines are shown if they begin as a warning's."""

NOTES_CHILDREN = """
import os, psutil, sys, time
if "AUTODIST_RANK" in os.environ:
    print("WARNING: began", flush=True); sys.exit(7)
while len(children := psutil.Process().children()) < 2:
    time.sleep(0.01)
open("processes", "w").write(" ".join(str(child.pid) for child in children))
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    commands = []

    def start(script: str, workers: int = 2, **environment: str) -> Command:
        (tmp_path / "train.py").write_text(textwrap.dedent(script))
        own = {name: value for name, value in os.environ.items() if not name.startswith("AUTODIST_")}
        own |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"} | environment
        commands.append(Command([*AUTODIST, "run", "--local", str(workers), "train.py", "--x"], tmp_path, own))
        return commands[-1]

    yield start
    for command in commands:
        command.close()


def found_by_the_worker(
    run: Callable[..., Command], before: str = "", after: str = "", shown: str = "''", **environment: str
) -> str:
    """What a script finds as the other worker, which has joined; the run has ended well."""
    command = run(JOINS.format(before=before, after=after, shown=shown), **environment)
    assert command.end(90) == 0, command.text
    (line,) = [line for line in command.lines if line.startswith("[1] WARNING: found")]
    return line.removeprefix("[1] WARNING: found ")


def test_a_workers_script_begins_with_tensorflow_imported_and_else_as_ever(run):
    assert found_by_the_worker(run) == f"{[True, '__main__', ['--x'], str(ROOT)]} "


def test_what_a_script_says_before_it_imports_tensorflow_holds_where_workers_have_imported_it(run, tmp_path):
    """Keras reads its file, in the folder that a variable names, when it is imported."""
    (tmp_path / "keras.json").write_text('{"floatx": "float64"}')
    before = f"os.environ['KERAS_HOME'] = {str(tmp_path)!r}"
    found = found_by_the_worker(run, before, shown="tf.keras.config.floatx()")
    assert found == f"{[True, '__main__', ['--x'], str(ROOT)]} float64"


def test_what_a_script_sets_later_holds_in_the_others_from_their_begin(run):
    before = "start = [os.environ.get(name) for name in ('LATER', 'KEPT')]"
    after = "os.environ['LATER'] = 'a\\tb'; os.environ.pop('KEPT', None)"
    found = found_by_the_worker(run, before, after, shown="start", KEPT="1")
    assert found == f"{[True, '__main__', ['--x'], str(ROOT)]} {['a' + chr(9) + 'b', None]}"


def test_the_sitecustomize_that_python_would_run_is_run(run, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/sitecustomize.py").write_text("import builtins; builtins.customized = __file__")
    path = os.pathsep.join([str(ROOT), str(tmp_path / "own")])
    script = "print('WARNING:', customized, flush=True)\n" + JOINS.format(before="", after="", shown="''")
    command = run(script, PYTHONPATH=path)
    assert command.end(90) == 0, command.text
    own = f"WARNING: {tmp_path / 'own/sitecustomize.py'}"
    assert sorted(line for line in command.lines if "own/" in line and "found" not in line) == [
        f"[0] {own}",
        f"[1] {own}",
    ]


@pytest.mark.parametrize("ends", ["", "1 / 0", "os.kill(os.getpid(), 9)"])
def test_workers_start_at_once_and_end_with_a_chief_that_needs_none(run, tmp_path, ends):
    command = run(f"{NOTES_CHILDREN}\n{ends}", workers=3)
    code = command.end(60)

    assert code == {"": 0, "1 / 0": 1}.get(ends, 137), command.text
    assert not any("began" in line for line in command.lines)
    assert len((tmp_path / "processes").read_text().split()) == 2
    until(lambda: not noted(tmp_path / "processes"), 20)


def test_a_process_that_the_chief_forks_tells_them_nothing(run):
    imports = "os.environ['FORKED'] = '1'; import tensorflow; os._exit(0)"
    before = f"if 'AUTODIST_RANK' not in os.environ:\n  if not (child := os.fork()):\n    {imports}\n"
    before += "  os.waitpid(child, 0)"
    assert found_by_the_worker(run, before, shown="os.environ.get('FORKED')").endswith(" None")


def test_a_script_with_nodes_of_its_own_has_its_own_workers(run, tmp_path):
    script = """
    import os
    from autodist_py import AutoDist, ResourceSpec
    from autodist_py.config.resource_spec import local_resource_spec
    autodist = AutoDist(None if "AUTODIST_RANK" in os.environ else local_resource_spec(2))
    print("WARNING: one of", autodist.num_workers, flush=True)
    """
    command = run(script, workers=3)
    assert command.end(90) == 0, command.text
    assert sorted(line for line in command.lines if "one of" in line) == [
        f"[{rank}] WARNING: one of 2" for rank in (0, 1)
    ]


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program `ssh`, first on the PATH, that does on this machine what it is told."""
    program = tmp_path / "bin/ssh"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nfor last in "$@"; do :; done\nexec /bin/sh -c "$last"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


RESOURCES = ResourceSpec((NodeSpec("10.0.0.1", chief=True), NodeSpec("10.0.0.2")))
SHOWS = (
    "import os, sys\n"
    "print('tensorflow' in sys.modules, *map(os.environ.get, ('AUTODIST_RANK', 'AUTODIST_COORDINATOR', 'TF_NEW')))\n"
    "print(sys.stdin.readline().strip())"
)


def test_a_worker_on_another_host_waits_there(ssh, monkeypatch):
    command = [sys.executable, "-c", SHOWS]
    monkeypatch.setattr(sys, "orig_argv", command)
    waiting = wait_over_ssh(1, RESOURCES.workers[1], RESOURCES, Settings(), command, os.getcwd())
    monkeypatch.setenv("TF_NEW", "1")
    waiting.imports("tensorflow")
    waiting.imports("autodist_py.autodist")
    lines, exits = Lines(), []
    launcher = SshLauncher(lines.output, RESOURCES, Settings(), waiting={1: waiting})
    job = Job(1, RESOURCES.workers[1], "10.0.0.1:9", Told("s3cr3t"))

    worker = launcher.launch(job, on_exit=lambda *ended: exits.append(ended[:3]))
    try:
        assert worker.wait(60) == 0
    finally:
        stop_workers([worker], grace=0.0)
    assert lines.all()[-2:] == ["[1] True 1 10.0.0.1:9 1", "[1] s3cr3t"]
    assert exits == [(1, 0, "")]


def test_one_that_waits_on_another_host_ends_with_its_connection(ssh):
    command = [sys.executable, "-c", SHOWS]
    waiting = wait_over_ssh(1, RESOURCES.workers[1], RESOURCES, Settings(), command, os.getcwd())
    client = psutil.Process(waiting.process.pid)
    until(lambda: client.children(), 20)
    behind = client.children(recursive=True)

    waiting.end()

    until(lambda: not any(map(is_running, [client, *behind])), 20)


STARTS = """
import psutil, sys
from autodist_py.cluster.launch import early
from autodist_py.config.resource_spec import load_resource_spec
early.start_workers()
children = psutil.Process().children()
other, one = map(load_resource_spec, sys.argv[1:])
print(len(children), early.waiting_for(other), [child.is_running() for child in children], early.waiting_for(one))
"""


def test_those_that_wait_on_other_nodes_are_ended(ssh, tmp_path):
    RESOURCES.save(tmp_path / "one.yml")
    replace(RESOURCES, nodes=(RESOURCES.nodes[0], NodeSpec("10.0.0.3"))).save(tmp_path / "other.yml")
    done = ended(
        [sys.executable, "-c", STARTS, "other.yml", "one.yml"], tmp_path, {"AUTODIST_RESOURCE_SPEC": "one.yml"}
    )
    assert done.stdout == "1 {} [False] {}\n", done.stderr


def test_a_worker_whose_imports_fail_tells_so_as_if_it_had_begun_then(run, tmp_path):
    """It is told why a process's first import fails; a second one, of what is half imported, fails otherwise."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/sitecustomize.py").write_text(
        "import os, sys\n"
        "class Breaks:\n"
        "    said = ['it is half imported', 'no licence']\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'tensorflow' and 'AUTODIST_RANK' in os.environ: raise ImportError(self.said.pop())\n"
        "sys.meta_path.insert(0, Breaks())\n"
    )
    command = run(
        JOINS.format(before="", after="", shown="1"), PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path / "own")])
    )
    assert command.end(90) == 1
    assert "[1] ImportError: no licence" in command.lines, command.text
    assert sum("Traceback" in line and line.startswith("[1]") for line in command.lines) == 1


def test_a_process_that_waits_is_told_what_has_changed():
    environment = {"A": "1", "B": "2"}
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    waiting = Waiting(process, lambda: environment)
    environment = {"A": "1", "C": "3"}
    waiting.imports("tensorflow")
    waiting.begins({"A": "0", "C": "3"}, b"told")

    told, _ = process.communicate(timeout=20)
    assert told.decode().split("\n") == [
        '{"changes": {"B": null, "C": "3"}, "imports": "tensorflow"}',
        '{"changes": {"A": "0"}, "imports": null}',
        "told",
    ]


def test_a_worker_that_waits_has_its_rank_and_no_coordinator_yet():
    assert own_variables(3) == {"AUTODIST_RANK": "3", "PYTHONUNBUFFERED": "1"}
