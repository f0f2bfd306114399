"""The example in the docstring of each pass: what it says is gone is gone, and what it says is there is there."""

import pytest

from autodist_py.kernel.pipeline import PASSES
from tests.support.pass_examples import EXAMPLES, around, block_of

MOST_LINES = 10


def test_each_pass_has_an_example():
    assert [step.name for step in PASSES] == list(EXAMPLES)


@pytest.mark.parametrize("step", PASSES, ids=lambda step: step.name)
def test_the_example_of_a_pass_is_what_it_does(step):
    block, (before, after) = block_of(step), around(step.name)
    changes = [f"- {line}" for line in before if line not in after] + [
        f"+ {line}" for line in after if line not in before
    ]
    assert changes
    assert 0 < len(block) <= MOST_LINES
    if block[-1] == "...":
        said = iter(changes)
        assert all(line in said for line in block[:-1]), changes  # In this order.
        assert len(block) - 1 < len(changes)
    else:
        assert block == changes
