"""Coordinators of two workers or three, called from threads as workers do."""

from concurrent.futures import ThreadPoolExecutor

from autodist_py.cluster.coordinator.shell import Coordinator
from autodist_py.proto.errors import ClusterError

ADDRESSES = ("127.0.0.1", "127.0.0.2")
THREE = (*ADDRESSES, "127.0.0.3")


def make_coordinator(heartbeat_timeout=5.0, addresses=ADDRESSES):
    return Coordinator(addresses, run_id="run", seed=7, spec="spec", heartbeat_timeout=heartbeat_timeout)


def both(call):
    """The results of `call(rank)` for both ranks at once; an error is a result."""

    def result(rank):
        try:
            return call(rank)
        except ClusterError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(result, (0, 1)))


def joined(heartbeat_timeout=5.0, addresses=ADDRESSES):
    coordinator = make_coordinator(heartbeat_timeout, addresses)
    with ThreadPoolExecutor(len(addresses)) as threads:
        ranks = range(len(addresses))
        list(threads.map(lambda rank: coordinator.join(rank, f"host:{rank}", spec="spec", timeout=5), ranks))
    return coordinator


def exchange(coordinator, rank, key, *, everyone=True, timeout=5.0):
    return coordinator.exchange(rank, key, value=f"{key}{rank}".encode(), everyone=everyone, timeout=timeout)
