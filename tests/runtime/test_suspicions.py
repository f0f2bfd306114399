"""Whose word a suspicion waits for, and who is nobody's: here no time passes but what a test lets pass."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from autodist_py.proto.errors import WorkerFailedError
from autodist_py.runtime import coordinator as coordinators
from autodist_py.runtime import reports
from autodist_py.runtime.coordinator import Coordinator
from autodist_py.runtime.waits import NO_WAITS, Waits
from tests.processes import until
from tests.runtime.clock import Clock
from tests.runtime.coordinators import THREE, exchange, joined

W = "dense gradients of w"

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("patient")]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats come in quick succession, and nothing is given up."""
    monkeypatch.setattr(reports, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(coordinators, "STOPPING_SECONDS", 600.0)
    monkeypatch.setattr(coordinators, "_EXIT_CODE_SECONDS", 600.0)


def beating(coordinator: Coordinator, *ranks: int) -> Coordinator:
    for rank in ranks:
        coordinator.heartbeat(rank, 7)
    return coordinator


def goes_on(*, without: set[int]) -> Coordinator:
    coordinator = Coordinator(THREE, run_id="run", seed=7, fingerprint="spec", heartbeat_timeout=60.0, goes_on=True)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda rank: coordinator.join(rank, "host", fingerprint="spec", timeout=5), range(3)))
    coordinator.step_apart(without)
    return beating(coordinator, 0, 1, 2)


@contextmanager
def left(coordinator: Coordinator, *ranks: int) -> Iterator[ThreadPoolExecutor]:
    """These have left, and wait for the others until the test is over; its further calls have threads, too."""
    with ThreadPoolExecutor(len(ranks) + 2) as threads:
        for rank in ranks:
            threads.submit(coordinator.leave, rank, 7)
        until(lambda: coordinator._left == {*ranks})
        try:
            yield threads
        finally:
            coordinator.abort(0, "failed", detail="the test", step=7)


def test_the_word_of_the_missing_worker_is_not_waited_for() -> None:
    coordinator = beating(joined(), 0, 1)
    coordinator.process_ended(1, -9)
    assert coordinator.cause is None

    assert coordinator.heartbeat(0, 7).suspicion is not None
    assert coordinator.heartbeat(0, 7).cause is not None


def test_the_word_of_a_lost_worker_is_not_waited_for() -> None:
    coordinator = goes_on(without={1})
    coordinator.process_ended(1, -9)
    coordinator.process_ended(2, -9)
    assert coordinator.cause is None

    assert coordinator.heartbeat(0, 7).suspicion is not None
    cause = coordinator.heartbeat(0, 7).cause
    assert cause is not None
    assert cause.startswith("worker 2 (127.0.0.3) ended")


def test_where_a_lost_worker_waited_is_of_no_interest() -> None:
    coordinator = goes_on(without={1})
    coordinator.heartbeat(1, 8, Waits(8, 0.0, W))
    coordinator.process_ended(1, -9)
    coordinator.process_ended(2, -9)
    for _ in range(2):
        coordinator.heartbeat(0, 7)

    assert coordinator.cause is not None
    assert "while" not in coordinator.cause


def test_nobodys_word_is_waited_for_when_all_have_left() -> None:
    coordinator = beating(joined(), 0, 1)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: coordinator.leave(rank, 7), (0, 1)))
    coordinator.process_ended(1, 3)

    assert coordinator.cause == "worker 1 (127.0.0.2) ended, last heard of at step 7: exit code 3; see its output above"


def test_the_first_that_is_missing_is_the_cause() -> None:
    coordinator = beating(joined(addresses=THREE), 0, 1, 2)
    coordinator.process_ended(2, -9)
    coordinator.process_ended(1, -9)
    for rank in (0, 1, 0, 1):
        coordinator.heartbeat(rank, 7)

    assert coordinator.cause is not None
    assert coordinator.cause.startswith("worker 2 (127.0.0.3) ended")


def test_who_waits_for_one_that_has_left_is_freed_by_its_exit_code() -> None:
    coordinator = beating(joined(), 0, 1)
    with left(coordinator, 1) as threads:
        waiting = threads.submit(exchange, coordinator, 0, "k")
        until(lambda: 1 in coordinator._released)
        coordinator.process_ended(1, 3)
        for _ in range(2):
            coordinator.heartbeat(0, 7)
        with pytest.raises(
            WorkerFailedError, match=r"worker 1 \(127.0.0.2\) ended, last heard of at step 7: exit code 3"
        ):
            waiting.result(5)


def test_the_end_of_a_lost_workers_process_is_no_news() -> None:
    coordinator = goes_on(without={1})
    coordinator.process_ended(1, -9)
    coordinator.heartbeat(0, 8, Waits(8, 0.0, W))
    coordinator.process_ended(1, -15)
    assert coordinator.heartbeat(0, 8, Waits(8, 0.0, W)).suspicion is None

    coordinator.check_heartbeats()
    suspicion = coordinator.heartbeat(0, 8, Waits(8, 0.0, W)).suspicion
    assert suspicion is not None
    assert suspicion.startswith(
        "worker 1 (127.0.0.2) ended, last heard of at step 7, when the chief is at step 8: killed by SIGKILL"
    )


@pytest.mark.parametrize("is_seen_to_end", [True, False])
def test_who_waits_for_one_that_has_left_goes_on_where_the_run_does(
    monkeypatch: pytest.MonkeyPatch, *, is_seen_to_end: bool
) -> None:
    if not is_seen_to_end:
        monkeypatch.setattr(coordinators, "_EXIT_CODE_SECONDS", 0.1)
    coordinator = goes_on(without={1, 2})
    with left(coordinator, 2) as threads:
        waiting = [threads.submit(exchange, coordinator, rank, "k") for rank in (0, 1)]
        until(lambda: 2 in coordinator._released)
        if is_seen_to_end:
            coordinator.process_ended(2, 0)
        assert [one.result(5) for one in waiting] == [{0: b"k0", 1: b"k1"}] * 2


def test_all_that_have_left_are_lost_where_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "_EXIT_CODE_SECONDS", 0.1)
    coordinator = goes_on(without={1, 2})
    with left(coordinator, 1, 2):
        assert exchange(coordinator, 0, "k") == {0: b"k0"}
        assert coordinator.heartbeat(0, 7).lost == (1, 2)


def test_one_that_left_and_is_lost_hurries_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "_EXIT_CODE_SECONDS", 0.1)
    coordinator = goes_on(without={1, 2})
    with left(coordinator, 2) as threads:
        waiting = threads.submit(exchange, coordinator, 0, "k")
        exchange(coordinator, 1, "k")
        waiting.result(5)
        assert coordinator._period == reports.HEARTBEAT_SECONDS


# -- Silence that is none ----------------------------------------------------------------------------------------------


def silent_while(monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator, speaking: int, seconds: float) -> set[int]:
    """Who is silent while only this one reports."""
    clock = Clock()
    clock.now = time.monotonic()
    monkeypatch.setattr(reports, "time", clock)
    found: set[int] = set()
    for _ in range(round(seconds / reports.HEARTBEAT_SECONDS)):
        clock.now += reports.HEARTBEAT_SECONDS
        coordinator._reports.take(speaking, NO_WAITS)
        found |= {*coordinator.check_heartbeats()}
    return found


def test_who_is_heard_of_no_more_is_silent_but_the_chief_who_looks_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = joined(heartbeat_timeout=2.0, addresses=THREE)

    assert silent_while(monkeypatch, coordinator, 1, 3.0) == {2}


def test_a_lost_worker_is_not_found_silent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = goes_on(without={1})
    coordinator.process_ended(1, -9)

    assert silent_while(monkeypatch, coordinator, 0, 61.0) == {2}


def test_all_that_have_left_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = joined(heartbeat_timeout=2.0)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: coordinator.leave(rank, 7), (0, 1)))

    assert silent_while(monkeypatch, coordinator, 0, 3.0) == set()
    assert coordinator.cause is None


def test_who_was_let_go_as_it_left_too_early_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = joined(heartbeat_timeout=2.0)
    with ThreadPoolExecutor(1) as threads:
        leaving = threads.submit(coordinator.leave, 1, 7)
        until(lambda: 1 in coordinator._left)
        coordinator.heartbeat(0, 8)
        leaving.result(5)

    assert silent_while(monkeypatch, coordinator, 0, 3.0) == set()
