"""`RunState`: the rules of one run, as plain state that events change: who has joined, what is exchanged, why it fails.

It has no lock, no thread, no clock and no I/O, so a test can give it any schedule. `shell.py` has all of these. What is
known of the workers is `roster.py`'s, and why a run fails `verdict.py`'s; here is which event ends which calls.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autodist_py.cluster.coordinator.announcements import NO_STEP, Announcements
from autodist_py.cluster.coordinator.api import HeartbeatReply, Membership
from autodist_py.cluster.coordinator.events import (
    Aborted,
    Action,
    Announced,
    Answer,
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
    Outcome,
    OutlivedScript,
    Prepares,
    Probe,
    ProcessEnded,
    Reply,
    SteppedApart,
    Stop,
    Tick,
    Warn,
)
from autodist_py.cluster.coordinator.exchanges import Exchanges, OpenExchange
from autodist_py.cluster.coordinator.liveness import Liveness
from autodist_py.cluster.coordinator.roster import CHIEF, Roster
from autodist_py.cluster.coordinator.verdict import Verdict
from autodist_py.cluster.failure import (
    ENDED,
    ENDED_SCRIPT,
    KEPT_WAITING,
    STOOD_STILL,
    STOPPED_ANSWERING,
    Failure,
    describe_exit,
)
from autodist_py.cluster.step_status import NO_STATUS
from autodist_py.config.resource_spec import first_difference
from autodist_py.proto.errors import AutoDistError, ClusterError, WorkerFailedError


@dataclass(slots=True)
class _Waiting:
    """A call that is not answered yet, until when it waits at most, and the exchange that it waits in."""

    call: Call
    until: float = math.inf
    exchange: OpenExchange | None = None


class RunState:
    """One run of the workers at `addresses` (by rank).

    A rank that has left may not be waited for: whoever does ends the run, as its script is another than theirs.

    Attributes:
        answers: those of the calls that have ended, by ticket, until whoever called takes them.
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
    ) -> None:
        self.answers: dict[int, Answer | AutoDistError] = {}
        self._identity = (run_id, seed, spec)
        self._roster = Roster(addresses)
        self._liveness = Liveness(heartbeat_timeout)
        self._verdict = Verdict(self._roster, self._liveness, goes_on=goes_on)
        self._exchanges = Exchanges(len(addresses))
        self._announcements = Announcements()
        self._waiting: dict[int, _Waiting] = {}
        self._now = -math.inf
        self._replies: list[Reply] = []
        self._actions: list[Action] = []
        self._is_rescheduled = False

    def step(self, event: Event, now: float) -> Outcome:
        """The event happens, at that time; the clock never goes back."""
        self._now = now
        self._replies, self._actions, self._is_rescheduled = [], [], False
        deadlines, ended = self._verdict.deadlines, self._verdict.ended
        try:
            self._take(event)
        except ClusterError as error:
            if not isinstance(event, Call):
                raise
            self._reply(Reply(event.ticket, error))
        self._settle()
        self._answer_calls()
        if self._verdict.ended != ended:
            self._exchanges.forget(self._verdict.ended)
        self._actions += map(Warn, self._verdict.warnings)
        self._verdict.warnings.clear()
        is_rescheduled = self._is_rescheduled or self._verdict.deadlines != deadlines
        return Outcome(tuple(self._replies), tuple(self._actions), is_rescheduled)

    def due(self, ticket: int) -> float:
        """When a call that waits may be answered by a Tick alone; infinity: it waits for another event."""
        times = (self._waiting[ticket].until, *self._verdict.deadlines)
        return min((until for until in times if until > self._now), default=math.inf)

    @property
    def failure(self) -> Failure | None:
        """Why the run failed; None: it has not."""
        return self._verdict.failure

    @property
    def joined(self) -> frozenset[int]:
        """The ranks that have joined."""
        return frozenset(self._roster.joined)

    @property
    def lost(self) -> Mapping[int, Failure]:
        """The workers that the others go on without, and how they failed."""
        return self._verdict.lost

    # -- Events -------------------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        match event:
            case Tick():
                pass
            case Began():
                self._roster.reach(CHIEF, event.step)
            case Beat():
                self._beat(event)
            case Exchanged():
                self._exchange(event)
            case Joined():
                self._join(event)
            case Heard():
                self._roster.require(event.rank)
                self._wait(event)
            case Left():
                self._roster.reach(event.rank, event.step)
                self._roster.left.add(event.rank)
                self._wait(event)
            case Aborted():
                self._roster.reach(event.rank, event.step)
                failure = self._roster.failure(event.rank, event.event, event.detail)
                if self._verdict.fail(failure):
                    self._wait(event)
                else:
                    self._reply(Reply(event.ticket, str(failure)))
            case Looked():
                self._look()
            case ProcessEnded():
                self._process_ended(event)
            case Lives():
                self._liveness.lives(event.rank, self._now)
            case Prepares():
                self._announcements.prepare(event.step, event.key, is_over=event.is_over)
            case Announced():
                others = [self._roster.steps.get(worker.rank, 0) for worker in self._roster.workers[1:]]
                others = [step for rank, step in enumerate(others, 1) if rank not in self.lost]
                self._announcements.add(event.step, event.key, event.value, reached=others)
            case SteppedApart():
                self._verdict.step_apart(event.expendable)
            case MadeAnother():
                self._roster.objects += 1
            case OutlivedScript():
                detail = f"its process had not ended {event.seconds:.0f} s after all scripts, and was made to"
                self._verdict.fail(self._roster.failure(event.rank, ENDED_SCRIPT, detail))
            case GaveUp():
                self._end(event.ticket)
                self.answers.pop(event.ticket, None)

    def _reply(self, reply: Reply) -> None:
        self.answers[reply.ticket] = reply.answer
        self._replies.append(reply)

    def _end(self, ticket: int) -> None:
        """The call waits no more; its worker does not come back to its exchange."""
        waiting = self._waiting.pop(ticket, None)
        if waiting is not None and waiting.exchange is not None:
            self._exchanges.end(waiting.call.rank, waiting.exchange, self._verdict.ended)

    def _wait(self, call: Call, seconds: float = math.inf, current: OpenExchange | None = None) -> None:
        self._waiting[call.ticket] = _Waiting(call, self._now + seconds, current)

    def _join(self, event: Joined) -> None:
        _, _, spec = self._identity
        if event.spec != spec:
            own, chiefs = first_difference(event.spec, spec)
            raise ClusterError(
                f"every worker has the same resource spec; worker {event.rank} has {own}, the chief {chiefs}. Give all "
                "of them the same file, and make it before AutoDist(...)."
            )
        self._roster.join(event.rank, event.server)
        self._wait(event, event.timeout)

    def _exchange(self, event: Exchanged) -> None:
        self._roster.require(event.rank)
        current = self._exchanges.give(event.rank, event.key, event.value, everyone=event.everyone)
        self._wait(event, event.timeout, current)

    def _beat(self, event: Beat) -> None:
        """A heartbeat of a worker that goes on while another has left may end the run."""
        self._roster.reach(event.rank, event.step)
        self._liveness.take(event.rank, event.waits, self._now)
        self._verdict.heard_of(event.rank)
        ended = {other: self._roster.steps[other] for other in self._roster.left} | self._exchanges.leaving(self.lost)
        behind = [other for other, last in ended.items() if event.step > last]
        if behind and self.failure is None and self._verdict.expendable is None:
            self._verdict.release(min(behind), f"worker {event.rank} went on to step {event.step}", self._now)
        self._wait(event, self._liveness.period)

    def _process_ended(self, event: ProcessEnded) -> None:
        """Unless all have left and the code is 0, the run fails.

        A worker that ends with an error after this process stood still has taken the chief for lost.
        """
        rank, code, has_joined = event.rank, event.exit_code, event.rank in self._roster.joined
        self._liveness.catch_up(self._now)
        if (code == 0 and self._verdict.all_left) or rank in self.lost:
            return
        if code == 0 and rank in self._verdict.released:
            self._verdict.fail(self._roster.failure(rank, ENDED_SCRIPT, self._verdict.released[rank]))
        elif event.reason:
            self._miss(rank, ENDED, event.reason)
        elif has_joined and code == 1 and self._liveness.stood_still(self._now):
            self._give_up_after_gap(event)
        elif not has_joined and code == 0:
            self._miss(rank, ENDED, "exit code 0; its script must reach AutoDist(...)")
        else:
            self._miss(rank, ENDED, _how_it_ended(event))

    def _miss(self, rank: int, event: str, detail: str) -> None:
        self._verdict.miss(self._roster.failure(rank, event, detail), self._now)

    def _give_up_after_gap(self, event: ProcessEnded) -> None:
        """A worker ended as one that lost its chief does, after this process stood still for as long as that takes."""
        rank = event.rank
        if self._verdict.goes_on_without(self._roster.failure(rank, ENDED, _how_it_ended(event))):
            return
        seconds = self._liveness.stood_still(self._now)
        gap = f"for {seconds:.0f} s, as a process that is stopped or on a sleeping machine"
        detail = f"{gap}; meanwhile {self._roster.names([rank])} gave it up for lost"
        self._verdict.fail(self._roster.failure(CHIEF, STOOD_STILL, detail))

    def _look(self) -> None:
        """Ends the run when a worker has been silent, or waited for, for too long."""
        self._liveness.catch_up(self._now)
        if self._verdict.all_left:
            return
        joined, left = self._roster.joined, self._roster.left
        others = self._liveness.ranks - self.lost.keys()
        doubtful = self._liveness.doubtful((others & joined.keys()) - left - {CHIEF}, self._now)
        self._actions += [Probe(rank, joined[rank]) for rank in doubtful]
        others -= self._verdict.released.keys()
        for rank, detail in sorted(self._liveness.silent(others - {CHIEF}, self._now).items()):
            self._miss(rank, STOPPED_ANSWERING, detail)
            self._actions.append(Stop(rank))
        behind = self._liveness.behind(others - left, self._now)
        if behind is not None:
            self._miss(behind[0], KEPT_WAITING, behind[1])
        for rank, failure in sorted(self.lost.items()):
            if self._verdict.waiting_for(rank):
                self._miss(rank, failure.event, f"{failure.detail}; the others went on without it, and now need it")

    def _settle(self) -> None:
        """What has become known, or will not be known any more, is the cause."""
        self._release_gone()
        while self._verdict.settle(self._now):
            self._release_gone()

    def _release_gone(self) -> None:
        """Who is waited for, and has left, is let go."""
        for waiting in self._waiting.values() if self.failure is None else ():
            call = waiting.call
            if isinstance(call, Exchanged) and call.rank not in self.lost and (gone := self._gone(waiting)):
                self._verdict.release(min(gone), f"worker {call.rank} waits for it at {call.key!r}", self._now)

    def _gone(self, waiting: _Waiting) -> set[int]:
        """Those that a worker waits for in an exchange, and that have left, or wait elsewhere for all others to end."""
        missing = set() if waiting.exchange is None else waiting.exchange.missing(self.lost)
        if not missing or waiting.exchange is None:
            return missing
        return missing & (self._roster.left | self._exchanges.leaving(self.lost, but=waiting.exchange.key).keys())

    # -- Answers ------------------------------------------------------------------------------------------------------

    def _answer_calls(self) -> None:
        for ticket, waiting in list(self._waiting.items()):
            reply = self._answer(ticket, waiting)
            if reply is not None:
                self._reply(reply)  # Before it is no call that waits: a signal may interrupt the chief's script here.
                self._end(ticket)

    def _answer(self, ticket: int, waiting: _Waiting) -> Reply | None:
        """The end of a call, if it has come."""
        call, is_due, verdict = waiting.call, self._now >= waiting.until, self._verdict
        cause = verdict.cause_for(call.rank)
        match call:
            case Beat():
                if not (is_due or cause or verdict.all_left or verdict.is_untold(call.rank)):
                    return None
                lost, suspicion = tuple(sorted(self.lost)), verdict.tell(call.rank)
                return Reply(ticket, HeartbeatReply(cause, verdict.all_left, lost, suspicion))
            case Heard() if self._announcements.find(call.step, call.key, call.position) is not None:
                return Reply(ticket, self._announcements.find(call.step, call.key, call.position))
            case Heard() if self._has_passed(call):
                return Reply(ticket, None)
            case Aborted() if cause is not None:
                return Reply(ticket, cause)
        if cause is not None:
            return Reply(ticket, WorkerFailedError(cause))
        match call:
            case Left() if verdict.all_left or call.rank in verdict.released:
                return Reply(ticket, None)
            case Exchanged():
                return self._answer_exchange(call, waiting, is_due=is_due)
            case Joined() if self._roster.is_complete:
                return self._welcome(call)
            case Joined() if is_due:
                return Reply(ticket, self._roster.incomplete(call.timeout))
            case Heard():
                return self._go_on_hearing(call, waiting, is_due=is_due)
        return None

    def _welcome(self, call: Joined) -> Reply:
        run_id, seed, _ = self._identity
        self._liveness.take(call.rank, NO_STATUS, self._now)
        return Reply(call.ticket, Membership(run_id, seed, self._roster.servers))

    def _answer_exchange(self, call: Exchanged, waiting: _Waiting, *, is_due: bool) -> Reply | None:
        if waiting.exchange is None:
            return None
        missing = waiting.exchange.missing(self.lost)
        if not missing:
            return Reply(call.ticket, waiting.exchange.answer())
        if not is_due or self._gone(waiting):
            return None
        return Reply(
            call.ticket,
            ClusterError(
                f"{self._roster.names(missing)} did not reach {call.key!r} within {call.timeout:g} s, where worker "
                f"{call.rank} waits: every worker runs the same script and reaches the same places in it."
            ),
        )

    def _go_on_hearing(self, call: Heard, waiting: _Waiting, *, is_due: bool) -> Reply | None:
        """Time counts only while the chief makes no announcement."""
        if self._announcements.preparing:
            waiting.until = math.inf
        elif waiting.until == math.inf:
            waiting.until = self._now + call.timeout
            self._is_rescheduled = True
        elif is_due:
            return Reply(
                call.ticket,
                ClusterError(
                    f"worker {call.rank} waits for the chief, {self._roster.names([CHIEF])}, at {call.key}, and it has "
                    f"not come there within {call.timeout:g} s. Every worker's script comes to the same places, or "
                    "the chief's alone (`if autodist.is_chief:`)."
                ),
            )
        return None

    def _has_passed(self, call: Heard) -> bool:
        """Whether the chief is past all that a worker's script does before its next step, or waits for the worker.

        It is not while a thread of its own still makes what it will announce there. Where a thread of the worker's own
        asks, which stands at no step and holds up nobody, the chief is past it when it has left.
        """
        if self._announcements.preparing[call.step, call.key]:
            return False
        if call.step == NO_STEP:
            return CHIEF in self._roster.left
        is_ahead = self._roster.steps.get(CHIEF, 0) > call.step
        return is_ahead or CHIEF in self._roster.left or self._exchanges.chief_waits_for(call.rank)


def _how_it_ended(event: ProcessEnded) -> str:
    """The exit code, and where to look for more, if there is anything to look at."""
    return describe_exit(event.exit_code) + ("; see its output above" if event.is_shown else "")
