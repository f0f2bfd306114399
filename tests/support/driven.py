"""`Driven`: a run's state on a clock that goes on only where a test lets it."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

from autodist_py.cluster.coordinator.api import HeartbeatReply
from autodist_py.cluster.coordinator.events import (
    Aborted,
    Action,
    Announced,
    Beat,
    Began,
    Event,
    Exchanged,
    Heard,
    Joined,
    Left,
    Looked,
    Prepares,
    ProcessEnded,
    SteppedApart,
    Stop,
    Tick,
)
from autodist_py.cluster.coordinator.state import RunState
from autodist_py.cluster.step_status import NO_STATUS, StepStatus
from autodist_py.proto.errors import AutoDistError
from tests.support.coordinators import ADDRESSES


class Waiting:
    """A call that a worker has made."""

    def __init__(self, driven: "Driven", ticket: int):
        self._driven, self._ticket = driven, ticket

    @property
    def is_open(self) -> bool:
        """Whether there is no answer yet."""
        return self._ticket not in self._driven.answers

    def answer(self) -> Any:
        """What the call returns, now. Raises what it raises."""
        assert not self.is_open, "this call is not answered"
        answer = self._driven.answers[self._ticket]
        if isinstance(answer, AutoDistError):
            raise answer
        return answer

    def answer_in_time(self) -> Any:
        """What the call returns, when as much time has passed as that takes, if nothing else happens."""
        while self.is_open:
            due = self._driven.run.due(self._ticket)
            assert due < math.inf, "this call waits for another event"
            self._driven.now = due
            self._driven.tell(Tick())
        return self.answer()


class Driven:
    """A run's state, and what workers and the chief do to it."""

    def __init__(
        self, addresses: tuple[str, ...] = ADDRESSES, *, heartbeat_timeout: float = 5.0, goes_on: bool = False
    ) -> None:
        self.run = RunState(
            addresses,
            run_id="run",
            seed=7,
            spec="spec",
            heartbeat_timeout=heartbeat_timeout,
            goes_on=goes_on,
        )
        self.now = 1000.0
        self.answers: dict[int, Any] = {}
        self._tickets = itertools.count()

    def tell(self, event: Event) -> tuple[Action, ...]:
        """The event happens now; what is to be done."""
        outcome = self.run.step(event, self.now)
        self.answers.update((reply.ticket, reply.answer) for reply in outcome.replies)
        return outcome.actions

    @property
    def cause(self) -> str | None:
        return None if self.run.failure is None else str(self.run.failure)

    def _call(self, kind: Any, *arguments: object) -> Waiting:
        ticket = next(self._tickets)
        self.tell(kind(ticket, *arguments))
        return Waiting(self, ticket)

    def join(self, rank: int, *, spec: str = "spec", timeout: float = 5.0) -> Waiting:
        return self._call(Joined, rank, f"host:{rank}", spec, timeout)

    def exchange(self, rank: int, key: str = "k", *, everyone: bool = True, timeout: float = 60.0) -> Waiting:
        """Its value is the key and the rank."""
        return self._call(Exchanged, rank, key, f"{key}{rank}".encode(), everyone, timeout)

    def hear(self, *, step: int = 0, position: int = 0, timeout: float = 10.0) -> Waiting:
        """What worker 1 hears at "k"."""
        return self._call(Heard, 1, "k", step, position, timeout)

    def beat(self, rank: int, step: int, waits: StepStatus = NO_STATUS) -> Waiting:
        """A heartbeat that is held back."""
        return self._call(Beat, rank, step, waits)

    def heartbeat(self, rank: int, step: int, waits: StepStatus = NO_STATUS) -> HeartbeatReply:
        """The answer to a heartbeat, for which time passes."""
        return self.beat(rank, step, waits).answer_in_time()

    def abort(self, rank: int, detail: str, step: int) -> Waiting:
        return self._call(Aborted, rank, "failed", detail, step)

    def leave(self, rank: int, step: int) -> Waiting:
        return self._call(Left, rank, step)

    def process_ended(self, rank: int, exit_code: int, reason: str = "", *, is_shown: bool = True) -> None:
        self.tell(ProcessEnded(rank, exit_code, reason, is_shown))

    def look(self) -> list[int]:
        """The chief looks; the workers that it is to stop."""
        return [action.rank for action in self.tell(Looked()) if isinstance(action, Stop)]

    def begins(self, step: int) -> None:
        self.tell(Began(step))

    def prepares(self, key: str = "k", *, step: int = 0, is_over: bool = False) -> None:
        self.tell(Prepares(key, step, is_over))

    def announce(self, value: bytes, *, step: int) -> None:
        """The chief says so at "k"."""
        self.tell(Announced("k", value, step))

    def step_apart(self, expendable: Iterable[int]) -> None:
        self.tell(SteppedApart(frozenset(expendable)))


def driven(addresses: tuple[str, ...] = ADDRESSES, *, heartbeat_timeout: float = 5.0, goes_on: bool = False) -> Driven:
    """A run that all workers have joined."""
    made = Driven(addresses, heartbeat_timeout=heartbeat_timeout, goes_on=goes_on)
    for waiting in [made.join(rank) for rank in range(len(addresses))]:
        waiting.answer()
    return made
