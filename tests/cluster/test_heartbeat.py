"""What follows from a heartbeat's answer, and from none."""

from collections.abc import Callable
from typing import Any

import pytest

from autodist_py.cluster import heartbeat as module
from autodist_py.cluster import tf_adapter
from autodist_py.cluster.coordinator.api import HeartbeatReply
from autodist_py.cluster.coordinator.service import ChiefSilentError
from autodist_py.cluster.coordinator_link import CoordinatorLink
from autodist_py.cluster.heartbeat import Heartbeat
from autodist_py.cluster.last_words import LastWords
from autodist_py.cluster.progress import Progress
from autodist_py.cluster.run_failure import Losses, RunFailure
from autodist_py.cluster.seat import Seat
from autodist_py.cluster.step_status import LEAST_SILENCE_SECONDS, PROMPT_SECONDS, OwnStepStatus, StepStatus
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec

SPEC = ResourceSpec((NodeSpec("127.0.0.1", chief=True), NodeSpec("127.0.0.2")))
SERVER = "127.0.0.1:1"
GOES_ON = HeartbeatReply(None, False)
SILENT = ChiefSilentError("deadline exceeded")
FAILED = HeartbeatReply("worker 1 ended", False)


class Beating:
    """A worker whose heartbeats are answered as told; after the last the run has failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: HeartbeatReply | ChiefSilentError, rank: int = 1):
        self.answers = [*answers, FAILED]
        self.reported: list[tuple[int, StepStatus]] = []
        self.looks = 0
        self.failure, self.losses, self.status = RunFailure(), Losses(), OwnStepStatus()
        self.progress = Progress(None)
        self.stopped: list[str] = []
        monkeypatch.setattr(tf_adapter, "abort_collectives", self.stopped.append)
        calls: Any = self
        seat = Seat(rank, SPEC)
        self.link = CoordinatorLink(
            seat,
            calls,
            self.failure,
            status=self.status,
            progress=self.progress,
            last_words=LastWords(None),
            hang_up=lambda: None,
        )
        self.beats = Heartbeat(
            seat,
            self.link,
            timeout=5.0,
            status=self.status,
            progress=self.progress,
            failure=self.failure,
            losses=self.losses,
            look=self.look,
        )

    def look(self) -> None:
        self.looks += 1

    def heartbeat(self, rank: int, step: int, waits: StepStatus) -> HeartbeatReply:
        self.reported.append((step, waits))
        answer = self.answers.pop(0)
        if isinstance(answer, ChiefSilentError):
            raise answer
        return answer

    def leave(self, rank: int, step: int) -> None:
        """See CoordinatorCalls."""


def test_each_beat_tells_the_step_and_what_it_waits_in(monkeypatch: pytest.MonkeyPatch) -> None:
    beating = Beating(monkeypatch, GOES_ON)
    beating.progress.note(7)
    with beating.status.together(2.0, "gradients"):
        beating.beats.beat(SERVER)
    assert beating.reported == [(7, StepStatus(1, 2.0, "gradients"))] * 2
    assert beating.looks == 2


def test_a_cause_that_is_answered_ends_the_run_and_the_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    beating = Beating(monkeypatch)
    beating.beats.beat(SERVER)
    assert beating.failure.cause == FAILED.cause and len(beating.reported) == 1


def test_losses_that_are_answered_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    beating = Beating(monkeypatch, HeartbeatReply(None, False, lost=(2, 3)))
    told: list[int] = []
    beating.losses.listeners.add(told.append)
    beating.beats.beat(SERVER)
    assert told == [2, 3]


def test_a_suspicion_stops_the_step_which_then_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    beating = Beating(monkeypatch, HeartbeatReply(None, False, suspicion="worker 1 is missing"))
    beating.beats.beat(SERVER)
    assert beating.stopped == ["worker 1 is missing"]


def test_beats_end_when_all_have_left_and_this_worker_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MARGIN_SECONDS", 0.01)
    finished = HeartbeatReply(None, True)
    beating = Beating(monkeypatch, finished, finished, finished)
    asked = beating.heartbeat

    def heartbeat(rank: int, step: int, waits: StepStatus) -> HeartbeatReply:
        if len(beating.reported) == 1:
            beating.link.leave()  # Its answer comes after that to the first heartbeat.
        return asked(rank, step, waits)

    monkeypatch.setattr(beating, "heartbeat", heartbeat)
    beating.beats.beat(SERVER)
    assert len(beating.reported) == 2 and beating.failure.cause is None


@pytest.mark.parametrize(("answers", "asked", "cause"), [(True, 2, FAILED.cause), (False, 1, "the chief, is lost")])
def test_a_silent_chief_is_asked_again_while_its_process_lives(
    monkeypatch: pytest.MonkeyPatch, answers: bool, asked: int, cause: str
) -> None:
    beating, servers = Beating(monkeypatch, SILENT, SILENT), list[str]()

    def lives(server: str, seconds: float) -> bool:
        servers.append(server)
        return answers

    monkeypatch.setattr(module, "answers", lives)
    beating.beats.beat(SERVER)
    assert servers == [SERVER] * asked
    assert cause in str(beating.failure.cause)


def test_a_process_that_lives_and_never_goes_on_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STILL_SECONDS", 0.0)
    monkeypatch.setattr(module, "answers", lambda server, seconds: True)
    beating = Beating(monkeypatch, SILENT)
    beating.beats.beat(SERVER)
    assert "the chief, is lost" in str(beating.failure.cause)


def test_a_step_with_a_limit_loses_a_chief_that_answers_nothing_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    beating = Beating(monkeypatch)
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return beating.failure.cause is not None

    monkeypatch.setattr(beating.failure, "wait", wait)
    with beating.status.together(1.0, "gradients"):
        beating.status.stopped_in("gradients")
        beating.beats.listen()
    assert "the chief, is lost" in str(beating.failure.cause)
    assert set(waited) == {PROMPT_SECONDS} and len(waited) * PROMPT_SECONDS > LEAST_SILENCE_SECONDS


@pytest.mark.parametrize(("rank", "listens"), [(0, False), (1, True)])
def test_only_workers_beside_the_chief_listen_for_it(monkeypatch: pytest.MonkeyPatch, rank: int, listens: bool) -> None:
    beating, begun = Beating(monkeypatch, rank=rank), list[str]()

    def noting(name: str) -> Callable[..., None]:
        return lambda *_: begun.append(name)

    for name in ("beat", "listen"):
        monkeypatch.setattr(beating.beats, name, noting(name))
    beating.beats.start(SERVER)
    beating.beats.wait_for_last(60.0)
    assert sorted(begun) == (["beat", "listen"] if listens else ["beat"])
