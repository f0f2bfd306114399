"""Programs of the tower API give what the same programs of `tf.distribute` give under TensorFlow's own strategy."""

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support import tower_session_references, tower_sessions
from tests.support.distribute_outcomes import Outcomes, require_equal
from tests.support.processes import ROOT
from tests.support.tower_programs import PROGRAMS
from tests.support.tower_references import PROGRAMS as REFERENCES

assert tower_sessions and tower_session_references  # They add their programs.

TAKEN = """
call_for_each_tower                     | T       | T       | T       | T
broadcast                               | refused | refused | refused | M
broadcast to v                          | refused | refused | refused | V(v:0)
broadcast to one device                 | refused | refused | refused | N
reduce by sum                           | M       | refused | refused | refused
reduce by sum to v                      | V(v:0)  | refused | refused | refused
reduce by sum to one device             | N       | refused | refused | refused
reduce by mean to all devices           | M       | M       | M       | M
batch_reduce by mean to v, to a device  | V(v:0) N | V(v:0) N | V(v:0) N | V(v:0) N
update                                  | refused | V(v:0)  | V(v:0)  | V(v:0)
update_non_slot                         | refused | M       | M       | M
fetch                                   | refused | N       | N       | N
"""
"""What each method gives for a T, an M, a V(v) and an N."""
REFUSED = [
    r"RuntimeError: reduce is used outside of its strategy's scope; use it in `with d.scope\(\):`",
    r"RuntimeError: reduce is used in a tower context.*given to get_tower_context\(\).merge_call",
    r"ValueError: towers' values are reduced by 'sum' or 'mean'; received 'max'",
    r"ValueError: reduce\(\): destinations takes a variable.*received \['/cpu:0', '/cpu:7'\]. Leave it out",
    r"ValueError: update\(\): args takes values of locality M, V\(variable\) or N; received one of.* T:.*Reduce it",
    r"ValueError: update\(\): args takes values of locality M, V\(variable\) or N; received one of.* T:.*Reduce it",
    r"ValueError: update\(\): var takes values of locality V\(variable\); received one of.* T:.*in the strategy's",
    r"ValueError: update\(\): var takes a variable of the strategy; received.*'Variable:0'.*Give a variable",
    r"ValueError: update\(\): var takes a variable of the strategy; received.*'v:0'.*Give a variable",
    r"ValueError: batch_reduce\(\): value takes values of locality T; received one of locality N: 3.0.*by 'mean'",
    r"RuntimeError: device is asked for in a tf.function.*Leave it out",
    r"RuntimeError: a TowerContext is used where it is not the current one.*get_tower_context\(\)",
    r"ValueError: call_for_each_tower\(\): args takes values of 2 towers; received one of locality T of 3",
    r"ValueError: distribute_dataset\(\) takes a tf.data.Dataset.*received \[1, 2\]. Make one",
    r"ValueError: MirroredStrategy takes devices or a number.*devices=\['/cpu:0'\], num_gpus=1 of 0. Give one",
    r"ValueError: MirroredStrategy takes devices or a number.*num_gpus=64 of 0. Give one",
    r"ValueError: reduce\(\): value takes values of locality T; received one of locality N: 3.0",
    r"ValueError: fetch\(\): val takes values of locality M, V\(variable\) or N; received one of locality T",
    r"ValueError: update_non_slot\(\): destinations takes the non-slot devices; received '/cpu:1'. Give what non_slot",
    r"ValueError: `colocate_vars_with` must only be passed a variable created in this",
]
pytestmark = [pytest.mark.first]
KINDS = ("tower-references", "towers")
IN_A_SESSION = "a_published_training_loop"
"""Its mean loss, 8.2, once differed by the last bit of a float, on a busy machine."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    yield Outcomes(tmp_path_factory.mktemp("towers"), KINDS, 2)


def test_each_program_is_compared() -> None:
    assert list(PROGRAMS) == list(REFERENCES)


@pytest.mark.parametrize("case", PROGRAMS)
def test_a_program_gives_what_it_gives_by_tf_distribute(outcomes: Outcomes, case: str) -> None:
    theirs, ours = (outcomes.arrays(kind, case) for kind in KINDS)
    require_equal(theirs, ours, exactly=case != IN_A_SESSION)


def test_each_method_takes_and_gives_the_documented_localities(outcomes: Outcomes) -> None:
    """Eagerly, in a tf.function, and in a merge_call of one."""
    expected = [", ".join(cell.strip() for cell in line.split("|")[1:]) for line in TAKEN.splitlines() if "|" in line]
    lines = [str(line) for line in outcomes.arrays("towers", "localities")]
    assert [lines[:12], lines[12:24], lines[24:36]] == [expected] * 3
    assert lines[36:] == ["V(v:0)", "T", "V(v:0)", "N", "T", "T T"]


def test_what_cannot_be_done_is_refused_by_name(outcomes: Outcomes) -> None:
    errors = [str(error) for error in outcomes.arrays("towers", "refusals")]
    for error, expected in zip(errors, REFUSED, strict=True):
        assert re.search(expected, error, re.DOTALL), error


def test_the_current_context_is_the_documented_one(outcomes: Outcomes) -> None:
    *kinds, number = (str(one) for one in outcomes.arrays("towers", "contexts"))
    outside, crossing, in_tower = (False,) * 5, (False, True, True, True, True), (True, False, True, True, False)
    assert kinds == [str(kind) for kind in (outside, crossing, in_tower)]
    assert number == "9"


def test_a_reduction_in_a_merge_call_is_all_that_towers_combine(outcomes: Outcomes) -> None:
    assert [array.item() for array in outcomes.arrays("towers", "what_is_combined")] == [1, 0, 0]


def test_the_example_of_the_documentation_prints_what_it_says() -> None:
    text = (ROOT / "docs/distribute.md").read_text()
    section = text[text.index("## The tower API") :]
    ((script, printed),) = re.findall(r"```python\n(.*?)```\n+```\n(.*?)```", section, re.DOTALL)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert run.stdout == printed, run.stderr
