"""What the chief announces, and who hears it: at the same place of the script, while the chief waits for nobody."""

import pytest

from autodist_py.cluster.coordinator.announcements import NO_STEP, Places
from autodist_py.proto.errors import ClusterError, WorkerFailedError
from tests.support.driven import driven


def test_what_was_announced_before_or_after_is_heard():
    run = driven()
    run.announce(b"early", step=0)
    assert run.hear().answer() == b"early"
    second = run.hear(position=1)
    assert second.is_open
    run.announce(b"late", step=0)
    assert second.answer() == b"late"


def test_nothing_may_be_announced():
    run = driven()
    run.announce(b"", step=0)
    assert run.hear().answer() == b""


def test_an_announcement_of_an_earlier_step_is_another_one():
    run = driven()
    run.announce(b"of the chief alone", step=3)
    run.begins(4)
    heard = run.hear(step=4)
    assert heard.is_open
    run.announce(b"of all", step=4)
    assert heard.answer() == b"of all"


def test_who_hears_goes_on_when_the_chief_has_begun_another_step():
    run = driven()
    run.begins(4)
    heard = run.hear(step=4)
    assert heard.is_open
    run.begins(5)
    assert heard.answer() is None


def test_who_hears_goes_on_when_the_chief_waits_for_it_elsewhere():
    run = driven()
    heard = run.hear()
    assert heard.is_open
    run.exchange(0, "elsewhere")
    assert heard.answer() is None


def test_who_hears_goes_on_when_the_chief_has_left():
    run = driven()
    heard = run.hear()
    run.leave(0, 0)
    assert heard.answer() is None


def test_an_exchange_that_both_have_come_to_lets_nobody_go_on():
    run = driven()
    for rank in (0, 1):
        run.exchange(rank, "before")
    heard = run.hear()
    assert heard.is_open
    run.announce(b"said", step=0)
    assert heard.answer() == b"said"


def test_time_is_up_but_not_while_the_chief_prepares_what_it_says():
    run = driven()
    heard = run.hear(timeout=10.0)
    run.now += 9.0
    run.prepares()
    run.now += 600.0
    run.prepares("other")
    assert heard.is_open
    run.prepares("other", is_over=True)
    run.now += 600.0
    run.prepares(is_over=True)
    assert heard.is_open

    begun = run.now
    with pytest.raises(ClusterError, match=r"waits for the chief, worker 0 \(127.0.0.1\), at k, and it has not come"):
        heard.answer_in_time()
    assert run.now == begun + 10.0


def test_a_failure_of_the_run_ends_the_wait():
    run = driven()
    heard = run.hear()
    run.abort(0, "why", 0)
    with pytest.raises(WorkerFailedError, match="why"):
        heard.answer()


def test_what_nobody_can_ask_for_any_more_is_forgotten():
    run = driven()
    for step in range(5):
        run.announce(b"said", step=step)
    assert len(run.run._announcements._values) == 5
    run.beat(1, 4)
    run.announce(b"said", step=5)
    assert sorted(step for step, _ in run.run._announcements._values) == [4, 5]


def test_a_chief_whose_own_thread_still_makes_it_is_not_past_it():
    run = driven()
    run.prepares()
    run.prepares("other")
    heard = run.hear()
    run.begins(1)
    assert heard.is_open
    run.announce(b"by a thread", step=0)
    assert heard.answer() == b"by a thread"


def test_threads_of_the_scripts_hear_each_other_whatever_the_step():
    run = driven()
    heard = run.hear(step=NO_STEP)
    run.begins(3)
    assert heard.is_open
    run.announce(b"by a thread", step=NO_STEP)
    assert heard.answer() == b"by a thread"


def test_a_script_counts_how_often_it_comes_to_a_key_at_its_step():
    places = Places()
    assert [places.next_position(3, key) for key in "aab"] == [0, 1, 0]
    assert [places.next_position(NO_STEP, "a") for _ in range(2)] == [0, 1]
    assert [places.next_position(4, key) for key in "aa"] == [0, 1]
    assert places.next_position(NO_STEP, "a") == 2
