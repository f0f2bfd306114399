"""The corpus: programs as others write them train as on one device, or are refused for the reason that they state.

`make test` runs a part of it, another one for each commit (`CORPUS_TURN`); `make test-all` and `make corpus` run all.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.corpus.cells import Outcome, compare, expect
from tests.corpus.header import FAMILIES, FOLDER, STRATEGIES, Header, Refusal, load, program_names
from tests.corpus.report import CLUSTERS, TABLE, rows, run_cell
from tests.support.cluster_pool import Cluster

TURN = int(os.environ.get("CORPUS_TURN", "0"))
THIRDS = 3
CELLS = [(shape, strategy) for shape in CLUSTERS for strategy in STRATEGIES]


def in_turn(turn: int) -> set[tuple[str, str, str]]:
    """A third of the programs, each in one of its cells; the next third comes next, and each another cell after it."""
    chosen = set()
    for number, name in enumerate(program_names()):
        if (number + turn) % THIRDS == 0:
            shape, strategy = CELLS[(number + turn // THIRDS) % len(CELLS)]
            chosen.add((name, strategy, shape.name))
    return chosen


def parameters() -> Iterator[Any]:
    chosen = in_turn(TURN)
    for name in program_names():
        for shape, strategy in CELLS:
            marks = () if (name, strategy, shape.name) in chosen else pytest.mark.slow
            yield pytest.param(shape, name, strategy, id=f"{shape.name}-{name}-{strategy}", marks=marks)


@pytest.mark.parametrize(("cluster", "name", "strategy"), list(parameters()), indirect=["cluster"], scope="module")
def test_a_program_trains_as_on_one_device_or_is_refused_as_it_says(cluster: Cluster, name: str, strategy: str):
    outcome = run_cell(cluster, name, strategy)
    assert expect(outcome, load(name).header.refusal(strategy, cluster.shape.name)) == ""


def test_each_cell_has_its_turn():
    turns = range(THIRDS * len(CELLS))
    met = set().union(*map(in_turn, turns))
    assert met == {(name, strategy, shape.name) for name in program_names() for shape, strategy in CELLS}
    assert sum(len(in_turn(turn)) for turn in turns) == len(met)


def test_the_table_lists_the_programs_that_there_are_and_what_their_headers_say():
    found = rows(TABLE.read_text())
    assert list(found) == [
        name for family in FAMILIES for name in program_names() if load(name).header.family == family
    ]
    for name, (door, tolerance, *outcomes) in found.items():
        header = load(name).header
        assert (door, tolerance) == (header.door, f"{header.tolerance:g}"), name
        for strategy, told in zip(STRATEGIES, outcomes, strict=True):
            refused = {header.refusal(strategy, shape.name) is not None for shape in CLUSTERS}
            words = set(re.findall(r"equal|refused|different|broken", told))
            assert words <= {"refused" if one else "equal" for one in refused}, f"{name} under {strategy}: {told}"


def test_every_family_has_several_programs_and_every_door_is_used():
    headers = [load(name).header for name in program_names()]
    assert {family: sum(header.family == family for header in headers) >= 2 for family in FAMILIES} == dict.fromkeys(
        FAMILIES, True
    )
    assert {header.door for header in headers} == set(Header.__annotations__["door"].__args__)


def test_a_program_has_a_docstring_of_a_line_and_no_more_than_eighty_lines():
    for name in program_names():
        lines = (FOLDER / f"{name}.py").read_text().splitlines()
        assert lines[0].startswith('"""') and lines[0].endswith('."""'), name
        assert len(lines) <= 80, f"{name} has {len(lines)} lines"


HEADER = Header(FAMILIES[0], "step function", refused={"AllReduce": Refusal("cannot be", ("2-workers",))})


@pytest.mark.parametrize(
    ("strategy", "cluster", "outcome", "is_expected"),
    [
        ("AllReduce", "2-workers", Outcome("refused", "CaptureError: it cannot be"), True),
        ("AllReduce", "2-workers", Outcome("refused", "CaptureError: something else"), False),
        ("AllReduce", "2-workers", Outcome("equal"), False),
        ("AllReduce", "3-workers", Outcome("refused", "it cannot be"), False),
        ("AllReduce", "3-workers", Outcome("equal"), True),
        ("Parallax", "2-workers", Outcome("equal"), True),
        ("Parallax", "2-workers", Outcome("different", "by 1"), False),
        ("AllReduce", "2-workers", Outcome("broken", "it cannot be"), False),
    ],
)
def test_there_is_no_third_outcome(strategy: str, cluster: str, outcome: Outcome, is_expected: bool):
    assert (expect(outcome, HEADER.refusal(strategy, cluster)) == "") == is_expected


@pytest.mark.parametrize(
    ("actual", "is_equal"),
    [
        ([{"a": np.array([1.0, 2.0])}], True),
        ([{"a": np.array([1.0, 2.0 + 1e-6])}], False),
        ([{"a": np.array([1.0, 2.0]), "b": np.zeros(1)}], False),
        ([{"a": np.array([1.0, 2.0], "float32")}], False),
        ([], False),
    ],
)
def test_trails_are_compared_value_by_value(actual: list[dict[str, np.ndarray]], is_equal: bool):
    try:
        compare(actual, [{"a": np.array([1.0, 2.0])}], HEADER)
    except AssertionError:
        assert not is_equal
    else:
        assert is_equal
