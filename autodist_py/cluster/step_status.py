"""What a worker's step waits in: `StepStatus`, as heartbeats tell it, and `OwnStepStatus`, this worker's.

Who is missing is found in `coordinator/liveness.py` on the chief; here only whether this worker hears nothing of the
chief itself.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

PROMPT_SECONDS = 0.25
"""How often a worker reports, and is looked for, once a program has a timeout."""

LEAST_SILENCE_SECONDS = 2.0
"""A shorter silence is no sign of anything: a busy machine falls silent for longer than a heartbeat takes."""

STOPPING_SECONDS = 1.5
"""How long a step may take to say in which collective it was stopped; on a busy machine that takes a while."""


@dataclass(frozen=True, slots=True)
class StepStatus:
    """A worker's steps that all workers take together; those that each takes by itself do not count here.

    Attributes:
        step: the last that it has begun, 0 before the first.
        seconds: how long its program lets a step wait for a worker; 0: as long as that one lives.
        what: what the step combines with others, while it is under way; empty between steps.
        stopped_in: the collective in which it was stopped, as a worker was missing; empty while that is unknown.
    """

    step: int = 0
    seconds: float = 0.0
    what: str = ""
    stopped_in: str = ""

    @property
    def is_under_way(self) -> bool:
        """Whether the step waits for others, or has until it was stopped."""
        return bool(self.what or self.stopped_in)

    @property
    def silence(self) -> float:
        """For how many seconds the step goes on without a sign of a worker, if that one's heartbeat allows it."""
        return max(self.seconds, LEAST_SILENCE_SECONDS) if self.seconds else math.inf


NO_STATUS = StepStatus()
"""Of a worker that has taken no step with others."""


class OwnStepStatus:
    """This worker's `StepStatus`, kept by the thread that takes steps and read by those that keep up with the chief."""

    def __init__(self) -> None:
        self.now = NO_STATUS
        self._stopped = threading.Event()
        self._answers = 0
        self._looks = 0
        self._seen = (0, 0)

    @contextmanager
    def together(self, seconds: float, what: str) -> Iterator[None]:
        """See Cluster."""
        self._stopped.clear()
        self.now = StepStatus(self.now.step + 1, seconds, what)
        try:
            yield
        finally:
            self.now = replace(self.now, what="")

    def stopped_in(self, what: str) -> None:
        """See Cluster."""
        self.now = replace(self.now, stopped_in=what)
        self._stopped.set()

    def find_out(self) -> None:
        """The collectives of a step that is under way have been stopped: say in which it was, if that is known soon."""
        if self.now.what:
            self._stopped.wait(STOPPING_SECONDS)

    def answered(self) -> None:
        """The coordinator has answered a heartbeat."""
        self._answers += 1

    def hears_nothing(self) -> bool:
        """Whether the step waits, and no answer has come, for too long. Ask every PROMPT_SECONDS.

        It is asked so often, not timed, so that time for which this process stood still does not count. A step that
        was stopped still counts: another worker, which heard nothing either, has stopped it.
        """
        seen = (self._answers, self.now.step)
        self._looks = self._looks + 1 if seen == self._seen else 0
        self._seen = seen
        return self.now.is_under_way and self._looks * PROMPT_SECONDS > self.now.silence
