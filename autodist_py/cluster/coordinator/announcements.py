"""`Announcements`: what the chief has told the other workers, for who asks at the same place of the script.

`Places` counts those of one worker's script.

A place is a key, the number of the step that the script is at, and how many times the key has come at that step. So
scripts need not wait for each other, and a call that the chief alone makes is mistaken for no other one.
"""

from collections import Counter
from collections.abc import Sequence
from threading import Lock

NO_STEP = -1
"""In the place of a step's number, where a thread of the script's own asks, which stands at no step."""


class Announcements:
    """All that others may still ask for. Plain memory.

    Attributes:
        preparing: the places at which the chief is making what it will announce, which takes as long as it takes.
    """

    def __init__(self) -> None:
        self.preparing: Counter[tuple[int, str]] = Counter()
        self._values: dict[tuple[int, str], list[bytes]] = {}

    def prepare(self, step: int, key: str, *, is_over: bool) -> None:
        """The chief begins to make an announcement, or has ended that."""
        self.preparing[step, key] += -1 if is_over else 1
        self.preparing += Counter()  # Without those that are none.

    def add(self, step: int, key: str, value: bytes, *, reached: Sequence[int]) -> None:
        """The chief announces `value`; other workers have begun the steps `reached`, and ask for no earlier one's."""
        oldest = min(reached, default=step)
        self._values = {
            place: values for place, values in self._values.items() if place[0] >= oldest or place[0] == NO_STEP
        }
        self._values.setdefault((step, key), []).append(value)

    def find(self, step: int, key: str, position: int) -> bytes | None:
        """The announcement at that place; None where there is none yet."""
        values = self._values.get((step, key), [])
        return values[position] if len(values) > position else None


class Places:
    """Where one worker's script asks. Several threads of it may."""

    def __init__(self) -> None:
        self._step = 0
        self._counts: Counter[tuple[int, str]] = Counter()
        self._lock = Lock()

    def next_position(self, step: int, key: str) -> int:
        """How many times the script has come to the key at that step before; only the last step's are known."""
        with self._lock:
            if step not in (NO_STEP, self._step):
                self._step = step
                self._counts = Counter({place: n for place, n in self._counts.items() if place[0] == NO_STEP})
            position = self._counts[step, key]
            self._counts[step, key] += 1
        return position
