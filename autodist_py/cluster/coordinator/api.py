"""What a worker may ask of the coordinator, and what it is told: `CoordinatorCalls`, and its values."""

from dataclasses import dataclass
from typing import Protocol

from autodist_py.cluster.step_status import NO_STATUS, StepStatus

LEAVING = "leaving/"
"""What the keys of exchanges begin with at which workers take no further step; each gives its last step's number."""


@dataclass(frozen=True, slots=True)
class Membership:
    """What joining tells a worker: the run's id and random seed, and every TensorFlow server (host:port) by rank."""

    run_id: str
    seed: int
    servers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """The answer to a heartbeat.

    Attributes:
        cause: why the run has failed, if it has.
        finished: whether every worker has left.
        lost: the workers that the run goes on without.
        suspicion: why the run is about to fail, told once; who waits stops, and says in which collective it did.
    """

    cause: str | None
    finished: bool
    lost: tuple[int, ...] = ()
    suspicion: str | None = None


class CoordinatorCalls(Protocol):
    """What a worker may ask of the coordinator: in the chief directly, elsewhere by a client.

    `step` is the last step that the worker began, 0 before the first.

    Each raises WorkerFailedError, with the run's cause, when the run has failed, and ClusterError when asked for
    something wrong or when time is up.
    """

    def join(self, rank: int, server: str, *, spec: str, timeout: float) -> Membership:
        """The run, once every worker has joined."""
        ...

    def exchange(self, rank: int, key: str, *, value: bytes, everyone: bool, timeout: float) -> dict[int, bytes]:
        """Values by rank: all of them (`everyone`), or the chief's only. The n-th calls with a key belong together."""
        ...

    def hear(self, rank: int, key: str, *, step: int, position: int, timeout: float) -> bytes | None:
        """The chief's announcement of that position among those with the key at that step, once there is one.

        None: the chief has gone on without.
        """
        ...

    def heartbeat(self, rank: int, step: int, waits: StepStatus = NO_STATUS) -> HeartbeatReply:
        """Reports that the worker lives, and what it waits in; returns in a while, or when the run has failed."""
        ...

    def abort(self, rank: int, event: str, *, detail: str, step: int) -> str:
        """Ends the run on every worker, unless it has failed already. Returns the run's cause."""
        ...

    def leave(self, rank: int, step: int) -> None:
        """Returns when the script has ended on every worker."""
        ...
