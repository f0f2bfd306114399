"""Workers that are missing, by what heartbeats say, or do not say. One module, though long: all is one subject."""

from collections.abc import Callable

import pytest

from autodist_py.cluster.coordinator import liveness, verdict
from autodist_py.cluster.coordinator.api import HeartbeatReply
from autodist_py.cluster.failure import Failure, Worker
from autodist_py.cluster.step_status import StepStatus
from autodist_py.proto.errors import WorkerFailedError
from tests.support.coordinators import ADDRESSES, THREE
from tests.support.driven import Driven, driven

HEARTBEAT = 0.05
SILENCE = 0.5
STOPPING = 0.5
W = "dense gradients of w"
AT_LAST = "while worker {} ({}) was in a step that combines dense gradients of w"
STOPPED = "while worker {} ({}) waited for it to combine dense gradients of w"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats come in quick succession, and short silences count."""
    monkeypatch.setattr(liveness, "HEARTBEAT_SECONDS", HEARTBEAT)
    monkeypatch.setattr(liveness, "PROMPT_SECONDS", HEARTBEAT)
    monkeypatch.setattr("autodist_py.cluster.step_status.LEAST_SILENCE_SECONDS", SILENCE)
    monkeypatch.setattr(verdict, "STOPPING_SECONDS", STOPPING)


def until_failed(run: Driven, beat: Callable[[], object], seconds: float = 5.0) -> float:
    """How long it took."""
    begun = run.now
    while run.cause is None and run.now < begun + seconds:
        beat()
        run.look()
    return run.now - begun


def test_a_silent_worker_ends_the_run():
    run = driven(heartbeat_timeout=0.3)
    until_failed(run, lambda: run.heartbeat(0, 4))

    assert run.look() == [1]
    assert (
        run.cause
        == "worker 1 (127.0.0.2) stopped answering, last heard of before its first step, when the chief is at step 4: "
        "no heartbeat for 0.3 s"
    )


@pytest.mark.parametrize("step", [7, 8], ids=["before the step", "in the step"])
def test_who_is_silent_while_others_wait_is_lost_after_the_limit(step):
    run = driven(heartbeat_timeout=60.0)
    run.heartbeat(1, step, StepStatus(step, 0.6, W))

    took = until_failed(run, lambda: run.heartbeat(0, 8, StepStatus(8, 0.6, W)))

    assert 0.6 + STOPPING < took < 0.6 + STOPPING + 3 * HEARTBEAT
    chief = ", when the chief is at step 8" if step < 8 else ""
    assert run.cause == (
        f"worker 1 (127.0.0.2) stopped answering, last heard of at step {step}{chief}: "
        f"no heartbeat for 0.6 s, with timeout_seconds 0.6, "
        f"{AT_LAST.format(0, ADDRESSES[0])}"
    )


@pytest.mark.parametrize("waits", [StepStatus(8, 0.6), StepStatus(8, 0.0, W)], ids=["between steps", "no limit"])
def test_who_is_silent_while_nobody_waits_has_the_heartbeats_time(waits):
    run = driven(heartbeat_timeout=60.0)
    until_failed(run, lambda: run.heartbeat(0, 8, waits), seconds=1.2)

    assert run.cause is None


def test_who_is_silent_while_steps_go_on_is_waited_for_by_nobody():
    run = driven(heartbeat_timeout=60.0)
    steps = iter(range(1, 10_000))

    def beat():
        step = next(steps)
        run.heartbeat(0, step, StepStatus(step, 0.6, W))

    until_failed(run, beat, seconds=1.2)

    assert run.cause is None


def test_a_short_silence_is_none_however_short_the_limit():
    run = driven(heartbeat_timeout=60.0)
    took = until_failed(run, lambda: run.heartbeat(0, 8, StepStatus(8, 0.1, W)))

    assert SILENCE + STOPPING < took < SILENCE + STOPPING + 3 * HEARTBEAT
    assert "no heartbeat for 0.5 s, with timeout_seconds 0.1" in str(run.cause)


def test_a_heartbeat_that_is_shorter_than_the_limit_rules():
    run = driven(heartbeat_timeout=0.3)
    until_failed(run, lambda: run.heartbeat(0, 8, StepStatus(8, 60.0, W)))

    assert run.cause == (
        "worker 1 (127.0.0.2) stopped answering, last heard of before its first step, when the chief is at step 8: "
        "no heartbeat for 0.3 s, " + AT_LAST.format(0, ADDRESSES[0])
    )


def test_a_program_with_a_limit_is_looked_after_more_often(monkeypatch):
    monkeypatch.setattr(liveness, "HEARTBEAT_SECONDS", 5.0)
    run = driven()
    begun = run.now
    for _ in range(2):
        run.heartbeat(0, 8, StepStatus(8, 2.0, W))

    assert run.now - begun == pytest.approx(2 * HEARTBEAT)


@pytest.mark.parametrize("behind", [0, 1])
def test_others_are_kept_waiting_no_longer_than_the_limit(behind):
    run = driven(heartbeat_timeout=60.0)

    def beat():
        for rank in (0, 1):  # Both live; one does not come to the next step.
            step = 7 if rank == behind else 8
            run.heartbeat(rank, step, StepStatus(step, 0.5, W if step == 8 else ""))

    took = until_failed(run, beat)

    assert 0.5 + STOPPING < took < 2 * 0.5 + STOPPING + 10 * HEARTBEAT  # Two heartbeats between checks: half counts.
    assert run.cause == (
        f"worker {behind} (127.0.0.{behind + 1}) kept others waiting at step 7: 0.5 s after another it has not begun "
        f"step 8 of all workers, with timeout_seconds 0.5, {AT_LAST.format(1 - behind, ADDRESSES[1 - behind])}"
    )


def test_who_waits_for_a_silent_worker_in_an_earlier_step_is_not_the_one_that_is_missing():
    run = driven(THREE, heartbeat_timeout=60.0)
    run.heartbeat(2, 7, StepStatus(7, 0.2, W))  # It is cut when worker 0 has its part of step 7, and 1 has not.

    def beat():
        run.heartbeat(0, 8, StepStatus(8, 0.2, W))
        run.heartbeat(1, 7, StepStatus(7, 0.2, W))

    until_failed(run, beat)

    assert str(run.cause).startswith(
        "worker 2 (127.0.0.3) stopped answering, last heard of at step 7, when the chief is at step 8: "
        "no heartbeat for 0.5 s"
    )


def test_who_is_late_is_not_taken_while_another_misses_its_heartbeats():
    run = driven(THREE, heartbeat_timeout=60.0)
    run.heartbeat(2, 7, StepStatus(7, 0.2))

    def beat():
        run.heartbeat(0, 8, StepStatus(8, 0.2, W))
        run.heartbeat(1, 7, StepStatus(7, 0.2))

    until_failed(run, beat)

    assert str(run.cause).startswith("worker 2 (127.0.0.3) stopped answering, last heard of at step 7")


@pytest.mark.parametrize("end", ["lost", "left"])
def test_one_that_has_ended_is_kept_waiting_by_nobody(end):
    run = driven(THREE, heartbeat_timeout=60.0)
    run.heartbeat(2, 8, StepStatus(8, 0.2, W))
    if end == "left":
        run.leave(2, 8)
    else:
        run.run._verdict.lost[2] = Failure(Worker(2, THREE[2]), "ended", "killed by SIGKILL")

    def beat():
        for rank in (0, 1):
            run.heartbeat(rank, 8, StepStatus(7, 0.2))

    until_failed(run, beat, seconds=2.5)

    assert run.cause is None


def test_who_hangs_in_an_earlier_step_keeps_others_waiting_for_no_longer_than_a_silence_may_last():
    run = driven(heartbeat_timeout=60.0)

    def beat():
        run.heartbeat(0, 8, StepStatus(8, 0.2, W))
        run.heartbeat(1, 7, StepStatus(7, 0.2, W))

    took = until_failed(run, beat)

    assert SILENCE + STOPPING < took < 2 * SILENCE + STOPPING + 10 * HEARTBEAT
    assert str(run.cause).startswith(
        "worker 1 (127.0.0.2) kept others waiting at step 7: 0.5 s after another it has not begun step 8"
    )


@pytest.mark.parametrize("waits", [StepStatus(8, 0.0, W), StepStatus(8, 0.5)], ids=["no limit", "between steps"])
def test_who_waits_for_nobody_may_take_as_long_as_it_likes(waits):
    run = driven(heartbeat_timeout=60.0)

    def beat():
        run.heartbeat(0, 7, StepStatus(7, waits.seconds))
        run.heartbeat(1, 8, waits)

    until_failed(run, beat, seconds=1.0)

    assert run.cause is None


def test_steps_that_a_worker_takes_by_itself_are_not_waited_for_but_those_of_all_are():
    run = driven(heartbeat_timeout=60.0)
    run.step_apart(())  # One program's steps are.
    own = iter(range(100, 10_000))

    def beat():
        run.heartbeat(0, 8, StepStatus(8, 0.5, waited))
        run.heartbeat(1, next(own), StepStatus(7, 0.5))

    waited = ""
    until_failed(run, beat, seconds=1.0)
    assert run.cause is None

    waited = W
    until_failed(run, beat)
    assert "it has not begun step 8 of all workers" in str(run.cause)


def test_what_has_not_been_said_since_is_no_sign_of_waiting():
    run = driven(heartbeat_timeout=60.0)

    def beat():
        run.heartbeat(0, 7, StepStatus(7, 0.4))
        run.heartbeat(1, 8, StepStatus(8, 0.4, W))

    beat()
    run.now += 1.0  # The chief stood still, or its reports are late: it may have begun the step long ago.
    run.look()
    assert run.cause is None

    until_failed(run, beat)
    assert str(run.cause).startswith("worker 0 (127.0.0.1) kept others waiting at step 7")


def test_a_report_that_was_long_on_its_way_is_no_sign_of_waiting():
    run = driven(heartbeat_timeout=60.0)
    run.heartbeat(0, 7, StepStatus(7, 0.4))
    begun = run.now
    while run.now < begun + 0.8:  # What worker 0 has said meanwhile is not here.
        run.heartbeat(1, 8, StepStatus(8, 0.4, W))
        run.look()
    run.heartbeat(0, 7, StepStatus(7, 0.4))
    run.heartbeat(1, 8, StepStatus(8, 0.4, W))
    run.look()

    assert run.heartbeat(1, 8, StepStatus(8, 0.4, W)).suspicion is None


def test_a_chief_that_stood_still_itself_blames_nobody():
    run = driven(heartbeat_timeout=2.0)
    run.heartbeat(0, 8, StepStatus(8, 2.0, W))
    run.now += 60

    assert run.look() == []


def test_a_chief_that_is_slow_itself_does_not_count_the_time_it_lost():
    run = driven(heartbeat_timeout=0.3)
    for _ in range(4):
        run.now += 2 * HEARTBEAT  # Twice as long as it should take from one check to the next.
        assert run.look() == []
    for _ in range(10):
        run.now += HEARTBEAT
        run.heartbeat(0, 1)
        silent = run.look()

    assert silent == [1]


# -- Where others wait ------------------------------------------------------------------------------------------------


def waited_for(addresses: tuple[str, ...] = ADDRESSES) -> Driven:
    """Worker 1 has ended, and worker 0 waits for it."""
    run = driven(addresses)
    run.heartbeat(0, 8, StepStatus(8, 0.0, "dense gradients of v, w (one of its 3 collectives)"))
    run.process_ended(1, -9)
    return run


def test_the_cause_says_in_which_collective_another_was_stopped():
    run = waited_for()
    suspicion = run.heartbeat(0, 8, StepStatus(8, 0.0, "dense gradients of v, w")).suspicion

    assert (
        suspicion == "worker 1 (127.0.0.2) ended, last heard of before its first step, when the chief is at step 8: "
        "killed by SIGKILL; see its output above"
    )
    cause = run.heartbeat(0, 8, StepStatus(8, 0.0, "", W)).cause
    assert cause == f"{suspicion}, while worker 0 (127.0.0.1) waited for it to combine dense gradients of w"
    assert run.abort(1, "later", 9).answer() == cause


def test_the_cause_does_not_wait_for_one_that_cannot_say_where_it_waits():
    run = waited_for()
    replies: list[HeartbeatReply] = []
    took = until_failed(run, lambda: replies.append(run.heartbeat(0, 8, StepStatus(8, 0.0, W))))

    assert STOPPING <= took < STOPPING + 2 * HEARTBEAT
    assert [reply.suspicion is None for reply in replies] == [False, *[True] * (len(replies) - 1)]
    assert replies[-1].cause == f"{replies[0].suspicion}, {AT_LAST.format(0, ADDRESSES[0])}"


def test_the_cause_is_told_at_once_when_nobody_turns_out_to_wait():
    run = waited_for()
    begun = run.now
    replies = [run.heartbeat(0, 8, StepStatus(8)) for _ in range(2)]

    assert run.now == begun
    assert replies[1].cause == replies[0].suspicion


def test_who_begins_a_step_after_its_last_report_is_still_asked_where_it_waits():
    run = driven()
    run.heartbeat(0, 7, StepStatus(7))
    run.process_ended(1, -9)
    assert run.cause is None

    assert run.heartbeat(0, 8, StepStatus(8, 0.0, W)).suspicion is not None
    assert str(run.heartbeat(0, 8, StepStatus(8, 0.0, "", W)).cause).endswith("to combine dense gradients of w")


@pytest.mark.parametrize("is_said", [True, False], ids=["said", "never-said"])
def test_another_failure_meanwhile_does_not_keep_others_from_saying_where_they_wait(is_said):
    run = waited_for(THREE)
    suspicion = run.heartbeat(0, 8, StepStatus(8, 0.0, W)).suspicion
    failing = run.abort(2, "as its peer is gone", 8)
    assert failing.is_open  # Worker 2 waits, for what is said of worker 1.
    assert run.cause is None
    if is_said:
        run.beat(0, 8, StepStatus(8, 0.0, "", W))
        cause = failing.answer()
    else:
        begun, cause = run.now, failing.answer_in_time()
        assert run.now == begun + STOPPING

    where = STOPPED.format(0, ADDRESSES[0]) if is_said else AT_LAST.format(0, ADDRESSES[0])
    assert cause == run.cause == f"{suspicion}, {where}"


def test_who_waits_outside_of_a_step_does_not_keep_others_from_saying_where_they_wait():
    run = driven(THREE)
    run.heartbeat(0, 8, StepStatus(8, 0.0, W))
    leaving, waiting = run.leave(1, 7), run.exchange(2)
    assert leaving.answer() is None  # It is let go, as worker 2 needs it.
    run.process_ended(1, 3)
    assert waiting.is_open
    assert run.cause is None
    assert run.heartbeat(0, 8, StepStatus(8, 0.0, W)).suspicion is not None
    run.beat(0, 8, StepStatus(8, 0.0, "", W))

    with pytest.raises(WorkerFailedError) as raised:
        waiting.answer()
    assert str(raised.value) == (
        "worker 1 (127.0.0.2) ended, last heard of at step 7, when the chief is at step 8: "
        "exit code 3; see its output above, " + STOPPED.format(0, ADDRESSES[0])
    )


def test_a_run_does_not_go_on_without_a_worker_that_a_step_of_all_needs():
    run = driven(heartbeat_timeout=60.0, goes_on=True)
    for rank in (0, 1):
        run.heartbeat(rank, 0)
    run.step_apart({1})
    run.process_ended(1, -9)
    assert run.cause is None

    until_failed(run, lambda: run.heartbeat(0, 8, StepStatus(8, 0.0, W)))

    assert str(run.cause).startswith(
        "worker 1 (127.0.0.2) ended, last heard of before its first step, when the chief is at step 8: "
        "killed by SIGKILL; see its output above; the others went on "
        "without it, and now need it, while worker 0 (127.0.0.1) was in a step"
    )
