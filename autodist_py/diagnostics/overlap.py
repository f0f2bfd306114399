"""What a timeline tells of communication: how much of it computation hid, and what the workers waited for.

It reads the file that `Timeline` writes, without TensorFlow.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.filesize import decimal

from autodist_py.proto.text import count, table

_NO_COMPUTATION = frozenset({"_Send", "_HostSend", "IteratorGetNext", "IteratorGetNextSync"})
"""Ops whose time is spent on messages, or on waiting for data."""
_SHOWN = 60
"""So many characters of what a collective combines are shown."""
_MOST_ROWS = 12
_SERVERS, _HOROVOD = "messages to and from servers", "Horovod's all-reduces"


class Span(NamedTuple):
    """From when to when, in milliseconds."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Shares:
    """One worker's communication, in milliseconds a step.

    Attributes:
        worker: its rank.
        communication: for how long a collective was under way.
        hidden: the part of it in which an op computed meanwhile.
    """

    worker: int
    communication: float
    hidden: float

    @property
    def waited(self) -> float:
        """The rest of it: no op computed."""
        return self.communication - self.hidden


@dataclass(frozen=True, slots=True)
class Collected:
    """What was measured of one collective, or of several that combine the same; medians of all workers and steps.

    Attributes:
        what: what it combines, in words.
        nbytes: what one worker gives; None: not known.
        wire: the milliseconds that its bytes take on the slowest link, as stated; None: not known, or within one host.
        taken: the milliseconds that it took, which of two under way at once each counts.
        waited: the milliseconds a step in which it was under way, no op computed, and no collective was that began
            before it.
    """

    what: str
    nbytes: int | None
    wire: float | None
    taken: float
    waited: float


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a timeline tells.

    Attributes:
        workers: in order.
        collectives: those that were waited for longest first.
        unseen: what else workers tell one another, of which TensorFlow's profiler sees nothing.
    """

    workers: tuple[Shares, ...]
    collectives: tuple[Collected, ...]
    unseen: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: Path) -> "Overlap":
        """That of a timeline's file."""
        content = json.loads(path.read_text())
        events = [event for event in content["traceEvents"] if event["ph"] == "X"]
        about = content["otherData"]
        parts = {rank: [one for one in events if one["pid"] == rank] for rank in range(about["workers"])}
        shares, waits = [], []
        for rank, part in parts.items():
            computing = list(_merged(_spans(part, is_collective=False)))
            under_way = list(_merged(_spans(part, is_collective=True)))
            waited, total = _waited(part, computing), _length(under_way)
            waits.append(waited)
            shares.append(Shares(rank, total / about["steps"], (total - sum(waited.values())) / about["steps"]))
        found = [one for one in events if one["cat"] == "collective"]
        collected = []
        for what in dict.fromkeys(one["name"] for one in found):
            own = [one for one in found if one["name"] == what]
            waited_for = statistics.median(wait.get(what, 0.0) for wait in waits) / about["steps"]
            taken = statistics.median(one["dur"] / 1e3 for one in own)
            nbytes = own[0]["args"].get("bytes")
            wire = _wire(nbytes, own[0]["args"]["type"], about["workers"], about["bits_per_second"])
            collected.append(Collected(what, nbytes, wire, taken, waited_for))
        has_servers = any(one["args"]["type"] == "_Send" for one in events)
        unseen = [_SERVERS] * has_servers + [_HOROVOD] * about["has_horovod"]
        return cls(tuple(shares), tuple(sorted(collected, key=lambda one: -one.waited)), tuple(unseen))

    def __str__(self) -> str:
        unseen = [f"It is without {' and '.join(self.unseen)}, which the profiler does not see."] if self.unseen else []
        if not self.collectives:
            return "\n".join(["Timeline: it has no collective", *unseen])
        workers = (
            (one.worker, f"{one.communication:.2f}", f"{_percent(one):.0f} %", f"{one.waited:.2f}")
            for one in self.workers
        )
        shown = self.collectives[:_MOST_ROWS]
        collectives = (
            (
                one.what if len(one.what) <= _SHOWN else f"{one.what[:_SHOWN]}...",
                "" if one.nbytes is None else decimal(one.nbytes),
                "" if one.wire is None else f"{one.wire:.2f}",
                f"{one.taken:.2f}",
                f"{one.waited:.2f}",
            )
            for one in shown
        )
        parts = [
            "Timeline: milliseconds of communication a step, and how much of it computation hid",
            table(("worker", "communication", "hidden", "waited"), workers),
            table(("collective", "a worker gives", "ms on the stated link", "ms taken", "ms waited"), collectives),
        ]
        if left := len(self.collectives) - len(shown):
            parts.append(f"and {count(left, 'collective')} that workers waited for less")
        return "\n\n".join([*parts, *unseen])


def _percent(one: Shares) -> float:
    return 100.0 * one.hidden / one.communication if one.communication else 0.0


def _wire(nbytes: int | None, kind: str, workers: int, bits_per_second: float | None) -> float | None:
    """Milliseconds of what each worker sends in a ring: of a sum its parts twice, of what is gathered all others'."""
    if nbytes is None or bits_per_second is None:
        return None
    times = 2 * (workers - 1) / workers if "Reduce" in kind else workers - 1
    return 8e3 * times * nbytes / bits_per_second


def _span(event: dict[str, Any]) -> Span:
    return Span(event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)


def _spans(events: Iterable[dict[str, Any]], *, is_collective: bool) -> Iterator[Span]:
    """Those of a worker's collectives, or of its ops that compute."""
    for event in events:
        if (event["cat"] == "collective") == is_collective and event["args"]["type"] not in _NO_COMPUTATION:
            yield _span(event)


def _merged(spans: Iterable[Span]) -> Iterator[Span]:
    """The spans' union, as spans that do not touch, in order."""
    last: Span | None = None
    for span in sorted(spans):
        if last is None or span.begin > last.end:
            if last is not None:
                yield last
            last = span
        else:
            last = Span(last.begin, max(last.end, span.end))
    if last is not None:
        yield last


def _length(spans: Iterable[Span]) -> float:
    return sum(span.end - span.begin for span in spans)


def _waited(events: Sequence[dict[str, Any]], computing: Sequence[Span]) -> dict[str, float]:
    """By what is combined, for how long a worker waited for it; of several under way it waits for the first."""
    found: defaultdict[str, float] = defaultdict(float)
    collectives = sorted((one for one in events if one["cat"] == "collective"), key=_span)
    until, position = 0.0, 0
    for event in collectives:
        begin, end = _span(event)
        begin = max(begin, until)
        while position < len(computing) and computing[position].end <= begin:
            position += 1
        at = position
        while begin < end:
            busy = computing[at] if at < len(computing) else Span(end, end)
            found[event["name"]] += max(0.0, min(busy.begin, end) - begin)
            begin, at = max(begin, busy.end), at + 1
        until = max(until, end)
    return dict(found)
