"""Who is missing by the reports of all workers, on a clock that goes as a test lets it."""

import pytest

from autodist_py.runtime import reports
from autodist_py.runtime.liveness import STILL_SECONDS
from autodist_py.runtime.reports import Reports
from autodist_py.runtime.waits import NO_WAITS, PROMPT_SECONDS, Waits
from tests.runtime.clock import Clock

W = "dense gradients of w"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(reports, "time", clock)
    return clock


def told(found: Reports, said: dict[int, Waits]) -> None:
    for rank, waits in said.items():
        found.take(rank, waits)


def go_on(found: Reports, clock: Clock, said: dict[int, Waits], seconds: float) -> None:
    """These report, and the chief looks, as often as they do with a limit."""
    for _ in range(round(seconds / PROMPT_SECONDS)):
        clock.now += PROMPT_SECONDS
        told(found, said)
        found.catch_up()


def test_time_for_which_the_chief_stood_still_is_no_waiting(clock: Clock) -> None:
    found, ranks = Reports(60.0), {0, 1}
    said = {0: Waits(8, 3.0, W), 1: Waits(7, 3.0)}
    told(found, said)
    go_on(found, clock, said, 1.0)
    clock.now += 30.0
    found.catch_up()
    told(found, said)
    assert found.behind(ranks) is None

    go_on(found, clock, said, 1.0)
    assert found.behind(ranks) is None

    go_on(found, clock, said, 2.0)
    behind = found.behind(ranks)
    assert behind is not None
    assert behind[0] == 1


@pytest.mark.parametrize(("limit", "heartbeat"), [(2.0, 60.0), (0.0, 4.0)])
def test_who_falls_silent_as_soon_as_the_chief_goes_on_is_lost_as_soon_as_ever(
    clock: Clock, limit: float, heartbeat: float
) -> None:
    found = Reports(heartbeat)
    told(found, {0: NO_WAITS, 1: NO_WAITS})
    found.catch_up()
    clock.now += 30.0
    told(found, {0: Waits(1, limit, W), 1: Waits(1, limit, W)})  # These reports come first; then the chief looks.
    found.catch_up()

    go_on(found, clock, {0: Waits(1, limit, W)}, (limit or heartbeat) - PROMPT_SECONDS)
    assert found.silent({1}) == {}
    go_on(found, clock, {0: Waits(1, limit, W)}, 1.0)
    assert found.silent({1}).keys() == {1}


def test_who_lives_but_reports_nothing_is_waited_for_to_a_limit(clock: Clock) -> None:
    found = Reports(4.0)
    told(found, {0: NO_WAITS, 1: NO_WAITS, 2: NO_WAITS})
    go_on(found, clock, {0: NO_WAITS}, 1.0)
    assert found.doubtful({1, 2}) == []
    go_on(found, clock, {0: NO_WAITS}, 2.0)
    assert found.doubtful({1, 2}) == [1, 2]
    while clock.now < 1000.0 + STILL_SECONDS:
        found.lives(1)
        go_on(found, clock, {0: NO_WAITS}, 2.0)
        assert 1 not in found.silent({1, 2})
    assert found.silent({1, 2}) == {2: "no heartbeat for 4 s"}

    for _ in range(4):
        found.lives(1)
        go_on(found, clock, {0: NO_WAITS}, 2.0)
    assert "its Python stands still" in found.silent({1})[1]

    told(found, {1: NO_WAITS})
    assert found.silent({1}) == {}


def test_who_lived_a_while_ago_is_lost(clock: Clock) -> None:
    found = Reports(4.0)
    told(found, {0: NO_WAITS, 1: NO_WAITS})
    go_on(found, clock, {0: NO_WAITS}, 3.0)
    found.lives(1)
    go_on(found, clock, {0: NO_WAITS}, 4.0)
    assert found.silent({1}) == {}
    go_on(found, clock, {0: NO_WAITS}, 0.5)
    assert found.silent({1}).keys() == {1}


def test_time_before_all_have_joined_is_no_delay(clock: Clock) -> None:
    found = Reports(4.0)
    clock.now += 60.0
    told(found, {0: NO_WAITS, 1: NO_WAITS})
    go_on(found, clock, {0: NO_WAITS}, 5.0)

    assert found.silent({1}).keys() == {1}


@pytest.mark.parametrize(
    "said",
    [
        {1: Waits(7, 3.0), 2: Waits(6, 3.0)},
        {1: Waits(7, 3.0, W), 2: Waits(6, 3.0, W)},
        {1: Waits(7, 3.0, W), 2: Waits(7, 3.0)},
    ],
    ids=["the earlier step", "the earlier step that is under way", "between steps"],
)
def test_of_several_that_are_behind_the_one_that_the_others_may_wait_for_is_named(
    clock: Clock, said: dict[int, Waits]
) -> None:
    found = Reports(60.0)
    everyone = {0: Waits(8, 3.0, W), **said}
    told(found, everyone)
    go_on(found, clock, everyone, 4.0)

    behind = found.behind(everyone)
    assert behind is not None
    assert behind[0] == 2


def test_who_is_silent_itself_keeps_nobody_to_a_limit(clock: Clock) -> None:
    found = Reports(60.0)
    told(found, {0: Waits(8, 3.0), 1: Waits(8, 3.0, W), 2: Waits(8, 3.0, W)})
    go_on(found, clock, {0: Waits(8, 3.0)}, 20.0)

    assert found.silent({1, 2}) == {}


def test_of_those_that_wait_the_one_that_was_stopped_is_first() -> None:
    found = Reports(60.0)
    told(found, {0: Waits(8, 3.0, W), 1: Waits(7, 3.0), 2: Waits(8, 3.0, "", W), 3: Waits(8, 3.0, W)})

    assert list(found.waiting({0, 1, 2, 3})) == [2, 0, 3]
