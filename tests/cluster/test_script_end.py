"""How a script's end is told to the run, and how the run's failure ends a script."""

import os
import signal
import threading
from typing import Any

import pytest

from autodist_py.cluster.coordinator_link import MARGIN_SECONDS
from autodist_py.cluster.failure import FAILED, INTERRUPTED, TERMINATED
from autodist_py.cluster.run_failure import RunFailure
from autodist_py.cluster.script_end import ScriptEnd
from autodist_py.proto.errors import ClusterError, WorkerFailedError

CAUSE = "worker 0 (127.0.0.1) ended: killed by SIGKILL"
SECONDS = 60.0


class Script:
    """A worker's script, with a link and a heartbeat that note what they are told."""

    def __init__(self, *, grace: float = 1000.0, chief: Any = None):
        self.told: list[tuple[str, ...]] = []
        self.has_lost_chief = False
        self.failure = RunFailure()
        own: Any = self
        self.end = ScriptEnd(own, self.failure, own, chief=chief, grace=grace)

    def abort(self, event: str, reason: str) -> None:
        self.told.append((event, reason))
        self.failure.fail(f"{event}: {reason}")

    def leave(self) -> None:
        self.told.append(("left",))

    def wait_for_last(self, seconds: float) -> None:
        self.told.append(("last heartbeat",))

    def say_last_words(self) -> None:
        self.told.append(("last words",))


class Chief:
    """What the chief's process has, when another worker's process does not end, or all do."""

    def __init__(self, cause: str | None):
        self.cause, self.coordinator = cause, self
        self.graces: list[float] = []

    def wait_for_workers(self) -> None:
        """See chief.Chief."""

    def stop_workers(self, *, grace: float) -> None:
        self.graces.append(grace)


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """With which codes the process has ended."""
    found: list[int] = []
    monkeypatch.setattr(os, "_exit", found.append)
    return found


def test_what_a_script_raises_fails_the_run_and_is_shown() -> None:
    script = Script()
    assert script.end.raised(ValueError("too\nlong"))
    assert script.told == [(FAILED, "ValueError: too long")]


def test_what_follows_from_a_failure_is_no_news() -> None:
    script = Script()
    assert not script.end.raised(WorkerFailedError(CAUSE))
    assert not script.told


@pytest.mark.parametrize(
    ("number", "told", "code"),
    [
        (signal.SIGINT, (INTERRUPTED, "KeyboardInterrupt (Ctrl-C)"), 130),
        (signal.SIGTERM, (TERMINATED, "SIGTERM"), 143),
    ],
)
def test_a_signal_fails_the_run_and_is_the_exit_code(
    codes: list[int], number: signal.Signals, told: tuple[str, str], code: int
) -> None:
    script = Script()
    script.end.signalled(number)
    assert not script.end.raised(SystemExit(code))
    script.end.ended()
    assert (script.told, codes) == ([told], [code])


def test_a_script_that_ends_leaves_with_the_others_and_python_ends(
    codes: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script()
    script.end.ended()
    assert script.told == [("left",), ("last heartbeat",)]
    assert not codes and not capsys.readouterr().err


def test_the_chief_learns_last_how_the_others_ended(codes: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    chief = Chief("worker 1 did not end")
    Script(chief=chief).end.ended()
    assert capsys.readouterr().err == "autodist: worker 1 did not end\n"
    assert (codes, len(chief.graces)) == ([1], 1)


def test_a_script_that_leaves_as_the_run_fails_ends_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, codes: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script()

    def leave() -> None:
        threading.Timer(0.1, script.failure.fail, [CAUSE]).start()
        raise ClusterError("another went on")

    monkeypatch.setattr(script, "leave", leave)
    script.end.ended()
    assert (capsys.readouterr().err, codes) == (f"autodist: {CAUSE}\n", [1])


def test_who_has_lost_the_chief_says_so_as_its_last_words(codes: list[int]) -> None:
    script = Script()
    script.has_lost_chief = True
    script.failure.fail(CAUSE)
    script.end.ended()
    assert script.told == [("last words",)]


def test_a_script_that_goes_on_after_its_grace_is_ended(
    monkeypatch: pytest.MonkeyPatch, codes: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    chief = Chief(None)
    script = Script(grace=0.1, chief=chief)
    is_over = threading.Event()
    monkeypatch.setattr(script.end, "_exit", is_over.set)
    script.failure.fail(CAUSE)
    script.end.begin_grace()
    assert is_over.wait(SECONDS)
    assert capsys.readouterr().err == f"autodist: {CAUSE}\n"
    (grace,) = chief.graces
    assert 0.0 < grace <= MARGIN_SECONDS


def test_a_script_that_ends_in_its_grace_ends_by_itself(codes: list[int]) -> None:
    script = Script(grace=0.1)
    script.failure.fail(CAUSE)
    assert not script.end.raised(WorkerFailedError(CAUSE))
    script.end.ended()
    script.end.begin_grace()
    for thread in threading.enumerate():
        if thread.name == "autodist-end":
            thread.join(SECONDS)
    assert not codes
