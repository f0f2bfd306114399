"""`Coordinator`: a run's state behind one lock, for callers in threads that wait. The rules are in `state.py`.

`service.py` offers it to the other workers. It starts and ends no process.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from autodist_py.cluster.coordinator.api import HeartbeatReply, Membership
from autodist_py.cluster.coordinator.events import (
    Aborted,
    Announced,
    Beat,
    Began,
    Call,
    Event,
    Exchanged,
    GaveUp,
    Heard,
    Joined,
    Left,
    Lives,
    Looked,
    MadeAnother,
    OutlivedScript,
    Prepares,
    Probe,
    ProcessEnded,
    SteppedApart,
    Stop,
    Tick,
    Warn,
)
from autodist_py.cluster.coordinator.state import RunState
from autodist_py.cluster.step_status import NO_STATUS, StepStatus
from autodist_py.proto.errors import AutoDistError, ClusterError

_log = logging.getLogger(__name__)


class Caller(Protocol):
    """Who waits for an answer elsewhere: gRPC's context of a call is one."""

    def is_active(self) -> bool:
        """Whether it still waits."""
        ...

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """`callback()` is called, in another thread, when it does not wait any more."""
        ...


class CallerLeftError(ClusterError):
    """A caller has given its call up."""


class Coordinator:
    """One run of the workers at `addresses` (by rank). It implements CoordinatorCalls.

    Each caller waits on a condition of its own, until the state has its answer, or time has come to ask the state
    again. Under the lock the state changes, and nothing else is done.

    Attributes:
        num_workers: how many there are at the start.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        run_id: str,
        seed: int,
        spec: str,
        heartbeat_timeout: float,
        goes_on: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = RunState(
            addresses,
            run_id=run_id,
            seed=seed,
            spec=spec,
            heartbeat_timeout=heartbeat_timeout,
            goes_on=goes_on,
        )
        self.num_workers = len(addresses)
        self._clock = clock
        self._lock = threading.Lock()
        self._waiters: dict[int, threading.Condition] = {}
        self._tickets = itertools.count()

    # -- What workers ask: see CoordinatorCalls. A `caller` that is elsewhere may leave before it has its answer. ------

    def join(self, rank: int, server: str, *, spec: str, timeout: float, caller: Caller | None = None) -> Membership:
        """See CoordinatorCalls."""
        return self._ask(Joined(next(self._tickets), rank, server, spec, timeout), caller)

    def exchange(
        self, rank: int, key: str, *, value: bytes, everyone: bool, timeout: float, caller: Caller | None = None
    ) -> dict[int, bytes]:
        """See CoordinatorCalls."""
        return self._ask(Exchanged(next(self._tickets), rank, key, value, everyone, timeout), caller)

    def hear(
        self, rank: int, key: str, *, step: int, position: int, timeout: float, caller: Caller | None = None
    ) -> bytes | None:
        """See CoordinatorCalls."""
        return self._ask(Heard(next(self._tickets), rank, key, step, position, timeout), caller)

    def heartbeat(
        self, rank: int, step: int, waits: StepStatus = NO_STATUS, *, caller: Caller | None = None
    ) -> HeartbeatReply:
        """See CoordinatorCalls."""
        return self._ask(Beat(next(self._tickets), rank, step, waits), caller)

    def abort(self, rank: int, event: str, *, detail: str, step: int, caller: Caller | None = None) -> str:
        """See CoordinatorCalls."""
        return self._ask(Aborted(next(self._tickets), rank, event, detail, step), caller)

    def leave(self, rank: int, step: int, *, caller: Caller | None = None) -> None:
        """See CoordinatorCalls. A rank that left too early is let go, so that its exit code can be seen."""
        self._ask(Left(next(self._tickets), rank, step), caller)

    # -- What the chief itself reports --------------------------------------------------------------------------------

    def step_apart(self, expendable: Iterable[int]) -> None:
        """From now on workers take steps by themselves; the others can do without the `expendable` ones.

        Who was needed before still is.
        """
        self._tell(SteppedApart(frozenset(expendable)))

    @contextmanager
    def preparing(self, key: str, *, step: int) -> Iterator[None]:
        """Within it the chief is at what it will announce at that place: who waits for it has patience."""
        self._tell(Prepares(key, step))
        try:
            yield
        finally:
            self._tell(Prepares(key, step, is_over=True))

    def announce(self, key: str, value: bytes, *, step: int) -> None:
        """The chief says so to all who hear, or will, at this place of their scripts; it waits for nobody."""
        self._tell(Announced(key, value, step))

    def counts_on(self) -> None:
        """The script has made another AutoDist: steps are counted over all of them."""
        self._tell(MadeAnother())

    def begins(self, step: int) -> None:
        """The chief begins a step: who hears at an earlier one need not wait for it."""
        self._tell(Began(step))

    def process_ended(self, rank: int, exit_code: int, reason: str = "", is_shown: bool = True) -> None:
        """The launcher saw the worker's process end. See ProcessEnded."""
        self._tell(ProcessEnded(rank, exit_code, reason, is_shown))

    def did_not_end(self, rank: int, seconds: float) -> None:
        """All have left; the worker's process still runs so many seconds later, and is now made to end."""
        self._tell(OutlivedScript(rank, seconds))

    def lives(self, rank: int) -> None:
        """That worker's process lives, though no heartbeat comes."""
        self._tell(Lives(rank))

    def look(self) -> list[Probe | Stop]:
        """Ends the run when a worker has been silent, or waited for, for too long; what the chief then has to do.

        Call it about as often as a heartbeat is answered, which is more often once a program has a timeout.
        """
        return self._tell(Looked())

    @property
    def cause(self) -> str | None:
        """Why the run failed, if it has."""
        with self._lock:
            return None if self._run.failure is None else str(self._run.failure)

    @property
    def joined(self) -> set[int]:
        """The ranks that have joined."""
        with self._lock:
            return set(self._run.joined)

    # -- The shell ----------------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> list[Probe | Stop]:
        """The event happens now; who is answered wakes up, and all do who may now wait for another time."""
        with self._lock:
            try:
                outcome = self._run.step(event, self._clock())
            except BaseException:  # Such as that of a signal: others may have been answered.
                self._wake(self._waiters)
                raise
            self._wake(self._waiters if outcome.is_rescheduled else [reply.ticket for reply in outcome.replies])
        for action in outcome.actions:
            if isinstance(action, Warn):
                _log.warning("%s", action.text)
        return [action for action in outcome.actions if not isinstance(action, Warn)]

    def _wake(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            if ticket in self._waiters:
                self._waiters[ticket].notify()

    def _ask(self, call: Call, caller: Caller | None = None) -> Any:
        """The call's answer, when there is one.

        Raises:
            CallerLeftError: the caller does not wait any more.
        """
        ticket = call.ticket
        with self._lock:
            self._waiters[ticket] = self._new_waiter()
        try:
            if caller is not None:
                caller.add_callback(lambda: self._look_again(ticket))
            self._tell(call)
            while not self._is_answered(ticket, caller):
                self._tell(Tick())
            answer = self._run.answers.pop(ticket)
        except BaseException:  # Such as that of a signal.
            self._tell(GaveUp(ticket))
            raise
        finally:
            with self._lock:
                del self._waiters[ticket]
        if isinstance(answer, AutoDistError):
            raise answer
        return answer

    def _is_answered(self, ticket: int, caller: Caller | None) -> bool:
        """True when the call is answered; False when time has come to ask the state again."""
        with self._lock:
            while ticket not in self._run.answers:
                if caller is not None and not caller.is_active():
                    raise CallerLeftError("the caller does not wait for the answer any more")
                left = self._run.due(ticket) - self._clock()
                if left <= 0:
                    return False
                self._waiters[ticket].wait(min(left, threading.TIMEOUT_MAX))
        return True

    def _look_again(self, ticket: int) -> None:
        """The caller may have left."""
        with self._lock:
            self._wake([ticket])

    def _new_waiter(self) -> threading.Condition:
        return threading.Condition(self._lock)
