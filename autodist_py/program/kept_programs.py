"""Which programs are kept: of more than a bound those go that were not used for longest, as each takes megabytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from autodist_py.config.settings import KEPT_PROGRAMS_VARIABLE

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


class Bound:
    """How many programs of one step, or session, are kept. What reaches it first is said once."""

    def __init__(self, most: int, say: Callable[[str], None]):
        """At most so many; `say` is given a sentence for the user."""
        self.most = most
        self._say: Callable[[str], None] | None = say

    def reached(self, what: str) -> None:
        """`what` has more programs than are kept."""
        if self._say is None:
            return
        say, self._say = self._say, None
        say(
            f"{what} was called with more signatures (shapes, types, Python values) than {self.most}: from now on the "
            "program that was not used for longest is let go for each new one, and compiled anew if it is called "
            f"again. Pad batches to fewer shapes, or set {KEPT_PROGRAMS_VARIABLE}"
        )


class KeptPrograms(Generic[Key, Made]):
    """The programs of one step, or session, by signature.

    Programs that all workers run together are counted apart from a worker's own. All workers use them in the same
    order, so all let go of the same ones, and compile them anew together.
    """

    def __init__(self, what: str, bound: Bound, let_go: Callable[[Key, Made], None] = lambda key, made: None):
        """No program yet of `what`, as users know it; `let_go` is told of each that goes."""
        self._what, self._bound, self._let_go = what, bound, let_go
        self._lock = threading.RLock()  # A thread of the script may evaluate while another one trains.
        self._made: dict[Key, Made] = {}
        self._may_go: dict[str, OrderedDict[Key, None]] = {}

    def use(self, key: Key) -> Made | None:
        """The program of that signature, which is now the one that was used last; None: there is none."""
        with self._lock:
            for keys in self._may_go.values():
                if key in keys:
                    keys.move_to_end(key)
            return self._made.get(key)

    def add(self, key: Key, made: Made, pool: str) -> None:
        """Keep a new program.

        Args:
            key: its signature.
            made: the program.
            pool: with which ones it is counted; "": with none, as it is never let go.
        """
        with self._lock:
            self._made[key] = made
            if not pool:
                return
            keys = self._may_go.setdefault(pool, OrderedDict())
            keys[key] = None
            while len(keys) > self._bound.most:
                self._bound.reached(self._what)
                gone, _ = keys.popitem(last=False)
                self._let_go(gone, self._made.pop(gone))

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._made.clear()
            self._may_go.clear()
