"""Collectives whose peers do not come: the run ends in time, and says who is missing, and in what."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import StrategyBuilder
from tests.support.cluster_pool import TWO_WORKERS, CaseFailedError, Cluster
from tests.support.processes import until

STEPS = 15
"""More than those in which workers compare what they are given."""

pytestmark = [
    pytest.mark.alone,
    pytest.mark.own_cluster,
    pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"),
]


def report(autodist: AutoDist) -> None:
    """Returns when the chief knows at which step this worker is: the second answer is to a heartbeat sent since."""
    cluster: Any = autodist._cluster
    answers = cluster._status._answers
    until(lambda: cluster._status._answers >= answers + 2)


def train(builder: StrategyBuilder, victim: int, does: str, folder: str) -> None:
    """Trains until the victim dies, or stands still for longer than anybody is to wait; each notes when that ended."""
    with AutoDist(strategy_builder=builder) as autodist:
        weights = tf.Variable(np.ones([4, 2]), name="weights")
        in_step = Path(folder, f"in-step-{1 - victim}")

        def note_step() -> None:
            if autodist.rank != victim and number == STEPS + 1:
                in_step.touch()

        @autodist.function
        def step(x: tf.Tensor) -> None:
            tf.py_function(note_step, [], [])
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weights))
            weights.assign_sub(0.01 * tape.gradient(loss, weights))

        for number in range(1, 10_000):
            if number == STEPS + 1 and autodist.rank == victim:
                Path(folder, "begun").write_text(str(time.time()))
                if does == "dies":
                    until(in_step.exists)  # The other one is in a step that cannot end.
                    report(autodist)
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)  # It lives, and does not come.
            try:
                step(np.ones([6, 4]))
            except Exception:
                Path(folder, f"ended-{autodist.rank}").write_text(str(time.time()))
                raise


def seconds(folder: Path) -> dict[int, float]:
    """For each worker that raised, how long after the victim began to be missing."""
    begun = float((folder / "begun").read_text())
    return {int(path.name[-1]): float(path.read_text()) - begun for path in folder.glob("ended-*")}


@pytest.mark.parametrize("victim", [0, 1])
def test_who_lives_but_does_not_come_is_waited_for_no_longer_than_the_timeout(
    cluster: Cluster, victim: int, tmp_path: Path
) -> None:
    cause = (
        rf"worker {victim} \(127.0.0.{victim + 1}\) kept others waiting at step {STEPS}"
        r"( of its \d+ AutoDist objects)?: 2 s after another it "
        rf"has not begun step {STEPS + 1} of all workers, with timeout_seconds 2, while worker {1 - victim} "
        rf"\(127.0.0.{2 - victim}\) waited for it to combine dense gradients of weights\n"
    )
    with pytest.raises(CaseFailedError, match=cause):
        cluster.run(train, builder=AllReduce(timeout_seconds=2), victim=victim, does="sleeps", folder=str(tmp_path))
    ended = seconds(tmp_path)
    assert set(ended) == {1 - victim}
    assert min(ended.values()) >= 2.0 and max(ended.values()) < 8.0


def test_who_waits_for_a_lost_worker_says_in_which_group(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(CaseFailedError) as raised:
        cluster.run(train, builder=AllReduce(), victim=1, does="dies", folder=str(tmp_path))
    text = str(raised.value)
    assert re.search(
        rf"worker 1 \(127.0.0.2\) ended, last heard of at step {STEPS}( of its \d+ AutoDist objects)?"
        r"(, when the chief is at step \d+)?: killed by SIGKILL; see its output above, while worker 0 "
        r"\(127.0.0.1\) waited for it to combine dense gradients of weights\n",
        text,
    )
    assert "while this worker waited for the others to combine dense gradients of weights" in text
    assert set(seconds(tmp_path)) == {0}


def dies_half_way(builder: StrategyBuilder, folder: str) -> None:
    """A worker dies when the other has one of the gradients combined, and it has not computed its part of the last."""
    with AutoDist(strategy_builder=builder) as autodist:
        first, second = (tf.Variable(np.ones([4, 4]), name=name) for name in ("first", "second"))
        combined = Path(folder, "combined")

        def note_combined(gradient: tf.Tensor) -> None:
            if autodist.rank == 0 and number == STEPS - 1:
                combined.touch()

        def die() -> None:
            if autodist.rank == 1 and number == STEPS - 1:
                until(combined.exists)
                os.kill(os.getpid(), signal.SIGKILL)

        @tf.custom_gradient
        def passed_on(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def backward(gradient: tf.Tensor) -> tf.Tensor:
                with tf.control_dependencies([tf.py_function(die, [], [])]):
                    return tf.identity(gradient)

            return tf.identity(x), backward

        @autodist.function
        def step(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(passed_on(x @ first) @ second))
            gradients = tape.gradient(loss, (first, second))
            tf.py_function(note_combined, [gradients[1]], [])
            for variable, gradient in zip((first, second), gradients, strict=True):
                variable.assign_sub(0.01 * gradient)

        for number in range(STEPS):  # noqa: B007 (what the notes are of)
            step(np.ones([6, 4]))


def test_the_cause_names_the_group_of_several_in_which_the_others_wait(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(CaseFailedError) as raised:
        cluster.run(dies_half_way, builder=AllReduce(chunk_size=1), folder=str(tmp_path))
    cause = r"worker 1 \(127.0.0.2\) ended, .*, while worker 0 \(127.0.0.1\) waited for it to combine (.*)\n"
    assert set(re.findall(cause, str(raised.value))) == {"dense gradients of first"}


def slow(builder: StrategyBuilder) -> None:
    """Every worker is slower than the timeout, between steps and in them, and nobody keeps others waiting."""
    with AutoDist(strategy_builder=builder) as autodist:
        weights = tf.Variable(np.ones([4, 2]), name="weights")

        @autodist.function
        def step(x: tf.Tensor) -> tf.Tensor:
            tf.py_function(lambda: time.sleep(2.2), [], [])  # A step that is slow.
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ weights))
            weights.assign_sub(0.01 * tape.gradient(loss, weights))
            return loss

        for _ in range(2):
            step(np.ones([6, 4]))
            time.sleep(2.2)  # Its own work, between steps.


def test_slow_steps_are_no_waiting(cluster: Cluster) -> None:
    cluster.run(slow, builder=AllReduce(timeout_seconds=1.5))
