"""The timeline of a run: what the workers did in a few steps, and what of it at the same time."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autodist_py import tf_adapter
from autodist_py.cluster.cluster import SoloCluster
from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.diagnostics.overlap import Overlap
from autodist_py.diagnostics.timeline import FIRST_STEP, STEPS, Timeline
from tests.support.processes import AUTODIST, ROOT

pytestmark = [pytest.mark.alone, pytest.mark.turns(6)]

SCRIPT = """
import sys
import numpy as np
from autodist_py import AutoDist
from autodist_py.strategy_builders.all_reduce import AllReduce
autodist = AutoDist(strategy_builder=AllReduce(all_reduce_spec="RING"))
import tensorflow as tf

layers = [tf.Variable(np.full([700, 700], 0.01, np.float32), name=f"layer_{number}") for number in range(6)]

@autodist.function
def step(x):
    with tf.GradientTape() as tape:
        for layer in layers:
            x = tf.nn.relu(x @ layer)
        loss = tf.reduce_mean(x)
    for layer, gradient in zip(layers, tape.gradient(loss, layers)):
        layer.assign_sub(0.1 * gradient)
    return loss

for number in range(int(sys.argv[1])):
    step(np.ones([600, 700], np.float32))
autodist.close()
"""


def run(
    folder: Path, workers: int, steps: int, script: str = SCRIPT, *, code: int = 0
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    command = [*AUTODIST, "run", "--local", str(workers), "--timeline", "trace.json", "train.py", str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A timeline's file, and what the run has printed."""
    folder = tmp_path_factory.mktemp("timeline")
    ended = run(folder, workers=2, steps=8)
    return folder / "trace.json", ended.stdout


@pytest.fixture(scope="module")
def events(traced: tuple[Path, str]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(traced[0].read_text())["traceEvents"]
    return events


def test_the_command_says_what_was_hidden_and_waited_for(traced: tuple[Path, str]) -> None:
    file, printed = traced
    overlap = Overlap.of(file)
    assert str(overlap) in printed
    assert [one.worker for one in overlap.workers] == [0, 1]
    assert all(0.0 < one.hidden < one.communication for one in overlap.workers), overlap
    layers = {one.what: one.nbytes for one in overlap.collectives if "gradients" in one.what}
    assert layers == {f"dense gradients of layer_{number}": 4 * 700 * 700 for number in range(6)}


def ops(events: list[dict[str, Any]], worker: int, category: str) -> list[dict[str, Any]]:
    return [event for event in events if event["pid"] == worker and event.get("cat") == category]


@pytest.mark.parametrize("worker", [0, 1])
def test_each_collective_of_each_step_is_there_by_what_it_combines(events: list[dict[str, Any]], worker: int) -> None:
    seen = [event["name"] for event in ops(events, worker, "collective") if "gradients" in event["name"]]
    wanted = {f"dense gradients of layer_{number}" for number in range(6)}  # 2 MB each: a buffer.
    # The profiler may miss what goes on when it begins, or ends.
    assert set(seen) == wanted
    assert all(STEPS - 1 <= seen.count(name) <= STEPS for name in wanted)
    updates = [event for event in ops(events, worker, "op") if event["args"]["type"] == "AssignSubVariableOp"]
    assert len(updates) == 6 * STEPS


@pytest.mark.parametrize("worker", [0, 1])
def test_collectives_run_while_back_propagation_does(events: list[dict[str, Any]], worker: int) -> None:
    products = [event for event in ops(events, worker, "op") if event["args"]["type"].endswith("MatMul")]
    assert len(products) >= STEPS * (6 + 6 + 5)
    collectives = [event for event in ops(events, worker, "collective") if "layer_5" in event["name"]]
    together = [
        (one, other)
        for one in collectives
        for other in products
        if one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"]
    ]
    assert together, "the last layer's gradient is reduced while the other layers' are computed"


class Chief(SoloCluster):
    """It notes what it waits for, and whether the file is there by then."""

    def __init__(self, path: Path) -> None:
        super().__init__(local_resource_spec(1))
        self.path = path
        self.waited: list[tuple[str, bool]] = []

    def compare(self, key: str, value: bytes, *, timeout: float = 0.0) -> dict[int, bytes]:
        self.waited.append((key, self.path.exists()))
        return {0: value}

    def barrier(self, key: str, *, timeout: float = 0.0) -> None:
        self.waited.append((key, self.path.exists()))


def trace(path: Path, steps: Sequence[int]) -> Chief:
    """What the chief of a program has done that takes these of the steps."""
    chief = Chief(path)
    timeline = Timeline(path, chief, key="timeline", pause=lambda: None)
    for chief.step in steps:
        timeline.before_step()
        timeline.after_step({})
    timeline.close()
    return chief


def test_others_begin_no_step_while_the_chief_writes(tmp_path: Path) -> None:
    assert trace(tmp_path / "trace.json", range(1, 8)).waited == [("timeline", False), ("timeline/written", True)]


def test_one_whose_last_step_is_another_autodists_ends_with_its_next(tmp_path: Path) -> None:
    assert len(trace(tmp_path / "trace.json", [1, 3, 6, 8]).waited) == 2
    assert (tmp_path / "trace.json").exists()


@pytest.mark.parametrize("last", ["autodist.close()\n", ""], ids=["closed", "not-closed"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_is_too_short_says_why_it_has_no_timeline(tmp_path: Path, workers: int, last: str) -> None:
    ended = run(tmp_path, workers, steps=FIRST_STEP, script=SCRIPT.replace("autodist.close()\n", last))
    said = f"it is of the steps {FIRST_STEP} to {FIRST_STEP + STEPS - 1}, and the run had {FIRST_STEP}"
    assert (ended.stdout + ended.stderr).count(said) == 1
    assert not (tmp_path / "trace.json").exists()


@pytest.mark.parametrize(("workers", "is_closed"), [(1, False), (2, True)], ids=["not-closed", "closed"])
def test_a_run_that_fails_before_its_timeline_is_not_told_to_train_for_more(
    tmp_path: Path, workers: int, is_closed: bool
) -> None:
    beginning, _, _ = SCRIPT.partition("\nfor number")
    script = f"""{beginning}
with {"autodist" if is_closed else "contextlib.nullcontext()"}:
    for number in range(int(sys.argv[1])):
        if number == {FIRST_STEP} and autodist.rank == autodist.num_workers - 1:
            raise ValueError("boom")
        step(np.ones([600, 700], np.float32))
"""
    ended = run(tmp_path, workers, steps=8, script=f"import contextlib\n{script}", code=1)
    output = ended.stdout + ended.stderr
    assert output.count("there is no timeline in") == 1, output
    assert "Train for more" not in output


@pytest.mark.parametrize(
    ("error", "end"),
    [(ValueError("boom"), " when it failed"), (SystemExit(2), " when it failed"), (SystemExit(), ". Train for more")],
    ids=repr,
)
def test_an_error_on_its_way_out_is_a_failure_and_an_ordinary_end_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: BaseException, end: str
) -> None:
    timeline = Timeline(tmp_path / "trace.json", Chief(tmp_path), key="timeline", pause=lambda: None)
    with pytest.raises(type(error)):
        try:
            raise error
        finally:
            timeline.close()
    assert caplog.messages[0].endswith(f"and the run had 0{end}")


def test_what_was_traced_of_a_run_that_is_too_short_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []

    def profiled(space: bytes) -> list[Any]:
        read.append(space)
        return []

    monkeypatch.setattr(tf_adapter, "profiled", profiled)
    trace(tmp_path / "trace.json", range(1, FIRST_STEP + STEPS - 1))
    assert not read
    trace(tmp_path / "trace.json", range(1, FIRST_STEP + STEPS))
    assert read


def test_an_autodist_that_comes_after_the_first_traced_step_writes_nothing(tmp_path: Path) -> None:
    again = SCRIPT.partition("from autodist_py import AutoDist\n")[2]
    ended = run(tmp_path, workers=2, steps=FIRST_STEP + 1, script=SCRIPT + again)
    assert f"and the run had {FIRST_STEP + 1}. Train for more" in ended.stdout + ended.stderr
    assert not (tmp_path / "trace.json").exists()
