"""Threads that call the coordinator, as workers do: they wait, and each gets its own answer."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from autodist_py.cluster.coordinator import liveness, verdict
from autodist_py.cluster.coordinator.api import Membership
from autodist_py.cluster.coordinator.events import Probe, Stop
from autodist_py.cluster.coordinator.liveness import HEARTBEAT_SECONDS
from autodist_py.cluster.coordinator.shell import Coordinator
from autodist_py.proto.errors import ClusterError, WorkerFailedError
from tests.support.coordinators import ADDRESSES, both, exchange, joined, make_coordinator
from tests.support.processes import until


def waits(coordinator: Coordinator, calls: int = 1) -> None:
    """Returns when so many calls wait."""
    until(lambda: len(coordinator._run._waiting) == calls)


def test_who_joins_waits_for_the_others():
    coordinator = make_coordinator()

    results = both(lambda rank: coordinator.join(rank, f"host:{rank}", spec="spec", timeout=60))

    assert results == [Membership("run", 7, ("host:0", "host:1"))] * 2


def test_who_waits_is_freed_by_the_cause():
    coordinator = joined()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(exchange, coordinator, 0, "k", timeout=600.0)
        waits(coordinator)

        cause = coordinator.abort(1, "failed", detail="ValueError: boom", step=12)

        with pytest.raises(WorkerFailedError, match="boom"):
            waiting.result(10)
    assert coordinator.cause == cause
    assert coordinator._run.answers == {}


@pytest.mark.alone
def test_time_passes_by_itself():
    coordinator, begun = joined(), time.monotonic()
    assert coordinator.heartbeat(0, 1).cause is None
    assert HEARTBEAT_SECONDS <= time.monotonic() - begun < 2 * HEARTBEAT_SECONDS
    with pytest.raises(ClusterError, match=r"worker 1 \(127.0.0.2\) did not reach 'k' within 0.1 s"):
        exchange(coordinator, 0, "k", timeout=0.1)


def test_who_hears_waits_for_as_long_as_is_left_when_another_thread_ends_what_it_prepares():
    coordinator = joined()
    with ThreadPoolExecutor(1) as threads:
        with coordinator.preparing("k", step=0):
            heard = threads.submit(coordinator.hear, 1, "k", step=0, position=0, timeout=0.05)
            waits(coordinator)
        with pytest.raises(ClusterError, match=r"it has not come there within 0.05 s"):
            heard.result(10)


def test_who_waits_is_told_of_a_time_that_another_event_has_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verdict, "EXIT_CODE_SECONDS", 0.05)
    coordinator = joined()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(exchange, coordinator, 0, "k", timeout=600.0)
        waits(coordinator)
        coordinator.leave(1, 5)
        with pytest.raises(WorkerFailedError, match=r"worker 1 .* ended its script at step 5: worker 0 waits for it"):
            waiting.result(10)


def test_a_wait_that_a_signal_ends_is_given_up(monkeypatch: pytest.MonkeyPatch):
    coordinator = joined()

    def interrupted(seconds: float) -> bool:
        raise KeyboardInterrupt

    waiter = coordinator._new_waiter()
    monkeypatch.setattr(waiter, "wait", interrupted)
    monkeypatch.setattr(coordinator, "_new_waiter", lambda: waiter)
    with pytest.raises(KeyboardInterrupt):
        exchange(coordinator, 0, "k", timeout=600.0)
    monkeypatch.undo()

    assert exchange(coordinator, 1, "k") == {0: b"k0", 1: b"k1"}
    assert coordinator._run.answers == {} and coordinator._run._waiting == {}


def test_each_of_many_callers_gets_its_own_answers():
    addresses = tuple(f"127.0.0.{number}" for number in range(1, 9))
    coordinator = joined(addresses=addresses)
    keys = [str(number) for number in range(20)]

    def script(rank: int) -> list[dict[int, bytes]]:
        return [exchange(coordinator, rank, key, timeout=60.0) for key in keys]

    with ThreadPoolExecutor(len(addresses)) as threads:
        results = list(threads.map(script, range(len(addresses))))

    assert results == [[{rank: f"{key}{rank}".encode() for rank in range(8)} for key in keys]] * 8


def test_the_chief_is_told_whom_to_ask_and_whom_to_stop():
    now = [1000.0]
    coordinator = make_coordinator(heartbeat_timeout=4.0)
    coordinator._clock = lambda: now[0]
    both(lambda rank: coordinator.join(rank, f"host:{rank}", spec="spec", timeout=60))
    said = []
    for _ in range(6):
        now[0] += HEARTBEAT_SECONDS
        said.append(coordinator.look())
        if now[0] == 1004.0:
            coordinator.lives(1)

    assert said[1] == []
    assert said[2] == said[3] == said[4] == [Probe(1, "host:1")]
    assert coordinator.cause is None
    now[0] += HEARTBEAT_SECONDS
    coordinator.look()
    now[0] += HEARTBEAT_SECONDS + 0.5
    assert coordinator.look() == [Probe(1, "host:1"), Stop(1)]
    assert coordinator.cause is not None and coordinator.cause.startswith("worker 1 (127.0.0.2) stopped answering")


def test_only_who_is_answered_wakes_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(liveness, "HEARTBEAT_SECONDS", 0.02)
    coordinator, woken = joined(), []

    class Counted(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            is_told = super().wait(timeout)
            woken.append(threading.current_thread().name)
            return is_told

    monkeypatch.setattr(coordinator, "_new_waiter", lambda: Counted(coordinator._lock))
    with ThreadPoolExecutor(1, thread_name_prefix="waits") as threads:
        waiting = threads.submit(exchange, coordinator, 0, "k", timeout=600.0)
        waits(coordinator)
        for step in range(5):
            coordinator.heartbeat(1, step)
        early = [name for name in woken if name.startswith("waits")]
        exchange(coordinator, 1, "k")
        assert waiting.result(10) == {0: b"k0", 1: b"k1"}
    assert len(woken) > 5 and early == []
    assert sum(name.startswith("waits") for name in woken) == 1
    assert coordinator._waiters == {}


def test_nothing_is_logged_under_the_lock():
    coordinator = Coordinator(ADDRESSES, run_id="run", seed=7, spec="spec", heartbeat_timeout=5.0, goes_on=True)
    both(lambda rank: coordinator.join(rank, "host", spec="spec", timeout=60))
    coordinator.step_apart({1})
    held: list[bool] = []
    handler = logging.Handler()
    handler.emit = lambda record: held.append(coordinator._lock.locked())  # type: ignore[method-assign]
    log = logging.getLogger("autodist_py.cluster.coordinator.shell")
    log.addHandler(handler)
    try:
        coordinator.abort(1, "failed", detail="boom", step=3)
    finally:
        log.removeHandler(handler)
    assert held == [False]


def test_a_worker_that_the_run_goes_on_without_is_logged(caplog: pytest.LogCaptureFixture):
    coordinator = Coordinator(ADDRESSES, run_id="run", seed=7, spec="spec", heartbeat_timeout=5.0, goes_on=True)
    both(lambda rank: coordinator.join(rank, "host", spec="spec", timeout=60))
    coordinator.step_apart({1})
    with caplog.at_level(logging.WARNING):
        threading.Thread(target=coordinator.process_ended, args=[1, -9]).start()
        until(lambda: caplog.messages)
    assert caplog.messages == [
        "worker 1 (127.0.0.2) ended, last heard of before its first step: killed by SIGKILL; see its output above. "
        "The others go on without it"
    ]
