"""Which events wait for which, of events that a test writes down."""

from dataclasses import replace
from typing import Any

import pytest

from autodist_py.kernel.analysis.event_graph import awaited, waits
from autodist_py.kernel.events import (
    SERVER,
    CheckData,
    CountExamples,
    Event,
    Exchange,
    ReduceStatistics,
    ServerPlan,
    ServerPlans,
)
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.program import Program
from tests.support import kernel_programs
from tests.support.kernel_programs import parsed

LINES = ("a = Const()", "b = Neg(a)", "c = Neg(b)", "d = Neg(c)")
"""A chain: events stand between its ops."""


def chain(*lines: str) -> Program:
    return kernel_programs.program_of(parsed(*(lines or LINES)), kernel_programs.topology(1, 1))


def event(needs: str, gives: str) -> Event:
    """What is made of some ops' results, and read by others."""
    return ReduceStatistics(
        needs=tuple(needs), gives=tuple(gives), level=0, engine="RING", members=2, statistics=(), phase=0
    )


def exchange(server: int = 0, **facts: Any) -> Exchange:
    return replace(Exchange(needs=(), gives=(), level=0, engine=SERVER, phase=0, server=server), **facts)


def test_an_event_waits_for_those_on_the_way_to_what_it_needs():
    events = [event("c", "d"), event("a", "b"), event("d", "")]
    found = waits(chain(), events, None)
    assert found.behind == (0b010, 0b000, 0b011)
    assert (found.cycle, found.ops) == ((), frozenset())


def test_events_that_wait_for_one_another_are_found_with_the_ops_between():
    events = [event("a", ""), event("c", "b"), event("d", "c")]
    found = waits(chain(), events, None)
    assert found.cycle == (1, 2)
    assert found.ops == {"b", "c", "d"}


def test_of_several_cycles_the_one_of_the_first_event_is_found():
    lines = ("p = Const()", "q = Neg(p)", "r = Const()", "s = Neg(r)")
    events = [event("s", "r"), event("q", "p")]
    assert waits(chain(*lines), events, None).cycle == (0,)
    assert waits(chain(*lines), events[::-1], None).ops == {"p", "q"}


def test_an_exchange_follows_the_one_before_it_of_the_same_server():
    events = [exchange(0, needs=("a",)), exchange(1, needs=("a",)), exchange(0)]
    assert waits(chain(), events, ServerPlans((), frozenset(), frozenset(), frozenset())).behind == (0, 0, 0b001)


def count(needs: str) -> CountExamples:
    return CountExamples(needs=tuple(needs), gives=(), level=0, engine="RING", members=2)


def test_all_but_what_is_told_of_the_data_waits_for_the_number_of_examples():
    data = CheckData(needs=("a",), gives=("b",), level=0, engine="RING", members=2)
    found = waits(chain(), [data, count("c"), event("a", ""), exchange()], None)
    assert found.behind == (0, 0b0001, 0b0011, 0b0011)


def test_a_number_of_examples_that_is_made_of_what_they_weigh_is_a_cycle():
    found = waits(chain(), [count("d"), event("a", "b"), event("d", "")], None)
    assert found.cycle == (0, 1)
    assert found.ops == {"b", "c", "d"}


# -- What a message waits for -----------------------------------------------------------------------------------------

UPDATE = ("read = Const()", "before = Const()", "update = Neg(read, ^before)", "after = Neg(update)")


@pytest.mark.parametrize(
    ("worker_ops", "found"),
    [({"before", "after"}, {"read", "before"}), ({"after"}, {"read"})],
    ids=["own", "a server's"],
)
def test_a_message_waits_for_reads_and_for_what_the_workers_own_ops_do_before_the_update(worker_ops, found):
    plans = ServerPlans((), frozenset({"update"}), frozenset(worker_ops), frozenset())
    one = exchange(ops=frozenset({"update"}), read_before=frozenset({"read"}))
    assert awaited(GraphView(parsed(*UPDATE)), one, plans, None) == found


def test_a_message_does_not_wait_for_what_waits_for_the_update():
    lines = (*UPDATE, "later = NoOp(^after)")
    plans = ServerPlans((), frozenset({"update", "later"}), frozenset({"before", "after"}), frozenset())
    one = exchange(ops=frozenset({"update", "later"}))
    assert awaited(GraphView(parsed(*lines)), one, plans, None) == {"before"}


def test_what_a_server_counts_waits_on_the_servers_own_worker_too():
    plan = ServerPlan(0, (), (), frozenset({"update"}))
    plans = ServerPlans((plan,), frozenset(), frozenset({"read", "before", "after"}), frozenset())
    counted = exchange(ops=frozenset({"update"}), gives=("before",))
    assert awaited(GraphView(parsed(*UPDATE)), counted, plans, None) == set()
    assert awaited(GraphView(parsed(*UPDATE)), counted, plans, plan.worker) == {"before"}
    assert waits(chain(*UPDATE), [counted], plans).cycle == (0,)
    assert waits(chain(*UPDATE), [replace(counted, gives=())], plans).cycle == ()


COUNT = ("before = Const()", "count = Const(^before)", "a = Const(^count)", "b = Const(^count)")


def test_a_message_waits_for_what_the_workers_own_count_waits_for_and_not_for_the_count():
    plan = ServerPlan(0, (), (), frozenset({"count"}))
    plans = ServerPlans((plan,), frozenset({"a"}), frozenset({"before", "count"}), frozenset())
    graph = GraphView(parsed(*COUNT))
    for ops in ({"count", "a"}, {"a"}):  # It may have been counted in an earlier exchange.
        assert awaited(graph, exchange(ops=frozenset(ops)), plans, None) == {"before"}


def test_two_servers_that_both_count_do_not_wait_for_one_another():
    counts = frozenset({"count"})
    plans = ServerPlans(
        (ServerPlan(0, (), (), counts), ServerPlan(1, (), (), counts)),
        frozenset({"a", "b"}),
        frozenset({"before", "count"}),
        frozenset(),
    )
    events = [exchange(0, ops=frozenset({"count", "a"})), exchange(1, ops=frozenset({"count", "b"}))]
    assert waits(chain(*COUNT), events, plans).cycle == ()
