"""What a worker knows of its own waiting."""

import threading
import time
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from autodist_py.cluster.cluster import SoloCluster
from autodist_py.cluster.step_status import LEAST_SILENCE_SECONDS, PROMPT_SECONDS, OwnStepStatus, StepStatus
from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.kernel.events import Collective
from autodist_py.program.step import StepProgram
from autodist_py.program.together import Together

W = "dense gradients of w"


def looks(waits: OwnStepStatus, *, most: int = 100) -> int:
    """After how many of them without an answer the worker hears nothing; `most`: never."""
    return next((number for number in range(most) if waits.hears_nothing()), most)


@pytest.mark.parametrize("seconds", [0.1, 5.0])
def test_who_waits_and_gets_no_answer_hears_nothing_after_the_limit(seconds):
    waits = OwnStepStatus()
    with waits.together(seconds, W):
        waits.hears_nothing()
        silence = max(seconds, LEAST_SILENCE_SECONDS)
        assert silence < looks(waits) * PROMPT_SECONDS + 2 * PROMPT_SECONDS
        assert waits.hears_nothing()
        waits.answered()
        assert looks(waits) * PROMPT_SECONDS >= silence


def test_who_is_between_steps_has_no_limit_or_goes_on_does_not_wait():
    waits = OwnStepStatus()
    with waits.together(1.0, W):
        pass
    assert looks(waits) == 100
    with waits.together(0.0, W):
        assert looks(waits) == 100
    for _ in range(20):
        with waits.together(1.0, W):
            assert not waits.hears_nothing()


def test_a_step_that_another_has_stopped_still_waits():
    waits = OwnStepStatus()
    with pytest.raises(ValueError, match="aborted"), waits.together(1.0, W):
        before = looks(waits, most=4)
        waits.stopped_in(W)
        raise ValueError("aborted")

    assert before == 4
    assert looks(waits) < LEAST_SILENCE_SECONDS / PROMPT_SECONDS
    with waits.together(1.0, W):
        assert waits.now == StepStatus(2, 1.0, W)


class Waiting(SoloCluster):
    """A cluster of which one worker's waits are known."""

    def __init__(self) -> None:
        super().__init__(local_resource_spec(1))
        self.waits = OwnStepStatus()

    def together(self, seconds: float, what: str) -> AbstractContextManager[None]:
        return self.waits.together(seconds, what)

    def stopped_in(self, what: str) -> None:
        self.waits.stopped_in(what)


class Raising:
    """What runs a program whose one collective raises."""

    def run(self, feeds):
        raise tf.errors.InternalError(None, None, "no memory [{{node sum}}]")


def test_a_worker_whose_run_goes_on_after_a_step_has_raised_waits_for_nobody():
    cluster = Waiting()
    raising: Any = Raising()
    step = StepProgram(raising, cluster, [Together(cluster, [Collective(("sum",), 0, W)], 0.0)])
    with pytest.raises(tf.errors.InternalError):
        step.run([])

    assert cluster.waits.now == StepStatus(1, 0.0)


def test_a_step_says_first_that_it_waits_for_gradients():
    cluster = Waiting()
    seen = []

    def run(feeds):
        seen.append(cluster.waits.now)
        return []

    running: Any = SimpleNamespace(run=run)
    collectives = [Collective((what,), event, what) for event, what in enumerate(["fetches loss", f"sparse {W}"])]
    StepProgram(running, cluster, [Together(cluster, collectives, 2.0)]).run([])

    assert seen == [StepStatus(1, 2.0, f"sparse {W} (one of its 2 collectives)")]


@pytest.mark.alone
def test_where_a_step_was_stopped_is_known_as_soon_as_it_says_so():
    waits, begun = OwnStepStatus(), time.monotonic()
    waits.find_out()
    with waits.together(1.0, W):
        threading.Timer(0.05, waits.stopped_in, ["dense gradients of v"]).start()
        waits.find_out()
        assert waits.now.stopped_in == "dense gradients of v"
    assert time.monotonic() - begun < 0.4


def test_where_an_earlier_step_was_stopped_is_no_answer_for_the_next():
    waits = OwnStepStatus()
    with waits.together(1.0, W):
        waits.stopped_in("")  # It raised in none, and the script went on.
    with waits.together(1.0, W):
        threading.Timer(0.2, waits.stopped_in, ["dense gradients of v"]).start()
        waits.find_out()
        assert waits.now.stopped_in == "dense gradients of v"
