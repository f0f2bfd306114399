"""`join_cluster`: the run that this process is one worker of, as a `Cluster`.

A process belongs to one cluster at most, as TensorFlow's server cannot be stopped. How a program runs on the cluster is
`executor.py`'s.
"""

import math
import secrets
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Protocol

from autodist_py.cluster import tf_adapter
from autodist_py.cluster.last_words import keep_from_children
from autodist_py.cluster.launch.early import early_launcher
from autodist_py.cluster.member import EXCHANGE_SECONDS, HEAR_SECONDS, WorkerCluster
from autodist_py.cluster.progress import Progress
from autodist_py.cluster.run_failure import CAUSE_SECONDS
from autodist_py.config.settings import RANK_VARIABLE, Settings
from autodist_py.proto.errors import ClusterError, WorkerFailedError
from autodist_py.proto.resource_spec import ResourceSpec


class Cluster(Protocol):
    """The workers of a run, seen from one of them."""

    step: int
    """The last step begun, 0 before the first. Count before a step, and only steps that every worker takes part in: a
    worker whose script ends at step n while another begins n + 1 ends the run."""

    next_instance_key: int
    """The first instance key that no collective of this process uses; whoever takes keys moves it on."""

    def add_steps(self, counter: Callable[[], int]) -> None:
        """Steps are also begun in graphs, where nobody sets `step`: `counter` tells how many. Any thread asks it."""
        ...

    @property
    def rank(self) -> int:
        """This worker's rank; 0 is the chief."""
        ...

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        ...

    @property
    def is_chief(self) -> bool:
        """Whether this is the chief."""
        ...

    @property
    def resources(self) -> ResourceSpec:
        """The nodes of the run; each is a worker."""
        ...

    @property
    def run_id(self) -> str:
        """The run's name, the same on all workers and of no other run."""
        ...

    @property
    def seed(self) -> int:
        """The run's random seed, of 31 bits: the chief's choice, the same on all workers."""
        ...

    def broadcast(self, key: str, value: bytes, *, timeout: float = EXCHANGE_SECONDS) -> bytes:
        """The chief's value, on every worker; each calls it with the key. Raises ClusterError when time is up."""
        ...

    def compare(self, key: str, value: bytes, *, timeout: float = EXCHANGE_SECONDS) -> dict[int, bytes]:
        """Every worker's value, by rank; each calls it with the key. Raises ClusterError when time is up."""
        ...

    def barrier(self, key: str, *, timeout: float = EXCHANGE_SECONDS) -> None:
        """Returns when every worker has called it with the key. Raises ClusterError when time is up."""
        ...

    def announce(self, key: str, make: Callable[[], bytes]) -> None:
        """The chief says what `make` returns to those who hear at this key and step. It waits for nobody."""
        ...

    def hear(self, key: str, *, timeout: float = HEAR_SECONDS) -> bytes | None:
        """What the chief announces with the key at the step that this worker is at, the n-th time for the n-th call.

        None: the chief has gone on without, to its next step, its end, or a place where it waits for this worker.
        Raises ClusterError when time is up; while the chief makes what it will announce, time stands still.
        """
        ...

    def abort(self, reason: str) -> None:
        """Ends the run on every worker, with this worker, its step and `reason` as the cause."""
        ...

    def check(self) -> None:
        """Raises WorkerFailedError, with the run's one cause, if the run has failed. Costs nothing."""
        ...

    def failure(self, *, wait: float = CAUSE_SECONDS) -> WorkerFailedError | None:
        """The run's failure, if it is known within `wait` seconds: to raise for an error that may be its effect."""
        ...

    def on_failure(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """`callback(cause)` is called, in another thread, when the run fails. Returns what takes that back."""
        ...

    def step_apart(self, expendable: Collection[int]) -> None:
        """From now on workers take steps by themselves, and can do without `expendable` ones; each worker says so."""
        ...

    def together(self, seconds: float, what: str) -> AbstractContextManager[None]:
        """Within it this worker takes a step that all workers take together, in which `what` is combined.

        The run ends when the step has waited so many seconds for a worker that has not begun it, or is not heard of;
        0: as long as that worker's heartbeats come.
        """
        ...

    @property
    def heartbeat_timeout(self) -> float:
        """For how many seconds a worker may be silent before it is lost, where no step has a shorter limit."""
        ...

    def stopped_in(self, what: str) -> None:
        """The step has raised in this collective; empty: in none. Say so before `failure` is asked."""
        ...

    def on_loss(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """`callback(rank)` is called, in another thread, for each worker that the run goes on without.

        Returns what takes that back.
        """
        ...

    def leave(self) -> None:
        """Returns when every worker has left; at the latest each does when its script has ended."""
        ...


def join_cluster(
    resources: ResourceSpec | None, settings: Settings, *, timeout: float | None = None, secret: str = ""
) -> Cluster:
    """The cluster of `resources`, joined by this process; the same one when it has joined before.

    With one node nothing is started. With several, the chief starts the others, unless
    they are there, and returns when all have joined.

    Args:
        resources: the nodes; each is a worker. None: those that the chief has told this worker, which it started.
        settings: the environment of this process.
        timeout: how many seconds all workers have to join; default: `settings.join_timeout`.
        secret: the run's, where workers are started by hand; "": it is the first line of standard input.

    Raises:
        ClusterError: the cluster cannot be joined: it is another than before, something eager exists already, a worker
            does not come, a port is in use.
        WorkerFailedError: another worker failed meanwhile.
    """
    keep_from_children(settings.worker_output)
    joined = WorkerCluster.of_process
    if joined is not None:
        joined.require(resources)
        return joined
    if resources is None or len(resources.workers) > 1:
        patience = settings.join_timeout if timeout is None else timeout
        return WorkerCluster.join(resources, settings, patience, secret)
    if settings.rank is not None:
        raise ClusterError(
            f"every worker reads the same resource spec. Received: one node, in the process of rank {settings.rank}. "
            f"Give all workers the same file, or unset {RANK_VARIABLE} if this process belongs to no run."
        )
    early_launcher(settings.early_workers, resources)  # Workers that started with this process are of no use.
    node = resources.chief
    if len(node.cpus) > 1 or node.gpus:
        tf_adapter.set_local_devices(max(1, len(node.cpus)), node.gpus)
    return SoloCluster(resources, Progress(settings.progress))


class SoloCluster:
    """A run of one worker: no server, no thread, nothing to wait for. It implements Cluster."""

    _next_instance_key: ClassVar[int] = 1
    """Of the process: TensorFlow remembers the shape of a key for the life of the process."""

    rank = 0
    num_workers = 1
    is_chief = True
    heartbeat_timeout = math.inf

    def __init__(self, resources: ResourceSpec, progress: Progress | None = None) -> None:
        self.resources = resources
        self.run_id = secrets.token_hex(6)
        self.seed = secrets.randbits(31)
        self._progress = progress or Progress(None)
        self._cause: str | None = None

    @property
    def step(self) -> int:
        """See Cluster."""
        return self._progress.step

    @step.setter
    def step(self, step: int) -> None:
        self._progress.note(step)

    @property
    def next_instance_key(self) -> int:
        """See Cluster."""
        return SoloCluster._next_instance_key

    @next_instance_key.setter
    def next_instance_key(self, key: int) -> None:
        SoloCluster._next_instance_key = key

    def add_steps(self, counter: Callable[[], int]) -> None:
        """See Cluster."""
        self._progress.add(counter)

    def broadcast(self, key: str, value: bytes, *, timeout: float = EXCHANGE_SECONDS) -> bytes:
        """See Cluster."""
        return value

    def compare(self, key: str, value: bytes, *, timeout: float = EXCHANGE_SECONDS) -> dict[int, bytes]:
        """See Cluster."""
        return {0: value}

    def barrier(self, key: str, *, timeout: float = EXCHANGE_SECONDS) -> None:
        """See Cluster."""

    def announce(self, key: str, make: Callable[[], bytes]) -> None:
        """See Cluster. Nobody hears it."""
        make()

    def hear(self, key: str, *, timeout: float = HEAR_SECONDS) -> bytes | None:
        """See Cluster. Nobody else announces anything."""
        return None

    def abort(self, reason: str) -> None:
        """See Cluster."""
        self._cause = self._cause or reason

    def check(self) -> None:
        """See Cluster."""
        if self._cause is not None:
            raise WorkerFailedError(self._cause)

    def failure(self, *, wait: float = CAUSE_SECONDS) -> WorkerFailedError | None:
        """See Cluster."""
        return None if self._cause is None else WorkerFailedError(self._cause)

    def on_failure(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """See Cluster. Nothing else can fail here."""
        return lambda: None

    def step_apart(self, expendable: Collection[int]) -> None:
        """See Cluster."""

    def together(self, seconds: float, what: str) -> AbstractContextManager[None]:
        """See Cluster. Nobody is waited for."""
        return nullcontext()

    def stopped_in(self, what: str) -> None:
        """See Cluster."""

    def on_loss(self, callback: Callable[[int], None]) -> Callable[[], None]:
        """See Cluster. Nobody is lost."""
        return lambda: None

    def leave(self) -> None:
        """See Cluster."""
