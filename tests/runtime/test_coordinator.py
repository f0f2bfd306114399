"""The state of a run, called from threads as workers do."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from autodist_py.proto.errors import ClusterError, WorkerFailedError
from autodist_py.runtime.calls import Membership
from autodist_py.runtime.coordinator import Coordinator
from autodist_py.runtime.waits import LEAST_SILENCE_SECONDS, Waits
from tests.processes import until
from tests.runtime.coordinators import THREE, both, exchange, joined, make_coordinator

pytestmark = pytest.mark.alone


def test_joining_gives_every_worker_the_same_run_and_all_servers():
    coordinator = make_coordinator()

    results = both(lambda rank: coordinator.join(rank, f"host:{rank}", fingerprint="spec", timeout=5))

    assert results == [Membership("run", 7, ("host:0", "host:1"))] * 2


def test_a_worker_that_does_not_join_in_time_is_named():
    with pytest.raises(ClusterError, match=r"worker 1 \(127.0.0.2\) did not join within 0.1 s"):
        make_coordinator().join(0, "host:0", fingerprint="spec", timeout=0.1)


def test_a_worker_with_another_resource_spec_is_refused():
    with pytest.raises(ClusterError, match="worker 1 read other, the chief spec"):
        make_coordinator().join(1, "host:1", fingerprint="other", timeout=1)


def test_a_rank_joins_once():
    with pytest.raises(ClusterError, match=r"each rank from 0 to 1 joins once. Received: 1, after \[0, 1\]"):
        joined().join(1, "host:1", fingerprint="spec", timeout=1)


def test_everyone_gets_all_values_or_the_chiefs():
    coordinator = joined()

    assert both(lambda rank: exchange(coordinator, rank, "k")) == [{0: b"k0", 1: b"k1"}] * 2
    assert both(lambda rank: exchange(coordinator, rank, "k", everyone=False)) == [{0: b"k0"}] * 2


def test_the_chief_does_not_wait_for_those_it_tells():
    coordinator = joined()

    assert exchange(coordinator, 0, "k", everyone=False) == {0: b"k0"}
    assert exchange(coordinator, 0, "k", everyone=False) == {0: b"k0"}
    assert exchange(coordinator, 1, "k", everyone=False) == {0: b"k0"}


@pytest.mark.parametrize("value", [b"", b"-1", b"two", b"9" * 5000])
def test_who_leaves_says_the_number_of_its_last_step(value):
    with pytest.raises(ClusterError, match="'leaving/servers' is told the number of a worker's last step; got b'"):
        make_coordinator().exchange(1, "leaving/servers", value=value, everyone=True, timeout=5)


def test_exchanges_that_everyone_has_seen_are_forgotten():
    coordinator = joined()

    for number in range(20):
        both(lambda rank, number=number: exchange(coordinator, rank, f"k{number % 3}"))

    assert coordinator._rounds == {}


def test_an_exchange_that_is_too_late_names_who_is_missing():
    with pytest.raises(ClusterError, match=r"worker 1 \(127.0.0.2\) did not reach 'k' within 0.1 s"):
        exchange(joined(), 0, "k", timeout=0.1)


def test_the_first_cause_is_everyones_and_frees_those_who_wait():
    coordinator = joined()
    waiting = ThreadPoolExecutor(1).submit(exchange, coordinator, 0, "k")

    cause = coordinator.abort(1, "failed", detail="ValueError: boom", step=12)

    assert cause == "worker 1 (127.0.0.2) failed at step 12: ValueError: boom"
    assert coordinator.abort(0, "failed", detail="later", step=13) == cause
    assert coordinator.heartbeat(0, 13).cause == cause
    with pytest.raises(WorkerFailedError) as caught:
        waiting.result(5)
    assert str(caught.value) == cause


def test_what_a_launcher_knows_of_an_end_is_the_cause():
    coordinator = make_coordinator()

    coordinator.process_ended(1, 255, "it could not be started over SSH: no route")

    assert coordinator.cause == (
        "worker 1 (127.0.0.2) ended before it joined: it could not be started over SSH: no route"
    )


@pytest.mark.parametrize(
    ("exit_code", "cause"),
    [
        (3, "worker 1 (127.0.0.2) ended, last heard of before its first step: exit code 3; see its output above"),
        (
            -9,
            "worker 1 (127.0.0.2) ended, last heard of before its first step: killed by SIGKILL; see its output above",
        ),
        (0, "worker 1 (127.0.0.2) ended, last heard of before its first step: exit code 0; see its output above"),
    ],
)
def test_a_process_that_ends_before_all_have_left_ends_the_run(exit_code, cause):
    coordinator = joined()

    coordinator.process_ended(1, exit_code)

    assert coordinator.cause == cause


def test_a_process_that_ends_before_joining_ends_the_run_at_once():
    coordinator = make_coordinator()
    joining = ThreadPoolExecutor(1).submit(coordinator.join, 0, "host:0", fingerprint="spec", timeout=60)

    coordinator.process_ended(1, 2)

    with pytest.raises(WorkerFailedError, match=r"worker 1 \(127.0.0.2\) ended before it joined: exit code 2"):
        joining.result(5)


def test_leaving_returns_when_all_have_left():
    coordinator = joined()

    assert both(lambda rank: coordinator.leave(rank, 3)) == [None, None]
    coordinator.process_ended(1, 0)
    assert coordinator.cause is None


def test_a_script_that_fails_after_all_have_left_is_still_a_failure():
    coordinator = joined()
    both(lambda rank: coordinator.leave(rank, 3))

    coordinator.process_ended(1, 3)

    assert coordinator.cause == "worker 1 (127.0.0.2) ended, last heard of at step 3: exit code 3; see its output above"


def test_waiting_for_one_that_has_left_ends_the_run_with_its_exit_code():
    coordinator = joined()

    def leave_and_exit():
        with suppress(WorkerFailedError):
            coordinator.leave(1, 5)
        coordinator.process_ended(1, 3)

    threading.Thread(target=leave_and_exit).start()

    with pytest.raises(WorkerFailedError, match=r"worker 1 \(127.0.0.2\) ended, last heard of at step 5: exit code 3"):
        exchange(coordinator, 0, "k")


def test_a_step_that_one_did_not_reach_ends_the_run_with_its_exit_code_at_once():
    coordinator = joined()

    def leave_and_exit():
        with suppress(WorkerFailedError):
            coordinator.leave(1, 5)  # Until the other goes on.
        coordinator.process_ended(1, 3)

    threading.Thread(target=leave_and_exit).start()
    until(lambda: coordinator._left)
    begun = time.monotonic()
    while (cause := coordinator.heartbeat(0, 6).cause) is None and time.monotonic() < begun + 5:
        pass

    assert str(cause).startswith(
        "worker 1 (127.0.0.2) ended, last heard of at step 5, when the chief is at step 6: exit code 3"
    )
    assert time.monotonic() - begun < 2.0


def test_who_waits_hears_of_the_chief_while_that_one_waits_for_the_exit_code_of_one_that_left():
    coordinator = joined(addresses=THREE)
    leaving = ThreadPoolExecutor(1).submit(coordinator.leave, 1, 5)
    until(lambda: coordinator._left)

    begun, cause, longest = time.monotonic(), None, 0.0
    while cause is None and time.monotonic() < begun + 10:
        asked = time.monotonic()
        cause = coordinator.heartbeat(2, 6, Waits(6, 2.0, "dense gradients of w")).cause
        longest = max(longest, time.monotonic() - asked)

    assert longest < LEAST_SILENCE_SECONDS / 2
    assert time.monotonic() - begun > 2.0
    assert str(cause).startswith("worker 1 (127.0.0.2) ended its script at step 5: worker 2 went on to step 6")
    leaving.result(5)


def test_a_step_that_another_script_did_not_reach_ends_the_run():
    coordinator = joined()
    leaving = ThreadPoolExecutor(1).submit(coordinator.leave, 0, 5)
    until(lambda: coordinator._left)

    assert coordinator.heartbeat(1, 5).cause is None
    cause = coordinator.heartbeat(1, 6).cause

    assert cause is not None and "worker 0 (127.0.0.1) ended its script at step 5: worker 1 went on to step 6" in cause
    assert isinstance(leaving.exception(5), WorkerFailedError)


def apart(expendable, *, goes_on=True):
    """Three workers that take their steps by themselves."""
    coordinator = Coordinator(THREE, run_id="run", seed=7, fingerprint="spec", heartbeat_timeout=5.0, goes_on=goes_on)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda rank: coordinator.join(rank, "host:0", fingerprint="spec", timeout=5), range(3)))
    coordinator.step_apart(expendable)
    return coordinator


def test_a_run_goes_on_without_a_worker_that_nobody_needs():
    coordinator = apart({1, 2})
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(exchange, coordinator, rank, "k") for rank in (0, 1)]

        coordinator.process_ended(2, -9)

        assert [future.result(5) for future in waiting] == [{0: b"k0", 1: b"k1"}] * 2
    assert coordinator.cause is None
    assert coordinator.heartbeat(1, 3).lost == (2,)
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(coordinator.leave, rank, 3) for rank in (0, 1)]:
            future.result(5)


def test_a_run_goes_on_without_a_worker_that_nobody_needs_and_that_ends_its_script_too_early():
    coordinator = apart({1, 2})
    with ThreadPoolExecutor(3) as threads:
        leaving = threads.submit(coordinator.leave, 2, 3)
        waiting = [threads.submit(exchange, coordinator, rank, "k") for rank in (0, 1)]
        leaving.result(5)  # It is let go, as the others need it.

        coordinator.process_ended(2, 3)

        assert [future.result(5) for future in waiting] == [{0: b"k0", 1: b"k1"}] * 2
    assert coordinator.cause is None
    assert coordinator.heartbeat(1, 3).lost == (2,)


@pytest.mark.parametrize(
    ("expendable", "goes_on"), [({2}, True), ({1, 2}, False), (set(), True)], ids=["server", "not-asked-for", "nobody"]
)
def test_a_worker_that_is_needed_ends_the_run(expendable, goes_on):
    coordinator = apart(expendable, goes_on=goes_on)

    coordinator.process_ended(1, -9)

    assert coordinator.cause is not None and coordinator.cause.startswith("worker 1 (127.0.0.2) ended")


def test_the_chief_and_who_was_needed_before_are_always_needed():
    coordinator = apart({0, 1, 2})
    coordinator.step_apart({0, 2})

    assert coordinator.abort(2, "failed", detail="x", step=1) == "worker 2 (127.0.0.3) failed at step 1: x"
    assert coordinator.cause is None
    coordinator.abort(1, "failed", detail="y", step=1)
    assert coordinator.cause == "worker 1 (127.0.0.2) failed at step 1: y"


def test_workers_that_step_apart_may_leave_before_others_have_gone_as_far():
    coordinator = apart(())
    leaving = ThreadPoolExecutor(1).submit(coordinator.leave, 2, 3)
    until(lambda: 2 in coordinator._left)

    assert coordinator.heartbeat(1, 10).cause is None
    for rank in (0, 1):
        threading.Thread(target=coordinator.leave, args=(rank, 10)).start()
    leaving.result(5)


def test_steps_that_several_objects_of_a_script_count_together_are_said_to_be_so():
    coordinator = joined()
    coordinator.counts_on()
    cause = coordinator.abort(1, "failed", detail="why", step=7)
    assert cause == "worker 1 (127.0.0.2) failed at step 7 of its 2 AutoDist objects: why"


def test_of_a_worker_that_was_killed_nothing_is_said_but_what_is_known():
    coordinator = joined()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(coordinator.heartbeat, 1, 1)
        until(lambda: coordinator._steps.get(1) == 1)
        coordinator.begins(20)
        coordinator.process_ended(1, -9)
    assert coordinator.cause is not None
    assert "ended, last heard of at step 1, when the chief is at step 20: killed by SIGKILL" in coordinator.cause
