"""`StepTimes`: what a step's time goes to, and one line where several workers are slower than one device.

What is measured costs two clocks a step: the time that a step takes, and that for which this process has a processor.
The rest it waits: for other workers' messages, or for a processor, where it has none of its own.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import tensorflow as tf

from autodist_py.cluster.step_hook import StepHook

_SKIPPED_STEPS = 10
"""TensorFlow optimizes and connects in the first ones."""

_MEASURED_STEPS = 50


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step of one of `num_workers`: seconds that it takes, and for which its process has a processor.

    The latter is more than it computes, as messages take some, too; so what follows are lower bounds.
    """

    seconds: float
    computing: float
    num_workers: int

    @property
    def waiting(self) -> float:
        """For how long it waits at least."""
        return max(0.0, self.seconds - self.computing)

    @property
    def pays_from(self) -> float:
        """Up to how many times as many examples a step one device is faster, at least.

        That is so where computing grows with the examples, and waiting does not: one device computes what all workers
        do, and waits for nobody.
        """
        return math.inf if self.computing <= 0 else self.waiting / ((self.num_workers - 1) * self.computing)

    def __str__(self) -> str:
        """The line for the user."""
        return (
            f"a step takes {_milliseconds(self.seconds)}, of which at least {_milliseconds(self.waiting)} are waiting, "
            f"for messages of the {self.num_workers} workers or for a processor. One device, which waits for nobody, "
            f"is faster here, and with up to {self.pays_from:.2g} times as many examples a step at least"
        )


class StepTimes(StepHook):
    """Measures some steps of a program, and says once if one device would be faster."""

    def __init__(self, num_workers: int, say: Callable[[str], None]):
        """`say` is given the line."""
        self._num_workers, self._say = num_workers, say
        self._left = _SKIPPED_STEPS + _MEASURED_STEPS
        self._seconds: list[float] = []
        self._computing: list[float] = []
        self._begun = (0.0, 0.0)

    def before(self, step: int, feeds: Sequence[tf.Tensor]) -> None:
        """See StepHook."""
        self._begun = time.perf_counter(), time.process_time()

    def after(self, step: int) -> None:
        """See StepHook."""
        if not self._left:
            return
        begin, computed = self._begun
        self._seconds.append(time.perf_counter() - begin)
        self._computing.append(time.process_time() - computed)
        self._left -= 1
        if not self._left:
            self._conclude()

    def _conclude(self) -> None:
        seconds, computing = self._seconds[_SKIPPED_STEPS:], self._computing[_SKIPPED_STEPS:]
        found = StepTime(median(seconds), sum(computing) / len(computing), self._num_workers)
        if found.pays_from > 1.0:
            self._say(str(found))


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
