"""When a server applies what it was sent, and when it answers: the rules of each consistency, as plain state.

A rule is told of each message that arrives and of each worker that stops sending, and says what to do. It knows neither
tensors nor threads.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from autodist_py.proto.synchronizers import Consistency

_REMEMBERED = 100_000
"""How many accepted gradients are remembered: the last ones."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a server does next.

    Attributes:
        joined: the workers, each with its oldest message that is not used yet, whose messages become one update now.
        dropped: the workers whose oldest message is not used at all.
        answered: the workers that are answered then, in this order.
    """

    joined: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    answered: tuple[int, ...] = ()


class Accepted(NamedTuple):
    """A gradient that was applied: how many updates its worker had seen when it computed it, and the worker."""

    step: int
    worker: int


class Rule(Protocol):
    """One consistency, on one server."""

    def arrived(self, worker: int) -> Decision:
        """A message of `worker` has come."""
        ...

    def paused(self, worker: int) -> Decision:
        """`worker` sends nothing until its next message: nobody waits for it."""
        ...

    def lost(self, worker: int) -> Decision:
        """`worker` never sends anything again."""
        ...


def rule_of(consistency: Consistency, workers: Sequence[int]) -> Rule:
    """The rule of a consistency, for the last exchange of a step, of a server that these workers use."""
    if consistency.is_bsp:
        return Together(workers)
    if consistency.first_tokens is not None:
        return Tokens(workers, consistency.replicas_to_aggregate, consistency.first_tokens)
    if consistency.replicas_to_aggregate:
        return FirstToArrive(workers, consistency.replicas_to_aggregate)
    return Bounded(workers, consistency.staleness) if consistency.sync else AsTheyArrive()


class Together:
    """Synchronous: an update is made of one message of each worker."""

    def __init__(self, workers: Sequence[int]):
        self._workers = tuple(workers)
        self._here: set[int] = set()

    def arrived(self, worker: int) -> Decision:
        """See Rule."""
        self._here.add(worker)
        if len(self._here) < len(self._workers):
            return Decision()
        self._here.clear()
        return Decision(joined=self._workers, answered=self._workers)

    def paused(self, worker: int) -> Decision:
        """See Rule. Workers pause together, or the run fails elsewhere."""
        return Decision()

    def lost(self, worker: int) -> Decision:
        """See Rule. The run ends, as everybody is needed."""
        return Decision()


class AsTheyArrive:
    """Asynchronous: each message is an update, and is answered at once (Downpour SGD; Dean et al. 2012)."""

    def arrived(self, worker: int) -> Decision:
        """See Rule."""
        return Decision(joined=(worker,), answered=(worker,))

    def paused(self, worker: int) -> Decision:
        """See Rule."""
        return Decision()

    def lost(self, worker: int) -> Decision:
        """See Rule."""
        return Decision()


class AfterOwn:
    """Synchronous reads: each message is by itself, and answered once the server's own worker has sent as many.

    So whatever its script wrote to its variables before the step is there.
    """

    def __init__(self, workers: Sequence[int], own: int):
        self._sent = dict.fromkeys(workers, 0)
        self._own = own
        self._waiting: list[int] = []

    def arrived(self, worker: int) -> Decision:
        """See Rule."""
        self._sent[worker] += 1
        self._waiting.append(worker)
        ready = tuple(other for other in self._waiting if self._sent[other] <= self._sent[self._own])
        self._waiting = [other for other in self._waiting if other not in ready]
        return Decision(joined=(worker,), answered=ready)

    def paused(self, worker: int) -> Decision:
        """See Rule."""
        return Decision()

    def lost(self, worker: int) -> Decision:
        """See Rule. The run ends, as everybody is needed."""
        return Decision()


class Bounded:
    """Bounded staleness: each message is an update; a worker is not answered while it is too far ahead.

    A worker that has been answered has sent `staleness` messages more than the slowest one, at most (stale synchronous
    parallel; Ho et al. 2013).
    """

    def __init__(self, workers: Sequence[int], staleness: int):
        self._sent = dict.fromkeys(workers, 0)
        self._staleness = staleness
        self._paused: set[int] = set()
        self._waiting: list[int] = []

    def arrived(self, worker: int) -> Decision:
        """See Rule."""
        self._paused.discard(worker)
        self._sent[worker] += 1
        self._waiting.append(worker)
        return Decision(joined=(worker,), answered=self._released())

    def paused(self, worker: int) -> Decision:
        """See Rule."""
        self._paused.add(worker)
        return self._after_pause()

    def lost(self, worker: int) -> Decision:
        """See Rule."""
        self._sent.pop(worker, None)
        self._waiting = [other for other in self._waiting if other != worker]
        self._paused.discard(worker)
        return self._after_pause()

    def _after_pause(self) -> Decision:
        released = self._released()
        if self._paused == self._sent.keys():
            self._paused.clear()
            self._sent = dict.fromkeys(self._sent, 0)  # They meet, and nobody is behind.
        return Decision(answered=released)

    def _released(self) -> tuple[int, ...]:
        counts = [count for worker, count in self._sent.items() if worker not in self._paused]
        furthest = min(counts, default=max(self._sent.values(), default=0)) + self._staleness
        released = tuple(worker for worker in self._waiting if self._sent[worker] <= furthest)
        self._waiting = [worker for worker in self._waiting if worker not in released]
        return released


class FirstToArrive:
    """Backup workers: an update is made of the first messages that arrive (Chen et al. 2016).

    A message whose worker computed it before the last update is dropped, and its worker is given the new values. Where
    an update waits for more messages than there are workers, those who are early send again. Where fewer workers go on
    than an update waits for, it waits for those.

    Attributes:
        accepted: the gradients that were applied, in order; the last of them, when they are many.
        dropped: for each worker, how many of its messages were not.
    """

    def __init__(self, workers: Sequence[int], wanted: int):
        self._workers, self._wanted = set(workers), wanted
        self._updates = 0
        self._seen = dict.fromkeys(workers, 0)
        """For each worker, how many updates it had seen when it was last answered."""
        self._computing = set(workers)
        self._paused: set[int] = set()
        self._here: list[int] = []
        """The workers of the messages that wait for others."""
        self._waiting: list[int] = []
        """The workers that wait for an answer."""
        self.accepted: deque[Accepted] = deque(maxlen=_REMEMBERED)
        self.dropped: Counter[int] = Counter()

    def arrived(self, worker: int) -> Decision:
        """See Rule."""
        self._paused.discard(worker)
        self._computing.discard(worker)
        if self._seen[worker] < self._updates:
            self.dropped[worker] += 1
            return Decision(dropped=(worker,), answered=self._answered([worker]))
        self._here.append(worker)
        self._waiting.append(worker)
        return self._next()

    def paused(self, worker: int) -> Decision:
        """See Rule."""
        self._computing.discard(worker)
        self._paused.add(worker)
        return self._after_pause()

    def lost(self, worker: int) -> Decision:
        """See Rule. What it has sent counts."""
        for those in (self._computing, self._paused, self._workers):
            those.discard(worker)
        self._waiting = [other for other in self._waiting if other != worker]
        return self._after_pause()

    def _after_pause(self) -> Decision:
        decision = self._next()
        if self._paused == self._workers:
            self._paused.clear()
            self._computing.update(self._workers)
        return decision

    def _next(self) -> Decision:
        if len(self._here) >= self._wanted or (self._here and not self._computing and not self._sends_again()):
            joined, answered = tuple(self._here), self._waiting
            self.accepted.extend(Accepted(self._updates, worker) for worker in joined)
            self._updates += 1
            self._here, self._waiting = [], []
            return Decision(joined=joined, answered=self._answered(answered))
        again: list[int] = []
        while self._sends_again() and len(self._here) + len(self._computing) < self._wanted:
            again += self._answered([self._waiting.pop(0)])
        return Decision(answered=tuple(again))

    def _sends_again(self) -> bool:
        """Whether a worker that waits may send once more for the same update."""
        return self._wanted > len(self._workers) and bool(self._waiting)

    def _answered(self, workers: Iterable[int]) -> tuple[int, ...]:
        answered = tuple(workers)
        self._computing.update(answered)
        self._seen |= dict.fromkeys(answered, self._updates)
        return answered


class Tokens:
    """Backup workers that take tokens, as TensorFlow's SyncReplicasOptimizer has it.

    A worker that has sent its gradient waits for a token. The token is the number of updates when it was made, and says
    how old the worker's next gradient is: one that is older than the last update is dropped. Each update makes as many
    tokens as there are workers, or as it waits for, if that is more. Any worker takes the oldest one. Those that are
    there at the start let a worker send a second gradient for the first update.

    Where nobody is left who would send, an update waits for no more, and a worker is answered without a token.

    Attributes:
        accepted, dropped: as of FirstToArrive.
    """

    def __init__(self, workers: Sequence[int], wanted: int, first_tokens: int):
        self._workers, self._wanted = set(workers), wanted
        self._made_by_update = max(len(self._workers), wanted)
        self._updates = 0
        self._tokens = deque([0] * first_tokens)
        self._taken = dict.fromkeys(workers, 0)
        """For each worker, the last token that it took."""
        self._computing = set(workers)
        self._paused: set[int] = set()
        self._here: list[int] = []
        self._waiting: list[int] = []
        self.accepted: deque[Accepted] = deque(maxlen=_REMEMBERED)
        self.dropped: Counter[int] = Counter()

    def arrived(self, worker: int) -> Decision:
        """See Rule."""
        self._paused.discard(worker)
        self._computing.discard(worker)
        self._waiting.append(worker)
        if self._taken[worker] >= self._updates:
            self._here.append(worker)
            return self._next()
        self.dropped[worker] += 1
        return replace(self._next(), dropped=(worker,))

    def paused(self, worker: int) -> Decision:
        """See Rule."""
        self._computing.discard(worker)
        self._paused.add(worker)
        return self._after_pause()

    def lost(self, worker: int) -> Decision:
        """See Rule. What it has sent counts."""
        for those in (self._computing, self._paused, self._workers):
            those.discard(worker)
        self._waiting = [other for other in self._waiting if other != worker]
        return self._after_pause()

    def _after_pause(self) -> Decision:
        decision = self._next()
        if self._paused == self._workers:
            self._paused.clear()
            self._computing.update(self._workers)
        return decision

    def _next(self) -> Decision:
        is_stuck = not self._computing and not (self._tokens and self._waiting)
        joined: tuple[int, ...] = ()
        if len(self._here) >= self._wanted or (self._here and is_stuck):
            joined, self._here = tuple(self._here), []
            self.accepted.extend(Accepted(self._updates, worker) for worker in joined)
            self._updates += 1
            self._tokens.extend([self._updates] * self._made_by_update)
        elif is_stuck and self._waiting:
            self._tokens.append(self._updates)
        answered = []
        while self._tokens and self._waiting:
            answered.append(self._waiting.pop(0))
            self._taken[answered[-1]] = self._tokens.popleft()
        self._computing.update(answered)
        return Decision(joined=joined, answered=tuple(answered))
