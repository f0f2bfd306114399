"""What a timeline tells of communication: what was hidden, and what was waited for."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist_py.diagnostics.overlap import Overlap

Event = tuple[str, int, int]
"""A collective by name, or an op by type; when it begins, and for how long it takes, in milliseconds."""


def trace(
    collectives: list[Event], ops: list[Event], *, worker: int = 0, kind: str = "CollectiveReduceV2"
) -> list[Any]:
    found = []
    for category, events in (("collective", collectives), ("op", ops)):
        for name, begin, length in events:
            arguments = {"op": name, "type": kind, "bytes": 1000} if category == "collective" else {"type": name}
            times = {"ts": 1e3 * begin, "dur": 1e3 * length, "pid": worker}
            found.append({"ph": "X", "name": name, "cat": category, "args": arguments, **times})
    return found


def told(
    folder: Path,
    events: list[Any],
    *,
    steps: int = 1,
    workers: int = 1,
    rate: float | None = None,
    has_horovod: bool = False,
) -> Overlap:
    begin = {"ph": "M", "name": "process_name", "pid": 0}
    about = {"steps": steps, "workers": workers, "bits_per_second": rate, "has_horovod": has_horovod}
    (folder / "trace.json").write_text(json.dumps({"traceEvents": [begin, *events], "otherData": about}))
    return Overlap.of(folder / "trace.json")


EVENTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(1, 12)), max_size=8)
OPS = st.lists(st.tuples(st.sampled_from(["MatMul", "_Send"]), st.integers(0, 40), st.integers(1, 9)), max_size=8)


@given(EVENTS, OPS)
def test_hidden_and_waited_are_what_a_count_of_milliseconds_says(
    tmp_path_factory: pytest.TempPathFactory, collectives: list[Event], ops: list[Event]
) -> None:
    overlap = told(tmp_path_factory.mktemp("trace"), trace(collectives, ops))
    busy = {at for kind, begin, length in ops if kind == "MatMul" for at in range(begin, begin + length)}
    under_way = {at for _, begin, length in collectives for at in range(begin, begin + length)}
    waits: dict[str, int] = {}
    for at in under_way - busy:
        first = min(
            (one for one in collectives if one[1] <= at < one[1] + one[2]), key=lambda one: (one[1], one[1] + one[2])
        )
        waits[first[0]] = waits.get(first[0], 0) + 1
    (worker,) = overlap.workers
    assert worker.communication == pytest.approx(len(under_way))
    assert worker.hidden == pytest.approx(len(under_way & busy))
    names = {(begin, length): name for name, begin, length in collectives}
    if len(names) == len(collectives):  # Else it is not said which of two equal ones is waited for.
        assert {one.what: one.waited for one in overlap.collectives if one.waited} == pytest.approx(waits)


def test_of_two_collectives_under_way_the_first_is_waited_for_until_it_ends(tmp_path: Path) -> None:
    overlap = told(tmp_path, trace([("late", 2, 8), ("first", 0, 6)], [("MatMul", 1, 2), ("MatMul", 7, 1)]))
    assert {one.what: one.waited for one in overlap.collectives} == {"first": 4.0, "late": 3.0}


def test_shares_are_of_a_step_and_collectives_medians_of_all_workers(tmp_path: Path) -> None:
    events = trace([("sum", 0, 4), ("sum", 10, 4)], []) + trace([("sum", 0, 8), ("sum", 10, 8)], [], worker=1)
    overlap = told(tmp_path, events, steps=2, workers=2, rate=1e6)
    assert [(one.communication, one.hidden) for one in overlap.workers] == [(4.0, 0.0), (8.0, 0.0)]
    (collected,) = overlap.collectives
    assert (collected.taken, collected.waited, collected.nbytes) == (6.0, 6.0, 1000)
    assert collected.wire == 8.0  # 2 (n - 1) / n of 8,000 bits.


@pytest.mark.parametrize(("kind", "wire"), [("CollectiveReduceV2", 12.0), ("CollectiveGatherV2", 24.0)])
def test_a_ring_sends_a_sum_twice_and_rows_once_to_each_other_worker(tmp_path: Path, kind: str, wire: float) -> None:
    overlap = told(tmp_path, trace([("one", 0, 1)], [], kind=kind), workers=4, rate=1e6)
    assert overlap.collectives[0].wire == wire


def test_the_text_has_what_was_waited_for_longest_first_and_says_what_is_left_out(tmp_path: Path) -> None:
    events = trace(
        [(f"sum of {'x' * 80}{number}", 10 * number, 1 + number % 9) for number in range(14)], [("_Send", 0, 1)]
    )
    lines = str(told(tmp_path, events, workers=2)).splitlines()
    assert lines[2].split() == ["worker", "communication", "hidden", "waited"]
    assert lines[3].split() == ["0", "60.00", "0", "%", "60.00"]
    assert lines[7].startswith(f"sum of {'x' * 53}...") and lines[7].split()[-1] == "4.50"
    assert "and 2 collectives that workers waited for less" in lines
    assert lines[-1] == "It is without messages to and from servers, which the profiler does not see."


def test_horovods_all_reduces_are_said_to_be_missing(tmp_path: Path) -> None:
    said = str(told(tmp_path, trace([("one", 0, 1)], [("_Send", 0, 1)]), has_horovod=True)).splitlines()[-1]
    wanted = "It is without messages to and from servers and Horovod's all-reduces, which the profiler does not see."
    assert said == wanted


def test_a_timeline_without_collectives_says_so(tmp_path: Path) -> None:
    assert str(told(tmp_path, trace([], [("MatMul", 0, 1)]))) == "Timeline: it has no collective"
