"""What a worker makes of the coordinator's answers: a failure is noted, and where none comes the chief is lost."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from autodist_py.cluster import tf_adapter
from autodist_py.cluster.coordinator.api import CoordinatorCalls, HeartbeatReply, Membership
from autodist_py.cluster.coordinator.service import ChiefLostError
from autodist_py.cluster.coordinator_link import CoordinatorLink
from autodist_py.cluster.failure import FAILED
from autodist_py.cluster.last_words import LastWords
from autodist_py.cluster.progress import Progress
from autodist_py.cluster.run_failure import RunFailure
from autodist_py.cluster.seat import Seat
from autodist_py.cluster.step_status import NO_STATUS, OwnStepStatus, StepStatus
from autodist_py.proto.errors import ClusterError, WorkerFailedError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec

SEAT = Seat(1, ResourceSpec((NodeSpec("127.0.0.1", chief=True), NodeSpec("127.0.0.2"))))
LOST = "worker 0 (127.0.0.1), the chief, is lost: its coordinator does not answer"


class Calls:
    """A coordinator that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def join(self, rank: int, server: str, *, spec: str, timeout: float) -> Membership:
        self.asked.append(("join", rank, server))
        return Membership("run", 7, ("127.0.0.1:1", server))

    def exchange(self, rank: int, key: str, *, value: bytes, everyone: bool, timeout: float) -> dict[int, bytes]:
        raise ClusterError("time is up")

    def hear(self, rank: int, key: str, *, step: int, position: int, timeout: float) -> bytes | None:
        raise ChiefLostError("connection refused")

    def heartbeat(self, rank: int, step: int, waits: StepStatus = NO_STATUS) -> HeartbeatReply:
        raise WorkerFailedError("worker 0 ended")

    def abort(self, rank: int, event: str, *, detail: str, step: int) -> str:
        self.asked.append(("abort", rank, event, detail, step))
        return "worker 1 failed"

    def leave(self, rank: int, step: int) -> None:
        self.asked.append(("leave", rank, step))


@dataclass
class Linked:
    """A worker's link, and what it is put together of."""

    words: int
    calls: Calls = field(default_factory=Calls)
    failure: RunFailure = field(default_factory=RunFailure)
    status: OwnStepStatus = field(default_factory=OwnStepStatus)
    progress: Progress = field(default_factory=lambda: Progress(None))
    hung_up: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.link = CoordinatorLink(
            SEAT,
            self.calls,
            self.failure,
            status=self.status,
            progress=self.progress,
            last_words=LastWords(self.words),
            hang_up=lambda: self.hung_up.append(True),
        )


def hear(calls: CoordinatorCalls) -> bytes | None:
    return calls.hear(1, "k", step=0, position=0, timeout=1.0)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why collectives were stopped."""
    causes: list[str] = []
    monkeypatch.setattr(tf_adapter, "abort_collectives", causes.append)
    return causes


@pytest.fixture
def linked(pipe: tuple[int, int], aborted: list[str]) -> Linked:
    return Linked(pipe[1])


def test_joining_tells_the_run(linked: Linked) -> None:
    assert linked.link.join("127.0.0.2:9", 1.0) == Membership("run", 7, ("127.0.0.1:1", "127.0.0.2:9"))
    assert linked.calls.asked == [("join", 1, "127.0.0.2:9")]


def test_a_failure_that_an_answer_tells_is_noted(linked: Linked) -> None:
    with pytest.raises(WorkerFailedError, match="worker 0 ended"):
        linked.link.ask(lambda calls: calls.heartbeat(1, 0))
    assert linked.failure.cause == "worker 0 ended" and not linked.hung_up


def test_a_mistake_of_the_caller_is_no_failure_of_the_run(linked: Linked) -> None:
    with pytest.raises(ClusterError, match="time is up"):
        linked.link.ask(lambda calls: calls.exchange(1, "k", value=b"", everyone=True, timeout=1.0))
    assert linked.failure.cause is None


def test_who_gets_no_answer_has_lost_the_chief(linked: Linked, aborted: list[str], pipe: tuple[int, int]) -> None:
    linked.progress.note(3)
    with pytest.raises(WorkerFailedError, match="is lost"):
        linked.link.ask(hear)
    assert linked.failure.cause == LOST and linked.link.has_lost_chief and linked.hung_up
    assert aborted == [LOST]
    assert os.read(pipe[0], 1000).decode() == f"[1] autodist: in step 3: {LOST}\n"


def test_a_step_that_waited_for_the_lost_chief_says_in_which_collective(linked: Linked, aborted: list[str]) -> None:
    with linked.status.together(5.0, "gradients of w"):
        linked.status.stopped_in("the gradient of w")
        linked.link.lose_chief()
    waited = ", while worker 1 (127.0.0.2) waited for it to combine the gradient of w"
    assert linked.failure.cause == LOST + waited


def test_a_run_that_has_failed_before_keeps_its_cause_when_the_chief_is_lost(
    linked: Linked, aborted: list[str]
) -> None:
    linked.failure.fail("worker 0 ended")
    with pytest.raises(WorkerFailedError, match="worker 0 ended"):
        linked.link.ask(hear)
    assert not aborted


def test_a_chief_that_ends_when_all_have_left_is_not_lost(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    def leave(rank: int, step: int) -> None:
        is_asked.set()
        may_answer.wait(60.0)

    monkeypatch.setattr(linked.calls, "leave", leave)
    leaving = threading.Thread(target=linked.link.leave)
    leaving.start()
    assert is_asked.wait(60.0)
    threading.Timer(0.1, may_answer.set).start()
    with pytest.raises(ChiefLostError):
        linked.link.ask(hear)
    leaving.join()
    assert linked.failure.cause is None and not linked.link.has_lost_chief


def test_who_aborts_says_so_on_one_line_and_is_told_the_cause(linked: Linked) -> None:
    linked.progress.note(4)
    linked.link.abort(FAILED, "ValueError:\n  wrong")
    assert linked.calls.asked == [("abort", 1, FAILED, "ValueError: wrong", 4)]
    assert linked.failure.cause == "worker 1 failed"


def test_who_aborts_a_run_whose_chief_is_lost_raises_nothing(linked: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(rank: int, event: str, *, detail: str, step: int) -> str:
        raise ChiefLostError("connection refused")

    monkeypatch.setattr(linked.calls, "abort", lost)
    linked.link.abort(FAILED, "wrong")
    assert linked.failure.cause == LOST


def test_a_worker_leaves_once(linked: Linked) -> None:
    assert not linked.link.has_left()
    linked.link.leave()
    linked.link.leave()
    assert linked.link.has_left() and linked.calls.asked == [("leave", 1, 0)]
