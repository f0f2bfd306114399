"""Workers that are missing, by what heartbeats say, or do not say. Time passes only where the coordinator waits.

One module, though long: all of it runs on one clock of its own.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from autodist_py.runtime import coordinator as coordinators
from autodist_py.runtime import reports
from autodist_py.runtime.calls import Pulse
from autodist_py.runtime.coordinator import Coordinator
from autodist_py.runtime.waits import Waits
from tests.processes import until
from tests.runtime.clock import Clock
from tests.runtime.coordinators import ADDRESSES, THREE, exchange, joined

HEARTBEAT = 0.05
SILENCE = 0.5
STOPPING = 0.5
W = "dense gradients of w"
AT_LAST = "while worker {} ({}) was in a step that combines dense gradients of w"
STOPPED = "while worker {} ({}) waited for it to combine dense gradients of w"


class Waiting(threading.Condition):
    """A wait of the test's own thread takes no time: the clock goes on by as long as it may take."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock = clock

    def wait_for(self, predicate, timeout=None):
        if threading.current_thread() is not threading.main_thread():  # A call of another thread really waits.
            return super().wait_for(predicate, timeout)
        if not predicate():
            self.clock.now += timeout
        return predicate()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Heartbeats come in quick succession by it, and short silences count."""
    clock = Clock()
    for module in (reports, coordinators):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(coordinators, "threading", SimpleNamespace(Condition=lambda: Waiting(clock)))
    monkeypatch.setattr(reports, "HEARTBEAT_SECONDS", HEARTBEAT)
    monkeypatch.setattr(reports, "PROMPT_SECONDS", HEARTBEAT)
    monkeypatch.setattr("autodist_py.runtime.waits.LEAST_SILENCE_SECONDS", SILENCE)
    monkeypatch.setattr(coordinators, "STOPPING_SECONDS", STOPPING)
    return clock


def others_wait(coordinator: Any) -> bool:
    """Whether another thread waits in a call."""
    return bool(coordinator._changed._waiters)


def until_failed(clock: Clock, coordinator: Coordinator, beat: Callable[[], object], seconds: float = 5.0) -> float:
    """How long it took."""
    begun = clock.now
    while coordinator.cause is None and clock.now < begun + seconds:
        beat()
        coordinator.check_heartbeats()
    return clock.now - begun


def test_a_silent_worker_ends_the_run(clock):
    coordinator = joined(heartbeat_timeout=0.3)
    until_failed(clock, coordinator, lambda: coordinator.heartbeat(0, 4))

    assert coordinator.check_heartbeats() == [1]
    assert (
        coordinator.cause
        == "worker 1 (127.0.0.2) stopped answering, last heard of before its first step, when the chief is at step 4: "
        "no heartbeat for 0.3 s"
    )


@pytest.mark.parametrize("step", [7, 8], ids=["before the step", "in the step"])
def test_who_is_silent_while_others_wait_is_lost_after_the_limit(clock, step):
    coordinator = joined(heartbeat_timeout=60.0)
    coordinator.heartbeat(1, step, Waits(step, 0.6, W))

    took = until_failed(clock, coordinator, lambda: coordinator.heartbeat(0, 8, Waits(8, 0.6, W)))

    assert 0.6 + STOPPING < took < 0.6 + STOPPING + 3 * HEARTBEAT
    chief = ", when the chief is at step 8" if step < 8 else ""
    assert coordinator.cause == (
        f"worker 1 (127.0.0.2) stopped answering, last heard of at step {step}{chief}: "
        f"no heartbeat for 0.6 s, with timeout_seconds 0.6, "
        f"{AT_LAST.format(0, ADDRESSES[0])}"
    )


@pytest.mark.parametrize("waits", [Waits(8, 0.6), Waits(8, 0.0, W)], ids=["between steps", "no limit"])
def test_who_is_silent_while_nobody_waits_has_the_heartbeats_time(clock, waits):
    coordinator = joined(heartbeat_timeout=60.0)
    until_failed(clock, coordinator, lambda: coordinator.heartbeat(0, 8, waits), seconds=1.2)

    assert coordinator.cause is None


def test_who_is_silent_while_steps_go_on_is_waited_for_by_nobody(clock):
    coordinator = joined(heartbeat_timeout=60.0)
    steps = iter(range(1, 10_000))

    def beat():
        step = next(steps)
        coordinator.heartbeat(0, step, Waits(step, 0.6, W))

    until_failed(clock, coordinator, beat, seconds=1.2)

    assert coordinator.cause is None


def test_a_short_silence_is_none_however_short_the_limit(clock):
    coordinator = joined(heartbeat_timeout=60.0)
    took = until_failed(clock, coordinator, lambda: coordinator.heartbeat(0, 8, Waits(8, 0.1, W)))

    assert SILENCE + STOPPING < took < SILENCE + STOPPING + 3 * HEARTBEAT
    assert "no heartbeat for 0.5 s, with timeout_seconds 0.1" in str(coordinator.cause)


def test_a_heartbeat_that_is_shorter_than_the_limit_rules(clock):
    coordinator = joined(heartbeat_timeout=0.3)
    until_failed(clock, coordinator, lambda: coordinator.heartbeat(0, 8, Waits(8, 60.0, W)))

    assert coordinator.cause == (
        "worker 1 (127.0.0.2) stopped answering, last heard of before its first step, when the chief is at step 8: "
        "no heartbeat for 0.3 s, " + AT_LAST.format(0, ADDRESSES[0])
    )


def test_a_program_with_a_limit_is_looked_after_more_often(clock, monkeypatch):
    monkeypatch.setattr(reports, "HEARTBEAT_SECONDS", 5.0)
    coordinator, begun = joined(), clock.now
    for _ in range(2):
        coordinator.heartbeat(0, 8, Waits(8, 2.0, W))

    assert clock.now - begun == pytest.approx(2 * HEARTBEAT)


@pytest.mark.parametrize("behind", [0, 1])
def test_others_are_kept_waiting_no_longer_than_the_limit(clock, behind):
    coordinator = joined(heartbeat_timeout=60.0)

    def beat():
        for rank in (0, 1):  # Both live; one does not come to the next step.
            step = 7 if rank == behind else 8
            coordinator.heartbeat(rank, step, Waits(step, 0.5, W if step == 8 else ""))

    took = until_failed(clock, coordinator, beat)

    assert 0.5 + STOPPING < took < 2 * 0.5 + STOPPING + 10 * HEARTBEAT  # Two heartbeats between checks: half counts.
    assert coordinator.cause == (
        f"worker {behind} (127.0.0.{behind + 1}) kept others waiting at step 7: 0.5 s after another it has not begun "
        f"step 8 of all workers, with timeout_seconds 0.5, {AT_LAST.format(1 - behind, ADDRESSES[1 - behind])}"
    )


def test_who_waits_for_a_silent_worker_in_an_earlier_step_is_not_the_one_that_is_missing(clock):
    coordinator = joined(heartbeat_timeout=60.0, addresses=THREE)
    coordinator.heartbeat(2, 7, Waits(7, 0.2, W))  # It is cut when worker 0 has its part of step 7, and 1 has not.

    def beat():
        coordinator.heartbeat(0, 8, Waits(8, 0.2, W))
        coordinator.heartbeat(1, 7, Waits(7, 0.2, W))

    until_failed(clock, coordinator, beat)

    assert str(coordinator.cause).startswith(
        "worker 2 (127.0.0.3) stopped answering, last heard of at step 7, when the chief is at step 8: "
        "no heartbeat for 0.5 s"
    )


def test_who_is_late_is_not_taken_while_another_misses_its_heartbeats(clock):
    coordinator = joined(heartbeat_timeout=60.0, addresses=THREE)
    coordinator.heartbeat(2, 7, Waits(7, 0.2))

    def beat():
        coordinator.heartbeat(0, 8, Waits(8, 0.2, W))
        coordinator.heartbeat(1, 7, Waits(7, 0.2))

    until_failed(clock, coordinator, beat)

    assert str(coordinator.cause).startswith("worker 2 (127.0.0.3) stopped answering, last heard of at step 7")


@pytest.mark.parametrize("end", ["lost", "left"])
def test_one_that_has_ended_is_kept_waiting_by_nobody(clock, end):
    coordinator = joined(heartbeat_timeout=60.0, addresses=THREE)
    coordinator.heartbeat(2, 8, Waits(8, 0.2, W))
    if end == "left":
        coordinator._left.add(2)
    else:
        coordinator._lost[2] = "ended", "killed by SIGKILL"

    def beat():
        for rank in (0, 1):
            coordinator.heartbeat(rank, 8, Waits(7, 0.2))

    until_failed(clock, coordinator, beat, seconds=2.5)

    assert coordinator.cause is None


def test_who_hangs_in_an_earlier_step_keeps_others_waiting_for_no_longer_than_a_silence_may_last(clock):
    coordinator = joined(heartbeat_timeout=60.0)

    def beat():
        coordinator.heartbeat(0, 8, Waits(8, 0.2, W))
        coordinator.heartbeat(1, 7, Waits(7, 0.2, W))

    took = until_failed(clock, coordinator, beat)

    assert SILENCE + STOPPING < took < 2 * SILENCE + STOPPING + 10 * HEARTBEAT
    assert str(coordinator.cause).startswith(
        "worker 1 (127.0.0.2) kept others waiting at step 7: 0.5 s after another it has not begun step 8"
    )


@pytest.mark.parametrize("waits", [Waits(8, 0.0, W), Waits(8, 0.5)], ids=["no limit", "between steps"])
def test_who_waits_for_nobody_may_take_as_long_as_it_likes(clock, waits):
    coordinator = joined(heartbeat_timeout=60.0)

    def beat():
        coordinator.heartbeat(0, 7, Waits(7, waits.seconds))
        coordinator.heartbeat(1, 8, waits)

    until_failed(clock, coordinator, beat, seconds=1.0)

    assert coordinator.cause is None


def test_steps_that_a_worker_takes_by_itself_are_not_waited_for_but_those_of_all_are(clock):
    coordinator = joined(heartbeat_timeout=60.0)
    coordinator.step_apart(())  # One program's steps are.
    own = iter(range(100, 10_000))

    def beat():
        coordinator.heartbeat(0, 8, Waits(8, 0.5, waited))
        coordinator.heartbeat(1, next(own), Waits(7, 0.5))

    waited = ""
    until_failed(clock, coordinator, beat, seconds=1.0)
    assert coordinator.cause is None

    waited = W
    until_failed(clock, coordinator, beat)
    assert "it has not begun step 8 of all workers" in str(coordinator.cause)


def test_what_has_not_been_said_since_is_no_sign_of_waiting(clock):
    coordinator = joined(heartbeat_timeout=60.0)

    def beat():
        coordinator.heartbeat(0, 7, Waits(7, 0.4))
        coordinator.heartbeat(1, 8, Waits(8, 0.4, W))

    beat()
    clock.now += 1.0  # The chief stood still, or its reports are late: it may have begun the step long ago.
    coordinator.check_heartbeats()
    assert coordinator.cause is None

    until_failed(clock, coordinator, beat)
    assert str(coordinator.cause).startswith("worker 0 (127.0.0.1) kept others waiting at step 7")


def test_a_report_that_was_long_on_its_way_is_no_sign_of_waiting(clock):
    coordinator = joined(heartbeat_timeout=60.0)
    coordinator.heartbeat(0, 7, Waits(7, 0.4))
    begun = clock.now
    while clock.now < begun + 0.8:  # What worker 0 has said meanwhile is not here.
        coordinator.heartbeat(1, 8, Waits(8, 0.4, W))
        coordinator.check_heartbeats()
    coordinator.heartbeat(0, 7, Waits(7, 0.4))
    coordinator.heartbeat(1, 8, Waits(8, 0.4, W))
    coordinator.check_heartbeats()

    assert coordinator.heartbeat(1, 8, Waits(8, 0.4, W)).suspicion is None


def test_a_chief_that_stood_still_itself_blames_nobody(clock):
    coordinator = joined(heartbeat_timeout=2.0)
    coordinator.heartbeat(0, 8, Waits(8, 2.0, W))
    clock.now += 60

    assert coordinator.check_heartbeats() == []


def test_a_chief_that_is_slow_itself_does_not_count_the_time_it_lost(clock):
    coordinator = joined(heartbeat_timeout=0.3)
    for _ in range(4):
        clock.now += 2 * HEARTBEAT  # Twice as long as it should take from one check to the next.
        assert coordinator.check_heartbeats() == []
    for _ in range(10):
        clock.now += HEARTBEAT
        coordinator.heartbeat(0, 1)
        silent = coordinator.check_heartbeats()

    assert silent == [1]


# -- Where others wait ------------------------------------------------------------------------------------------------


def waited_for(addresses: tuple[str, ...] = ADDRESSES) -> Coordinator:
    """Worker 1 has ended, and worker 0 waits for it."""
    coordinator = joined(addresses=addresses)
    coordinator.heartbeat(0, 8, Waits(8, 0.0, "dense gradients of v, w (one of its 3 collectives)"))
    coordinator.process_ended(1, -9)
    return coordinator


def test_the_cause_says_in_which_collective_another_was_stopped():
    coordinator = waited_for()
    suspicion = coordinator.heartbeat(0, 8, Waits(8, 0.0, "dense gradients of v, w")).suspicion

    assert (
        suspicion == "worker 1 (127.0.0.2) ended, last heard of before its first step, when the chief is at step 8: "
        "killed by SIGKILL; see its output above"
    )
    cause = coordinator.heartbeat(0, 8, Waits(8, 0.0, "", W)).cause
    assert cause == f"{suspicion}, while worker 0 (127.0.0.1) waited for it to combine dense gradients of w"
    assert coordinator.abort(1, "failed", detail="later", step=9) == cause


def test_the_cause_does_not_wait_for_one_that_cannot_say_where_it_waits(clock):
    coordinator = waited_for()
    pulses: list[Pulse] = []
    took = until_failed(clock, coordinator, lambda: pulses.append(coordinator.heartbeat(0, 8, Waits(8, 0.0, W))))

    assert STOPPING <= took < STOPPING + 2 * HEARTBEAT
    assert [pulse.suspicion is None for pulse in pulses] == [False, *[True] * (len(pulses) - 1)]
    assert pulses[-1].cause == f"{pulses[0].suspicion}, {AT_LAST.format(0, ADDRESSES[0])}"


def test_the_cause_is_told_at_once_when_nobody_turns_out_to_wait(clock):
    coordinator, begun = waited_for(), clock.now
    pulses = [coordinator.heartbeat(0, 8, Waits(8)) for _ in range(2)]

    assert clock.now == begun
    assert pulses[1].cause == pulses[0].suspicion


def test_who_begins_a_step_after_its_last_report_is_still_asked_where_it_waits():
    coordinator = joined()
    coordinator.heartbeat(0, 7, Waits(7))
    coordinator.process_ended(1, -9)
    assert coordinator.cause is None

    assert coordinator.heartbeat(0, 8, Waits(8, 0.0, W)).suspicion is not None
    assert str(coordinator.heartbeat(0, 8, Waits(8, 0.0, "", W)).cause).endswith("to combine dense gradients of w")


@pytest.mark.parametrize("is_said", [True, False], ids=["said", "never-said"])
def test_another_failure_meanwhile_does_not_keep_others_from_saying_where_they_wait(clock, is_said):
    coordinator = waited_for(THREE)
    suspicion = coordinator.heartbeat(0, 8, Waits(8, 0.0, W)).suspicion
    with ThreadPoolExecutor(1) as threads:
        failing = threads.submit(coordinator.abort, 2, "failed", detail="as its peer is gone", step=8)
        until(lambda: others_wait(coordinator))  # Worker 2 waits, for what is said of worker 1.
        assert coordinator.cause is None
        if is_said:
            coordinator.heartbeat(0, 8, Waits(8, 0.0, "", W))
        else:
            clock.now += STOPPING
        cause = failing.result(STOPPING + 1.5)

    where = STOPPED.format(0, ADDRESSES[0]) if is_said else AT_LAST.format(0, ADDRESSES[0])
    assert cause == coordinator.cause == f"{suspicion}, {where}"


def test_who_waits_outside_of_a_step_does_not_keep_others_from_saying_where_they_wait():
    coordinator = joined(addresses=THREE)
    coordinator.heartbeat(0, 8, Waits(8, 0.0, W))
    with ThreadPoolExecutor(2) as threads:
        leaving = threads.submit(coordinator.leave, 1, 7)
        waiting = threads.submit(exchange, coordinator, 2, "k")
        leaving.exception(5)  # It is let go, as worker 2 needs it.
        coordinator.process_ended(1, 3)
        until(lambda: others_wait(coordinator))  # Worker 2, which has been woken, waits again.
        assert coordinator.cause is None
        assert coordinator.heartbeat(0, 8, Waits(8, 0.0, W)).suspicion is not None
        coordinator.heartbeat(0, 8, Waits(8, 0.0, "", W))

        assert str(waiting.exception(5)) == (
            "worker 1 (127.0.0.2) ended, last heard of at step 7, when the chief is at step 8: "
            "exit code 3; see its output above, " + STOPPED.format(0, ADDRESSES[0])
        )


def test_a_run_does_not_go_on_without_a_worker_that_a_step_of_all_needs(clock):
    coordinator = Coordinator(ADDRESSES, run_id="run", seed=7, fingerprint="spec", heartbeat_timeout=60.0, goes_on=True)
    for rank in (0, 1):
        coordinator._servers[rank] = "host"
        coordinator.heartbeat(rank, 0)
    coordinator.step_apart({1})
    coordinator.process_ended(1, -9)
    assert coordinator.cause is None

    until_failed(clock, coordinator, lambda: coordinator.heartbeat(0, 8, Waits(8, 0.0, W)))

    assert str(coordinator.cause).startswith(
        "worker 1 (127.0.0.2) ended, last heard of before its first step, when the chief is at step 8: "
        "killed by SIGKILL; see its output above; the others went on "
        "without it, and now need it, while worker 0 (127.0.0.1) was in a step"
    )
