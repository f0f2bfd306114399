"""Each invariant of a program's graph, broken once."""

from dataclasses import replace

import pytest

from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.names import on_replica, op_of
from autodist_py.kernel.program import Launch, Promise
from autodist_py.kernel.rewrite import Edits
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


ORDERED = frozenset({Promise.ORDERED})
LAUNCHES = (
    Launch(("p", "q"), (0, 0, 0), "first"),
    Launch(("m",), (0, 0, 1), "under way with either"),
    Launch(("r", "s"), (0, 0, 2), "last"),
)
SOME_LAUNCHES = ("p = X()", "q = X()", "m = X()", "r = X(^p, ^q)")


def test_a_collective_that_does_not_wait_for_all_ops_of_those_before_but_one():
    with pytest.raises(InvalidGraphError, match=r"collective 's' does not wait for \^q"):
        check(*SOME_LAUNCHES, "s = X(^p)", launches=LAUNCHES, holds=ORDERED)


def test_ordered_collectives_pass_and_unordered_ones_do_before_they_are_ordered():
    check(*SOME_LAUNCHES, "s = X(^p, ^q)", launches=LAUNCHES, holds=ORDERED)
    check(*SOME_LAUNCHES, "s = X()", launches=LAUNCHES)


def broken(name, edit, *, where=None, item=None):
    """The golden program after the pass `name`, with `edit` made in it, verified."""
    program = programs.after(name, item or programs.linear_regression(), where or programs.place(2))
    edits = Edits()
    edit(edits, program)
    verify(replace(program, graph=edits.apply(program.graph)))


def test_a_gradient_that_is_not_combined_is_named():
    def read_raw(edits, program):
        seam = program.item.gradients[0].tensors[0]
        raw = program.analysis.captured.nodes[op_of(seam)].input[0]
        edits.set_input(on_replica(1, op_of(seam)), 0, on_replica(1, raw))

    with pytest.raises(InvalidGraphError, match=r"the gradient of 'w' is not combined(?s:.*)  > AutoDist-Replica-1/"):
        broken("serve", read_raw)


def test_a_write_that_nothing_runs_is_named():
    program = programs.after("serve", programs.linear_regression(), programs.place(2))
    with pytest.raises(InvalidGraphError, match="'AutoDist-Replica-0/update' writes variable 'w', and nothing that is"):
        verify(replace(program, run_ops=()))


def test_a_write_that_is_left_out_is_named():
    program = programs.after("serve", programs.linear_regression(), programs.place(2))
    update = on_replica(0, "update")
    graph = program.graph.changed(added=(), replaced=parsed(f"{update} = NoOp()").node)
    with pytest.raises(
        InvalidGraphError, match=r"'update' writes variable 'w'.*on each worker; worker 0 does it 0 times"
    ):
        verify(replace(program, graph=graph))


def test_a_new_writer_of_a_variable_is_named():
    def write_again(edits, program):
        handle = on_replica(0, "w")
        edits.add(parsed(f"AutoDist-Replica-0/again = AssignVariableOp({handle}, {handle})").node)

    with pytest.raises(InvalidGraphError, match="'AutoDist-Replica-0/w' has two writers, one of them new"):
        broken("replicate", write_again)


def test_an_assignment_of_the_kernel_that_a_user_does_not_wait_for():
    def write(edits, program):
        handle = on_replica(1, "w")
        edits.add(
            parsed("AutoDist/value = Const()", f"AutoDist/assign = AssignVariableOp({handle}, AutoDist/value)").node
        )

    with pytest.raises(InvalidGraphError, match="does not wait for 'AutoDist/assign', which assigns it"):
        broken("replicate", write)


def test_an_update_on_another_device_than_its_variable():
    def move(edits, program):
        ((writer, *_), *_) = (names for names in program.analysis.writes.values() if names)
        edits.set_device(on_replica(1, writer), program.place.local_replicas[0].device)

    with pytest.raises(InvalidGraphError, match="writes a variable of another device"):
        broken("place", move)


def test_an_op_without_a_device_once_all_are_placed():
    with pytest.raises(InvalidGraphError, match="an op has no device: AutoDist/new = NoOp"):
        broken("place", lambda edits, program: edits.add(parsed("AutoDist/new = NoOp()").node))
