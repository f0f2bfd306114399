"""`Liveness`: what the heartbeats of all workers say, on the chief, and who is missing by them."""

import math
from collections.abc import Collection
from typing import NamedTuple

from autodist_py.cluster.server_probe import STILL_SECONDS
from autodist_py.cluster.step_status import LEAST_SILENCE_SECONDS, PROMPT_SECONDS, StepStatus

HEARTBEAT_SECONDS = 1.0
"""How often a worker reports while no program has a timeout; also how long the coordinator holds a report back."""


_RECENT_SECONDS = 10.0
"""How long after this process stood still the others' end is taken for an effect of it."""


class _Report(NamedTuple):
    """A worker's last one: when it came, its waits, since when they are of this step, and when the one before came.

    A worker reports again when it is answered, so it has said this one after that before came. Since it came the worker
    was last known to be `alive`, if it was.
    """

    seen: float
    waits: StepStatus
    since: float
    before: float
    alive: float = -math.inf

    def later(self, seconds: float, now: float) -> "_Report":
        """The report as if it had come so much later, but not later than now."""
        return self._replace(seen=min(now, self.seen + seconds), since=min(now, self.since + seconds))

    @property
    def known(self) -> float:
        """When the worker was last known to live; one that only lives, and says nothing, counts for a while."""
        return max(self.seen, min(self.alive, self.seen + STILL_SECONDS))

    @property
    def has_limit(self) -> bool:
        """Whether its step is under way, and has a limit for how long it waits."""
        return bool(self.waits.what and self.waits.seconds)


class Liveness:
    """The last report of each worker that has joined. Plain memory: who asks says what time it is."""

    def __init__(self, heartbeat_timeout: float):
        self._heartbeat_timeout = heartbeat_timeout
        self._last: dict[int, _Report] = {}
        self._checked = 0.0
        self._still = (0.0, -math.inf)

    def take(self, rank: int, waits: StepStatus, now: float) -> None:
        """A worker has joined, or reports."""
        last = self._last.get(rank)
        if last is None:
            self._checked = now  # Before, there was nothing to look for.
        is_same = last is not None and (last.waits.step, bool(last.waits.what)) == (waits.step, bool(waits.what))
        since, before = (now, -math.inf) if last is None else (last.since if is_same else now, last.seen)
        self._last[rank] = _Report(now, waits, since, before)

    def lives(self, rank: int, now: float) -> None:
        """A worker that has joined lives, by another sign than a report."""
        self._last[rank] = self._last[rank]._replace(alive=now)

    @property
    def ranks(self) -> set[int]:
        """Who has joined."""
        return set(self._last)

    @property
    def period(self) -> float:
        """How long a report is held back, and how often to look for those that are missing."""
        is_limited = any(last.waits.seconds for last in self._last.values())
        return PROMPT_SECONDS if is_limited else HEARTBEAT_SECONDS

    def catch_up(self, now: float) -> None:
        """Call it before `behind` and `silent`: what this machine itself stood still, or was late, does not count.

        What others sent meanwhile may be unread.
        """
        late = now - self._checked - self.period if self._last else 0.0
        self._checked = now
        if late > 0:
            self._last = {rank: last.later(late, now) for rank, last in self._last.items()}
        patience = min([self._heartbeat_timeout, *(last.waits.silence for last in self._last.values())])
        if late > max(LEAST_SILENCE_SECONDS, patience - 2 * self.period):
            self._still = (late, now)

    def stood_still(self, now: float) -> float:
        """For how many seconds this process did nothing, if just now, and as long as others' patience; else 0.

        Catch up before.
        """
        seconds, until = self._still
        return seconds if now - until < _RECENT_SECONDS else 0.0

    def behind(self, ranks: Collection[int], now: float) -> tuple[int, str] | None:
        """Which of these lives but keeps others of them waiting, and how; none, until it has said so after the limit.

        One that is itself in an earlier step may wait for another: it has as long as a silence may last. While one of
        these misses a heartbeat nobody is behind: a worker that is silent may be what all others wait for.
        """
        if any(now - self._last[rank].seen > 2 * self.period for rank in ranks):
            return None
        late = sorted(ranks, key=lambda rank: (bool(self._last[rank].waits.what), self._last[rank].waits.step, rank))
        for last in (self._last[rank] for rank in ranks if self._last[rank].has_limit):
            step, seconds = last.waits.step, last.waits.seconds
            for rank in late:
                other = self._last[rank]
                limit = last.waits.silence if other.waits.what else seconds
                if other.waits.step < step and other.before - last.since > limit:
                    rule = f"it has not begun step {step} of all workers, with timeout_seconds {seconds:g}"
                    return rank, f"{limit:g} s after another {rule}"
        return None

    def doubtful(self, ranks: Collection[int], now: float) -> list[int]:
        """Which of these will soon be silent for as long as the heartbeat's timeout: ask whether they live."""
        return [rank for rank in sorted(ranks) if now - self._last[rank].seen > self._heartbeat_timeout / 2]

    def silent(self, ranks: Collection[int], now: float) -> dict[int, str]:
        """Which of these have not been heard of for so long that they are lost, and for how long.

        It is the heartbeat's timeout, in which no other sign of life came either, or the shorter one of a step in which
        another has been as long.
        """
        found: dict[int, str] = {}
        for rank in sorted(ranks):
            quiet = now - self._last[rank].seen
            if now - self._last[rank].known > self._heartbeat_timeout:
                found[rank] = self._why_lost(quiet)
                continue
            for last in self._last.values():
                silence = last.waits.silence
                is_waiting = last.has_limit and now - last.seen <= silence < now - last.since
                if is_waiting and quiet > silence:
                    found[rank] = f"no heartbeat for {silence:g} s, with timeout_seconds {last.waits.seconds:g}"
        return found

    def _why_lost(self, quiet: float) -> str:
        if quiet > STILL_SECONDS + self._heartbeat_timeout:
            return f"no heartbeat for {quiet:.0f} s; its Python stands still, or has ended, though its process lives"
        return f"no heartbeat for {self._heartbeat_timeout:g} s"

    def waiting(self, ranks: Collection[int]) -> dict[int, StepStatus]:
        """Which of these are in a step of all workers, and what it waits in; one that was stopped in it is first."""
        under_way = {rank: self._last[rank].waits for rank in ranks if self._last[rank].waits.is_under_way}
        return dict(sorted(under_way.items(), key=lambda item: (not item[1].stopped_in, item[0])))
