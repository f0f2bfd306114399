"""`Roster`: what is known of each worker of a run: who has joined, who has left, and which step each is at."""

from collections.abc import Collection, Sequence

from autodist_py.cluster.failure import Failure, Worker
from autodist_py.proto.errors import ClusterError

CHIEF = 0


class Roster:
    """The workers at `addresses` (by rank). Plain memory.

    Attributes:
        workers: all of them, by rank.
        joined: the TensorFlow servers of those that have joined, by rank.
        steps: the last step of each worker, as far as it is known.
        left: the workers whose scripts have ended.
        objects: over how many AutoDist objects of the script steps are counted.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.workers = tuple(Worker(rank, address) for rank, address in enumerate(addresses))
        self.joined: dict[int, str] = {}
        self.steps: dict[int, int] = {}
        self.left: set[int] = set()
        self.objects = 1

    def join(self, rank: int, server: str) -> None:
        """A worker has joined.

        Raises:
            ClusterError: it has joined before, or there is no such rank.
        """
        last = len(self.workers) - 1
        if not 0 <= rank <= last or rank in self.joined:
            raise ClusterError(
                f"each rank from 0 to {last} joins once. Received: {rank}, "
                f"after {sorted(self.joined)}. Start the script once; its chief starts the other workers."
            )
        self.joined[rank] = server

    @property
    def is_complete(self) -> bool:
        """Whether all have joined."""
        return len(self.joined) == len(self.workers)

    @property
    def servers(self) -> tuple[str, ...]:
        """Of all workers, by rank, when all have joined."""
        return tuple(self.joined[worker.rank] for worker in self.workers)

    def incomplete(self, timeout: float) -> ClusterError:
        """What is wrong where some have not joined in time."""
        missing = {worker.rank for worker in self.workers} - self.joined.keys()
        return ClusterError(
            f"{self.names(missing)} did not join within {timeout:g} s: every worker's script must reach AutoDist(...). "
            "AUTODIST_OUTPUT=all shows what they do until then; AUTODIST_JOIN_TIMEOUT gives a slow start more time."
        )

    def reach(self, rank: int, step: int) -> None:
        """The worker has begun the step. What it said earlier may come later: a thread for each call may overtake."""
        self.require(rank)
        self.steps[rank] = max(step, self.steps.get(rank, 0))

    def require(self, rank: int) -> None:
        """There is such a rank.

        Raises:
            ClusterError: there is none.
        """
        if not 0 <= rank < len(self.workers):
            raise ClusterError(f"ranks are 0 to {len(self.workers) - 1}. Received: {rank}.")

    def names(self, ranks: Collection[int]) -> str:
        """The workers of these ranks, as messages name them."""
        return ", ".join(str(self.workers[rank]) for rank in sorted(ranks))

    def failure(self, rank: int, event: str, detail: str) -> Failure:
        """What became of a worker, with the steps that are known now."""
        return Failure(
            self.workers[rank],
            event,
            detail,
            step=self.steps.get(rank, 0) if rank in self.joined else None,
            chief_step=self.steps.get(CHIEF, 0),
            objects=self.objects,
        )
