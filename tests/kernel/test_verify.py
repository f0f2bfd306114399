"""Each invariant of a program's graph, broken once."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import find, given, settings
from hypothesis import strategies as st

from autodist_py.kernel.ir.edits import Edits
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import on_replica, op_of
from autodist_py.kernel.program import Program
from autodist_py.kernel.verify import verify
from autodist_py.proto.errors import InvalidGraphError
from tests.support import capture_steps, kernel_programs
from tests.support.kernel_programs import parsed


def rewritten():
    """A program of which nothing holds that passes bring about: its graph may be any."""
    program = kernel_programs.program_of(parsed("a = Const()"), kernel_programs.topology(1))
    return replace(program, holds=frozenset())


def check(*lines, **changes):
    # The analysis is of the captured graph; only the graph as rewritten is what is verified here.
    verify(replace(rewritten(), graph=GraphView(parsed(*lines)), **changes))


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
    program = rewritten()
    with pytest.raises(InvalidGraphError, match="names 'missing', which is not in the library"):
        verify(replace(program, graph=GraphView(calling("missing"))))


def test_a_call_of_a_function_that_the_library_has_passes():
    program = rewritten()
    graph = calling("there")
    graph.library.function.add().signature.name = "there"
    verify(replace(program, graph=GraphView(graph)))


@pytest.mark.parametrize("back", ["b", "^b"])
def test_a_cycle_of_data_or_control_edges_is_printed(back):
    with pytest.raises(InvalidGraphError, match="cycle of 2 ops") as raised:
        check("x = Const()", f"a = Neg({back})", "b = Neg(a)")
    assert "b = Neg(a)" in str(raised.value)
    assert "x = Const()" not in str(raised.value)


@pytest.mark.parametrize("itself", ["a", "^a"])
def test_an_op_that_waits_for_itself_is_a_cycle(itself):
    with pytest.raises(InvalidGraphError, match="cycle of 1 ops:\na = Neg"):
        check("x = Const()", f"a = Neg({itself})", "b = Neg(a)")


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


def broken(name, edit, *, where=None, item=None):
    """The golden program after the pass `name`, with `edit` made in it, verified."""
    program = kernel_programs.after(
        name, item or kernel_programs.linear_regression(), where or kernel_programs.topology(2)
    )
    edits = Edits()
    edit(edits, program)
    verify(replace(program, graph=edits.apply(program.graph)))


def test_a_gradient_that_is_not_combined_is_named():
    def read_raw(edits, program):
        marker = program.item.gradients[0].tensors[0]
        raw = program.analysis.captured.nodes[op_of(marker)].input[0]
        edits.set_input(on_replica(1, op_of(marker)), 0, on_replica(1, raw))

    with pytest.raises(InvalidGraphError, match=r"the gradient of 'w' is not combined(?s:.*)  > AutoDist-Replica-1/"):
        broken("lower-exchanges", read_raw)


def test_a_share_that_does_not_count_is_named():
    weight = tf.Variable(np.ones([3, 1], np.float32), name="w")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.cast(tf.cast(x, tf.float16) @ tf.cast(weight, tf.float16), tf.float32))
        weight.assign_sub(tape.gradient(loss, weight))

    item = capture_steps.capture(step, capture_steps.batch()).item
    (marker,) = (op_of(one.tensor) for one in item.statistics if one.reduction == "part")

    def read_ones(edits, program):
        ones = program.analysis.captured.nodes[marker].input[0]
        edits.set_input(on_replica(1, marker), 0, on_replica(1, ones))

    with pytest.raises(InvalidGraphError, match=r"a statistic is not combined(?s:.*)  > AutoDist-Replica-1/"):
        broken("lower-exchanges", read_ones, item=item)


def test_a_write_that_nothing_runs_is_named():
    program = kernel_programs.after("lower-exchanges", kernel_programs.linear_regression(), kernel_programs.topology(2))
    with pytest.raises(InvalidGraphError, match="'AutoDist-Replica-0/update' writes variable 'w', and nothing that is"):
        verify(replace(program, run_ops=()))


def test_a_write_that_is_no_more_run_is_seen_beside_what_stood_before():
    program = kernel_programs.after("order", kernel_programs.linear_regression(), kernel_programs.topology(2))
    verify(replace(program, run_ops=(*program.run_ops, on_replica(0, "loss"))), program)
    with pytest.raises(InvalidGraphError, match="'AutoDist-Replica-0/update' writes variable 'w', and nothing that is"):
        verify(replace(program, run_ops=()), program)
    (nothing,) = parsed(f"{on_replica(0, 'update')} = NoOp() @/device:CPU:0").node
    with pytest.raises(InvalidGraphError, match="'update' writes variable 'w'"):
        verify(replace(program, graph=program.graph.changed(added=(), replaced=[nothing])), program)


def test_a_write_that_is_left_out_is_named():
    program = kernel_programs.after("lower-exchanges", kernel_programs.linear_regression(), kernel_programs.topology(2))
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
        edits.set_device(on_replica(1, writer), program.topology.local_replicas[0].device)

    with pytest.raises(InvalidGraphError, match="writes a variable of another device"):
        broken("place", move)


def test_an_op_without_a_device_once_all_are_placed():
    with pytest.raises(InvalidGraphError, match="an op has no device: AutoDist/new = NoOp"):
        broken("place", lambda edits, program: edits.add(parsed("AutoDist/new = NoOp()").node))


# -- What is looked at again, where a program follows one that is valid -----------------------------------------------

Edit = Callable[[Edits, GraphView, int], None]


def _pick(names: Sequence[str], number: int) -> str:
    return names[number % len(names)]


def _all(view: GraphView) -> list[str]:
    return [*view.nodes]


def _handles(view: GraphView) -> list[str]:
    return [node.name for node in view.of_type({"VarHandleOp"})]


def _assigns(view: GraphView) -> list[str]:
    return [node.name for node in view.of_type({"AssignVariableOp", "AssignSubVariableOp"})]


def _new(line: str) -> Edit:
    """An op of the kernel or of a replica, whose inputs are picked: {handle}, {assign}, {op}."""

    def add(edits: Edits, view: GraphView, number: int) -> None:
        handle = _pick(_handles(view), number)
        picked = {"handle": handle, "assign": _pick(_assigns(view), number // 2), "op": _pick(_all(view), number // 3)}
        scope = handle.partition("/")[0] if number % 4 == 3 else "AutoDist"
        text = line.format(name=f"{scope}/new_{len(view.nodes)}", **picked)
        (node,) = parsed(f"{text} @/device:CPU:0").node
        edits.add([node])

    return add


EDITS: Sequence[Edit] = (
    _new("{name} = ReadVariableOp({handle})"),
    _new("{name} = ReadVariableOp({handle}, ^{assign})"),
    _new("{name} = AssignVariableOp({handle}, {op})"),
    _new("{name} = AssignVariableOp({handle}, {op}, ^{assign})"),
    _new("{name} = NoOp(^{op}, ^{handle})"),
    lambda edits, view, number: edits.add_control(_pick(_all(view), number), _pick(_all(view), number // 7)),
    lambda edits, view, number: edits.add_control(_pick(_all(view), number), _pick(_assigns(view), number // 7)),
    lambda edits, view, number: edits.set_device(_pick(_all(view), number), f"/device:CPU:{number % 2}"),
    lambda edits, view, number: edits.set_device(_pick(_handles(view), number), f"/device:CPU:{number % 2}"),
    lambda edits, view, number: edits.redirect(
        _pick(_assigns(view), number), _pick(_handles(view), number // 3), _pick(_handles(view), number // 5)
    ),
)


def _is_accepted(program: Program, before: Program | None) -> bool:
    try:
        verify(program, before)
    except InvalidGraphError:
        return False
    return True


@cache
def _bases() -> tuple[Program, ...]:
    item = kernel_programs.linear_regression()
    return tuple(
        kernel_programs.after(name, item, kernel_programs.topology(2)) for name in ("refresh", "place", "order")
    )


def _outcomes(base: Program, edits: Sequence[tuple[Edit, int]]) -> list[tuple[bool, bool]]:
    """For each edit, made after those that are accepted: whether all of it is, and what has changed since."""
    found = []
    for edit, number in edits:
        collected = Edits()
        edit(collected, base.graph, number)
        program = replace(base, graph=collected.apply(base.graph))
        found.append((_is_accepted(program, None), _is_accepted(program, base)))
        base = program if all(found[-1]) else base
    return found


_histories = st.tuples(
    st.sampled_from(range(3)),
    st.lists(st.tuples(st.sampled_from(EDITS), st.integers(0, 10_000)), min_size=1, max_size=8),
)


@settings(max_examples=150, deadline=None)
@given(_histories)
def test_what_has_changed_is_accepted_where_the_whole_is(history):
    which, edits = history
    outcomes = _outcomes(_bases()[which], edits)
    assert all(whole == changed for whole, changed in outcomes), outcomes


def test_histories_have_edits_that_are_accepted_and_later_ones_that_are_not():
    """Else the test above would compare nothing."""

    def is_mixed(history):
        counted = Counter(_outcomes(_bases()[history[0]], history[1]))
        return counted[True, True] > 1 and counted[False, False] > 1

    find(_histories, is_mixed, settings=settings(deadline=None))


def test_what_closes_no_loop_any_more_closes_a_cycle():
    program = rewritten()
    before = replace(program, graph=GraphView(parsed("m = Merge(n)", "n = NextIteration(m)")), fetches=(), run_ops=())
    verify(before)
    after = replace(before, graph=before.graph.changed(added=(), replaced=parsed("n = Neg(m)").node))
    with pytest.raises(InvalidGraphError, match="cycle of 2 ops"):
        verify(after, before)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("AutoDist/assign = AssignVariableOp({handle}, {value})",), ("AutoDist/read = ReadVariableOp({handle})",)),
        (
            ("AutoDist/assign = AssignVariableOp({handle}, {value})",),
            ("AutoDist/again = AssignVariableOp({handle}, {value}, ^AutoDist/assign)",),
        ),
    ],
)
def test_what_is_added_later_is_seen_beside_what_stood_before(first, then):
    graph = parsed("v = VarHandleOp()", "value = Const()")
    program = rewritten()
    before = replace(program, graph=GraphView(graph), fetches=(), run_ops=())

    def added(program, lines):
        nodes = parsed(*(line.format(handle="v", value="value") for line in lines)).node
        return replace(program, graph=program.graph.changed(added=nodes, replaced=()))

    valid = added(before, first)
    verify(valid, before)
    with pytest.raises(InvalidGraphError, match="'v' has two writers"):
        verify(added(valid, then), valid)


def test_a_variable_that_is_moved_away_from_its_update_is_seen():
    program = kernel_programs.after("place", kernel_programs.linear_regression(), kernel_programs.topology(2))
    edits = Edits()
    edits.set_device(on_replica(1, "w"), program.topology.local_replicas[0].device)
    with pytest.raises(InvalidGraphError, match="writes a variable of another device"):
        verify(replace(program, graph=edits.apply(program.graph)), program)
