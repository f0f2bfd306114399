"""The variables that a worker holds as a server, as the other workers may see them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import tensorflow as tf

from autodist_py.runtime.watched import peek, watch


class Held:
    """The variables that live on this worker: updated one update at a time, seen as the last update left them.

    A script writes the same on every worker, and not at the same time. Who asks for a value, to write something that is
    made of it, must not be given one that this worker's script has written already.
    """

    def __init__(self) -> None:
        """None is held yet."""
        self._variables: dict[int, tf.Variable] = {}
        """Until the end: other workers may ask when this one's script has let go of them."""
        self._left: dict[int, tf.Tensor] = {}
        """What the last update left in those that eager code of this worker has used since; it shares their memory."""
        self._lock = threading.RLock()

    def add(self, number: int, variable: tf.Variable) -> None:
        """From now on the variable, known by that number to all workers, lives here."""
        self._variables[number] = variable
        watch(variable, partial(self._keep, number))

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

    def value(self, number: int) -> tf.Tensor:
        """What the last update left in the variable of that number."""
        with self._lock:
            return self._left[number] if number in self._left else peek(self._variables[number])

    def clear(self) -> None:
        """Nothing is held any more."""
        self._variables.clear()
        self._left.clear()

    def _keep(self, number: int, variable: tf.Variable) -> None:
        """Eager code of this worker is about to read or write the variable."""
        with self._lock:
            if number not in self._left:
                self._left[number] = peek(variable)
