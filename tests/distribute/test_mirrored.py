"""Programs of `tf.distribute` do under our strategies what they do under TensorFlow's, bit for bit.

Of three replicas TensorFlow adds up values in no fixed order: then the last bits of floats may differ.
"""

from collections.abc import Iterator

import pytest

from tests.support import distribute_branches, distribute_training, distribute_variables
from tests.support.distribute_branches import RUN_EAGERLY
from tests.support.distribute_cases import CASES
from tests.support.distribute_outcomes import Outcomes, cases_asked, require_equal

pytestmark = [pytest.mark.first, pytest.mark.turns(2)]
assert distribute_branches and distribute_training and distribute_variables  # They add their cases.
KINDS = ("tensorflow", "ours")


@pytest.fixture(scope="module", params=[2, 3], ids=["2-replicas", "3-replicas"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    yield Outcomes(tmp_path_factory.mktemp("mirrored"), KINDS, request.param, *cases_asked(request))


@pytest.mark.parametrize("case", CASES)
def test_a_program_gives_what_it_gives_under_tensorflows_strategy(outcomes: Outcomes, case: str) -> None:
    theirs, ours = (outcomes.arrays(kind, case) for kind in KINDS)
    require_equal(theirs, ours, exactly=outcomes.replicas == 2 and case not in RUN_EAGERLY)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("replica_functions_are_traced_once", [1, 2]),
        ("random_numbers_of_a_seed", [False, True, True]),
        ("random_numbers_of_a_seed_for_each_replica", [False, False, False]),
        ("a_seed_of_each_replica_in_a_merge_call", [True]),
        ("several_strategies_by_rings", [True, True]),
        ("python_numbers_of_each_replica", [True]),
        ("what_a_merge_call_returns_is_one_value", [True, False]),
        ("a_random_number_that_a_merge_call_reads", [True]),
        ("gradients_are_seen_as_such", [6, 6, 1, 1, 1]),
        ("what_a_merge_call_updates_a_variable_by_is_its_gradient", [1]),
        ("a_value_is_the_gradient_of_what_it_is_computed_from", [True, True, True]),
        ("what_each_variable_asks_for_is_computed_once", [2]),
        ("gradients_of_branches_are_seen_as_such", [4, 4, 0]),
        ("a_gradient_in_a_branch", [True]),
        ("a_merge_call_in_a_branch_that_combines_nothing", [True, True]),
        ("branches_are_taken_by_all_or_none", [True, True]),
        ("loss_scaling_with_an_infinite_gradient_elsewhere", [True]),
    ],
)
def test_what_only_ours_has(outcomes: Outcomes, case: str, expected: list[int]) -> None:
    assert [array.item() for array in outcomes.arrays("ours", case)] == expected
