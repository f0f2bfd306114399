"""The state of a run, called from threads as workers do, and its gRPC service."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from autodist_py.proto.errors import ClusterError, WorkerFailedError
from autodist_py.runtime import coordinator as coordinator_module
from autodist_py.runtime.coordinator import Coordinator, Limit, Membership
from autodist_py.runtime.service import ChiefLostError, CoordinatorClient, serve

pytestmark = pytest.mark.alone

ADDRESSES = ("127.0.0.1", "127.0.0.2")


def make_coordinator(heartbeat_timeout=5.0):
    return Coordinator(ADDRESSES, run_id="run", seed=7, fingerprint="spec", heartbeat_timeout=heartbeat_timeout)


def both(call):
    """The results of `call(rank)` for both ranks at once; an error is a result."""

    def result(rank):
        try:
            return call(rank)
        except ClusterError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(result, (0, 1)))


def joined(heartbeat_timeout=5.0):
    coordinator = make_coordinator(heartbeat_timeout)
    both(lambda rank: coordinator.join(rank, f"host:{rank}", fingerprint="spec", timeout=5))
    return coordinator


def exchange(coordinator, rank, key, *, everyone=True, timeout=5.0):
    return coordinator.exchange(rank, key, value=f"{key}{rank}".encode(), everyone=everyone, timeout=timeout)


def until(condition):
    """Returns when the condition holds; so that another thread is as far as a test needs it."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


def test_a_silent_worker_ends_the_run(monkeypatch):
    monkeypatch.setattr(coordinator_module, "HEARTBEAT_SECONDS", 0.05)
    coordinator = joined(heartbeat_timeout=0.3)
    deadline = time.monotonic() + 5
    silent: list[int] = []
    while not silent and time.monotonic() < deadline:
        coordinator.heartbeat(0, 4)
        silent = coordinator.check_heartbeats()

    assert silent == [1]
    assert coordinator.cause == "worker 1 (127.0.0.2) stopped answering before its first step: no heartbeat for 0.3 s"


@pytest.mark.parametrize("behind", [0, 1])
def test_others_are_kept_waiting_no_longer_than_the_limit(monkeypatch, behind):
    monkeypatch.setattr(coordinator_module, "HEARTBEAT_SECONDS", 0.05)
    coordinator = joined(heartbeat_timeout=60.0)
    limit = Limit(0.5, "dense gradients of w")
    begun = time.monotonic()
    while coordinator.cause is None and time.monotonic() < begun + 5:
        for rank in (0, 1):  # Both live; one does not come to the next step.
            coordinator.heartbeat(rank, 7 if rank == behind else 8, limit)
        coordinator.check_heartbeats()

    assert 0.5 < time.monotonic() - begun < 2.0
    assert coordinator.cause == (
        f"worker {behind} (127.0.0.{behind + 1}) kept others waiting at step 7: 0.5 s (timeout_seconds) after the "
        f"first it has not begun step 8; they cannot go on with dense gradients of w without worker {behind} "
        f"(127.0.0.{behind + 1})"
    )


@pytest.mark.parametrize("limit", [Limit(0.0, ""), Limit(0.5, "dense gradients of w")])
def test_who_waits_for_nobody_may_take_as_long_as_it_likes(monkeypatch, limit):
    monkeypatch.setattr(coordinator_module, "HEARTBEAT_SECONDS", 0.05)
    coordinator = joined(heartbeat_timeout=60.0)
    begun = time.monotonic()
    while time.monotonic() < begun + 1.0:
        for rank in (0, 1):  # One is at the step before, but with a limit that was of that one.
            coordinator.heartbeat(rank, 8 if rank or limit.seconds else 7, limit)
        coordinator.check_heartbeats()

    assert coordinator.cause is None


def test_what_has_not_been_said_since_is_no_sign_of_waiting(monkeypatch):
    monkeypatch.setattr(coordinator_module, "HEARTBEAT_SECONDS", 0.05)
    coordinator = joined(heartbeat_timeout=60.0)
    limit, begun = Limit(0.5, "dense gradients of w"), time.monotonic()
    coordinator.heartbeat(0, 7, limit)
    coordinator.heartbeat(1, 8, limit)
    time.sleep(1.0)  # The chief stood still, or its reports are late: it may have begun the step long ago.
    coordinator.check_heartbeats()
    assert coordinator.cause is None

    while coordinator.cause is None and time.monotonic() < begun + 5:
        for rank in (0, 1):
            coordinator.heartbeat(rank, 7 + rank, limit)
        coordinator.check_heartbeats()
    assert str(coordinator.cause).startswith("worker 0 (127.0.0.1) kept others waiting at step 7")


def test_a_chief_that_stood_still_itself_blames_nobody():
    coordinator = joined(heartbeat_timeout=2.0)
    for rank in (0, 1):
        coordinator._seen[rank] -= 60
    coordinator._checked -= 60

    assert coordinator.check_heartbeats() == []


def test_a_chief_that_is_slow_itself_does_not_count_the_time_it_lost(monkeypatch):
    monkeypatch.setattr(coordinator_module, "HEARTBEAT_SECONDS", 0.05)
    coordinator = joined(heartbeat_timeout=0.3)
    for _ in range(4):
        time.sleep(0.1)  # Twice as long as it should take from one check to the next.
        assert coordinator.check_heartbeats() == []
    for _ in range(10):
        time.sleep(0.05)
        coordinator.heartbeat(0, 1)
        silent = coordinator.check_heartbeats()

    assert silent == [1]


@pytest.mark.parametrize(
    ("exit_code", "cause"),
    [
        (3, "worker 1 (127.0.0.2) ended before its first step: exit code 3; see its output above"),
        (-9, "worker 1 (127.0.0.2) ended before its first step: killed by SIGKILL; see its output above"),
        (0, "worker 1 (127.0.0.2) ended before its first step: exit code 0; see its output above"),
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

    assert coordinator.cause == "worker 1 (127.0.0.2) ended at step 3: exit code 3; see its output above"


def test_waiting_for_one_that_has_left_ends_the_run_with_its_exit_code():
    coordinator = joined()

    def leave_and_exit():
        with suppress(WorkerFailedError):
            coordinator.leave(1, 5)
        coordinator.process_ended(1, 3)

    threading.Thread(target=leave_and_exit).start()

    with pytest.raises(WorkerFailedError, match=r"worker 1 \(127.0.0.2\) ended at step 5: exit code 3"):
        exchange(coordinator, 0, "k")


def test_a_step_that_another_script_did_not_reach_ends_the_run():
    coordinator = joined()
    leaving = ThreadPoolExecutor(1).submit(coordinator.leave, 0, 5)
    until(lambda: coordinator._left)

    assert coordinator.heartbeat(1, 5).cause is None
    cause = coordinator.heartbeat(1, 6).cause

    assert cause is not None and "worker 0 (127.0.0.1) ended its script at step 5: worker 1 went on to step 6" in cause
    assert isinstance(leaving.exception(5), WorkerFailedError)


# -- The service ------------------------------------------------------------------------------------------------------


@pytest.fixture
def service():
    coordinator = make_coordinator()
    server, port = serve(coordinator, "the secret", host="127.0.0.1", port=0)
    yield coordinator, f"127.0.0.1:{port}"
    server.stop(None)


def test_a_client_is_a_coordinator_elsewhere(service):
    coordinator, address = service
    client = CoordinatorClient(address, "the secret", heartbeat_timeout=5)
    calls = [coordinator, client]

    assert both(lambda rank: calls[rank].join(rank, f"host:{rank}", fingerprint="spec", timeout=5))[1].seed == 7
    assert both(lambda rank: exchange(calls[rank], rank, "k"))[1] == {0: b"k0", 1: b"k1"}
    assert client.heartbeat(1, 2).cause is None
    cause = client.abort(1, "failed", detail="why", step=2)
    assert cause == "worker 1 (127.0.0.2) failed at step 2: why"
    with pytest.raises(WorkerFailedError, match="failed at step 2: why"):
        client.leave(1, 2)


def test_large_values_pass(service):
    coordinator, address = service
    client = CoordinatorClient(address, "the secret", heartbeat_timeout=5)
    value = bytes(20_000_000)

    coordinator.exchange(0, "k", value=value, everyone=False, timeout=5)

    assert client.exchange(1, "k", value=b"", everyone=False, timeout=5) == {0: value}


def test_a_call_without_the_secret_is_refused(service):
    coordinator, address = service
    client = CoordinatorClient(address, "guessed", heartbeat_timeout=5)

    with pytest.raises(ClusterError, match=f"coordinator at {address} refused this worker"):
        client.abort(1, "failed", detail="why", step=0)
    assert coordinator.cause is None


def test_a_port_in_use_is_an_error_that_says_so(service):
    _, address = service
    with pytest.raises(ClusterError, match=r"the port is in use, .* Choose another AUTODIST_COORDINATOR_PORT"):
        serve(make_coordinator(), "secret", host="127.0.0.1", port=int(address.rpartition(":")[2]))


def test_a_worker_that_awaits_its_chief_may_come_first():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = CoordinatorClient(f"127.0.0.1:{port}", "the secret", heartbeat_timeout=5, awaits_chief=True)
    worker = ThreadPoolExecutor(1).submit(client.join, 1, "host:1", fingerprint="spec", timeout=20)
    time.sleep(0.5)
    coordinator = make_coordinator()
    server, _ = serve(coordinator, "the secret", host="::", port=port)

    coordinator.join(0, "host:0", fingerprint="spec", timeout=20)

    assert worker.result(20) == Membership("run", 7, ("host:0", "host:1"))
    server.stop(None)


def test_a_client_that_is_closed_lets_go_of_who_waits(service):
    coordinator, address = service
    client = CoordinatorClient(address, "the secret", heartbeat_timeout=5)
    waiting = ThreadPoolExecutor(1).submit(client.leave, 1, 0)
    until(lambda: coordinator._left)

    client.close()

    with pytest.raises(ChiefLostError, match="does not answer"):
        waiting.result(5)
    with pytest.raises(ChiefLostError, match="is given up"):
        client.abort(1, "failed", detail="why", step=0)


def test_a_coordinator_that_is_not_there_is_an_error_at_once():
    client = CoordinatorClient("127.0.0.1:1", "secret", heartbeat_timeout=5)
    with pytest.raises(ChiefLostError, match=r"127.0.0.1:1 does not answer"):
        client.heartbeat(1, 0)


THREE = (*ADDRESSES, "127.0.0.3")


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
