"""Clusters of worker processes that run one test case after another. The test process itself is no member of any.

It owns the processes and the way to them; what a case does is the case's own. A start costs seconds of each core, so
`Clusters` keeps those of a session of pytest, one for each shape.
"""

import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil

from tests.support.cluster_worker import ADDRESS_VARIABLE, AUTHKEY_VARIABLE
from tests.support.processes import kill

ROOT = Path(__file__).resolve().parents[2]

START_SECONDS = 120.0
CASE_SECONDS = 240.0
"""Many times what a case takes on an idle machine: what does not stand still may be slow on a busy one."""
END_SECONDS = 15.0
_OTHERS_SECONDS = 5.0
"""How long the other workers may take to answer once one has failed: they may wait for it in a collective."""
_POLL_SECONDS = 0.25
_OUTPUT_LINES = 120
_MOST_MEMORY = 2 << 30
"""Bytes of a process that runs no further module's cases: programs stay in TensorFlow's memory."""
_MOST_CLUSTERS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """A cluster on this machine: how many replicas (CPU devices) each worker has."""

    name: str
    replicas: tuple[int, ...]

    @property
    def num_workers(self) -> int:
        return len(self.replicas)

    @property
    def num_replicas(self) -> int:
        return sum(self.replicas)

    def resource_spec(self) -> str:
        """Its resource spec, as YAML."""
        lines = ["nodes:"]
        for rank, count in enumerate(self.replicas):
            chief = ", chief: true" if rank == 0 else ""
            lines.append(f"  - {{address: 127.0.0.{rank + 1}, cpus: {list(range(count))}{chief}}}")
        return "\n".join(lines) + "\n"


ONE_DEVICE = Shape("1-worker-1-replica", (1,))
TWO_REPLICAS = Shape("1-worker-2-replicas", (2,))
TWO_WORKERS = Shape("2-workers", (1, 1))
UNEVEN_WORKERS = Shape("2-workers-2+1-replicas", (2, 1))
THREE_WORKERS = Shape("3-workers", (1, 1, 1))
SHAPES = (TWO_REPLICAS, TWO_WORKERS, UNEVEN_WORKERS, THREE_WORKERS)
"""What synchronous training is tried on."""


class CaseFailedError(AssertionError):
    """A case failed on a worker, or did not end; the message holds every failed worker's traceback."""


class ClusterStartError(RuntimeError):
    """The workers of a cluster did not all come up; the message holds their output."""


class _Worker(NamedTuple):
    rank: int
    process: psutil.Process
    """Found while it ran, as its id may be another's afterwards."""
    connection: Connection


class Cluster:
    """One cluster's processes: started when first needed, and anew after a failure that may leave them waiting."""

    def __init__(self, shape: Shape, directory: Path):
        self.shape = shape
        self._directory = directory
        self._starts = 0
        self._chief: subprocess.Popen[bytes] | None = None
        self._workers: list[_Worker] = []

    def run(self, case: Callable[..., Any], *, timeout: float = CASE_SECONDS, **arguments: Any) -> list[Any]:
        """What `case(**arguments)` returns on each worker, by rank.

        Args:
            case: a function of a module; every worker imports the module and calls it.
            timeout: how long it may take, in seconds; a start of the cluster is not counted.
            arguments: must be picklable, as must be the results.

        Raises:
            CaseFailedError: a worker raised, ended, or was late.
        """
        if self._chief is None:
            self._start()
        for worker in self._workers:
            worker.connection.send((case.__module__, case.__qualname__, arguments))
        results, failures = self._collect(time.monotonic() + timeout)
        if not failures:
            return [results[rank] for rank in range(self.shape.num_workers)]
        late = [rank for rank in range(self.shape.num_workers) if rank not in results and rank not in failures]
        for rank in late:
            failures[rank] = "no answer in time"
        output = self.output()
        if self.shape.num_workers > 1 or late:
            self.kill()
        told = "\n".join(f"--- worker {rank}: {text}" for rank, text in sorted(failures.items()))
        raise CaseFailedError(f"{case.__qualname__}({arguments}) on {self.shape.name}:\n{told}\n--- output:\n{output}")

    def process_ids(self) -> list[int]:
        """The workers' processes, by rank."""
        return [worker.process.pid for worker in self._workers]

    def memory(self) -> int:
        """The bytes that its largest process holds; 0 where it does not run."""
        held = [0]
        for worker in self._workers:
            with suppress(psutil.NoSuchProcess):
                held.append(worker.process.memory_info().rss)
        return max(held)

    def output(self) -> str:
        """The end of what the workers have printed."""
        path = self._output_path
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(lines[-_OUTPUT_LINES:])

    def close(self) -> int | None:
        """Ask all workers to end; returns the chief's exit code, None where it was not running or had to be killed."""
        if self._chief is None:
            return None
        for worker in self._workers:
            with suppress(OSError):
                worker.connection.send(None)
        try:
            return self._chief.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.kill()

    def kill(self) -> None:
        """End all processes, whatever they do."""
        if self._chief is None:
            return
        if self._chief.poll() is None:
            self._chief.kill()
            self._chief.wait()
        kill(worker.process for worker in self._workers)
        for worker in self._workers:
            worker.connection.close()
        self._chief, self._workers = None, []

    @property
    def _output_path(self) -> Path:
        return self._directory / f"output-{self._starts}.txt"

    def _start(self) -> None:
        self._starts += 1
        spec = self._directory / "resources.yaml"
        spec.write_text(self.shape.resource_spec())
        authkey = secrets.token_bytes(16)
        with Listener(("127.0.0.1", 0), authkey=authkey) as listener, self._output_path.open("wb") as output:
            host, port = listener.address
            own = {name: value for name, value in os.environ.items() if not name.startswith("AUTODIST_")}
            environment = own | {
                "AUTODIST_RESOURCE_SPEC": str(spec),
                "AUTODIST_OUTPUT": "all",
                # Cases are not about it, and two cores may be busy with the processes of several clusters.
                "AUTODIST_HEARTBEAT_TIMEOUT": "120",
                ADDRESS_VARIABLE: f"{host}:{port}",
                AUTHKEY_VARIABLE: authkey.hex(),
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "PYTHONUNBUFFERED": "1",
                "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
                "CUDA_VISIBLE_DEVICES": "-1",
            }
            self._chief = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "support" / "cluster_worker.py")],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
            )
            self._workers = sorted(self._accept(listener))
        if [worker.rank for worker in self._workers] != list(range(self.shape.num_workers)):
            output_text = self.output()
            came = [worker.rank for worker in self._workers]
            self.kill()
            raise ClusterStartError(
                f"of the {self.shape.num_workers} workers of {self.shape.name}, ranks {came} came up\n{output_text}"
            )

    def _accept(self, listener: Listener) -> list[_Worker]:
        """The workers that connect in time, before the chief ends."""
        accepted: queue.SimpleQueue[Connection] = queue.SimpleQueue()

        def accept() -> None:
            for _ in range(self.shape.num_workers):
                with suppress(Exception):  # a connection that is none of ours, or the listener's end
                    accepted.put(listener.accept())

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        workers: list[_Worker] = []
        deadline = time.monotonic() + START_SECONDS
        while len(workers) < self.shape.num_workers and time.monotonic() < deadline:
            try:
                connection = accepted.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._chief is not None and self._chief.poll() is not None:
                    break
                continue
            if connection.poll(END_SECONDS):
                rank, process_id = connection.recv()
                with suppress(psutil.NoSuchProcess):
                    workers.append(_Worker(rank, psutil.Process(process_id), connection))
        for _ in range(self.shape.num_workers - len(workers)):  # wakes the thread from accept()
            with suppress(OSError):
                socket.create_connection(listener.address, timeout=1).close()
        thread.join(1)
        return workers

    def _collect(self, deadline: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Results and failures by rank; a worker in neither did not answer in time."""
        pending = {worker.connection: worker.rank for worker in self._workers}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while pending and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), timeout=left):
                rank = pending.pop(cast(Connection, connection))
                try:
                    succeeded, value = cast(Connection, connection).recv()
                except (EOFError, OSError):
                    succeeded, value = False, "ended"
                if succeeded:
                    results[rank] = value
                    continue
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
        if pending and not failures:
            failures = dict.fromkeys(pending.values(), "no answer in time")
        return results, failures


class Clusters:
    """The clusters of one session of pytest, by shape: as many as fit into memory, those that were used last."""

    def __init__(self, directory: Callable[[str], Path]):
        self._directory = directory
        self._kept: dict[Shape, Cluster] = {}

    def of(self, shape: Shape) -> Cluster:
        """The cluster of this shape, with little in its memory."""
        found = self._kept.pop(shape, None)
        if found is not None and found.memory() > _MOST_MEMORY:
            found.close()
        self._kept[shape] = found or Cluster(shape, self._directory(shape.name))
        while len(self._kept) > _MOST_CLUSTERS:
            self._kept.pop(next(iter(self._kept))).close()
        return self._kept[shape]

    def close(self) -> None:
        """End all processes."""
        while self._kept:
            self._kept.popitem()[1].close()


def same_on_all_workers(results: list[Any]) -> Any:
    """The result that every worker returned.

    Raises:
        AssertionError: they differ, in a single bit of an array.
    """
    first = _comparable(results[0])
    for rank, other in enumerate(results[1:], start=1):
        assert _comparable(other) == first, f"worker {rank} has another result than the chief: {other} != {results[0]}"
    return results[0]


def _comparable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    if hasattr(value, "tobytes"):
        return (str(value.dtype), value.shape, value.tobytes())
    return value
