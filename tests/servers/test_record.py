"""What becomes of a variable's record by each transition, from each state: a table, and no cluster."""

import pytest

from autodist_py.servers.record import State, VariableRecord
from autodist_py.servers.store import Location

CURRENT, STALE, RELEASED = State


@pytest.mark.parametrize(
    ("state", "transition", "wanted"),
    [
        (CURRENT, VariableRecord.left_behind, STALE),
        (STALE, VariableRecord.left_behind, STALE),
        (RELEASED, VariableRecord.left_behind, RELEASED),
        (CURRENT, VariableRecord.filled, CURRENT),
        (STALE, VariableRecord.filled, CURRENT),
        (RELEASED, VariableRecord.filled, CURRENT),
        (CURRENT, VariableRecord.released, CURRENT),
        (STALE, VariableRecord.released, RELEASED),
        (RELEASED, VariableRecord.released, RELEASED),
    ],
)
def test_each_transition_from_each_state(state, transition, wanted):
    record = VariableRecord(Location(1, 0), state)
    transition(record)
    assert record.state is wanted
    assert (record.is_current, record.is_released) == (wanted is CURRENT, wanted is RELEASED)


def test_memory_is_let_go_of_once():
    record = VariableRecord(Location(1, 0), STALE)
    assert [record.released(), record.released()] == [True, False]


def test_a_variable_that_may_be_read_unseen_keeps_its_memory():
    record = VariableRecord(Location(1, 0), STALE, is_pinned=True)
    assert not record.released()
    assert record.state is STALE


def test_what_is_current_is_not_let_go_of():
    assert not VariableRecord(Location(1, 0)).released()
