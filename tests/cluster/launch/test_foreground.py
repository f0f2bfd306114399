"""What is said of a chief that was killed: its step, and what the system tells of its memory."""

import io
import os
import sys

import pytest
from rich.console import Console

from autodist_py.cluster.launch import foreground
from autodist_py.cluster.launch.console import Screen
from autodist_py.cluster.launch.oom import killed_for_memory, memory_limit
from tests.support.processes import AUTODIST, STEP_OF_A_WEIGHT, ended


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        ((3, 3), "since its start the kernel counts no end for lack of memory"),
        ((3, 4), "since its start the kernel has killed 1 process here for lack of memory"),
        ((3, 5), "since its start the kernel has killed 2 processes here for lack of memory"),
        ((None, None), "`dmesg` tells"),
    ],
)
def test_what_the_system_says_of_memory_is_said_of_a_chief_that_was_killed(monkeypatch, counts, wanted):
    left = iter(counts)
    monkeypatch.setattr(foreground, "killed_for_memory", lambda: next(left))
    written = io.StringIO()
    screen = Screen(Console(file=written, width=300))
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert foreground.run_chief(command, os.environ, output=screen, errors=screen) == 137
    assert wanted in written.getvalue()


@pytest.mark.parametrize(
    ("groups", "file", "content"),
    [
        ("0::/job/one\n", "job/one/memory.events", "low 0\noom 4\noom_kill 3\noom_group_kill 0\n"),
        ("0::/seen/from/outside\n", "memory.events", "oom 4\noom_kill 3\n"),
        ("8:pids:/\n4:cpu,memory:/job\n0::/\n", "memory/job/memory.oom_control", "under_oom 0\noom_kill 3\n"),
    ],
)
def test_the_kernels_count_is_found_in_control_groups_of_both_versions(tmp_path, groups, file, content):
    own, root = tmp_path / "cgroup", tmp_path / "root"
    own.write_text(groups)
    assert killed_for_memory(root, own) is None
    (root / file).parent.mkdir(parents=True)
    (root / file).write_text(content)
    assert killed_for_memory(root, own) == 3


@pytest.mark.parametrize(
    ("groups", "limits", "lowest"),
    [
        ("0::/job/one\n", {"job/one/memory.max": "max\n", "job/memory.max": "3000\n", "memory.max": "4000\n"}, 3000),
        ("0::/seen/from/outside\n", {"memory.max": "2000\n"}, 2000),
        ("8:pids:/\n4:cpu,memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "1000\n"}, 1000),
        ("4:memory:/seen/from/outside\n", {"memory/memory.limit_in_bytes": "1000\n"}, 1000),
        ("0::/job\n", {"job/memory.max": "max\n"}, None),
    ],
)
def test_the_lowest_limit_of_memory_is_found_in_control_groups_of_both_versions(tmp_path, groups, limits, lowest):
    own, root = tmp_path / "cgroup", tmp_path / "root"
    assert memory_limit(root, own) is None
    own.write_text(groups)
    for file, content in limits.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(content)
    assert memory_limit(root, own) == lowest


def test_the_top_of_version_1_does_not_count_for_a_group_that_is_not_seen(tmp_path):
    own, root = tmp_path / "cgroup", tmp_path / "root"
    own.write_text("4:memory:/seen/from/outside\n")
    (root / "memory").mkdir(parents=True)
    (root / "memory/memory.oom_control").write_text("under_oom 0\noom_kill 3\n")
    assert killed_for_memory(root, own) is None


def test_the_step_of_one_worker_that_was_killed_is_said(tmp_path):
    steps = "for number in range(3):\n    step(np.ones([4, 2, 3]))\nos.kill(os.getpid(), 9)\n"
    (tmp_path / "train.py").write_text(f"import os\n{STEP_OF_A_WEIGHT}{steps}")
    killed = ended([*AUTODIST, "run", "--local", "1", "train.py"], tmp_path)
    assert killed.returncode == 137, killed.stdout + killed.stderr
    assert " s after its start, at step 3; " in killed.stderr
