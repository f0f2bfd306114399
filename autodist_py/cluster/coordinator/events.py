"""What happens to a run, and what follows: the events that `RunState.step` takes, its replies and its actions."""

from dataclasses import dataclass

from autodist_py.cluster.coordinator.api import HeartbeatReply, Membership
from autodist_py.cluster.step_status import NO_STATUS, StepStatus
from autodist_py.proto.errors import AutoDistError

# -- What workers ask: each call is answered by one reply, at once or later. See CoordinatorCalls. --------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker has started, and waits for all others."""

    ticket: int
    rank: int
    server: str
    spec: str
    timeout: float


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A worker gives its value for a key, and waits for those of others."""

    ticket: int
    rank: int
    key: str
    value: bytes
    everyone: bool
    timeout: float


@dataclass(frozen=True, slots=True)
class Heard:
    """A worker waits for an announcement of the chief."""

    ticket: int
    rank: int
    key: str
    step: int
    position: int
    timeout: float


@dataclass(frozen=True, slots=True)
class Beat:
    """A worker's heartbeat."""

    ticket: int
    rank: int
    step: int
    waits: StepStatus = NO_STATUS


@dataclass(frozen=True, slots=True)
class Aborted:
    """A worker says that it has failed."""

    ticket: int
    rank: int
    event: str
    detail: str
    step: int


@dataclass(frozen=True, slots=True)
class Left:
    """A worker's script has ended."""

    ticket: int
    rank: int
    step: int


Call = Joined | Exchanged | Heard | Beat | Aborted | Left

# -- What the chief reports: nobody waits for a reply. ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Who made the call does not wait any more."""

    ticket: int


@dataclass(frozen=True, slots=True)
class SteppedApart:
    """From now on workers take steps by themselves, and can do without the `expendable` ones."""

    expendable: frozenset[int]


@dataclass(frozen=True, slots=True)
class Began:
    """The chief has begun a step."""

    step: int


@dataclass(frozen=True, slots=True)
class Prepares:
    """The chief begins to make an announcement, or has ended that (`is_over`)."""

    key: str
    step: int
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Announced:
    """The chief has announced a value."""

    key: str
    value: bytes
    step: int


@dataclass(frozen=True, slots=True)
class MadeAnother:
    """The script has made another AutoDist."""


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """A worker's process has ended; `reason`, if there is one, says more than the exit code.

    `is_shown` says whether the user has seen any line of its output.
    """

    rank: int
    exit_code: int
    reason: str = ""
    is_shown: bool = True


@dataclass(frozen=True, slots=True)
class OutlivedScript:
    """A worker's process still runs so many seconds after all scripts have ended, and is made to end."""

    rank: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Lives:
    """A worker's process lives, by another sign than a heartbeat."""

    rank: int


@dataclass(frozen=True, slots=True)
class Looked:
    """The chief looks for workers that are missing; it does so about as often as heartbeats come."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: calls may be due."""


Event = (
    Call
    | GaveUp
    | SteppedApart
    | Began
    | Prepares
    | Announced
    | MadeAnother
    | ProcessEnded
    | OutlivedScript
    | Lives
    | Looked
    | Tick
)

# -- What follows -----------------------------------------------------------------------------------------------------

Answer = Membership | dict[int, bytes] | bytes | HeartbeatReply | str | None


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a call: its answer, or the error that it raises."""

    ticket: int
    answer: Answer | AutoDistError


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the worker's TensorFlow server whether its process lives."""

    rank: int
    server: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the worker's process: it is silent, and cannot end by itself."""

    rank: int


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the user."""

    text: str


Action = Probe | Stop | Warn


@dataclass(frozen=True, slots=True)
class Outcome:
    """What follows from one event.

    Attributes:
        replies: the calls that have ended.
        actions: what is to be done.
        is_rescheduled: whether calls that wait may be due earlier than before.
    """

    replies: tuple[Reply, ...] = ()
    actions: tuple[Action, ...] = ()
    is_rescheduled: bool = False
