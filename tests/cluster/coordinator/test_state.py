"""The rules of a run, on a clock that stands still but where a test lets it go on.

One module, though long: each case is a few events of the same run.
"""

import re

import pytest

from autodist_py.cluster.coordinator.api import Membership
from autodist_py.cluster.coordinator.events import Exchanged, GaveUp, MadeAnother, Tick, Warn
from autodist_py.cluster.coordinator.verdict import EXIT_CODE_SECONDS
from autodist_py.cluster.failure import Failure, Worker
from autodist_py.cluster.step_status import LEAST_SILENCE_SECONDS, StepStatus
from autodist_py.proto.errors import ClusterError, WorkerFailedError
from tests.support.coordinators import THREE
from tests.support.driven import Driven, driven


def test_joining_gives_every_worker_the_same_run_and_all_servers():
    run = Driven()
    first = run.join(0)
    assert first.is_open
    second = run.join(1)

    assert first.answer() == second.answer() == Membership("run", 7, ("host:0", "host:1"))


def test_a_worker_that_does_not_join_in_time_is_named():
    run = Driven()
    with pytest.raises(ClusterError, match=r"worker 1 \(127.0.0.2\) did not join within 5 s.*AUTODIST_OUTPUT=all"):
        run.join(0).answer_in_time()
    assert run.now == 1005.0


def test_a_worker_with_another_resource_spec_is_refused():
    with pytest.raises(ClusterError, match=r"worker 1 has nodes: 2, the chief spec\. Give all of them the same file"):
        Driven().join(1, spec="nodes: 2").answer()


def test_a_rank_joins_once():
    with pytest.raises(ClusterError, match=r"each rank from 0 to 1 joins once. Received: 1, after \[0, 1\]"):
        driven().join(1).answer()


def test_everyone_gets_all_values_or_the_chiefs():
    run = driven()

    of_all = [run.exchange(rank) for rank in (0, 1)]
    assert [each.answer() for each in of_all] == [{0: b"k0", 1: b"k1"}] * 2
    of_chief = [run.exchange(rank, everyone=False) for rank in (1, 0)]
    assert [each.answer() for each in of_chief] == [{0: b"k0"}] * 2


def test_the_chief_does_not_wait_for_those_it_tells():
    run = driven()

    assert run.exchange(0, everyone=False).answer() == {0: b"k0"}
    assert run.exchange(0, everyone=False).answer() == {0: b"k0"}
    assert run.exchange(1, everyone=False).answer() == {0: b"k0"}


@pytest.mark.parametrize("value", [b"", b"-1", b"two", b"9" * 5000])
def test_who_leaves_says_the_number_of_its_last_step(value):
    run = Driven()
    run.tell(Exchanged(-1, 1, "leaving/servers", value, everyone=True, timeout=5.0))
    assert str(run.answers[-1]).startswith(
        "'leaving/servers' is told the number of a worker's last step; got b'",
    )


def test_exchanges_that_everyone_has_seen_are_forgotten():
    run = driven()

    for number in range(20):
        for rank in (0, 1):
            run.exchange(rank, f"k{number % 3}")

    assert list(run.run._exchanges) == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("everyone", [True, False])
def test_exchanges_that_are_given_up_are_forgotten_when_all_have_come(order, everyone):
    run = driven()
    first, second = order
    run.tell(Exchanged(-1, first, "k", b"1", everyone=everyone, timeout=5.0))
    run.tell(GaveUp(-1))
    later = run.exchange(second, everyone=everyone)
    assert not later.is_open or not everyone  # Whose value was given is there.
    if later.is_open:
        run.now += 60.0
        run.tell(Tick())

    assert list(run.run._exchanges) == [] and run.run._waiting == {}


def test_exchanges_in_which_time_is_up_for_all_are_forgotten():
    run = driven(THREE)
    waiting = [run.exchange(rank, timeout=5.0) for rank in (0, 1)]
    run.now += 5.0
    run.tell(Tick())
    assert not any(each.is_open for each in waiting)
    assert run.exchange(2).answer() == {rank: f"k{rank}".encode() for rank in range(3)}

    assert list(run.run._exchanges) == []


def test_an_exchange_that_a_lost_worker_did_not_come_to_is_forgotten():
    run = apart({1, 2})
    run.exchange(0, everyone=False)
    run.exchange(1, everyone=False)

    run.process_ended(2, -9)

    assert list(run.run._exchanges) == []


def test_an_exchange_that_is_too_late_names_who_is_missing():
    run = driven()
    with pytest.raises(ClusterError, match=r"worker 1 \(127.0.0.2\) did not reach 'k' within 60 s"):
        run.exchange(0).answer_in_time()
    assert run.now == 1060.0


def test_all_workers_use_a_key_for_one_kind_of_exchange():
    run = driven()
    run.exchange(0, everyone=True)
    with pytest.raises(ClusterError, match="all workers use 'k' for the same kind of exchange; worker 1 uses it for"):
        run.exchange(1, everyone=False).answer()


def test_the_first_cause_is_everyones_and_frees_those_who_wait():
    run = driven()
    waiting = run.exchange(0)

    cause = run.abort(1, "ValueError: boom", 12).answer()

    assert cause == "worker 1 (127.0.0.2) failed at step 12: ValueError: boom"
    assert run.abort(0, "later", 13).answer() == cause
    assert run.beat(0, 13).answer().cause == cause
    with pytest.raises(WorkerFailedError) as caught:
        waiting.answer()
    assert str(caught.value) == cause


def test_what_a_launcher_knows_of_an_end_is_the_cause():
    run = Driven()

    run.process_ended(1, 255, "it could not be started over SSH: no route")

    assert run.cause == "worker 1 (127.0.0.2) ended before it joined: it could not be started over SSH: no route"


@pytest.mark.parametrize(
    ("exit_code", "cause"),
    [
        (3, "worker 1 (127.0.0.2) ended, last heard of before its first step: exit code 3; see its output above"),
        (
            -9,
            "worker 1 (127.0.0.2) ended, last heard of before its first step: killed by SIGKILL; see its output above",
        ),
        (0, "worker 1 (127.0.0.2) ended, last heard of before its first step: exit code 0; see its output above"),
    ],
)
def test_a_process_that_ends_before_all_have_left_ends_the_run(exit_code, cause):
    run = driven()

    run.process_ended(1, exit_code)

    assert run.cause == cause


@pytest.mark.parametrize("made", [Driven, driven])
@pytest.mark.parametrize(("exit_code", "said"), [(3, "exit code 3"), (-9, "killed by SIGKILL")])
def test_a_cause_refers_only_to_output_that_was_shown(made, exit_code, said):
    unseen, seen = made(), made()

    unseen.process_ended(1, exit_code, is_shown=False)
    seen.process_ended(1, exit_code)

    assert re.fullmatch(rf"worker 1 \(127\.0\.0\.2\) ended[^:]*: {said}", unseen.cause)
    assert seen.cause == f"{unseen.cause}; see its output above"


def test_a_process_that_ends_before_joining_ends_the_run_at_once():
    run = Driven()
    joining = run.join(0)

    run.process_ended(1, 2)

    with pytest.raises(WorkerFailedError, match=r"worker 1 \(127.0.0.2\) ended before it joined: exit code 2"):
        joining.answer()


def test_a_process_that_ends_long_after_it_joined_while_others_do_not_come_is_the_cause():
    """No heartbeat comes before all have joined, so that time shows nothing of the chief's own standing still."""
    run = Driven(THREE)
    for rank in (0, 1):
        run.join(rank, timeout=600.0)
    for seconds in (30.0, 60.0):
        run.now += seconds
        run.process_ended(1, 1)
    assert (
        run.cause
        == "worker 1 (127.0.0.2) ended, last heard of before its first step: exit code 1; see its output above"
    )


def test_leaving_returns_when_all_have_left():
    run = driven()

    first = run.leave(0, 3)
    assert first.is_open
    second = run.leave(1, 3)
    assert first.answer() is second.answer() is None
    run.process_ended(1, 0)
    assert run.cause is None


def test_a_script_that_fails_after_all_have_left_is_still_a_failure():
    run = driven()
    for rank in (0, 1):
        run.leave(rank, 3)

    run.process_ended(1, 3)

    assert run.cause == "worker 1 (127.0.0.2) ended, last heard of at step 3: exit code 3; see its output above"


def test_waiting_for_one_that_has_left_ends_the_run_with_its_exit_code():
    run = driven()
    leaving, waiting = run.leave(1, 5), run.exchange(0)
    assert leaving.answer() is None  # It is let go, as another needs it.
    run.now += EXIT_CODE_SECONDS / 2
    assert waiting.is_open

    run.process_ended(1, 3)

    with pytest.raises(WorkerFailedError, match=r"worker 1 \(127.0.0.2\) ended, last heard of at step 5: exit code 3"):
        waiting.answer()


@pytest.mark.parametrize("timeout", [1.0, 60.0])
def test_an_exit_code_that_does_not_come_is_waited_for_for_a_while_whatever_the_exchanges_own_time(timeout):
    run = driven()
    run.leave(1, 5)
    with pytest.raises(WorkerFailedError, match=r"ended its script at step 5: worker 0 waits for it at 'k', and a syn"):
        run.exchange(0, timeout=timeout).answer_in_time()
    assert run.now == 1000.0 + EXIT_CODE_SECONDS


def test_a_step_that_one_did_not_reach_ends_the_run_with_its_exit_code_at_once():
    run = driven()
    leaving, beat = run.leave(1, 5), run.beat(0, 6)
    assert leaving.answer() is None
    assert beat.is_open

    run.process_ended(1, 3)

    assert beat.answer().suspicion is not None
    assert str(run.beat(0, 6).answer().cause).startswith(
        "worker 1 (127.0.0.2) ended, last heard of at step 5, when the chief is at step 6: exit code 3"
    )


def test_who_waits_hears_of_the_chief_while_that_one_waits_for_the_exit_code_of_one_that_left():
    run = driven(THREE)
    run.leave(1, 5)

    cause, longest = None, 0.0
    while cause is None:
        asked = run.now
        cause = run.heartbeat(2, 6, StepStatus(6, 2.0, "dense gradients of w")).cause
        longest = max(longest, run.now - asked)

    assert longest < LEAST_SILENCE_SECONDS / 2
    assert run.now == 1000.0 + EXIT_CODE_SECONDS
    assert cause.startswith("worker 1 (127.0.0.2) ended its script at step 5: worker 2 went on to step 6")


def test_a_step_that_another_script_did_not_reach_ends_the_run():
    run = driven()
    leaving = run.leave(0, 5)

    assert run.heartbeat(1, 5).cause is None
    cause = run.beat(1, 6).answer().cause

    assert cause is not None and "worker 0 (127.0.0.1) ended its script at step 5: worker 1 went on to step 6" in cause
    with pytest.raises(WorkerFailedError):
        leaving.answer()


def test_who_waits_for_all_to_end_has_taken_its_last_step():
    run = driven()
    run.tell(Exchanged(-1, 0, "leaving/servers", b"5", everyone=True, timeout=60.0))
    cause = run.beat(1, 6).answer().cause
    assert cause is not None and cause.startswith("worker 0 (127.0.0.1) ended its script")


def apart(expendable, *, goes_on=True):
    """Three workers that take their steps by themselves."""
    run = driven(THREE, goes_on=goes_on)
    run.step_apart(expendable)
    return run


def test_a_run_goes_on_without_a_worker_that_nobody_needs():
    run = apart({1, 2})
    waiting = [run.exchange(rank) for rank in (0, 1)]

    run.process_ended(2, -9)

    assert [each.answer() for each in waiting] == [{0: b"k0", 1: b"k1"}] * 2
    assert run.cause is None
    assert run.heartbeat(1, 3).lost == (2,)
    assert [each.answer() for each in [run.leave(rank, 3) for rank in (0, 1)]] == [None, None]


def test_a_worker_that_is_lost_and_lives_is_told_why_and_ends_by_that():
    run = apart({1, 2}, goes_on=True)
    waiting, beat = run.exchange(2), run.beat(2, 3)

    run.abort(2, "boom", 3)

    cause = "worker 2 (127.0.0.3) failed at step 3: boom; the others go on without it"
    assert beat.answer().cause == cause and not beat.answer().finished
    for call in (waiting, run.exchange(2, "other"), run.leave(2, 3)):
        with pytest.raises(WorkerFailedError, match=re.escape(cause)):
            call.answer()
    assert run.cause is None and run.heartbeat(1, 3).cause is None


def test_the_loss_of_a_worker_is_told_to_the_user():
    run = apart({1, 2})
    told = run.run.step(Exchanged(-1, 0, "k", b"", everyone=True, timeout=5.0), run.now).actions
    assert told == ()
    run.abort(2, "boom", 4)
    assert run.run.lost[2] == Failure(Worker(2, "127.0.0.3"), "failed", "boom", step=4)
    run.leave(1, 3)
    run.beat(0, 4)
    run.now += EXIT_CODE_SECONDS
    assert run.tell(Tick()) == (
        Warn(
            "worker 1 (127.0.0.2) ended its script at step 3: worker 0 waits for it at 'k', and a synchronous run "
            "needs every worker to the end. The others go on without it"
        ),
    )


def test_a_run_goes_on_without_a_worker_that_nobody_needs_and_that_ends_its_script_too_early():
    run = apart({1, 2})
    leaving = run.leave(2, 3)
    waiting = [run.exchange(rank) for rank in (0, 1)]
    assert leaving.answer() is None  # It is let go, as the others need it.

    run.process_ended(2, 3)

    assert [each.answer() for each in waiting] == [{0: b"k0", 1: b"k1"}] * 2
    assert run.cause is None
    assert run.heartbeat(1, 3).lost == (2,)


@pytest.mark.parametrize(
    ("expendable", "goes_on"), [({2}, True), ({1, 2}, False), (set(), True)], ids=["server", "not-asked-for", "nobody"]
)
def test_a_worker_that_is_needed_ends_the_run(expendable, goes_on):
    run = apart(expendable, goes_on=goes_on)

    run.process_ended(1, -9)

    assert run.cause is not None and run.cause.startswith("worker 1 (127.0.0.2) ended")


def test_the_chief_and_who_was_needed_before_are_always_needed():
    run = apart({0, 1, 2})
    run.step_apart({0, 2})

    assert run.abort(2, "x", 1).answer() == "worker 2 (127.0.0.3) failed at step 1: x"
    assert run.cause is None
    run.abort(1, "y", 1)
    assert run.cause == "worker 1 (127.0.0.2) failed at step 1: y"


def test_workers_that_step_apart_may_leave_before_others_have_gone_as_far():
    run = apart(())
    leaving = run.leave(2, 3)

    assert run.heartbeat(1, 10).cause is None
    for rank in (0, 1):
        run.leave(rank, 10)
    assert leaving.answer() is None


def test_steps_that_several_objects_of_a_script_count_together_are_said_to_be_so():
    run = driven()
    run.tell(MadeAnother())
    cause = run.abort(1, "why", 7).answer()
    assert cause == "worker 1 (127.0.0.2) failed at step 7 of its 2 AutoDist objects: why"


def test_of_a_worker_that_was_killed_nothing_is_said_but_what_is_known():
    run = driven()
    run.heartbeat(1, 1)
    run.begins(20)
    run.process_ended(1, -9)
    assert run.beat(1, 1).answer().cause == (
        "worker 1 (127.0.0.2) ended, last heard of at step 1, when the chief is at step 20: killed by SIGKILL; see its "
        "output above"
    )


def test_who_gives_a_call_up_is_not_answered():
    run = driven()
    run.tell(Exchanged(-1, 0, "k", b"", everyone=True, timeout=5.0))
    run.tell(GaveUp(-1))
    run.exchange(1)
    assert -1 not in run.answers


def test_a_signal_that_interrupts_a_step_loses_no_answer_of_another_call(monkeypatch):
    run = driven()
    run.exchange(0)
    answers = iter([None, KeyboardInterrupt()])
    original = run.run._answer

    def interrupted(ticket, waiting):
        reply = original(ticket, waiting)
        if reply is not None and isinstance(next(answers), KeyboardInterrupt):
            raise KeyboardInterrupt
        return reply

    monkeypatch.setattr(run.run, "_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.exchange(1)
    assert list(run.run.answers.values())[-1:] == [{0: b"k0", 1: b"k1"}]
