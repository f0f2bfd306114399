"""The coordinator's gRPC service, and its clients."""

import math
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from autodist_py.cluster.coordinator import service as service_module
from autodist_py.cluster.coordinator.api import HeartbeatReply, Membership
from autodist_py.cluster.coordinator.service import ChiefLostError, CoordinatorClient, serve
from autodist_py.cluster.step_status import STOPPING_SECONDS, StepStatus
from autodist_py.proto import coordinator_pb2 as pb
from autodist_py.proto import coordinator_pb2_grpc as pb_grpc
from autodist_py.proto.errors import ClusterError, WorkerFailedError
from tests.support.coordinators import both, exchange, make_coordinator
from tests.support.processes import until

pytestmark = pytest.mark.alone  # Some take a free port, and bind it later.


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

    assert both(lambda rank: calls[rank].join(rank, f"host:{rank}", spec="spec", timeout=5))[1].seed == 7
    assert both(lambda rank: exchange(calls[rank], rank, "k"))[1] == {0: b"k0", 1: b"k1"}
    assert client.heartbeat(1, 2).cause is None
    cause = client.abort(1, "failed", detail="why", step=2)
    assert cause == "worker 1 (127.0.0.2) failed at step 2: why"
    with pytest.raises(WorkerFailedError, match="failed at step 2: why"):
        client.leave(1, 2)


def start_none(*_, **__):
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_calls_find_threads_that_are_ready_again_after_each(monkeypatch):
    pool = service_module._DaemonThreads(2)
    monkeypatch.setattr(service_module, "threading", SimpleNamespace(Thread=start_none))
    for _ in range(3):
        together = threading.Barrier(2)
        calls = [pool.submit(together.wait, 5) for _ in range(2)]
        assert sorted(call.result(5) for call in calls) == [0, 1]
        until(lambda: pool._num_ready._value == 2, 5)


def test_calls_at_the_end_need_no_new_thread(service, monkeypatch):
    """Python 3.12 starts none in `atexit`, where workers wait for one another to leave, and heartbeats go on."""
    coordinator, address = service
    client = CoordinatorClient(address, "the secret", heartbeat_timeout=5)
    both(lambda rank: [coordinator, client][rank].join(rank, f"host:{rank}", spec="spec", timeout=5))

    monkeypatch.setattr(service_module, "threading", SimpleNamespace(Thread=start_none))
    left = threading.Event()

    def leave() -> None:
        client.leave(1, 3)
        left.set()

    threading.Thread(target=leave, daemon=True).start()
    assert client.heartbeat(1, 3).cause is None
    threading.Thread(target=coordinator.leave, args=[0, 3], daemon=True).start()
    assert left.wait(5)


def test_a_failure_that_waits_for_what_others_say_of_another_is_no_lost_chief(service):
    coordinator, address = service
    client = CoordinatorClient(address, "the secret", heartbeat_timeout=STOPPING_SECONDS / 2)
    both(lambda rank: coordinator.join(rank, f"host:{rank}", spec="spec", timeout=5))
    coordinator.heartbeat(0, 8, StepStatus(8, 0.0, "dense gradients of w"))
    coordinator.process_ended(1, -9)

    cause = client.abort(0, "failed", detail="why", step=8)

    assert cause.startswith("worker 1 (127.0.0.2) ended") and cause.endswith("that combines dense gradients of w")


def test_what_a_heartbeat_says_and_is_told_is_the_same_elsewhere():
    heard = []
    pulse = HeartbeatReply("why", finished=True, lost=(1, 3), suspicion="who")

    class Hearing:
        num_workers = 2

        def heartbeat(self, rank, step, waits, *, caller):
            heard.append((rank, step, waits))
            return pulse

    hearing: Any = Hearing()
    server, port = serve(hearing, "the secret", host="127.0.0.1", port=0)
    try:
        client = CoordinatorClient(f"127.0.0.1:{port}", "the secret", heartbeat_timeout=5)
        waits = StepStatus(7, 2.5, "dense gradients of w", "dense gradients of v")
        assert client.heartbeat(1, 9, waits) == pulse
        assert heard == [(1, 9, waits)]
        pulse = HeartbeatReply(None, finished=False)
        assert client.heartbeat(1, 9) == pulse
    finally:
        server.stop(None)


def test_large_values_pass(service):
    coordinator, address = service
    client = CoordinatorClient(address, "the secret", heartbeat_timeout=5)
    value = bytes(20_000_000)

    coordinator.exchange(0, "k", value=value, everyone=False, timeout=5)

    assert client.exchange(1, "k", value=b"", everyone=False, timeout=5) == {0: value}


def test_values_of_all_sizes_come_back_as_they_were(service):
    coordinator, address = service
    client = CoordinatorClient(address, "the secret", heartbeat_timeout=5)
    calls = [coordinator, client]
    for number, size in enumerate((0, 1, 2**20 - 1, 2**20, 2**20 + 1, 5 * 2**20 + 3)):
        values = [np.random.default_rng(rank + number).bytes(size) for rank in (0, 1)]
        answers = both(
            lambda rank, values=values, key=str(number): calls[rank].exchange(
                rank, key, value=values[rank], everyone=True, timeout=10
            )
        )
        assert answers == [dict(enumerate(values))] * 2


def test_a_call_whose_client_is_gone_is_given_up(service):
    coordinator, address = service
    both(lambda rank: coordinator.join(rank, f"host:{rank}", spec="spec", timeout=5))
    client = CoordinatorClient(address, "the secret", heartbeat_timeout=5)
    with ThreadPoolExecutor(3) as threads:
        calls = [
            threads.submit(exchange, client, 1, "k", timeout=600.0),
            threads.submit(client.hear, 1, "k", step=0, position=0, timeout=600.0),
            threads.submit(client.leave, 1, 1),
        ]
        until(lambda: len(coordinator._run._waiting) == len(calls))
        client.close()
        assert all(isinstance(call.exception(10), ChiefLostError) for call in calls)
    until(lambda: coordinator._run._waiting == {} and coordinator._waiters == {})

    assert exchange(coordinator, 0, "k") == {0: b"k0", 1: b"k1"}
    assert list(coordinator._run._exchanges) == [] and coordinator._run.answers == {}


@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_a_rank_that_there_is_not_is_an_error_that_says_so(service, rank):
    client = CoordinatorClient(service[1], "the secret", heartbeat_timeout=5)
    calls = [
        lambda: client.join(rank, "host:1", spec="spec", timeout=5),
        lambda: client.exchange(rank, "k", value=b"", everyone=False, timeout=5),
        lambda: client.heartbeat(rank, 1),
        lambda: client.abort(rank, "failed", detail="why", step=1),
        lambda: client.leave(rank, 1),
    ]
    for call in calls:
        with pytest.raises(ClusterError, match=f"Received: {rank}"):
            call()


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 1e10, -1.0])
def test_seconds_that_nobody_can_wait_for_are_refused(service, seconds):
    requests = {
        "Join": pb.JoinRequest(rank=1, server="host:1", spec="spec", timeout_seconds=seconds),
        "Exchange": iter([pb.ExchangeRequest(rank=1, key="k", timeout_seconds=seconds)]),
        "Heartbeat": pb.HeartbeatRequest(rank=1, limit_seconds=seconds),
        "Hear": pb.HearRequest(rank=1, key="k", timeout_seconds=seconds),
    }
    assert refused(service, requests) == [
        f"{name} of a {method}Request must be a number of seconds from 0 to 1000000000; got {seconds}"
        for method, name in zip(requests, ["timeout_seconds"] * 2 + ["limit_seconds", "timeout_seconds"], strict=True)
    ]


def test_a_place_before_the_first_is_refused(service):
    request = pb.HearRequest(rank=1, key="k", position=-1, timeout_seconds=5)
    assert refused(service, {"Hear": request}) == ["position of a HearRequest must be an integer >= 0; got -1"]


def refused(service, requests: dict[str, Any]) -> list[str]:
    """What the coordinator says to requests, by method, that ask for something wrong."""
    said = []
    with grpc.insecure_channel(service[1]) as channel:
        stub: Any = pb_grpc.CoordinatorStub(channel)
        for method, request in requests.items():
            with pytest.raises(grpc.RpcError) as refusal:
                list(getattr(stub, method)(request, timeout=20, metadata=(("autodist-secret", "the secret"),)) or ())
            error: Any = refusal.value
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            said.append(error.details())
    return said


METHODS = ("Join", "Exchange", "Heartbeat", "Abort", "Leave", "NoSuch")


def raw_call(channel: grpc.Channel, method: str, content: bytes, metadata: Any = ()) -> grpc.StatusCode:
    call: Any = channel.unary_unary(f"/autodist.proto.Coordinator/{method}")
    with pytest.raises(grpc.RpcError) as refusal:
        call(content, timeout=20, metadata=metadata)
    error: Any = refusal.value
    return error.code()


def test_a_large_call_without_the_secret_takes_no_memory(service):
    """What a stranger sends is not read: the chief holds no more than what the network's windows let in."""
    code = """
import sys, grpc
channel = grpc.insecure_channel(sys.argv[1], options=[("grpc.max_send_message_length", -1)])
for method in sys.argv[2:]:
    try:
        channel.unary_unary(f"/autodist.proto.Coordinator/{method}")(bytes(200_000_000), timeout=20)
    except grpc.RpcError as error:
        print(error.code().name)
"""
    before = psutil.Process().memory_info().rss
    peak = [before]
    stop = threading.Event()

    def watch():
        while not stop.wait(0.005):
            peak.append(psutil.Process().memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    ended = subprocess.run(
        [sys.executable, "-c", code, service[1], *METHODS], capture_output=True, text=True, timeout=60, check=True
    )
    stop.set()
    watching.join()
    assert ended.stdout.split() == ["UNAUTHENTICATED"] * len(METHODS)
    assert max(peak) - before < 100_000_000  # One body is 200 MB.


def test_refusals_are_counted_and_logged_once_a_minute(service, caplog):
    with grpc.insecure_channel(service[1]) as channel:
        codes = {raw_call(channel, method, b"") for method in METHODS * 50}
    assert codes == {grpc.StatusCode.UNAUTHENTICATED}
    (record,) = [record for record in caplog.records if "refused" in record.message]
    assert "refused 1 calls without the run's secret" in record.message


def test_a_call_without_the_secret_is_refused(service):
    coordinator, address = service
    client = CoordinatorClient(address, "guessed", heartbeat_timeout=5)

    with pytest.raises(ClusterError, match=f"coordinator at {address} refused this worker"):
        client.abort(1, "failed", detail="why", step=0)
    assert coordinator.cause is None


WRONG_SECRETS = (
    (),
    (("autodist-secret", ""),),
    (("autodist-secret", "the secre"),),
    (("autodist-secret", "the secrets"),),
    (("autodist-secrets", "the secret"),),
)


@pytest.mark.parametrize("metadata", WRONG_SECRETS, ids=["none", "empty", "shorter", "longer", "elsewhere"])
def test_each_method_is_refused_without_exactly_the_secret(service, metadata):
    with grpc.insecure_channel(service[1]) as channel:
        codes = {method: raw_call(channel, method, b"", metadata) for method in METHODS}
    assert codes == dict.fromkeys(METHODS, grpc.StatusCode.UNAUTHENTICATED)


def test_connections_that_say_nothing_or_nonsense_harm_nobody(service):
    coordinator, address = service
    host, _, port = address.partition(":")
    begun = [b"", b"PRI * HTTP/2.0", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"\xff" * 1000]
    sockets = [socket.create_connection((host, int(port)), timeout=5) for _ in begun * 10]
    try:
        for connection, content in zip(sockets, begun * 10, strict=True):
            connection.sendall(content)
        calls: list[Any] = [coordinator, CoordinatorClient(address, "the secret", heartbeat_timeout=5)]
        both(lambda rank: calls[rank].join(rank, f"host:{rank}", spec="spec", timeout=5))
        assert both(lambda rank: exchange(calls[rank], rank, "k"))[1] == {0: b"k0", 1: b"k1"}
    finally:
        for connection in sockets:
            connection.close()
    assert coordinator.cause is None


def test_two_runs_on_one_machine_do_not_take_each_other_for_their_own(service):
    other = make_coordinator()
    server, port = serve(other, "another secret", host="127.0.0.1", port=0)
    try:
        with pytest.raises(ClusterError, match="refused this worker"):
            CoordinatorClient(service[1], "another secret", heartbeat_timeout=5).abort(1, "failed", detail="", step=0)
        own = CoordinatorClient(f"127.0.0.1:{port}", "another secret", heartbeat_timeout=5)
        own.abort(1, "failed", detail="", step=0)
    finally:
        server.stop(None)
    assert service[0].cause is None and other.cause is not None


def test_a_port_in_use_is_an_error_that_says_so(service):
    _, address = service
    with pytest.raises(ClusterError, match=r"the port is in use, .* Choose another AUTODIST_COORDINATOR_PORT"):
        serve(make_coordinator(), "secret", host="127.0.0.1", port=int(address.rpartition(":")[2]))


def test_a_worker_that_awaits_its_chief_may_come_first():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = CoordinatorClient(f"127.0.0.1:{port}", "the secret", heartbeat_timeout=5, awaits_chief=True)
    states: list[grpc.ChannelConnectivity] = []
    client._channel.subscribe(states.append)
    worker = ThreadPoolExecutor(1).submit(client.join, 1, "host:1", spec="spec", timeout=20)
    until(lambda: grpc.ChannelConnectivity.TRANSIENT_FAILURE in states)  # It has tried, and nobody was there.
    coordinator = make_coordinator()
    server, _ = serve(coordinator, "the secret", host="::", port=port)

    coordinator.join(0, "host:0", spec="spec", timeout=20)

    assert worker.result(20) == Membership("run", 7, ("host:0", "host:1"))
    server.stop(None)


def test_a_client_that_is_closed_lets_go_of_who_waits(service):
    coordinator, address = service
    client = CoordinatorClient(address, "the secret", heartbeat_timeout=5)
    waiting = ThreadPoolExecutor(1).submit(client.leave, 1, 0)
    until(lambda: coordinator._run._roster.left)

    client.close()

    with pytest.raises(ChiefLostError, match="does not answer"):
        waiting.result(5)
    with pytest.raises(ChiefLostError, match="is given up"):
        client.abort(1, "failed", detail="why", step=0)


def test_a_coordinator_that_is_not_there_is_an_error_at_once():
    client = CoordinatorClient("127.0.0.1:1", "secret", heartbeat_timeout=5)
    with pytest.raises(ChiefLostError, match=r"127.0.0.1:1 does not answer"):
        client.heartbeat(1, 0)
