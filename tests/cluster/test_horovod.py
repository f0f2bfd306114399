"""How Horovod is started in the processes of a run, and what keeps it from that."""

import re
import socket
import sys
from collections.abc import Callable
from os import environ
from typing import Any

import numpy as np
import pytest

from autodist_py import AutoDist
from autodist_py.cluster import horovod
from autodist_py.cluster.cluster import SoloCluster
from autodist_py.kernel.collectives import horovod_adapter
from autodist_py.proto.errors import ClusterError, StrategyError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.strategy_builders.all_reduce import AllReduce
from tests.support.by_horovod import ON_TWO, descending, is_installed
from tests.support.cluster_pool import Cluster

ONE = ResourceSpec((NodeSpec("127.0.0.1"),))


class Started:
    """Horovod as worker 1 of two meets it, and the cluster that it is started in; both note what is done."""

    rank, num_workers, is_chief, heartbeat_timeout = 1, 2, False, 60.0

    def __init__(self) -> None:
        self.done: list[str] = []
        self.variables: dict[str, str] = {}
        self.shutdown = lambda: None

    def compare(self, key: str, value: bytes) -> dict[int, bytes]:
        self.done.append(key)
        return {0: b"127.0.0.1:1234" if key == "rendezvous" else value, 1: value}

    def barrier(self, key: str) -> None:
        self.done.append(key)

    def on_failure(self, callback: Callable[[str], None]) -> Callable[[], None]:
        return lambda: None

    def is_initialized(self) -> bool:
        return "init" in self.done

    def init(self) -> None:
        self.done.append("init")
        self.variables = {name: value for name, value in environ.items() if name.startswith("HOROVOD_")}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """As it is after `start`."""
    both: Any = Started()
    monkeypatch.setattr(horovod_adapter, "library", lambda: both)
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.2")
    nodes = (NodeSpec("127.0.0.1", chief=True), NodeSpec("127.0.0.2"))
    horovod.start(both, ResourceSpec(nodes), lambda word: word)
    return both


def test_it_starts_when_every_worker_is_about_to(started: Started) -> None:
    assert started.done == ["rendezvous", "init", "horovod started"]
    assert started.variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "1234"


def test_it_waits_for_a_silent_worker_longer_than_its_heartbeat_may_be_missing(started: Started) -> None:
    assert int(started.variables["HOROVOD_GLOO_TIMEOUT_SECONDS"]) == started.heartbeat_timeout + 1


@is_installed
@pytest.mark.parametrize(
    ("address", "found", "words"),
    [
        ("127.0.0.1", None, r"resolves its own name. Received: 'pluto', .*; add the line '127.0.0.1 pluto'"),
        ("10.9.8.7", "127.0.1.1", r"others reach. Received: 'pluto' at 127.0.1.1; add the line '10.9.8.7 pluto'"),
        ("10.9.8.7", "10.9.8.6", r"others reach. Received: 'pluto' at 10.9.8.6; add the line '10.9.8.7 pluto'"),
    ],
    ids=["unknown", "loopback", "of-another-host"],
)
def test_a_host_whose_own_name_does_not_serve_is_refused_before_horovod_ends_its_process(
    monkeypatch: pytest.MonkeyPatch, address: str, found: str | None, words: str
) -> None:
    def resolve(*_: Any, **__: Any) -> list[Any]:
        if found is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0))]

    monkeypatch.setattr(socket, "gethostname", lambda: "pluto")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    obstacle = horovod.obstacle(SoloCluster(ONE), ResourceSpec((NodeSpec(address),)), str)
    assert isinstance(obstacle, ClusterError)
    assert re.search(rf"^worker 0 \({address}\): Horovod needs a host .*{words}", str(obstacle))


@is_installed
def test_a_chief_at_whose_address_the_rendezvous_cannot_listen_is_refused() -> None:
    obstacle = horovod.obstacle(SoloCluster(ONE), ResourceSpec((NodeSpec("::1"),)), str)
    assert isinstance(obstacle, ClusterError)
    assert re.search(r"^worker 0 \(::1\): .* the chief's IPv4 address. Received: ::1: .* AUTO or RING", str(obstacle))


@is_installed
def test_a_rendezvous_that_cannot_listen_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_adapter.library(), "is_initialized", lambda: False)
    words = r"rendezvous listens at the chief's IPv4 address. Received: 192.0.2.1, \[Errno \d+\] .*; Give the chief one"
    with pytest.raises(ClusterError, match=words):
        horovod.start(SoloCluster(ONE), ResourceSpec((NodeSpec("192.0.2.1"),)), str)


def missing_on_worker_1() -> str:
    strategy = AllReduce(all_reduce_spec="HOROVOD")
    with AutoDist(strategy_builder=strategy) as autodist, pytest.MonkeyPatch.context() as patch:
        if autodist.rank == 1:
            patch.setitem(sys.modules, "horovod", None)
        step, _ = descending(autodist)
        with pytest.raises(StrategyError) as raised:
            step(np.ones([4, 3]))
    return str(raised.value)


@is_installed
@ON_TWO
def test_where_one_worker_lacks_it_all_are_told_which(cluster: Cluster) -> None:
    for told in cluster.run(missing_on_worker_1):
        assert re.match(r"worker 1 \(127.0.0.2\): all_reduce_spec HOROVOD needs Horovod, which is not installed", told)
