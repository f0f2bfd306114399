"""`Exchanges`: the values that workers give each other, by key, until all have them."""

import reprlib
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from autodist_py.cluster.coordinator.api import LEAVING
from autodist_py.proto.errors import ClusterError

_CHIEF = 0

_STEP_DIGITS = 19
"""Of the number of a step, which has 63 bits."""


@dataclass(slots=True, eq=False)
class OpenExchange:
    """One exchange: the values given so far, and who has been answered, or has given up.

    Its workers wait for the values of the `needed` ones: of all workers (`everyone`), or of the chief.
    """

    key: str
    everyone: bool
    needed: frozenset[int]
    values: dict[int, bytes] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def missing(self, lost: Collection[int]) -> set[int]:
        """Whose values are not there; the run goes on without the `lost` ones."""
        return set(self.needed - self.values.keys() - set(lost))

    def answer(self) -> dict[int, bytes]:
        """The values, where nobody is missing."""
        return {rank: self.values[rank] for rank in sorted(self.needed & self.values.keys())}


class Exchanges:
    """All exchanges that are under way. Plain memory."""

    def __init__(self, num_workers: int) -> None:
        self._everyone = frozenset(range(num_workers))
        self._open: dict[str, deque[OpenExchange]] = {}

    def __iter__(self) -> Iterator[OpenExchange]:
        return (current for open_ones in self._open.values() for current in open_ones)

    def give(self, rank: int, key: str, value: bytes, *, everyone: bool) -> OpenExchange:
        """A worker gives its value; the n-th ones with a key belong together.

        Raises:
            ClusterError: others use the key for another kind of exchange, or the value is not as the key asks for.
        """
        if key.startswith(LEAVING) and not (value.isdigit() and len(value) <= _STEP_DIGITS):
            raise ClusterError(f"{key!r} is told the number of a worker's last step; got {reprlib.repr(value)}.")
        open_ones = self._open.setdefault(key, deque())
        for current in open_ones:
            if rank not in current.values:
                break
        else:
            current = OpenExchange(key, everyone, self._everyone if everyone else frozenset({_CHIEF}))
            open_ones.append(current)
        if current.everyone != everyone:
            raise ClusterError(
                f"all workers use {key!r} for the same kind of exchange; worker {rank} uses it for another."
            )
        current.values[rank] = value
        return current

    def end(self, rank: int, current: OpenExchange, gone: Collection[int]) -> None:
        """A worker waits no more: it has been answered, or has given up. Its value stays, for who comes later."""
        current.ended.add(rank)
        self._forget(current, gone)

    def forget(self, gone: Collection[int]) -> None:
        """An exchange is over to which nobody comes any more but those that are gone."""
        for current in list(self):
            self._forget(current, gone)

    def _forget(self, current: OpenExchange, gone: Collection[int]) -> None:
        open_ones = self._open.get(current.key)
        if open_ones is not None and current in open_ones and self._everyone <= current.ended.union(gone):
            open_ones.remove(current)
            if not open_ones:
                del self._open[current.key]

    def leaving(self, lost: Collection[int], *, but: str = "") -> dict[int, int]:
        """The workers that wait for all others to end, at another key than `but`, and the last step of each."""
        return {
            rank: int(value)
            for current in self
            if current.key.startswith(LEAVING) and current.key != but
            if len(current.values) < len(self._everyone) - len(lost)
            for rank, value in current.values.items()
        }

    def chief_waits_for(self, rank: int) -> bool:
        """Whether the chief waits in an exchange that the worker has not come to."""
        return any(
            current.everyone and _CHIEF in current.values.keys() - current.ended and rank not in current.values
            for current in self
        )
