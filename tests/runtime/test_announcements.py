"""What the chief announces, and who hears it: at the same place of the script, while the chief waits for nobody."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from autodist_py.proto.errors import ClusterError, WorkerFailedError
from autodist_py.runtime.announcements import NO_STEP
from autodist_py.runtime.coordinator import Coordinator
from tests.processes import until
from tests.runtime.coordinators import exchange, joined


def hearing(coordinator: Coordinator, *, step: int = 0, position: int = 0, timeout: float = 10.0) -> Future:
    """What worker 1 hears at "k"."""
    with_result: Future = Future()

    def hear() -> None:
        try:
            heard = coordinator.hear(1, "k", step=step, position=position, timeout=timeout)
            with_result.set_result(heard)
        except ClusterError as error:
            with_result.set_exception(error)

    threading.Thread(target=hear, daemon=True).start()
    return with_result


def waits(coordinator: Coordinator) -> None:
    until(lambda: coordinator._announcements.hearing)


def test_what_was_announced_before_or_after_is_heard():
    coordinator = joined()
    coordinator.announce("k", b"early", step=0)
    assert hearing(coordinator).result(5) == b"early"
    second = hearing(coordinator, position=1)
    waits(coordinator)
    coordinator.announce("k", b"late", step=0)
    assert second.result(5) == b"late"


def test_an_announcement_of_an_earlier_step_is_another_one():
    coordinator = joined()
    coordinator.announce("k", b"of the chief alone", step=3)
    coordinator.begins(4)
    heard = hearing(coordinator, step=4)
    waits(coordinator)
    coordinator.announce("k", b"of all", step=4)
    assert heard.result(5) == b"of all"


def test_who_hears_goes_on_when_the_chief_has_begun_another_step():
    coordinator = joined()
    coordinator.begins(4)
    heard = hearing(coordinator, step=4)
    waits(coordinator)
    coordinator.begins(5)
    assert heard.result(5) is None


def test_who_hears_goes_on_when_the_chief_waits_for_it_elsewhere():
    coordinator = joined()
    heard = hearing(coordinator)
    waits(coordinator)
    with ThreadPoolExecutor(1) as threads:
        chief = threads.submit(exchange, coordinator, 0, "elsewhere")
        assert heard.result(5) is None
        exchange(coordinator, 1, "elsewhere")
        chief.result(5)


def test_who_hears_goes_on_when_the_chief_has_left():
    coordinator = joined()
    heard = hearing(coordinator)
    waits(coordinator)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(coordinator.leave, 0, 0)
        assert heard.result(5) is None
        coordinator.leave(1, 0)


def test_an_exchange_that_both_have_come_to_lets_nobody_go_on():
    coordinator = joined()
    with ThreadPoolExecutor(1) as threads:
        chief = threads.submit(exchange, coordinator, 0, "before")
        exchange(coordinator, 1, "before")
        chief.result(5)
    heard = hearing(coordinator)
    waits(coordinator)
    with pytest.raises(TimeoutError):
        heard.result(0.3)
    coordinator.announce("k", b"said", step=0)
    assert heard.result(5) == b"said"


def test_time_is_up_but_not_while_the_chief_prepares_what_it_says():
    coordinator = joined()
    with coordinator.preparing("k", step=0):
        heard = hearing(coordinator, timeout=0.2)
        waits(coordinator)
        with pytest.raises(TimeoutError):
            heard.result(0.6)
        coordinator.announce("k", b"at last", step=0)
    assert heard.result(5) == b"at last"
    with pytest.raises(ClusterError, match=r"waits for the chief, worker 0 \(127.0.0.1\), at k, and it has not come"):
        hearing(coordinator, position=1, timeout=0.2).result(5)


def test_a_failure_of_the_run_ends_the_wait():
    coordinator = joined()
    heard = hearing(coordinator)
    waits(coordinator)
    coordinator.abort(0, "failed", detail="why", step=0)
    with pytest.raises(WorkerFailedError, match="why"):
        heard.result(5)


def test_what_nobody_can_ask_for_any_more_is_forgotten():
    coordinator = joined()
    for step in range(5):
        coordinator.announce("k", b"said", step=step)
    assert len(coordinator._announcements._values) == 5
    with ThreadPoolExecutor(1) as threads:
        threads.submit(coordinator.heartbeat, 1, 4)
        until(lambda: coordinator._steps.get(1) == 4)
        coordinator.announce("k", b"said", step=5)
        coordinator.abort(1, "failed", detail="its end", step=4)
    assert sorted(step for step, _ in coordinator._announcements._values) == [4, 5]


def test_a_chief_whose_own_thread_still_makes_it_is_not_past_it():
    coordinator = joined()
    with coordinator.preparing("k", step=0), coordinator.preparing("other", step=0):
        heard = hearing(coordinator)
        waits(coordinator)
        coordinator.begins(1)
        with pytest.raises(TimeoutError):
            heard.result(0.3)
        coordinator.announce("k", b"by a thread", step=0)
    assert heard.result(5) == b"by a thread"


def test_threads_of_the_scripts_hear_each_other_whatever_the_step():
    coordinator = joined()
    heard = hearing(coordinator, step=NO_STEP)
    waits(coordinator)
    coordinator.begins(3)
    with pytest.raises(TimeoutError):
        heard.result(0.3)
    coordinator.announce("k", b"by a thread", step=NO_STEP)
    assert heard.result(5) == b"by a thread"
