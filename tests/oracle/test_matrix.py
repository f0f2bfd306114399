"""What each run tries of the oracle's matrix."""

import itertools

import pytest

from tests.support.oracle_matrix import matrix


@pytest.mark.parametrize("families", [("one", "two"), ("one", "two", "three")], ids=len)
def test_any_two_values_of_any_two_axes_meet_in_each_run(families: tuple[str, ...]):
    every = [parameters.values for parameters in matrix(families)]
    chosen = [parameters.values for parameters in matrix(families) if not parameters.marks]
    for one, other in itertools.combinations(range(len(every[0])), 2):
        missing = {(p[one], p[other]) for p in every} - {(p[one], p[other]) for p in chosen}
        assert not missing, f"axes {one} and {other}: {missing}"
