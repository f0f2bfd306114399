"""Whole runs without processes: a virtual clock, a network drawn by a seed, and workers that do as WorkerCluster does.

The chief's rules are those of the product (`RunState`), and so is what a worker knows of its own waiting
(`OwnStepStatus`). What a worker's threads do with it is told again here, as `member.py` has it, in generators: they
yield a number of seconds to sleep, or a `Future` to wait for. It is long, as workers, their network and
their script are one simulation.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from autodist_py.cluster.chief import SOON_SECONDS
from autodist_py.cluster.coordinator.events import (
    Aborted,
    Announced,
    Beat,
    Began,
    Event,
    Exchanged,
    GaveUp,
    Heard,
    Joined,
    Left,
    Lives,
    Looked,
    OutlivedScript,
    Prepares,
    Probe,
    ProcessEnded,
    SteppedApart,
    Stop,
    Tick,
)
from autodist_py.cluster.coordinator.service import REPLY_SECONDS
from autodist_py.cluster.coordinator.state import RunState
from autodist_py.cluster.coordinator_link import MARGIN_SECONDS
from autodist_py.cluster.failure import FAILED, Worker, chief_lost
from autodist_py.cluster.launch.local import TERMINATE_SECONDS
from autodist_py.cluster.member import EXCHANGE_SECONDS, HEAR_SECONDS
from autodist_py.cluster.run_failure import CAUSE_SECONDS
from autodist_py.cluster.server_probe import STILL_SECONDS, ask_seconds
from autodist_py.cluster.step_status import PROMPT_SECONDS, STOPPING_SECONDS, OwnStepStatus, StepStatus
from autodist_py.config.settings import Settings
from autodist_py.proto.errors import AutoDistError, ClusterError, WorkerFailedError

DELAY_SECONDS = 0.02
"""The longest way of a message that is not lost."""

RESENT_SECONDS = 0.3
"""How much later a message comes that was lost once."""

WORKERS_SECONDS = SOON_SECONDS + STILL_SECONDS
JOIN_SECONDS = 10.0
"""What these runs ask for; less than by default, so that they are over sooner."""

EXIT_GRACE_SECONDS = Settings().exit_grace

W = "dense gradients of w"

Steps = Generator[Any, Any, Any]


class LostError(Exception):
    """What a call raises whose chief is not there."""


class SilentError(LostError):
    """What a call raises that is not answered in time."""


class StoppedError(Exception):
    """What a collective raises that is stopped."""


class ExitError(Exception):
    """What `sys.exit` raises."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


class Future:
    """What a task waits for: a value, or an error. The first that is set stays."""

    __slots__ = ("error", "is_done", "then", "value")

    def __init__(self, then: Callable[[Any, Exception | None], None] | None = None) -> None:
        self.is_done = False
        self.value: Any = None
        self.error: Exception | None = None
        self.then = [] if then is None else [then]

    def set(self, value: Any = None, error: Exception | None = None) -> None:
        if not self.is_done:
            self.is_done, self.value, self.error = True, value, error
            for act in self.then:
                act(value, error)


class Process:
    """One process of a world: what it does waits while it stands still, and ends with it."""

    def __init__(self, world: "World", *, rate: float):
        self.world, self._rate = world, rate
        self.is_alive = True
        self.is_stopped = False
        self.is_held = False
        """Whether its Python stands still, while its TensorFlow server answers."""
        self.is_over = False
        """Whether it stands still for ever."""
        self.goes_on_at = 0.0
        """When it goes on, or went on, after it was stopped."""
        self._put_off: list[Callable[[], None]] = []

    def clock(self) -> float:
        """Its own, which goes a little faster or slower than others'."""
        return self.world.now * self._rate

    def start(self, steps: Steps) -> None:
        self.go_on(steps)

    def go_on(self, steps: Steps, value: Any = None, error: Exception | None = None) -> None:
        """The task runs until it waits again."""
        if not self.is_alive:
            return
        if self.is_stopped or self.is_held:
            self._put_off.append(lambda: self.go_on(steps, value, error))
            return
        try:
            wait = steps.send(value) if error is None else steps.throw(error)
            while isinstance(wait, Future) and wait.is_done:
                wait = steps.send(wait.value) if wait.error is None else steps.throw(wait.error)
        except StopIteration:
            return
        if isinstance(wait, Future):
            wait.then.append(lambda value, error: self.go_on(steps, value, error))
        else:
            self.after(wait, lambda: self.go_on(steps))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """It acts so many of its own seconds later."""
        self.world.at(self.world.now + seconds / self._rate, lambda: self.act(act))

    def act(self, act: Callable[[], None]) -> None:
        """Now, or when it goes on."""
        if self.is_stopped or self.is_held:
            self._put_off.append(act)
        elif self.is_alive:
            act()

    def wake(self) -> None:
        """It goes on, with all that has come meanwhile."""
        self.is_stopped = self.is_held = False
        acts, self._put_off = self._put_off, []
        for act in acts:
            self.act(act)


class World:
    """The clock, and what will happen."""

    def __init__(self, *, trace: bool = False):
        self.now = 1000.0
        self.trace: list[str] | None = [] if trace else None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, act))

    def run(self, is_over: Callable[[], bool], until: float) -> None:
        """All that happens, until it is over, or it is too late."""
        heap = self._heap
        while heap and not is_over():
            time, _, act = heapq.heappop(heap)
            if time > until:
                return
            self.now = time
            act()

    def note(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now - 1000.0:8.3f}  {text}")


class Network:
    """The ways between the hosts of the workers, a host each."""

    def __init__(self, world: World, choose: Random, *, loss: float, duplicates: float):
        self._world, self._choose = world, choose
        self._loss, self._duplicates = loss, duplicates
        self.cut: dict[int, float] = {}
        """The hosts that are cut off, and until when."""

    def is_cut(self, one: int, other: int) -> bool:
        return one != other and any(self._world.now < self.cut.get(rank, 0.0) for rank in (one, other))

    def send(self, sender: int, receiver: int, to: Process, act: Callable[[], None], *, again: bool = False) -> None:
        """The receiver acts when the message comes; it may come twice, where a caller may send it `again`."""
        for _ in range(2 if again and self._choose.random() < self._duplicates else 1):
            begun = self._world.now
            if self.is_cut(sender, receiver):
                begun = max(self.cut.get(rank, 0.0) for rank in (sender, receiver))
                if begun == math.inf:
                    return
            seconds = self._choose.random() * DELAY_SECONDS
            if self._choose.random() < self._loss:
                seconds += RESENT_SECONDS
            self._world.at(begun + seconds, lambda: self._deliver(sender, receiver, to, act))

    def _deliver(self, sender: int, receiver: int, to: Process, act: Callable[[], None]) -> None:
        if not (self.is_cut(sender, receiver) and max(self.cut.values()) == math.inf):
            to.act(act)


@dataclass(frozen=True)
class Plan:
    """What a run does, and with what settings.

    `ops` are the places of the script, the same for all: "step", "compare", "broadcast", "announce" or "work".
    """

    workers: int
    ops: tuple[str, ...]
    heartbeat_timeout: float
    limit: float
    is_apart: bool = False
    loss: float = 0.0
    duplicates: float = 0.0
    rates: tuple[float, ...] = ()
    breaks_peers: bool = True
    """Whether a collective that is stopped, or whose process ends, raises on the others, too."""
    by_hand: bool = False
    """Whether nobody sees, or can end, the other workers' processes."""


class Member:
    """One worker, as WorkerCluster is one. Worker 0 is the chief, and has the run's state."""

    def __init__(self, rank: int, run: "Run"):
        self.rank, self.run = rank, run
        self.process = Process(run.world, rate=run.plan.rates[rank])
        self.status = OwnStepStatus()
        self.step = 0
        self.began: list[float] = []
        """When it began each step."""
        self.waits: list[tuple[float, float]] = []
        """From when till when it waited in each collective."""
        self.was_slow = False
        """Whether a collective that was stopped took long to say so."""
        self.cause: str | None = None
        self.cause_at = math.inf
        self.failed = Future()
        self.left = Future()
        self.is_leaving = False
        self.leaving_at = math.inf
        self.is_over = False
        """Whether its script has ended; where it failed, the process then ends by itself."""
        self.exit_code: int | None = None
        self.collective: Future | None = None
        self.has_stopped = Future()
        self.pending: set[Future] = set()
        self.heard: Counter[tuple[int, str]] = Counter()

    # -- Calls --------------------------------------------------------------------------------------------------------

    def ask(self, make: Callable[[int], Event], *, patience: float | None = None, again: bool = False) -> Future:
        """The coordinator's answer to a call."""
        answer, run = Future(), self.run
        if self.rank == 0:
            run.take_call(make, answer)
            return answer
        self.pending.add(answer)
        tickets: list[int] = []

        def give_up(_: Any, error: Exception | None) -> None:
            """gRPC tells the other end, if it reaches it."""
            if isinstance(error, LostError) and self.process.is_alive:
                run.network.send(self.rank, 0, run.chief.process, lambda: run.give_up(tickets))

        def come_back(value: Any, error: Exception | None) -> None:
            self.pending.discard(answer)
            answer.set(value, error)

        def reply(value: Any, error: Exception | None) -> None:
            run.network.send(0, self.rank, self.process, lambda: come_back(value, error))

        def arrive() -> None:
            tickets.append(run.take_call(make, Future(reply)))
            if answer.error is not None:
                run.give_up(tickets)

        answer.then.append(give_up)

        if run.chief.process.is_alive and run.serves:
            run.network.send(self.rank, 0, run.chief.process, arrive, again=again)
        elif not run.network.is_cut(0, self.rank):
            self.process.after(DELAY_SECONDS, lambda: come_back(None, LostError("connection refused")))
        if patience is not None:
            self.process.after(patience, lambda: come_back(None, SilentError("deadline exceeded")))
        return answer

    def call(self, make: Callable[[int], Event], *, patience: float | None = None) -> Steps:
        """See CoordinatorLink.ask."""
        try:
            return (yield self.ask(make, patience=patience))
        except WorkerFailedError as error:
            self.fail(str(error))
            raise
        except LostError:
            yield from self.chief_is_lost()
            raise WorkerFailedError(self.cause) from None

    def chief_is_lost(self) -> Steps:
        if self.is_leaving and (yield from self.within(self.left, MARGIN_SECONDS)):
            raise ClusterError("the chief has ended, as all have left")
        yield from self.lose_chief()

    def within(self, future: Future, seconds: float) -> Steps:
        """Whether it comes in time."""
        if not future.is_done:
            timed = Future()
            future.then.append(lambda value, error: timed.set())
            self.process.after(seconds, timed.set)
            yield timed
        return future.is_done

    # -- What a worker's threads do -----------------------------------------------------------------------------------

    def script(self) -> Steps:
        """The main thread, to the end of the process."""
        code = 0
        try:
            yield from self.join()
            for number, op in enumerate(self.run.plan.ops):
                self.check()
                yield from self.run.fault.strike(self, number)
                yield from getattr(self, f"do_{op}")(number)
        except WorkerFailedError:
            code = 1
        except ExitError as error:
            code = error.code
        except (ClusterError, StoppedError, ValueError) as error:
            code = 1
            yield from self.raised(error)
        yield from self.end(code)

    def raised(self, error: Exception) -> Steps:
        """See ScriptEnd.raised."""
        if isinstance(error, StoppedError) and (yield from self.within(self.failed, CAUSE_SECONDS)):
            return
        try:
            abort = f"{type(error).__name__}: {error}"
            cause = yield from self.call(lambda ticket: Aborted(ticket, self.rank, FAILED, abort, self.step))
            self.fail(cause)
        except AutoDistError:
            pass

    def end(self, code: int) -> Steps:
        """See ScriptEnd.ended. The chief waits for all others' processes."""
        if self.cause is None:
            try:
                self.is_leaving, self.leaving_at = True, self.run.world.now
                yield from self.call(lambda ticket: Left(ticket, self.rank, self.step))
                self.left.set()
                if self.rank == 0:
                    yield MARGIN_SECONDS / 10  # The other workers' answers are on their way.
                    self.run.serves = False
                    yield from self.wait_for_workers()
                    if self.run.state.failure is not None:
                        self.fail(str(self.run.state.failure))
            except ClusterError:
                yield from self.within(self.failed, CAUSE_SECONDS)
        self.is_over = True
        if self.rank and code == 0 and self.cause is None:
            yield from self.run.fault.keep_process(self)
        if self.cause is not None and self.rank == 0:
            yield from self.stop_workers()
        self.run.ended(self, 1 if self.cause is not None and code == 0 else code)

    def stop_workers(self) -> Steps:
        """See Chief.stop_workers. Where the chief reaches nobody, the agent there ends the worker."""
        if not (yield from self.within(self.run.all_ended, EXIT_GRACE_SECONDS + MARGIN_SECONDS)):
            for late in [member for member in self.run.members[1:] if member.exit_code is None]:
                if not (self.run.plan.by_hand or self.run.network.is_cut(0, late.rank)):
                    self.run.kill(late, -9)

    def wait_for_workers(self) -> Steps:
        """See Chief.wait_for_workers."""
        if not (yield from self.within(self.run.all_ended, WORKERS_SECONDS)):
            for late in [member for member in self.run.members[1:] if member.exit_code is None]:
                self.run.tell(OutlivedScript(late.rank, WORKERS_SECONDS))
                if not self.run.network.is_cut(0, late.rank):
                    self.run.kill(late, -15)

    def join(self) -> Steps:
        yield self.run.choose.random() * 0.5
        yield from self.call(
            lambda ticket: Joined(ticket, self.rank, f"host:{self.rank}", "spec", JOIN_SECONDS),
            patience=JOIN_SECONDS + REPLY_SECONDS,
        )
        self.run.members_joined += 1
        self.process.start(self.beat())
        if self.rank and self.run.plan.limit:  # Without a limit it never hears nothing.
            self.process.start(self.listen())
        if self.run.plan.is_apart and self.rank == 0:
            self.run.tell(SteppedApart(frozenset(range(1, self.run.plan.workers))))

    def beat(self) -> Steps:
        """See Heartbeat.beat."""
        try:
            while self.cause is None:
                if self.rank == 0:
                    self.run.look()
                try:
                    reply = yield from self.pulse()
                except LostError:
                    yield from self.chief_is_lost()
                    return
                self.status.answered()
                if reply.suspicion is not None:
                    yield from self.stop_step()
                    self.status.answered()
                if reply.cause is not None:
                    self.fail(reply.cause)
                if reply.finished and (yield from self.within(self.left, MARGIN_SECONDS)):
                    return
        except ClusterError:
            return

    def _beat(self, step: int, status: StepStatus, ticket: int) -> Beat:
        return Beat(ticket, self.rank, step, status)

    def pulse(self) -> Steps:
        """See Heartbeat._report."""
        timeout = self.run.plan.heartbeat_timeout
        patience = None if self.rank == 0 else timeout - ask_seconds(timeout)
        begun = self.process.clock()
        while True:
            step, status = self.step, self.status.now
            try:
                return (
                    yield self.ask(
                        partial(self._beat, step, status),
                        patience=patience,
                        again=True,
                    )
                )
            except SilentError:
                is_over = self.process.clock() - begun > STILL_SECONDS
                if is_over or not (yield self.run.probe(self, 0)):
                    raise

    def listen(self) -> Steps:
        """See Heartbeat.listen."""
        while self.cause is None and not self.left.is_done:
            yield PROMPT_SECONDS
            if self.cause is None and not self.left.is_done and self.status.hears_nothing():
                yield from self.lose_chief()

    def lose_chief(self) -> Steps:
        """See CoordinatorLink.lose_chief."""
        chief, own = (Worker(rank, self.run.addresses[rank]) for rank in (0, self.rank))
        yield from self.stop_step()
        self.fail(str(chief_lost(chief, own, self.status.now)))
        for answer in list(self.pending):
            self.pending.discard(answer)
            answer.set(error=LostError("the channel is closed"))

    def stop_step(self) -> Steps:
        """See CoordinatorLink.stop_step."""
        if self.cause is None:
            self.abort_collective()
            if self.status.now.what:
                yield from self.within(self.has_stopped, STOPPING_SECONDS)

    def fail(self, cause: str) -> None:
        """See RunFailure.fail."""
        if self.cause is None:
            self.run.world.note(f"{self.rank}: {cause}")
            self.cause, self.cause_at = cause, self.run.world.now
            self.failed.set()
            self.abort_collective()
            self.process.after(EXIT_GRACE_SECONDS, self.end_after_grace)

    def end_after_grace(self) -> None:
        """See ScriptEnd._end_after_grace."""
        if not self.is_over:
            self.is_over = True
            self.run.ended(self, 1)

    def abort_collective(self) -> None:
        """It raises in a while, here, and perhaps where others wait for it."""
        if self.collective is not None and not self.collective.is_done:
            self.run.break_collective(self)

    def check(self) -> None:
        if self.cause is not None:
            raise WorkerFailedError(self.cause)

    # -- What scripts do ----------------------------------------------------------------------------------------------

    def do_work(self, number: int) -> Steps:
        yield self.run.choose.random() * 0.5

    def do_step(self, number: int) -> Steps:
        """See StepProgram.run."""
        self.step += 1
        self.began.append(self.run.world.now)
        if self.rank == 0:
            self.run.tell(Began(self.step))
        if self.run.plan.is_apart:
            yield 0.2
            return
        with self.status.together(self.run.plan.limit, W):
            self.has_stopped = Future()
            yield self.run.choose.random() * 0.1
            try:
                self.check()  # Its collectives are stopped already.
                begun = self.run.world.now
                try:
                    yield self.run.collective(self)
                finally:
                    self.waits.append((begun, self.run.world.now))
            except StoppedError:
                self.status.stopped_in(W)
                self.has_stopped.set()
                if (yield from self.within(self.failed, CAUSE_SECONDS)):
                    raise WorkerFailedError(self.cause) from None
                self.status.stopped_in("")
                raise
            finally:
                self.collective = None

    def do_compare(self, number: int) -> Steps:
        yield from self.exchange(f"compare {number}", everyone=True)

    def do_broadcast(self, number: int) -> Steps:
        yield from self.exchange(f"broadcast {number}", everyone=False)

    def exchange(self, key: str, *, everyone: bool) -> Steps:
        value = b"%d" % self.rank
        values = yield from self.call(
            lambda ticket: Exchanged(ticket, self.rank, key, value, everyone, EXCHANGE_SECONDS),
            patience=EXCHANGE_SECONDS + REPLY_SECONDS,
        )
        wanted = set(range(self.run.plan.workers)) - self.run.state.lost.keys() if everyone else {0}
        assert wanted <= values.keys(), f"{key}: worker {self.rank} was given {values}"

    def do_announce(self, number: int) -> Steps:
        place = (self.step, "k")
        position = self.heard[place]
        self.heard[place] += 1
        if self.rank == 0:
            self.run.tell(Prepares("k", self.step))
            yield self.run.choose.random() * 0.3
            self.run.tell(Announced("k", b"%d" % number, self.step))
            self.run.tell(Prepares("k", self.step, is_over=True))
            return
        step = self.step
        heard = yield from self.call(lambda ticket: Heard(ticket, self.rank, "k", step, position, HEAR_SECONDS))
        is_gone = heard is None and self.run.fault.rank == 0 and self.run.fault.struck_at < math.inf
        assert is_gone or heard == b"%d" % number, f"worker {self.rank} heard {heard!r} at {place}"


@dataclass
class Fault:
    """What strikes one worker: nothing, as it stands. See `Schedule` for the kinds.

    Attributes:
        rank: whom it strikes.
        struck_at: when it did; infinity: it has not.
        is_harmless: whether the run must go on.
    """

    kind: str = "none"
    rank: int = 0
    time: float = math.inf
    place: int = -1
    seconds: float = 0.0
    is_harmless: bool = True
    struck_at: float = math.inf

    def strike(self, member: Member, number: int) -> Steps:
        """What happens at a place of the script."""
        if member.rank != self.rank or number != self.place:
            return
        self.note(member.run)
        if self.kind == "raise":
            raise ValueError("boom")
        if self.kind in ("exit", "early"):
            raise ExitError(3 if self.kind == "exit" else 0)
        if self.kind == "late":
            yield self.seconds

    def keep_process(self, member: Member) -> Steps:
        """The script has ended, and the process does not end."""
        if self.kind == "linger" and member.rank == self.rank:
            self.note(member.run)
            yield math.inf

    def is_late(self, struck: Member) -> bool:
        """Whether it strikes a worker that has left, or nobody: then the run may end well."""
        if self.kind == "linger":
            return self.struck_at == math.inf
        is_an_end = self.kind in ("exit", "early")
        return self.struck_at > struck.leaving_at or (self.struck_at >= struck.leaving_at and not is_an_end)

    def note(self, run: "Run") -> None:
        self.struck_at = run.world.now
        run.world.note(f"{self.kind} strikes {self.rank}, for {self.seconds:g} s")

    def happen(self, run: "Run") -> None:
        """What happens at its time."""
        member = run.members[self.rank]
        if member.exit_code is not None:
            return
        self.note(run)
        if self.kind == "kill":
            run.kill(member, -9)
        elif self.kind == "cut":
            run.network.cut[self.rank] = run.world.now + self.seconds
        else:
            member.process.is_stopped, member.process.is_held = self.kind == "stop", self.kind == "hold"
            member.process.goes_on_at = run.world.now + self.seconds if self.kind == "stop" else 0.0
            member.process.is_over = self.seconds == math.inf
            if self.seconds < math.inf:
                run.world.at(run.world.now + self.seconds, member.process.wake)


class Run:
    """All workers of one run, and the chief's state."""

    def __init__(self, plan: Plan, fault: Fault, choose: Random, *, trace: bool = False):
        self.plan, self.fault, self.choose = plan, fault, choose
        self.addresses = [f"127.0.0.{rank + 1}" for rank in range(plan.workers)]
        self.world = World(trace=trace)
        self.network = Network(self.world, choose, loss=plan.loss, duplicates=plan.duplicates)
        self.state = RunState(
            self.addresses,
            run_id="run",
            seed=7,
            spec="spec",
            heartbeat_timeout=plan.heartbeat_timeout,
            goes_on=plan.is_apart,
        )
        self.members = [Member(rank, self) for rank in range(plan.workers)]
        self.chief = self.members[0]
        self.serves = True
        self.all_ended = Future()
        self.members_joined = 0
        self.failed_at = math.inf
        """When the chief knew why the run fails."""
        self._tickets: dict[int, Future] = {}
        self._ticket = 0
        self._tick_at = math.inf
        self._collectives: dict[int, dict[int, Future]] = {}

    def play(self, seconds: float) -> None:
        """The run, until all that can have ended, or for as long as it may take."""
        if self.fault.time < math.inf:
            self.world.at(self.fault.time, lambda: self.fault.happen(self))
        for member in self.members:
            member.process.start(member.script())
        self.world.run(lambda: not self.running(), self.world.now + seconds)

    def running(self) -> list[Member]:
        """Those that have not ended, and can."""
        return [member for member in self.members if member.exit_code is None and not member.process.is_over]

    # -- The chief ----------------------------------------------------------------------------------------------------

    def take_call(self, make: Callable[[int], Event], answer: Future) -> int:
        """The call's ticket."""
        self._ticket += 1
        ticket = self._ticket
        self._tickets[ticket] = answer
        self.tell(make(ticket))
        return ticket

    def give_up(self, tickets: list[int]) -> None:
        """Who has made these calls does not wait any more."""
        for ticket in tickets:
            if self._tickets.pop(ticket, None) is not None:
                self.tell(GaveUp(ticket))

    @property
    def kept(self) -> list[object]:
        """What the chief's state keeps of calls, and of exchanges."""
        return [*self.state._waiting.values(), *self.state._exchanges, *self.state.answers]

    def tell(self, event: Event) -> None:
        """See Coordinator."""
        outcome = self.state.step(event, self.chief.process.clock())
        if self.state.failure is not None:
            self.failed_at = min(self.failed_at, self.world.now)
        if self.world.trace is not None and not isinstance(event, Beat | Tick | Looked | Began):
            self.world.note(f"   {event}")
        answered = [
            (self._tickets.pop(reply.ticket), self.state.answers.pop(reply.ticket)) for reply in outcome.replies
        ]
        for future, answer in answered:  # What follows from one may be another event.
            if isinstance(answer, AutoDistError):
                future.set(error=answer)
            else:
                future.set(answer)
        for action in outcome.actions:
            if isinstance(action, Probe):
                self.chief.process.start(self._ask(action.rank))
            elif isinstance(action, Stop):
                member = self.members[action.rank]
                if not (self.network.is_cut(0, action.rank) or self.plan.by_hand):
                    self.world.at(self.world.now + TERMINATE_SECONDS, partial(self.kill, member, -9))
        due = min((self.state.due(ticket) for ticket in self._tickets), default=math.inf)
        if due < self._tick_at:
            self._tick_at = due
            self.chief.process.after(due - self.chief.process.clock(), lambda: self._tick(due))

    def _tick(self, due: float) -> None:
        if due == self._tick_at:
            self._tick_at = math.inf
            self.tell(Tick())

    def look(self) -> None:
        self.tell(Looked())

    def _ask(self, rank: int) -> Steps:
        if (yield self.probe(self.chief, rank)):
            self.tell(Lives(rank))

    def probe(self, asking: Member, rank: int) -> Future:
        """Whether that worker's TensorFlow server answers in time."""
        answer, other = Future(), self.members[rank].process
        lives = other.is_alive and not other.is_stopped and not self.network.is_cut(asking.rank, rank)
        is_refused = not other.is_alive and not self.network.is_cut(asking.rank, rank)
        seconds = DELAY_SECONDS if lives or is_refused else ask_seconds(self.plan.heartbeat_timeout)
        asking.process.after(seconds, lambda: answer.set(lives))
        return answer

    # -- Steps of all workers -----------------------------------------------------------------------------------------

    def collective(self, member: Member) -> Future:
        """The worker's part in the collective of its step, which all workers have to come to."""
        parts = self._collectives.setdefault(member.step, {})
        member.collective = parts[member.rank] = Future()
        begins = max([self.world.now, *self.network.cut.values(), *(each.process.goes_on_at for each in self.members)])
        is_whole = len(parts) == self.plan.workers and not any(part.is_done for part in parts.values())
        if is_whole and begins < math.inf and all(each.process.is_alive for each in self.members):
            for rank, part in parts.items():
                seconds = begins - self.world.now + self.choose.random() * DELAY_SECONDS
                self.members[rank].process.after(seconds, part.set)
        return member.collective

    def break_collective(self, member: Member) -> None:
        """It raises in this worker's step; most say so at once, some after the others do not wait for it any more."""
        parts = self._collectives.get(member.step, {})
        peers = self.members if self.plan.breaks_peers else [member]
        for peer in peers:
            part = parts.get(peer.rank)
            if part is not None and not part.is_done and not self.network.is_cut(member.rank, peer.rank):
                slow = self.choose.random() < 0.1
                peer.was_slow |= slow
                seconds = self.choose.uniform(1.0, 3.0) if slow else self.choose.random() * 0.2
                peer.process.after(seconds, partial(part.set, error=StoppedError("aborted")))

    # -- Ends ---------------------------------------------------------------------------------------------------------

    def kill(self, member: Member, code: int) -> None:
        """A signal ends the process."""
        if member.exit_code is None:
            self.ended(member, code)
            if member.collective is not None:
                self.break_collective(member)

    def ended(self, member: Member, code: int) -> None:
        """The process has ended: the launcher sees it, and connections to the chief break with that one."""
        self.world.note(f"{member.rank}: exit code {code}")
        member.exit_code = code
        member.process.is_alive = False
        if member.rank:
            event = ProcessEnded(member.rank, code)
            if not self.plan.by_hand:
                self.network.send(member.rank, 0, self.chief.process, lambda: self.tell(event))
            if all(other.exit_code is not None for other in self.members[1:]):
                self.chief.process.after(2 * DELAY_SECONDS + RESENT_SECONDS, self.all_ended.set)
            return
        for other in self.members[1:]:
            for answer in list(other.pending):
                if not self.network.is_cut(0, other.rank):
                    other.process.after(DELAY_SECONDS, partial(answer.set, error=LostError("connection reset")))
