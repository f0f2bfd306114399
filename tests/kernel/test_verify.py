"""Each invariant of a program's graph, broken once."""

from dataclasses import replace

import pytest

from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.program import Launch
from autodist_py.kernel.verify import verify
from autodist_py.proto.errors import InvalidGraphError
from tests.kernel import programs
from tests.kernel.programs import parsed


def check(*lines, **changes):
    # The analysis is of the captured graph; only the graph as rewritten is what is verified here.
    program = programs.program_of(parsed("a = Const()"), programs.place(1))
    verify(replace(program, graph=GraphView(parsed(*lines)), **changes))


def calling(name):
    graph = parsed("a = Const()")
    graph.node[0].attr["f"].func.name = name
    return graph


def test_a_valid_graph_passes():
    check("a = Const()", "b = Neg(a, ^a)", fetches=("b:0",), run_ops=("a",))


def test_two_ops_of_one_name():
    with pytest.raises(InvalidGraphError, match="two ops have the name 'a'"):
        check("a = Const()", "a = Const()")


@pytest.mark.parametrize("name", ["b", "b:1", "^b"])
def test_an_input_that_no_op_makes(name):
    with pytest.raises(InvalidGraphError, match=r"is no op of the graph: a = Neg"):
        check(f"a = Neg({name})")


def test_a_data_input_after_a_control_input():
    with pytest.raises(InvalidGraphError, match="data input 'a' comes after a control input"):
        check("a = Const()", "b = Neg(^a, a)")


def test_a_call_of_a_function_that_the_library_lacks():
    program = programs.program_of(parsed("a = Const()"), programs.place(1))
    with pytest.raises(InvalidGraphError, match="names 'missing', which is not in the library"):
        verify(replace(program, graph=GraphView(calling("missing"))))


def test_a_call_of_a_function_that_the_library_has_passes():
    program = programs.program_of(parsed("a = Const()"), programs.place(1))
    graph = calling("there")
    graph.library.function.add().signature.name = "there"
    verify(replace(program, graph=GraphView(graph)))


@pytest.mark.parametrize("back", ["b", "^b"])
def test_a_cycle_of_data_or_control_edges_is_printed(back):
    with pytest.raises(InvalidGraphError, match="cycle of 2 ops") as raised:
        check("x = Const()", f"a = Neg({back})", "b = Neg(a)")
    assert "b = Neg(a)" in str(raised.value)
    assert "x = Const()" not in str(raised.value)


def test_a_loop_of_tensorflow_1_is_no_cycle():
    check("m = Merge(n)", "n = NextIteration(m)")


def test_a_fetch_or_an_op_to_run_that_is_not_there():
    with pytest.raises(InvalidGraphError, match="'gone:0' is to be fetched or run"):
        check("a = Const()", fetches=("gone:0",))
    with pytest.raises(InvalidGraphError, match="'gone' is to be fetched or run"):
        check("a = Const()", run_ops=("gone",))


def test_an_op_of_one_replica_that_reads_another_replica_is_shown_with_its_neighbours():
    with pytest.raises(InvalidGraphError, match="an op of replica 1 reads replica 0") as raised:
        check("AutoDist-Replica-0/a = Const()", "AutoDist-Replica-1/b = Neg(AutoDist-Replica-0/a)", "c = NoOp()")
    assert "  > AutoDist-Replica-1/b = Neg(AutoDist-Replica-0/a)" in str(raised.value)


def test_the_kernels_own_ops_may_read_several_replicas():
    check(
        "AutoDist-Replica-0/a = Const()",
        "AutoDist-Replica-1/a = Const()",
        "AutoDist/sum = AddN(AutoDist-Replica-0/a, AutoDist-Replica-1/a)",
    )


LAUNCHES = (Launch(("p", "q"), (0, 0, 0), "first"), Launch(("r", "s"), (0, 0, 1), "second"))
TWO_LAUNCHES = ("p = X()", "q = X()", "r = X(^p, ^q)")


def test_a_collective_that_does_not_wait_for_all_ops_of_the_one_before():
    with pytest.raises(InvalidGraphError, match=r"collective 's' does not wait for \^q"):
        check(*TWO_LAUNCHES, "s = X(^p)", launches=LAUNCHES, ordered=True)


def test_ordered_collectives_pass_and_unordered_ones_do_before_they_are_ordered():
    check(*TWO_LAUNCHES, "s = X(^p, ^q)", launches=LAUNCHES, ordered=True)
    check(*TWO_LAUNCHES, "s = X()", launches=LAUNCHES, ordered=False)
