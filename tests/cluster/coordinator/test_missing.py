"""Who is missing by the reports of all workers."""

from collections.abc import Collection

import pytest

from autodist_py.cluster.coordinator.liveness import Liveness
from autodist_py.cluster.server_probe import STILL_SECONDS
from autodist_py.cluster.step_status import NO_STATUS, PROMPT_SECONDS, StepStatus

W = "dense gradients of w"


class Heard:
    """What is heard of workers, at a time that goes on only where a test lets it."""

    def __init__(self, heartbeat_timeout: float):
        self.liveness = Liveness(heartbeat_timeout)
        self.now = 1000.0

    def told(self, said: dict[int, StepStatus]) -> None:
        for rank, waits in said.items():
            self.liveness.take(rank, waits, self.now)

    def go_on(self, said: dict[int, StepStatus], seconds: float) -> None:
        """These report, and the chief looks, as often as they do with a limit."""
        for _ in range(round(seconds / PROMPT_SECONDS)):
            self.now += PROMPT_SECONDS
            self.told(said)
            self.catch_up()

    def catch_up(self) -> None:
        self.liveness.catch_up(self.now)

    def lives(self, rank: int) -> None:
        self.liveness.lives(rank, self.now)

    def behind(self, ranks: Collection[int]) -> tuple[int, str] | None:
        return self.liveness.behind(ranks, self.now)

    def doubtful(self, ranks: Collection[int]) -> list[int]:
        return self.liveness.doubtful(ranks, self.now)

    def silent(self, ranks: Collection[int]) -> dict[int, str]:
        return self.liveness.silent(ranks, self.now)


def test_time_for_which_the_chief_stood_still_is_no_waiting() -> None:
    found, ranks = Heard(60.0), {0, 1}
    said = {0: StepStatus(8, 3.0, W), 1: StepStatus(7, 3.0)}
    found.told(said)
    found.go_on(said, 1.0)
    found.now += 30.0
    found.catch_up()
    found.told(said)
    assert found.behind(ranks) is None

    found.go_on(said, 1.0)
    assert found.behind(ranks) is None

    found.go_on(said, 2.0)
    behind = found.behind(ranks)
    assert behind is not None
    assert behind[0] == 1


@pytest.mark.parametrize(("limit", "heartbeat"), [(2.0, 60.0), (0.0, 4.0)])
def test_who_falls_silent_as_soon_as_the_chief_goes_on_is_lost_as_soon_as_ever(limit: float, heartbeat: float) -> None:
    found = Heard(heartbeat)
    found.told({0: NO_STATUS, 1: NO_STATUS})
    found.catch_up()
    found.now += 30.0
    found.told(
        {0: StepStatus(1, limit, W), 1: StepStatus(1, limit, W)}
    )  # These reports come first; then the chief looks.
    found.catch_up()

    found.go_on({0: StepStatus(1, limit, W)}, (limit or heartbeat) - PROMPT_SECONDS)
    assert found.silent({1}) == {}
    found.go_on({0: StepStatus(1, limit, W)}, 1.0)
    assert found.silent({1}).keys() == {1}


def test_who_lives_but_reports_nothing_is_waited_for_to_a_limit() -> None:
    found = Heard(4.0)
    found.told({0: NO_STATUS, 1: NO_STATUS, 2: NO_STATUS})
    found.go_on({0: NO_STATUS}, 1.0)
    assert found.doubtful({1, 2}) == []
    found.go_on({0: NO_STATUS}, 2.0)
    assert found.doubtful({1, 2}) == [1, 2]
    while found.now < 1000.0 + STILL_SECONDS:
        found.lives(1)
        found.go_on({0: NO_STATUS}, 2.0)
        assert 1 not in found.silent({1, 2})
    assert found.silent({1, 2}) == {2: "no heartbeat for 4 s"}

    for _ in range(4):
        found.lives(1)
        found.go_on({0: NO_STATUS}, 2.0)
    assert "its Python stands still" in found.silent({1})[1]

    found.told({1: NO_STATUS})
    assert found.silent({1}) == {}


def test_who_lived_a_while_ago_is_lost() -> None:
    found = Heard(4.0)
    found.told({0: NO_STATUS, 1: NO_STATUS})
    found.go_on({0: NO_STATUS}, 3.0)
    found.lives(1)
    found.go_on({0: NO_STATUS}, 4.0)
    assert found.silent({1}) == {}
    found.go_on({0: NO_STATUS}, 0.5)
    assert found.silent({1}).keys() == {1}


def test_time_before_all_have_joined_is_no_delay() -> None:
    found = Heard(4.0)
    found.now += 60.0
    found.told({0: NO_STATUS, 1: NO_STATUS})
    found.go_on({0: NO_STATUS}, 5.0)

    assert found.silent({1}).keys() == {1}


@pytest.mark.parametrize(
    "said",
    [
        {1: StepStatus(7, 3.0), 2: StepStatus(6, 3.0)},
        {1: StepStatus(7, 3.0, W), 2: StepStatus(6, 3.0, W)},
        {1: StepStatus(7, 3.0, W), 2: StepStatus(7, 3.0)},
    ],
    ids=["the earlier step", "the earlier step that is under way", "between steps"],
)
def test_of_several_that_are_behind_the_one_that_the_others_may_wait_for_is_named(said: dict[int, StepStatus]) -> None:
    found = Heard(60.0)
    everyone = {0: StepStatus(8, 3.0, W), **said}
    found.told(everyone)
    found.go_on(everyone, 4.0)

    behind = found.behind(everyone)
    assert behind is not None
    assert behind[0] == 2


def test_who_is_silent_itself_keeps_nobody_to_a_limit() -> None:
    found = Heard(60.0)
    found.told({0: StepStatus(8, 3.0), 1: StepStatus(8, 3.0, W), 2: StepStatus(8, 3.0, W)})
    found.go_on({0: StepStatus(8, 3.0)}, 20.0)

    assert found.silent({1, 2}) == {}


def test_of_those_that_wait_the_one_that_was_stopped_is_first() -> None:
    found = Heard(60.0)
    found.told(
        {0: StepStatus(8, 3.0, W), 1: StepStatus(7, 3.0), 2: StepStatus(8, 3.0, "", W), 3: StepStatus(8, 3.0, W)}
    )

    assert list(found.liveness.waiting({0, 1, 2, 3})) == [2, 0, 3]
