"""The variables that a worker holds as a server, as the other workers may see them."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import tensorflow as tf

from autodist_py.servers.lazy_variable import peek
from autodist_py.servers.weak_map import WeakIdentityMap


class Location(NamedTuple):
    """Where a variable, or a shard of one, lives: its number, the same on every worker, and the server's rank."""

    number: int
    rank: int


class ServerStore:
    """The variables that live on this worker: updated one update at a time, seen as the last update left them.

    A script writes the same on every worker, and not at the same time. Who asks for a value, to write something that is
    made of it, must not be given one that this worker's script has written already.
    """

    def __init__(self) -> None:
        """None is held yet."""
        self._variables: dict[int, tf.Variable] = {}
        """Until the end: other workers may ask when this one's script has let go of them."""
        self._numbers: WeakIdentityMap[int] = WeakIdentityMap()
        self._left: dict[int, tf.Tensor] = {}
        """What the last update left in those that this worker's script may have written since."""
        self._lock = threading.RLock()

    def add(self, number: int, variable: tf.Variable) -> None:
        """From now on the variable, known by that number to all workers, lives here."""
        self._variables[number] = variable
        self._numbers[variable] = number

    def keep(self, variables: Iterable[tf.Variable]) -> None:
        """This worker's script is about to use these, perhaps to write them; others still see what was left."""
        with self._lock:
            for variable in variables:
                if variable in self._numbers and self._numbers[variable] not in self._left:
                    self._left[self._numbers[variable]] = peek(variable)  # It shares memory until one is written.

    @contextmanager
    def steady(self) -> Iterator[None]:
        """Nobody else updates them meanwhile."""
        with self._lock:
            yield

    @contextmanager
    def updating(self) -> Iterator[None]:
        """They are being updated, by nobody else."""
        with self._lock:
            self._left.clear()  # Before the update, which would copy what shares its memory.
            yield

    def changed(self, variables: Iterable[tf.Variable]) -> None:
        """A step of this worker's program has given these new values."""
        with self._lock:
            for variable in variables:
                self._left.pop(self._numbers[variable], None)

    def value(self, number: int) -> tf.Tensor:
        """What the last update left in the variable of that number."""
        with self._lock:
            return self._left[number] if number in self._left else peek(self._variables[number])

    def clear(self) -> None:
        """Nothing is held any more."""
        self._variables.clear()
        self._numbers.clear()
        self._left.clear()
