"""How a run that trains by Horovod ends: well, or with one cause when a worker does not come."""

import re
import signal
import time
from collections.abc import Callable
from os import kill
from pathlib import Path

import pytest

from tests.support.by_horovod import is_installed
from tests.support.cluster_pool import TWO_WORKERS
from tests.support.runs import Run

SCRIPT = """
import time
import numpy as np
from autodist_py import AutoDist
from autodist_py.strategy_builders.all_reduce import AllReduce

with AutoDist(strategy_builder=AllReduce(all_reduce_spec="HOROVOD", timeout_seconds=TIMEOUT)) as autodist:
    import tensorflow as tf
    weights = tf.Variable(np.ones(1_000_000, np.float32), name="weights")

    @autodist.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x) * tf.reduce_sum(weights)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))

    for number in range(STEPS):
        if number == STANDS_AT and autodist.rank == 1:
            time.sleep(60)  # It lives, and does not come.
        try:
            step(np.ones([4], np.float32))
        except Exception as error:
            print("raised", type(error).__name__, error, flush=True)
            raise
        if number == 9:
            print("training", flush=True)
print("over", flush=True)
"""

pytestmark = [is_installed, pytest.mark.alone]

Train = Callable[..., Run]


@pytest.fixture
def train(start: Callable[..., Run], tmp_path: Path) -> Train:
    resources = tmp_path / "resources.yaml"
    resources.write_text(TWO_WORKERS.resource_spec())

    def start_training(*, steps: int = 10**9, timeout: float = 0.0, stands_at: int = 10**9, **environment: str) -> Run:
        words = {"STEPS": steps, "TIMEOUT": timeout, "STANDS_AT": stands_at}
        settings = "".join(f"{name} = {value}\n" for name, value in words.items())
        return start(settings + SCRIPT, AUTODIST_RESOURCE_SPEC=str(resources), **environment)

    return start_training


def test_a_script_that_ends_well_ends_at_once(train: Train) -> None:
    run = train(steps=20)
    run.wait_for("over", 2)
    assert run.end(10.0) == 0, run.text
    assert run.causes == {}


WAITED = (
    r", while worker 0 \(127.0.0.1\) (waited for it to combine|was in a step that combines) dense gradients of weights"
)


@pytest.mark.parametrize(
    ("number", "timeout", "words"),
    [
        (signal.SIGKILL, 0.0, "ended, .*: killed by SIGKILL; see its output above"),
        (signal.SIGSTOP, 2.0, "stopped answering, .*: no heartbeat for 2 s, with timeout_seconds 2"),
        pytest.param(signal.SIGSTOP, 0.0, "stopped answering, .*: no heartbeat for 5 s", marks=pytest.mark.slow),
    ],
    ids=["killed", "stopped-timeout", "stopped"],
)
def test_a_worker_that_is_killed_or_stands_still_ends_the_run_with_one_cause(
    train: Train, number: signal.Signals, timeout: float, words: str
) -> None:
    run = train(timeout=timeout)
    run.wait_for("training", 2)
    began = time.monotonic()
    kill(run.pids[1], number)
    assert run.end(20.0) == 1, run.text
    assert time.monotonic() - began < 12.0, run.text
    assert re.fullmatch(rf"worker 1 \(127.0.0.2\) {words}{WAITED}", run.causes[0]), run.text
    if not timeout:  # With one the grace period may end the process first.
        assert f"raised WorkerFailedError {run.causes[0]}" in run.lines, run.text


@pytest.mark.slow
def test_a_step_with_a_timeout_raises_for_a_silent_worker_where_the_grace_period_is_longer_than_the_heartbeat(
    train: Train,
) -> None:
    run = train(timeout=2.0, AUTODIST_EXIT_GRACE="6")
    run.wait_for("training", 2)
    kill(run.pids[1], signal.SIGSTOP)
    assert run.end(20.0) == 1, run.text
    assert "with timeout_seconds 2" in run.causes[0]
    assert f"raised WorkerFailedError {run.causes[0]}" in run.lines, run.text


@pytest.mark.slow
def test_a_step_raises_when_a_worker_lives_but_does_not_come(train: Train) -> None:
    run = train(timeout=2.0, stands_at=30)
    assert run.end(60.0) == 1, run.text
    words = (
        "kept others waiting at step 30: 2 s after another it has not begun step 31 of all workers, with "
        "timeout_seconds 2"
    )
    assert re.fullmatch(rf"worker 1 \(127.0.0.2\) {words}{WAITED}", run.causes[0]), run.text
    assert f"raised WorkerFailedError {run.causes[0]}" in run.lines, run.text


@pytest.mark.slow
def test_a_chief_that_is_killed_ends_the_others(train: Train) -> None:
    run = train()
    run.wait_for("training", 2)
    kill(run.pids[0], signal.SIGKILL)
    assert run.end(10.0) == -signal.SIGKILL, run.text
