"""The index over a graph: reachability, back edges, and who writes which variable."""

import pytest
import tensorflow as tf

from autodist_py.kernel.ir.graph import GraphView
from tests.support import kernel_programs
from tests.support.kernel_programs import parsed

DIAMOND = parsed("a = Const()", "b = Neg(a)", "c = Neg(a:0)", "d = AddV2(b, c)", "e = NoOp(^d)", "f = Neg(d)")


def test_ancestors_follow_data_and_control_edges():
    view = GraphView(DIAMOND)
    assert view.ancestors(["e"]) == {"a", "b", "c", "d", "e"}


def test_dataflow_descendants_leave_control_edges_out():
    assert GraphView(DIAMOND).dataflow_descendants(["d"]) == {"d", "f"}


def test_a_blocked_op_is_neither_reached_nor_passed():
    view = GraphView(DIAMOND)
    assert view.dataflow_descendants(["a"], blocked={"b"}) == {"a", "c", "d", "f"}
    assert view.dataflow_descendants(["a"], blocked={"d"}) == {"a", "b", "c"}
    assert view.ancestors(["f"], blocked={"d"}) == {"f"}
    assert view.dataflow_descendants(["a"], blocked={"a"}) == set()


def test_the_back_edge_of_a_loop_is_no_edge():
    loop = parsed("e = Enter(x)", "x = Const()", "m = Merge(e, n)", "s = Switch(m, m:1)", "n = NextIteration(s:1)")
    view = GraphView(loop)
    assert not view.digraph.has_edge("n", "m")
    assert view.ancestors(["s"]) == {"x", "e", "m", "s", "n"}


@pytest.mark.parametrize(
    ("op", "written"),
    [
        ("AssignVariableOp", True),
        ("ResourceApplyAdam", True),
        ("ResourceScatterAdd", True),
        ("AnOpThatNobodyKnows", True),
        ("ReadVariableOp", False),
        ("ResourceGather", False),
        ("VarIsInitializedOp", False),
    ],
)
def test_whatever_takes_a_handle_and_is_not_known_to_read_writes(op, written):
    view = GraphView(parsed("v = VarHandleOp()", f"use = {op}(v)"))
    assert view.writes == {"v": ("use",) if written else ()}


def test_a_handle_is_followed_through_ops_that_pass_it_on():
    view = GraphView(parsed("v = VarHandleOp()", "i = Identity(v)", "w = AssignVariableOp(i, i)", "c = NoOp(^v)"))
    assert view.writes == {"v": ("w",)}


def test_a_write_in_one_branch_of_an_if_is_the_ifs_write_of_that_variable_only():
    with tf.Graph().as_default() as graph:
        taken, read = (
            tf.compat.v1.get_variable(name, initializer=0.0, use_resource=True) for name in ("taken", "read")
        )
        going = tf.compat.v1.placeholder(tf.bool, [])
        tf.cond(going, lambda: taken.assign(read + 1.0).op, lambda: tf.group(read.read_value()))
    view = GraphView(graph.as_graph_def())
    (conditional,) = (node.name for node in view.of_type({"If", "StatelessIf"}))
    assert conditional in view.writes["taken"]
    assert conditional not in view.writes["read"]


def test_a_write_in_a_nested_function_is_found():
    with tf.Graph().as_default() as graph:
        variable = tf.compat.v1.get_variable("v", initializer=0.0, use_resource=True)
        other = tf.compat.v1.get_variable("other", initializer=0.0, use_resource=True)

        @tf.function(autograph=False)
        def inner():
            return tf.cond(other > 0.0, lambda: variable.assign_add(1.0), lambda: tf.identity(variable))

        @tf.function(autograph=False)
        def outer():
            return inner()

        outer()
    view = GraphView(graph.as_graph_def())
    (call,) = (node.name for node in view.of_type({"StatefulPartitionedCall", "PartitionedCall"}))
    assert call in view.writes["v"]
    assert call not in view.writes["other"]


def test_a_write_in_the_body_of_a_while_is_the_whiles_write():
    with tf.Graph().as_default() as graph:
        variable = tf.compat.v1.get_variable("v", initializer=0.0, use_resource=True)
        bound = tf.compat.v1.get_variable("bound", initializer=0.0, use_resource=True)

        def body(count):
            with tf.control_dependencies([variable.assign_add(1.0)]):
                return count + 1.0

        tf.while_loop(lambda count: count < bound, body, [0.0])
    view = GraphView(graph.as_graph_def())
    (loop,) = (node.name for node in view.of_type({"While", "StatelessWhile"}))
    assert loop in view.writes["v"]
    assert loop not in view.writes["bound"]


def test_the_writers_of_the_golden_program_are_its_update():
    graph = tf.compat.v1.GraphDef.FromString(kernel_programs.linear_regression().graph_def)
    assert GraphView(graph).writes == {"w": ("update",)}
