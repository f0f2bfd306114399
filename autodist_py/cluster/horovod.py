"""Horovod as an engine of this process: initialized once, as a member of our cluster, when a program first asks for it.

horovodrun takes no part: ranks and addresses are the cluster's. Horovod's own rendezvous, by which its processes find
each other, runs in the chief's process meanwhile. How ops are made is `kernel/collectives/horovod_adapter.py`'s.

A worker that ends breaks the others' connections: all-reduces then raise one of TensorFlow's errors on them. Where one
lives but does not come, Horovod is shut down when the run fails, on all workers alike, and all-reduces raise. One that
is silent holds up Horovod's own thread, which takes no order then; it gives up by itself after the heartbeat's timeout,
and a little more, so that all-reduces raise when the cause is known. It listens between steps, too, where a program's
`timeout_seconds` does not count, so it cannot give up as early as that; then the grace period ends the process, if that
is not longer than the heartbeat's timeout.
"""

import atexit
import ipaddress
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from autodist_py.cluster.cluster import Cluster
from autodist_py.cluster.exit_stack import Ending, at_exit
from autodist_py.cluster.ports import bind_error
from autodist_py.kernel.collectives import horovod_adapter
from autodist_py.proto.errors import AutoDistError, ClusterError, StrategyError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.proto.strategy import Strategy

_LATER_SECONDS = 1
"""How much longer Horovod waits for a silent worker than the cluster, which can name it."""

_OTHER_ADDRESS = "Give the chief one in the resource spec, or use all_reduce_spec AUTO or RING"

_KINDS = {kind.__name__: kind for kind in (StrategyError, ClusterError)}
"""What is wrong with a worker: its Horovod, or its host."""


def is_asked_for(strategy: Strategy) -> bool:
    """Whether gradients of `strategy` travel between workers by Horovod."""
    synchronizers = (one for node in strategy.node_config for one in node.every_synchronizer)
    return strategy.consistency.is_bsp and any(
        one.as_all_reduce and one.as_all_reduce.spec == "HOROVOD" for one in synchronizers
    )


def obstacle(cluster: Cluster, resources: ResourceSpec, key: Callable[[str], str]) -> AutoDistError | None:
    """Why Horovod cannot be started on the first worker that has a reason: all are told the same. None: it can.

    Every worker calls it.

    Args:
        cluster: the workers.
        resources: their nodes.
        key: makes a key for something that all workers do together, of a word for it.

    Returns:
        A StrategyError: the worker has no Horovod for its TensorFlow. A ClusterError: its host does not serve, or the
        script has started Horovod with other ranks. The message names the worker, and what to do.
    """
    own = b""
    try:
        _require_startable(cluster, resources)
    except tuple(_KINDS.values()) as error:
        own = f"{type(error).__name__} {error}".encode()
    for rank, found in sorted(cluster.compare(key("horovod"), own).items()):
        if found:
            kind, _, words = found.decode().partition(" ")
            return _KINDS[kind](f"worker {rank} ({resources.workers[rank].address}): {words}")
    return None


def _require_startable(cluster: Cluster, resources: ResourceSpec) -> None:
    """This worker has what Horovod needs to start, or to go on."""
    library = horovod_adapter.library()
    if library.is_initialized():
        _require_ours(library, cluster)
        return
    node = resources.workers[cluster.rank]
    _require_own_name(node)
    problem = bind_error(socket.AF_INET, node.address) if cluster.is_chief else ""
    if problem:
        raise ClusterError(
            f"Horovod's rendezvous listens at the chief's IPv4 address. Received: {node.address}: {problem}. "
            f"{_OTHER_ADDRESS}"
        )


def start(cluster: Cluster, resources: ResourceSpec, key: Callable[[str], str]) -> None:
    """Horovod is initialized on every worker, each of which calls this, as there is no `obstacle`; or it was before.

    Raises:
        ClusterError: it does not start, though nothing seemed to be in its way.
    """
    library = horovod_adapter.library()
    if library.is_initialized():
        return
    node = resources.workers[cluster.rank]
    with _rendezvous(library, cluster, resources) as address:
        # Who starts waits for others no longer than in a step, and missing one ends the process: so all start together.
        everyone = cluster.compare(key("rendezvous"), address.encode())
        host, _, port = everyone[0].decode().rpartition(":")
        with _environment(_variables(cluster, node, host, port)):
            try:
                library.init()
            except ValueError as error:
                raise ClusterError(f"Horovod cannot start: {error}. Use all_reduce_spec RING") from error
        _end_with_run(library, cluster)
        cluster.barrier(key("horovod started"))


def _end_with_run(library: Any, cluster: Cluster) -> None:
    """Horovod is shut down when the run fails, so that what waits in it raises, and else when the script has ended.

    Its own way to do that at exit could come while ours waits for its thread; two that wait for one end the process.
    """
    lock = threading.Lock()

    def end() -> None:
        with lock:
            library.shutdown()  # Nothing, where it is.

    atexit.unregister(library.shutdown)
    at_exit(Ending.HOROVOD, end)
    cluster.on_failure(lambda _: threading.Thread(target=end, name="autodist-horovod-end", daemon=True).start())


def _require_ours(library: Any, cluster: Cluster) -> None:
    found = (library.rank(), library.size())
    if found != (cluster.rank, cluster.num_workers):
        raise ClusterError(
            "with all_reduce_spec HOROVOD, Horovod's ranks are those of the workers. Received: rank "
            f"{found[0]} of {found[1]}, on worker {cluster.rank} of {cluster.num_workers}. Leave out hvd.init()"
        )


def _require_own_name(node: NodeSpec) -> None:
    """Gloo listens at the first address of the host's own name that it can bind; without one it ends the process."""
    name = socket.gethostname()
    fix = f"add the line '{node.address} {name}' to this host's /etc/hosts"
    try:
        found = [(info[0], str(info[4][0])) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise ClusterError(
            f"Horovod needs a host that resolves its own name. Received: '{name}', {error.strerror}; {fix}"
        ) from error
    own = next((address for family, address in found if not bind_error(family, address)), None)
    if own is None or (ipaddress.ip_address(own).is_loopback and not node.is_loopback):
        raise ClusterError(
            "Horovod needs a host whose own name stands for an address of it that others reach. Received: "
            f"'{name}' at {', '.join(address for _, address in found)}; {fix}"
        )


@contextmanager
def _rendezvous(library: Any, cluster: Cluster, resources: ResourceSpec) -> Iterator[str]:
    """Horovod's rendezvous answers at this address (host:port), where this is the chief; elsewhere it is ""."""
    if not cluster.is_chief:
        yield ""
        return
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    host = resources.chief.address
    try:
        server = RendezvousHTTPServer((host, 0), RendezvousHandler, 0)
    except OSError as error:
        raise ClusterError(
            f"Horovod's rendezvous listens at the chief's IPv4 address. Received: {host}, {error}; {_OTHER_ADDRESS}"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="autodist-horovod", daemon=True)
    thread.start()
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _variables(cluster: Cluster, node: NodeSpec, host: str, port: str) -> Mapping[str, str]:
    """What Horovod reads when it starts. A node is one worker, so each worker is the only one of its host."""
    return {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(cluster.heartbeat_timeout) + _LATER_SECONDS),
        "HOROVOD_HOSTNAME": node.address,
        "HOROVOD_RANK": str(cluster.rank),
        "HOROVOD_SIZE": str(cluster.num_workers),
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": str(cluster.rank),
        "HOROVOD_CROSS_SIZE": str(cluster.num_workers),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
    }


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The variables are set within the context, and as before after it."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
