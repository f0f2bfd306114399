"""The run has one cause; who asked is told it once, and so are losses."""

import threading

import pytest

from autodist_py.cluster.run_failure import Losses, RunFailure
from autodist_py.proto.errors import WorkerFailedError

SECONDS = 60.0


def test_the_first_cause_stays_and_is_told_once() -> None:
    failure, told = RunFailure(), list[str]()
    failure.listeners.add(told.append)
    for cause in ("worker 1 ended", "worker 2 ended"):
        failure.fail(cause)
    assert (failure.cause, told) == ("worker 1 ended", ["worker 1 ended"])
    with pytest.raises(WorkerFailedError, match="worker 1 ended"):
        failure.check()


def test_a_run_that_goes_on_raises_nothing() -> None:
    failure = RunFailure()
    failure.check()
    assert failure.error(wait=0.0) is None and failure.since == 0.0 and failure.wait_for_listeners(0.0)


def test_an_error_waits_for_the_failure_that_it_follows_from() -> None:
    failure = RunFailure()
    threading.Timer(0.1, failure.fail, ["worker 1 ended"]).start()
    error = failure.error(wait=SECONDS)
    assert str(error) == "worker 1 ended"


def test_listeners_are_told_in_their_order_whatever_another_raises(caplog: pytest.LogCaptureFixture) -> None:
    failure, told = RunFailure(), list[str]()

    def wrong(_: str) -> None:
        told.append("wrong")
        raise ValueError("a callback's mistake")

    failure.listeners.add(wrong)
    failure.listeners.add(lambda _: told.append("second"))
    failure.listeners.add(lambda _: told.append("taken back"))()
    failure.fail("worker 1 ended")
    assert told == ["wrong", "second"] and "a callback's mistake" in caplog.text


def test_listeners_are_waited_for_until_all_are_told() -> None:
    failure, may_end = RunFailure(), threading.Event()

    def slow(_: str) -> None:
        may_end.wait(SECONDS)

    failure.listeners.add(slow)
    thread = threading.Thread(target=failure.fail, args=["worker 1 ended"])
    thread.start()
    assert failure.wait(SECONDS) and not failure.wait_for_listeners(0.05)
    may_end.set()
    assert failure.wait_for_listeners(SECONDS)
    thread.join()


def test_what_is_found_after_the_end_is_told_to_nobody_and_replaces_nothing() -> None:
    failure, told = RunFailure(), list[str]()
    failure.listeners.add(told.append)
    for cause in (None, "worker 1 did not end", "another"):
        failure.fail_untold(cause)
    assert (failure.cause, told) == ("worker 1 did not end", [])


def test_each_loss_is_told_once() -> None:
    losses, told = Losses(), list[int]()
    losses.listeners.add(told.append)
    for rank in (2, 1, 2):
        losses.lose(rank)
    assert told == [2, 1]
