"""`VariableRecord`: what one worker knows of a variable that lives on a server, or in shards."""

from dataclasses import dataclass
from enum import Enum

from autodist_py.proto.strategy import VariableStrategy
from autodist_py.servers.sharded_variable import ShardedVariable
from autodist_py.servers.store import Location


class State(Enum):
    """What the variable holds on this worker, beside what it holds where it lives."""

    CURRENT = "the same"
    STALE = "an older value"
    RELEASED = "nothing: its memory was let go of"


@dataclass(slots=True)
class VariableRecord:
    """One variable. Its methods are all the ways in which it changes; who calls them holds the directory's lock.

    Attributes:
        where: where the variable lives: whole, on a server, or in shards.
        state: what it holds on this worker.
        is_pinned: a function of the user's, or another thread, may read it at any time: its memory is never released.
        is_seen: the script has looked at it since the last step, and may have written to it; noted for shards alone.
        strategy: how it is trained, where it is cut.
    """

    where: Location | ShardedVariable
    state: State = State.CURRENT
    is_pinned: bool = False
    is_seen: bool = False
    strategy: VariableStrategy | None = None

    @property
    def is_current(self) -> bool:
        """Whether nothing newer is elsewhere."""
        return self.state is State.CURRENT

    @property
    def is_released(self) -> bool:
        """Whether it holds nothing here."""
        return self.state is State.RELEASED

    def left_behind(self) -> None:
        """A step has given it a new value elsewhere."""
        if self.is_current:
            self.state = State.STALE

    def filled(self) -> None:
        """It was given the newest value: it was brought, a step has assigned it, or the script has written it."""
        self.state = State.CURRENT

    def released(self) -> bool:
        """No step of this worker's uses it. Returns whether its memory is to be let go of now."""
        if self.is_pinned or self.state is not State.STALE:
            return False
        self.state = State.RELEASED
        return True
