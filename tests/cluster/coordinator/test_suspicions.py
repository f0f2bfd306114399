"""Whose word a suspicion waits for, and who is nobody's."""

import pytest

from autodist_py.cluster.coordinator.liveness import HEARTBEAT_SECONDS
from autodist_py.cluster.coordinator.verdict import EXIT_CODE_SECONDS
from autodist_py.cluster.step_status import StepStatus
from autodist_py.proto.errors import WorkerFailedError
from tests.support.coordinators import THREE
from tests.support.driven import Driven, driven

W = "dense gradients of w"


def beating(run: Driven, *ranks: int) -> Driven:
    for rank in ranks:
        run.heartbeat(rank, 7)
    return run


def goes_on(*, without: set[int]) -> Driven:
    run = driven(THREE, heartbeat_timeout=60.0, goes_on=True)
    run.step_apart(without)
    return beating(run, 0, 1, 2)


def test_the_word_of_the_missing_worker_is_not_waited_for() -> None:
    run = beating(driven(), 0, 1)
    run.process_ended(1, -9)
    assert run.cause is None

    assert run.beat(0, 7).answer().suspicion is not None
    assert run.beat(0, 7).answer().cause is not None


def test_the_word_of_a_lost_worker_is_not_waited_for() -> None:
    run = goes_on(without={1})
    run.process_ended(1, -9)
    run.process_ended(2, -9)
    assert run.cause is None

    assert run.beat(0, 7).answer().suspicion is not None
    cause = run.beat(0, 7).answer().cause
    assert cause is not None
    assert cause.startswith("worker 2 (127.0.0.3) ended")


def test_where_a_lost_worker_waited_is_of_no_interest() -> None:
    run = goes_on(without={1})
    run.heartbeat(1, 8, StepStatus(8, 0.0, W))
    run.process_ended(1, -9)
    run.process_ended(2, -9)
    for _ in range(2):
        run.beat(0, 7).answer()

    assert run.cause is not None
    assert "while" not in run.cause


def test_nobodys_word_is_waited_for_when_all_have_left() -> None:
    run = beating(driven(), 0, 1)
    for rank in (0, 1):
        run.leave(rank, 7)
    run.process_ended(1, 3)

    assert run.cause == "worker 1 (127.0.0.2) ended, last heard of at step 7: exit code 3; see its output above"


def test_the_first_that_is_missing_is_the_cause() -> None:
    run = beating(driven(THREE), 0, 1, 2)
    run.process_ended(2, -9)
    run.process_ended(1, -9)
    for rank in (0, 1, 0, 1):
        run.beat(rank, 7)

    assert run.cause is not None
    assert run.cause.startswith("worker 2 (127.0.0.3) ended")


def test_who_waits_for_one_that_has_left_is_freed_by_its_exit_code() -> None:
    run = beating(driven(), 0, 1)
    run.leave(1, 7)
    waiting = run.exchange(0)
    run.process_ended(1, 3)
    for _ in range(2):
        run.beat(0, 7).answer()
    with pytest.raises(WorkerFailedError, match=r"worker 1 \(127.0.0.2\) ended, last heard of at step 7: exit code 3"):
        waiting.answer()


def test_the_end_of_a_lost_workers_process_is_no_news() -> None:
    run = goes_on(without={1})
    run.process_ended(1, -9)
    run.heartbeat(0, 8, StepStatus(8, 0.0, W))
    run.process_ended(1, -15)
    assert run.heartbeat(0, 8, StepStatus(8, 0.0, W)).suspicion is None

    run.look()
    suspicion = run.beat(0, 8, StepStatus(8, 0.0, W)).answer().suspicion
    assert suspicion is not None
    assert suspicion.startswith(
        "worker 1 (127.0.0.2) ended, last heard of at step 7, when the chief is at step 8: killed by SIGKILL"
    )


@pytest.mark.parametrize("is_seen_to_end", [True, False])
def test_who_waits_for_one_that_has_left_goes_on_where_the_run_does(*, is_seen_to_end: bool) -> None:
    run = goes_on(without={1, 2})
    run.leave(2, 7)
    begun, waiting = run.now, [run.exchange(rank) for rank in (0, 1)]
    if is_seen_to_end:
        run.process_ended(2, 0)
    assert [one.answer_in_time() for one in waiting] == [{0: b"k0", 1: b"k1"}] * 2
    assert run.now == begun + (0.0 if is_seen_to_end else EXIT_CODE_SECONDS)


def test_all_that_have_left_are_lost_where_the_run_goes_on() -> None:
    run = goes_on(without={1, 2})
    for rank in (1, 2):
        run.leave(rank, 7)
    begun = run.now
    assert run.exchange(0).answer_in_time() == {0: b"k0"}
    assert run.now == begun + 2 * EXIT_CODE_SECONDS
    assert run.heartbeat(0, 7).lost == (1, 2)


def test_one_that_left_and_is_lost_hurries_no_heartbeat() -> None:
    run = goes_on(without={1, 2})
    run.leave(2, 7)
    waiting = [run.exchange(rank) for rank in (0, 1)]
    for each in waiting:
        each.answer_in_time()
    begun = run.now
    run.heartbeat(0, 7)
    assert run.now == begun + HEARTBEAT_SECONDS


# -- Silence that is none ----------------------------------------------------------------------------------------------


def silent_while(run: Driven, speaking: int, seconds: float) -> set[int]:
    """Who is silent while only this one reports."""
    found: set[int] = set()
    for _ in range(round(seconds / HEARTBEAT_SECONDS)):
        run.now += HEARTBEAT_SECONDS
        run.beat(speaking, 7)
        found |= {*run.look()}
    return found


def test_who_is_heard_of_no_more_is_silent_but_the_chief_who_looks_is_not() -> None:
    assert silent_while(driven(THREE, heartbeat_timeout=2.0), 1, 4.0) == {2}


def test_a_lost_worker_is_not_found_silent_again() -> None:
    run = goes_on(without={1})
    run.process_ended(1, -9)

    assert silent_while(run, 0, 61.0) == {2}


def test_all_that_have_left_may_be_silent() -> None:
    run = driven(heartbeat_timeout=2.0)
    for rank in (0, 1):
        run.leave(rank, 7)

    assert silent_while(run, 0, 4.0) == set()
    assert run.cause is None


def test_who_was_let_go_as_it_left_too_early_may_be_silent() -> None:
    run = driven(heartbeat_timeout=2.0)
    leaving = run.leave(1, 7)
    run.heartbeat(0, 8)
    leaving.answer()

    assert silent_while(run, 0, 4.0) == set()
