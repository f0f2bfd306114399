"""What a step's time goes to, by clocks of the test's."""

import math
import time

import pytest

from autodist_py.diagnostics.step_times import StepTime, StepTimes


@pytest.mark.parametrize(
    ("seconds", "computing", "num_workers", "pays_from"),
    [(3.0, 1.0, 2, 2.0), (2.0, 1.0, 2, 1.0), (3.0, 1.0, 3, 1.0), (5.0, 1.0, 3, 2.0), (1.0, 2.0, 2, 0.0)],
)
def test_one_device_is_as_fast_with_as_many_times_the_examples(
    seconds: float, computing: float, num_workers: int, pays_from: float
) -> None:
    step = StepTime(seconds, computing, num_workers)
    assert step.pays_from == pays_from
    if pays_from:
        many = pays_from * computing
        assert many + step.waiting == pytest.approx(num_workers * many)


def test_a_step_that_computes_nothing_pays_at_no_size() -> None:
    assert StepTime(1.0, 0.0, 2).pays_from == math.inf


class Clocks:
    """Steps of so many seconds, of which the process has a processor for some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = self.computed = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "process_time", lambda: self.computed)

    def steps(self, times: StepTimes, number: int, seconds: float, computing: float) -> None:
        for _ in range(number):
            times.before(1, [])
            self.now += seconds
            self.computed += computing
            times.after(1)


def test_it_is_said_once_and_the_first_steps_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    clocks = Clocks(monkeypatch)
    times = StepTimes(2, said.append)
    clocks.steps(times, 10, 9.0, 9.0)
    clocks.steps(times, 49, 0.0026, 0.0007)
    assert said == []
    clocks.steps(times, 200, 0.0026, 0.0007)
    assert len(said) == 1
    assert "a step takes 2.6 ms, of which at least 1.9 ms are waiting" in said[0]
    assert "with up to 2.7 times as many examples" in said[0]


def test_where_workers_pay_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    Clocks(monkeypatch).steps(StepTimes(2, said.append), 200, 0.0026, 0.0015)
    assert said == []
