"""`Coordinator`: the state of one run, on the chief: who has joined, what is exchanged, why it failed.

It is plain shared memory behind one lock; `service.py` offers it to the other workers. It starts and ends no process.
Over 400 lines, as all that waits for anything in a run waits for that one lock; what can be without it is elsewhere
(`reports.py`, `announcements.py`).
"""

import logging
import reprlib
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from autodist_py.proto.errors import ClusterError, WorkerFailedError
from autodist_py.runtime.announcements import NO_STEP, Announcements
from autodist_py.runtime.calls import Membership, Pulse
from autodist_py.runtime.reports import Reports
from autodist_py.runtime.waits import NO_WAITS, STOPPING_SECONDS, Waits

LEAVING = "leaving/"
"""What the keys of exchanges begin with at which workers take no further step; each gives its last step's number."""

_STEP_DIGITS = 19
"""Of the number of a step, which has 63 bits."""

_log = logging.getLogger(__name__)

_EXIT_CODE_SECONDS = 8.0
"""How long the exit code of a script that ended too early is waited for."""

_CHIEF = 0

_UNTOLD = ("ended", "stopped answering")
"""What becomes of a worker without its saying at which step."""


@dataclass(slots=True)
class _Round:
    """One exchange: the values given so far, and who has been answered."""

    everyone: bool
    values: dict[int, bytes] = field(default_factory=dict)
    answered: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Suspicion:
    """A worker for which the run fails, how that is told, and until when others may say where they wait.

    `untold` are those that do not know yet, and `asked` those that have not reported since; reports before may be old.
    """

    rank: int
    what: str
    until: float
    untold: set[int]
    asked: set[int]

    def tell(self, rank: int) -> str:
        """What a worker is told once; from now on it is asked."""
        self.untold.discard(rank)
        return self.what


class _Leaver(NamedTuple):
    """A worker whose script ended too early, who needs it, and until when its exit code may come."""

    rank: int
    detail: str
    until: float


class Coordinator:
    """One run of the workers at `addresses` (by rank). It implements CoordinatorCalls.

    A rank that has left may not be waited for: whoever does ends the run, as its script is another than theirs. Where
    the run `goes_on`, a worker that fails, and that the others can do without, is lost, and nobody waits for it.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        run_id: str,
        seed: int,
        fingerprint: str,
        heartbeat_timeout: float,
        goes_on: bool = False,
    ) -> None:
        self._addresses = tuple(addresses)
        self._run_id, self._seed, self._fingerprint = run_id, seed, fingerprint
        self._changed = threading.Condition()
        self._cause: str | None = None
        self._suspicion: _Suspicion | None = None
        self._leaver: _Leaver | None = None
        self._servers: dict[int, str] = {}
        self._steps: dict[int, int] = {}
        self._reports = Reports(heartbeat_timeout)
        self._left: set[int] = set()
        self._goes_on = goes_on
        self._expendable: set[int] | None = None
        """The workers that the others can do without; None while all take their steps together."""
        self._lost: dict[int, tuple[str, str]] = {}
        """Whom the others go on without, and how they were lost: an event and its detail."""
        self._beating: set[int] = set()
        """Who has sent a heartbeat."""
        self._released: dict[int, str] = {}
        self._rounds: dict[str, deque[_Round]] = {}
        self._announcements = Announcements()
        self._objects = 1

    # -- What workers ask ---------------------------------------------------------------------------------------------

    def join(self, rank: int, server: str, *, fingerprint: str, timeout: float) -> Membership:
        """See CoordinatorCalls."""
        with self._changed:
            if fingerprint != self._fingerprint:
                raise ClusterError(
                    "every worker reads the same resource spec; "
                    f"worker {rank} read {fingerprint[:12]}, the chief {self._fingerprint[:12]}. "
                    "Give all of them the same file, and make it before AutoDist(...)."
                )
            if not 0 <= rank < len(self._addresses) or rank in self._servers:
                raise ClusterError(
                    f"each rank from 0 to {len(self._addresses) - 1} joins once. Received: {rank}, "
                    f"after {sorted(self._servers)}. Start the script once; its chief starts the other workers."
                )
            self._servers[rank] = server
            self._changed.notify_all()
            if not self._wait(lambda: len(self._servers) == len(self._addresses), timeout):
                missing = set(range(len(self._addresses))) - set(self._servers)
                raise ClusterError(
                    f"{self._names(missing)} did not join within {timeout:g} s: every worker's script must reach "
                    "AutoDist(...). See their output above; AUTODIST_JOIN_TIMEOUT gives a slow start more time."
                )
            self._reports.take(rank, NO_WAITS)
            servers = tuple(self._servers[each] for each in range(len(self._addresses)))
            return Membership(self._run_id, self._seed, servers)

    def exchange(self, rank: int, key: str, *, value: bytes, everyone: bool, timeout: float) -> dict[int, bytes]:
        """See CoordinatorCalls."""
        if key.startswith(LEAVING) and not (value.isdigit() and len(value) <= _STEP_DIGITS):
            raise ClusterError(f"{key!r} is told the number of a worker's last step; got {reprlib.repr(value)}.")
        with self._changed:
            self._require_rank(rank)
            current = self._round(rank, key, everyone)
            current.values[rank] = value
            self._changed.notify_all()
            needed = set(range(len(self._addresses))) if everyone else {_CHIEF}

            def missing() -> set[int]:
                return needed - current.values.keys() - self._lost.keys()

            def gone() -> set[int]:
                return missing() & (self._left | self._leaving(but=key).keys())

            deadline = time.monotonic() + timeout
            while self._wait(lambda: not missing() or bool(gone()), deadline - time.monotonic()) and gone():
                self._do_without(min(gone()), f"worker {rank} waits for it at {key!r}")
            if missing():
                raise ClusterError(
                    f"{self._names(missing())} did not reach {key!r} within {timeout:g} s, where worker {rank} waits: "
                    "every worker runs the same script and reaches the same places in it."
                )
            return self._answer(rank, key, current, needed)

    def hear(self, rank: int, key: str, *, step: int, position: int, timeout: float) -> bytes | None:
        """See CoordinatorCalls."""
        with self._changed:
            self._require_rank(rank)
            said = self._announcements

            def is_settled() -> bool:
                return said.find(step, key, position) is not None or self._has_passed(rank, step, key)

            said.hearing += 1
            try:
                while not is_settled():
                    self._wait(lambda: is_settled() or not said.preparing, None)
                    if not self._wait(lambda: is_settled() or bool(said.preparing), timeout):
                        raise ClusterError(
                            f"worker {rank} waits for the chief, {self._names([_CHIEF])}, at {key}, and it has not "
                            f"come there within {timeout:g} s: every worker's script comes to the same places, or the "
                            "chief's alone (`if autodist.is_chief:`)."
                        )
            finally:
                said.hearing -= 1
            return said.find(step, key, position)

    def heartbeat(self, rank: int, step: int, waits: Waits = NO_WAITS) -> Pulse:
        """See CoordinatorCalls. Heartbeats of a worker that goes on while another has left may end the run."""
        with self._changed:
            self._require_rank(rank)
            self._reports.take(rank, waits)
            self._beating.add(rank)
            self._steps[rank] = step
            ended = {other: self._steps[other] for other in self._left} | self._leaving()
            behind = [other for other, last in ended.items() if step > last]
            if behind and self._cause is None and self._expendable is None:
                self._release(min(behind), f"worker {rank} went on to step {step}")
            if self._suspicion is not None:
                self._suspicion.asked -= {rank} - self._suspicion.untold
                self._settle()
            self._changed.wait_for(lambda: self._cause or self._all_left or self._has_news(rank), self._period)
            self._settle()
            suspicion = self._suspicion.tell(rank) if self._suspicion is not None and self._has_news(rank) else None
            return Pulse(self._cause, self._all_left, tuple(sorted(self._lost)), suspicion)

    def abort(self, rank: int, event: str, *, detail: str, step: int) -> str:
        """See CoordinatorCalls."""
        with self._changed:
            self._require_rank(rank)
            self._steps[rank] = step
            return self._fail(rank, event, detail)

    def leave(self, rank: int, step: int) -> None:
        """See CoordinatorCalls. A rank that left too early is let go, so that its exit code can be seen."""
        with self._changed:
            self._require_rank(rank)
            self._steps[rank] = step
            self._left.add(rank)
            self._changed.notify_all()
            self._wait(lambda: self._all_left or rank in self._released, None)

    def step_apart(self, expendable: Iterable[int]) -> None:
        """From now on workers take steps by themselves; the others can do without the `expendable` ones.

        Who was needed before still is.
        """
        with self._changed:
            allowed = set(expendable) - {_CHIEF}
            self._expendable = allowed if self._expendable is None else self._expendable & allowed

    # -- What the chief itself reports --------------------------------------------------------------------------------

    @contextmanager
    def preparing(self, key: str, *, step: int) -> Iterator[None]:
        """Within it the chief is at what it will announce at that place: who waits for it has patience."""
        with self._changed:
            self._announcements.preparing[step, key] += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._announcements.preparing[step, key] -= 1
                self._announcements.preparing += Counter()  # Without those that are none.
                self._changed.notify_all()

    def announce(self, key: str, value: bytes, *, step: int) -> None:
        """The chief says so to all who hear, or will, at this place of their scripts; it waits for nobody."""
        with self._changed:
            others = [self._steps.get(rank, 0) for rank in range(1, len(self._addresses)) if rank not in self._lost]
            self._announcements.add(step, key, value, reached=others)
            self._changed.notify_all()

    def counts_on(self) -> None:
        """The script has made another AutoDist: steps are counted over all of them."""
        with self._changed:
            self._objects += 1

    def begins(self, step: int) -> None:
        """The chief begins a step: who hears at an earlier one need not wait for it."""
        with self._changed:
            self._steps[_CHIEF] = step
            if self._announcements.hearing:
                self._changed.notify_all()

    def process_ended(self, rank: int, exit_code: int, reason: str = "") -> None:
        """The launcher saw the worker's process end; unless all have left and the code is 0, the run has failed.

        `reason` is given where the launcher knows more than the exit code tells. A worker that ends with an error after
        this process stood still has taken the chief for lost.
        """
        with self._changed:
            self._reports.catch_up()
            if (exit_code == 0 and self._all_left) or rank in self._lost:
                return
            if exit_code == 0 and rank in self._released:
                self._fail(rank, "ended its script", self._released[rank])
            elif reason:
                self._miss(rank, "ended", reason)
            elif rank in self._servers and exit_code == 1 and self._reports.stood_still:
                self._give_up_after_gap(rank)
            elif rank not in self._servers:
                hint = "see its output above" if exit_code else "its script must reach AutoDist(...)"
                self._miss(rank, "ended", f"{describe_exit(exit_code)}; {hint}")
            else:
                self._miss(rank, "ended", f"{describe_exit(exit_code)}; see its output above")

    def did_not_end(self, rank: int, seconds: float) -> None:
        """All have left; the worker's process still runs so many seconds later, and is now made to end."""
        with self._changed:
            detail = f"its process had not ended {seconds:.0f} s after all scripts, and was made to"
            self._fail(rank, "ended its script", detail)

    @property
    def cause(self) -> str | None:
        """Why the run failed, if it has."""
        with self._changed:
            return self._cause

    @property
    def joined(self) -> set[int]:
        """The ranks that have joined."""
        with self._changed:
            return set(self._servers)

    def doubtful(self) -> dict[int, str]:
        """The TensorFlow servers, by rank, of those that will soon be lost, as no heartbeat came, unless they live."""
        with self._changed:
            others = self._reports.ranks - self._left - self._lost.keys() - {_CHIEF}
            return {rank: self._servers[rank] for rank in self._reports.doubtful(others)}

    def lives(self, rank: int) -> None:
        """That worker's process lives, though no heartbeat comes."""
        with self._changed:
            self._reports.lives(rank)

    def check_heartbeats(self) -> list[int]:
        """Ends the run when a worker has been silent, or waited for, for too long.

        Call it about as often as a heartbeat is answered, which is more often once a program has a timeout.

        Returns:
            The ranks that are silent.
        """
        with self._changed:
            self._reports.catch_up()
            if self._all_left:
                return []
            others = self._reports.ranks - self._released.keys() - self._lost.keys()
            silent = self._reports.silent(others - {_CHIEF})
            for rank, detail in silent.items():
                self._miss(rank, "stopped answering", detail)
            behind = self._reports.behind(others - self._left)
            if behind is not None:
                self._miss(behind[0], "kept others waiting", behind[1])
            for rank, (event, detail) in sorted(self._lost.items()):
                if self._waiting_for(rank):
                    self._miss(rank, event, f"{detail}; the others went on without it, and now need it")
            return sorted(silent)

    # -- Under the lock -----------------------------------------------------------------------------------------------

    def _require_rank(self, rank: int) -> None:
        if not 0 <= rank < len(self._addresses):
            raise ClusterError(f"ranks are 0 to {len(self._addresses) - 1}. Received: {rank}.")

    def _has_passed(self, rank: int, step: int, key: str) -> bool:
        """Whether the chief is past all that a worker's script does before its next step, or waits for the worker.

        It is not while a thread of its own still makes what it will announce there. Where a thread of the worker's own
        asks, which stands at no step and holds up nobody, the chief is past it when it has left.
        """
        if self._announcements.preparing[step, key]:
            return False
        if step == NO_STEP:
            return _CHIEF in self._left
        waits = (
            current.everyone and _CHIEF in current.values.keys() - current.answered and rank not in current.values
            for rounds in self._rounds.values()
            for current in rounds
        )
        return self._steps.get(_CHIEF, 0) > step or _CHIEF in self._left or any(waits)

    def _leaving(self, *, but: str = "") -> dict[int, int]:
        """The workers that wait for all others to end, and the last step of each."""
        return {
            rank: int(value)
            for key, rounds in self._rounds.items()
            if key.startswith(LEAVING) and key != but
            for current in rounds
            if len(current.values) < len(self._addresses) - len(self._lost)
            for rank, value in current.values.items()
        }

    @property
    def _all_left(self) -> bool:
        return len(self._left | self._lost.keys()) == len(self._addresses)

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Whether `ready` became true in time; raises if the run has failed, before or meanwhile."""
        done = self._changed.wait_for(lambda: self._cause is not None or ready(), timeout)
        if self._cause is not None:
            raise WorkerFailedError(self._cause)
        return done

    def _round(self, rank: int, key: str, everyone: bool) -> _Round:
        rounds = self._rounds.setdefault(key, deque())
        for current in rounds:
            if rank not in current.values:
                break
        else:
            current = _Round(everyone)
            rounds.append(current)
        if current.everyone != everyone:
            raise ClusterError(
                f"all workers use {key!r} for the same kind of exchange; worker {rank} uses it for another."
            )
        return current

    def _answer(self, rank: int, key: str, current: _Round, needed: set[int]) -> dict[int, bytes]:
        current.answered.add(rank)
        if len(current.answered | self._lost.keys()) == len(self._addresses):
            self._rounds[key].remove(current)
            if not self._rounds[key]:
                del self._rounds[key]
        return {each: current.values[each] for each in sorted(needed & current.values.keys())}

    def _fail(self, rank: int, event: str, detail: str) -> str:
        """The run has failed, unless it goes on without the worker.

        A suspicion before is the cause: this failure may follow from it, and takes no time from those who are asked.
        """
        what = self._told(rank, event, detail)
        if self._goes_on_without(rank, event, detail):
            return what
        while self._suspicion is not None and self._cause is None:
            self._changed.wait(max(0.0, self._suspicion.until - time.monotonic()))
            self._settle()
        if self._cause is None:
            self._cause = what
            self._changed.notify_all()
        return self._cause

    def _miss(self, rank: int, event: str, detail: str) -> None:
        """The run fails, as soon as one that waits for the worker has said in which collective, or none waits."""
        if self._cause is not None or self._suspicion is not None or self._goes_on_without(rank, event, detail):
            return
        what = self._told(rank, event, detail)
        asked = self._beating - self._lost.keys() - {rank}
        self._suspicion = _Suspicion(rank, what, time.monotonic() + STOPPING_SECONDS, asked, set(asked))
        self._settle()
        self._changed.notify_all()

    def _give_up_after_gap(self, rank: int) -> None:
        """A worker ended as one that lost its chief does, after this process stood still for as long as that takes."""
        if self._goes_on_without(rank, "ended", f"{describe_exit(1)}; see its output above"):
            return
        gap = f"for {self._reports.stood_still:.0f} s, as a process that is stopped or on a sleeping machine"
        self._fail(_CHIEF, "stood still", f"{gap}; meanwhile {self._names([rank])} gave it up for lost")

    def _settle(self) -> None:
        """A suspicion is the cause, when it is known what others wait in, or will not be known; else one that left."""
        if self._cause is not None:
            return
        if self._suspicion is None:
            if self._leaver is not None and time.monotonic() >= self._leaver.until:
                self._fail(self._leaver.rank, "ended its script", self._leaver.detail)
            return
        waiting = self._waiting_for(self._suspicion.rank)
        rank, waits = next(iter(waiting.items()), (0, NO_WAITS))
        is_known = self._all_left or bool(waits.stopped_in) or not (waiting or self._suspicion.asked)
        if is_known or time.monotonic() >= self._suspicion.until:
            self._cause = f"{self._suspicion.what}{waits.of(self._names([rank]))}"
            self._changed.notify_all()

    def _waiting_for(self, rank: int) -> dict[int, Waits]:
        """The others that are in a step of all workers."""
        return self._reports.waiting(self._reports.ranks - self._lost.keys() - {rank})

    def _has_news(self, rank: int) -> bool:
        """Whether the worker has not been told of the suspicion yet."""
        return self._suspicion is not None and rank in self._suspicion.untold

    @property
    def _period(self) -> float:
        """How long a heartbeat is held back; never so long that who waits hears nothing of the chief."""
        until = [pending.until for pending in (self._suspicion, self._leaver) if pending is not None]
        return max(0.0, min([self._reports.period, *(each - time.monotonic() for each in until)]))

    def _told(self, rank: int, event: str, detail: str) -> str:
        joined = rank in self._servers
        when = self._last_heard(rank) if joined and event in _UNTOLD else f" {self._when(rank)}"
        return f"worker {rank} ({self._addresses[rank]}) {event}{when}: {detail}"

    def _last_heard(self, rank: int) -> str:
        """Where a worker was that has not said so itself: as of its last heartbeat, and where the chief is."""
        chiefs = self._steps.get(_CHIEF, 0)
        chief = f", when the chief is at step {chiefs}" if chiefs > self._steps.get(rank, 0) else ""
        return f", last heard of {self._when(rank)}{chief}"

    def _goes_on_without(self, rank: int, event: str, detail: str) -> bool:
        """Whether the run does; then the worker is lost. A step of all workers does not."""
        is_expendable = self._goes_on and rank in (self._expendable or ())
        if self._cause is not None or not is_expendable or self._waiting_for(rank):
            return False
        if rank not in self._lost:
            self._lost[rank] = event, detail
            _log.warning("%s. The others go on without it", self._told(rank, event, detail))
        if self._leaver is not None and self._leaver.rank in self._lost:
            self._leaver = None
        self._changed.notify_all()
        return True

    def _when(self, rank: int) -> str:
        if rank not in self._servers:
            return "before it joined"
        step = self._steps.get(rank)
        together = f" of its {self._objects} AutoDist objects" if self._objects > 1 else ""
        return f"at step {step}{together}" if step else "before its first step"

    def _release(self, rank: int, need: str) -> _Leaver:
        """The run is to fail as `rank` has left: by its exit code when there is one soon, else as others need it."""
        detail = f"{need}, and a synchronous run needs every worker to the end"
        self._released.setdefault(rank, detail)
        if self._leaver is None:
            self._leaver = _Leaver(rank, detail, time.monotonic() + (_EXIT_CODE_SECONDS if rank != _CHIEF else 0.0))
        self._changed.notify_all()
        return self._leaver

    def _do_without(self, rank: int, need: str) -> None:
        """Returns when the run goes on without `rank`, which has left too early; raises when it has failed for that."""
        leaver = self._release(rank, need)
        left = max(0.0, leaver.until - time.monotonic())
        self._changed.wait_for(lambda: self._cause or self._suspicion or leaver.rank in self._lost, left)
        self._fail(leaver.rank, "ended its script", leaver.detail)
        if self._cause is not None:
            raise WorkerFailedError(self._cause)

    def _names(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"worker {rank} ({self._addresses[rank]})" for rank in sorted(ranks))


def describe_exit(exit_code: int) -> str:
    """What a process's return code says; negative: the signal that ended it."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
