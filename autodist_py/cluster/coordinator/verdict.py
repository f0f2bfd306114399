"""`Verdict`: whether a run fails, for which failure, and whom it goes on without.

What is found out first is not always the cause: a worker that is missing is a suspicion, until those that wait for it
have said where; one that left too early has a while for its exit code to come.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from autodist_py.cluster.coordinator.liveness import Liveness
from autodist_py.cluster.coordinator.roster import CHIEF, Roster
from autodist_py.cluster.failure import ENDED_SCRIPT, Failure
from autodist_py.cluster.step_status import NO_STATUS, STOPPING_SECONDS, StepStatus

EXIT_CODE_SECONDS = 8.0
"""How long the exit code of a script that ended too early is waited for."""


@dataclass(slots=True)
class _Suspicion:
    """A failure for which the run fails, and until when others may say where they wait.

    `untold` are those that do not know yet, and `asked` those that have not reported since; reports before may be old.
    """

    failure: Failure
    until: float
    untold: set[int]
    asked: set[int]


class _Leaver(NamedTuple):
    """A worker whose script ended too early, who needs it, and until when its exit code may come."""

    rank: int
    detail: str
    until: float


class Verdict:
    """Plain memory: who asks says what time it is.

    Attributes:
        failure: why the run failed; None: it has not.
        lost: the workers that the others go on without, and how they failed. A step of all workers needs each of them.
        expendable: the workers that the others can do without; None while all take their steps together.
        released: who left too early, and is let go, and who needs it.
        warnings: what the user is to be told; who takes them clears them.
    """

    def __init__(self, roster: Roster, liveness: Liveness, *, goes_on: bool) -> None:
        """Where the run `goes_on`, a worker that fails, and that the others can do without, is lost."""
        self.failure: Failure | None = None
        self.lost: dict[int, Failure] = {}
        self.expendable: frozenset[int] | None = None
        self.released: dict[int, str] = {}
        self.warnings: list[str] = []
        self._roster = roster
        self._liveness = liveness
        self._goes_on = goes_on
        self._suspicion: _Suspicion | None = None
        self._leaver: _Leaver | None = None
        self._beating: set[int] = set()

    # -- What happens -------------------------------------------------------------------------------------------------

    def step_apart(self, expendable: Collection[int]) -> None:
        """From now on the others can do without these; who was needed before still is, and so is the chief."""
        allowed = frozenset(expendable) - {CHIEF}
        self.expendable = allowed if self.expendable is None else self.expendable & allowed

    def heard_of(self, rank: int) -> None:
        """A worker's heartbeat has come: it says where it waits, if it knows of the suspicion."""
        self._beating.add(rank)
        if self._suspicion is not None and rank not in self._suspicion.untold:
            self._suspicion.asked.discard(rank)

    def fail(self, failure: Failure) -> bool:
        """The run fails, unless it goes on without the worker; whether it does.

        A suspicion before is the cause: this failure may follow from it, and takes no time from those who are asked.
        """
        if self.goes_on_without(failure):
            return False
        if self.failure is None and self._suspicion is None:
            self.failure = failure
        return True

    def miss(self, failure: Failure, now: float) -> None:
        """The run fails, as soon as one that waits for the worker has said in which collective, or none waits."""
        if self.failure is not None or self._suspicion is not None or self.goes_on_without(failure):
            return
        asked = self._beating - self.lost.keys() - {failure.worker.rank}
        self._suspicion = _Suspicion(failure, now + STOPPING_SECONDS, asked, set(asked))

    def release(self, rank: int, need: str, now: float) -> None:
        """The run is to fail as `rank` has left: by its exit code when there is one soon, else as others need it."""
        detail = f"{need}, and a synchronous run needs every worker to the end"
        self.released.setdefault(rank, detail)
        if self._leaver is None:
            self._leaver = _Leaver(rank, detail, now + (EXIT_CODE_SECONDS if rank != CHIEF else 0.0))

    def goes_on_without(self, failure: Failure) -> bool:
        """Whether the run does; then the worker is lost."""
        rank = failure.worker.rank
        is_expendable = self._goes_on and rank in (self.expendable or ())
        if self.failure is not None or not is_expendable or self.waiting_for(rank):
            return False
        if rank not in self.lost:
            self.lost[rank] = failure
            self.warnings.append(f"{failure}. The others go on without it")
        if self._leaver is not None and self._leaver.rank in self.lost:
            self._leaver = None
        return True

    def settle(self, now: float) -> bool:
        """What has become known, or will not be known any more, is the cause; whether anything has changed by that."""
        if self.failure is not None:
            return False
        if self._suspicion is not None:
            self._settle_suspicion(self._suspicion, now)
            return self.failure is not None
        if self._leaver is None or now < self._leaver.until:
            return False
        self.fail(self._roster.failure(self._leaver.rank, ENDED_SCRIPT, self._leaver.detail))
        return True

    def _settle_suspicion(self, suspicion: _Suspicion, now: float) -> None:
        """It is the cause, when it is known what others wait in, or will not be known."""
        waiting = self.waiting_for(suspicion.failure.worker.rank)
        rank, waits = next(iter(waiting.items()), (None, NO_STATUS))
        is_known = self.all_left or bool(waits.stopped_in) or not (waiting or suspicion.asked)
        if is_known or now >= suspicion.until:
            waiter = None if rank is None else self._roster.workers[rank]
            self.failure = replace(suspicion.failure, waiter=waiter, waits=waits)

    # -- What is known ------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> set[int]:
        """The workers that come to no place of their scripts any more: they have left, or are lost."""
        return self._roster.left | self.lost.keys()

    @property
    def all_left(self) -> bool:
        """Whether every script has ended, but for those of workers that are lost."""
        return len(self.ended) == len(self._roster.workers)

    @property
    def deadlines(self) -> tuple[float, ...]:
        """When time alone may bring the cause."""
        return tuple(pending.until for pending in (self._suspicion, self._leaver) if pending is not None)

    def cause_for(self, rank: int) -> str | None:
        """Why a worker cannot go on, if so: the run has failed, or goes on without this worker."""
        if self.failure is not None:
            return str(self.failure)
        return f"{self.lost[rank]}; the others go on without it" if rank in self.lost else None

    def is_untold(self, rank: int) -> bool:
        """Whether there is a suspicion that the worker has not heard of."""
        return self._suspicion is not None and rank in self._suspicion.untold

    def tell(self, rank: int) -> str | None:
        """The suspicion, if the worker has not heard of it; from now on it is asked where it waits."""
        if self._suspicion is None or rank not in self._suspicion.untold:
            return None
        self._suspicion.untold.discard(rank)
        return str(self._suspicion.failure)

    def waiting_for(self, rank: int) -> dict[int, StepStatus]:
        """The others that are in a step of all workers."""
        return self._liveness.waiting(self._liveness.ranks - self.lost.keys() - {rank})
