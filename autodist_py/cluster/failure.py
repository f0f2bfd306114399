"""`Failure`: why a run fails, as one value, and `sentence`, the one place where that becomes text."""

import signal
from dataclasses import dataclass
from typing import NamedTuple

from autodist_py.cluster.step_status import NO_STATUS, StepStatus

FAILED = "failed"
INTERRUPTED = "was interrupted"
TERMINATED = "was terminated"
ENDED_SCRIPT = "ended its script"
KEPT_WAITING = "kept others waiting"
STOOD_STILL = "stood still"
ENDED = "ended"
STOPPED_ANSWERING = "stopped answering"
CHIEF_LOST = "is lost"
"""What becomes of the chief, as a worker sees it that hears nothing of the chief."""

_UNTOLD = (ENDED, STOPPED_ANSWERING)
"""What becomes of a worker that has not said at which step."""


class Worker(NamedTuple):
    """A worker as messages name it."""

    rank: int
    address: str

    def __str__(self) -> str:
        return f"worker {self.rank} ({self.address})"


@dataclass(frozen=True, slots=True)
class Failure:
    """What became of one worker, for which the run fails.

    Attributes:
        worker: the worker that failed.
        event: a verb that says what became of it.
        detail: why, or how that was seen.
        step: the last step that it is known to have begun, 0 before the first; None: it had not joined.
        chief_step: the step of the chief at that time.
        objects: over how many AutoDist objects of the script steps are counted.
        waiter: the worker that waited for it in a step of all workers, if one did.
        waits: the waiter's step.
    """

    worker: Worker
    event: str
    detail: str
    step: int | None = None
    chief_step: int = 0
    objects: int = 1
    waiter: Worker | None = None
    waits: StepStatus = NO_STATUS

    def __str__(self) -> str:
        return sentence(self)


def chief_lost(chief: Worker, own: Worker, waits: StepStatus) -> Failure:
    """The failure as a worker sees it that hears nothing of its chief; `waits` is the step that it is in."""
    waiter = own if waits.is_under_way else None
    return Failure(chief, CHIEF_LOST, "its coordinator does not answer", waiter=waiter, waits=waits)


def sentence(failure: Failure) -> str:
    """Who failed, how, at which step, why, and who waited for it in which collective."""
    when = ", the chief, is lost" if failure.event == CHIEF_LOST else f" {failure.event}{_when(failure)}"
    return f"{failure.worker}{when}: {failure.detail}{_while(failure)}"


def _when(failure: Failure) -> str:
    if failure.step is None:
        return " before it joined"
    together = f" of its {failure.objects} AutoDist objects" if failure.objects > 1 else ""
    place = f"at step {failure.step}{together}" if failure.step else "before its first step"
    if failure.event not in _UNTOLD:
        return f" {place}"
    is_ahead = failure.chief_step > failure.step
    chief = f", when the chief is at step {failure.chief_step}" if is_ahead else ""
    return f", last heard of {place}{chief}"


def _while(failure: Failure) -> str:
    if failure.waiter is None:
        return ""
    if failure.waits.stopped_in:
        return f", while {failure.waiter} waited for it to combine {failure.waits.stopped_in}"
    return f", while {failure.waiter} was in a step that combines {failure.waits.what}"


def describe_exit(exit_code: int) -> str:
    """What a process's return code says; negative: the signal that ended it."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
