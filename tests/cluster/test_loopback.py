"""Servers of local runs are reached from this machine's loopback addresses, and from nowhere else."""

import socket
from collections.abc import Iterator

import psutil
import pytest

from autodist_py.cluster import loopback
from autodist_py.cluster.loopback import closed_to_others, filter_others
from autodist_py.proto.errors import ClusterError
from tests.support.cluster_pool import TWO_WORKERS, Cluster

pytestmark = pytest.mark.alone

FAMILIES = [socket.AF_INET, socket.AF_INET6]


def other_addresses() -> list[tuple[int, str]]:
    """This machine's addresses that are none of loopback: what comes from them may come from another machine."""
    return [
        (family, one.address.partition("%")[0])
        for name, addresses in psutil.net_if_addrs().items()
        if psutil.net_if_stats()[name].isup
        for one in addresses
        for family in FAMILIES
        if one.family == family and not one.address.startswith(("127.", "::1", "fe80:"))
    ]


needs_another_address = pytest.mark.skipif(not other_addresses(), reason="this machine has loopback addresses only")


def connects(family: int, address: str, port: int) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect((address, port))
        except OSError:
            return False
        return True


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """On all addresses, IPv4 and IPv6, as TensorFlow's server."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=8) as server:
        yield server


@pytest.mark.parametrize(
    ("family", "address"), [*zip(FAMILIES, ["127.0.0.1", "::1"], strict=True), (socket.AF_INET, "127.0.0.9")]
)
def test_loopback_addresses_pass_the_filter(listening: socket.socket, family: int, address: str) -> None:
    filter_others(listening)
    assert connects(family, address, listening.getsockname()[1])


@needs_another_address
def test_other_addresses_do_not(listening: socket.socket) -> None:
    port = listening.getsockname()[1]
    assert [connects(family, address, port) for family, address in other_addresses()] == [True] * len(other_addresses())
    filter_others(listening)
    assert not any(connects(family, address, port) for family, address in other_addresses())


@needs_another_address
def test_who_came_before_the_filter_is_let_go(listening: socket.socket) -> None:
    family, address = other_addresses()[0]
    port = listening.getsockname()[1]
    with socket.create_connection((address, port)) as stranger, socket.create_connection(("127.0.0.1", port)) as own:
        accepted = [listening.accept()[0] for _ in range(2)]
        with closed_to_others(port):
            pass
        stranger.settimeout(2.0)
        assert stranger.recv(1) == b"", "it is still connected"
        own.sendall(b"x")
        assert [one.recv(1) for one in accepted if one.getpeername()[0].endswith("127.0.0.1")] == [b"x"]
        for one in accepted:
            one.close()
    assert family in FAMILIES


def test_a_server_that_did_not_start_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ClusterError, match=f"was to listen on port {port}"), closed_to_others(port):
        pass


def test_a_system_without_filters_is_warned_of(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loopback, "_ATTACH_FILTER", 9999)
    port = listening.getsockname()[1]
    with closed_to_others(port):
        pass
    (said,) = caplog.messages
    assert f"can reach TensorFlow's server of this worker, at port {port}" in said


def server_port() -> int:
    from autodist_py.cluster import tf_adapter

    return int(tf_adapter.server_target().rpartition(":")[2])


@needs_another_address
@pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
def test_tensorflows_servers_are_closed_to_other_machines(cluster: Cluster) -> None:
    for rank, port in enumerate(cluster.run(server_port)):
        assert connects(socket.AF_INET, f"127.0.0.{rank + 1}", port)
        assert not any(connects(family, address, port) for family, address in other_addresses())
