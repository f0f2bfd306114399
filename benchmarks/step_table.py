"""What was measured of all systems at one workload and one link, what follows from it, and how it is shown."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AGREEMENT = 1e-4
"""How much losses of the same step may differ, relatively."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Of one system, round by round: seconds a step, and the bytes that the host sent which sent most."""

    seconds: tuple[float, ...]
    sent: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def median_sent(self) -> float:
        return statistics.median(self.sent)


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload on so many hosts at one link.

    Attributes:
        systems: what was measured of each, round by round in the same order.
        alone: the system that trains on one device.
        peers: those that others are compared with.
        wire_rate: bytes a second that the link carries each way; None: it is not shaped.
        load: the machine's load average, before and after.
    """

    workload: str
    hosts: int
    link: str
    systems: Mapping[str, Blocks]
    alone: str
    peers: frozenset[str]
    wire_rate: float | None
    load: tuple[float, float]

    def bound(self, system: str) -> float:
        """Seconds that a step takes at least: those of one core's work, or of the system's bytes on the link."""
        on_wire = self.systems[system].median_sent / self.wire_rate if self.wire_rate else 0.0
        compute = self.systems[self.alone].median_seconds if self.alone in self.systems else 0.0
        return max(compute, on_wire)

    def ratio_to_best_peer(self, system: str) -> float | None:
        """The median over rounds of its time to that of the peer which was best in the round; None: no peer."""
        peers = [blocks.seconds for name, blocks in self.systems.items() if name in self.peers]
        if not peers:
            return None
        best = map(min, zip(*peers, strict=True))
        return statistics.median(own / least for own, least in zip(self.systems[system].seconds, best, strict=True))

    def ratio(self, system: str, other: str) -> float:
        """The median over rounds of its time to that of the other one in the round."""
        pairs = zip(self.systems[system].seconds, self.systems[other].seconds, strict=True)
        return statistics.median(own / theirs for own, theirs in pairs)

    def record(self) -> dict[str, object]:
        """All of it, as JSON has it; times in milliseconds."""
        return {
            "workload": self.workload,
            "hosts": self.hosts,
            "link": self.link,
            "wire_bytes_per_second": self.wire_rate,
            "load": self.load,
            "systems": {name: self._record_of(name) for name in self.systems},
        }

    def rows(self) -> list[str]:
        """Lines of a table in Markdown, one a system; `HEADER` goes before."""
        return [self._row_of(name) for name in self.systems]

    def _record_of(self, system: str) -> dict[str, object]:
        blocks = self.systems[system]
        return {
            "median_ms": 1e3 * blocks.median_seconds,
            "rounds_ms": [1e3 * each for each in blocks.seconds],
            "sent_bytes": blocks.median_sent,
            "bound_ms": 1e3 * self.bound(system),
            "ratio_to_best_peer": self.ratio_to_best_peer(system),
        }

    def _row_of(self, system: str) -> str:
        blocks, bound, ratio = self.systems[system], self.bound(system), self.ratio_to_best_peer(system)
        over_bound = f"{blocks.median_seconds / bound:.2f}" if bound else "–"
        shown = [
            self.workload,
            str(self.hosts),
            self.link,
            system,
            f"{1e3 * blocks.median_seconds:.1f}",
            f"{blocks.median_sent / 1e6:.2f}",
            f"{1e3 * bound:.1f}",
            over_bound,
            "–" if ratio is None else f"{ratio:.2f}",
        ]
        return f"| {' | '.join(shown)} |"


HEADER = [
    "| workload | hosts | link | system | ms a step | MB sent | bound, ms | ÷ bound | ÷ best peer |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
]


def disagreements(losses: Mapping[str, Sequence[float]], reference: str) -> list[str]:
    """Which systems did not train as that one did, and from which step on."""
    found = []
    for system, own in losses.items():
        for step, (loss, wanted) in enumerate(zip(own, losses[reference], strict=True)):
            if not abs(loss - wanted) <= AGREEMENT * abs(wanted):
                found.append(f"{system}: the loss of step {step} is {loss:.6g}, that of {reference} {wanted:.6g}")
                break
    return found
