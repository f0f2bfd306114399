"""Loops and branches of TensorFlow 1: where ops stand, what they depend on unsaid, and how they wait for each other."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from autodist_py.kernel.analysis.batch_layout.joins import after_turn, joined
from autodist_py.kernel.analysis.batch_layout.layouts import (
    COUNT,
    MIXED,
    PARTIAL_MEAN,
    PARTIAL_SUM,
    PARTIAL_SUM_PLUS,
    REPLICATED,
    SHARDED,
    BatchLayout,
)
from autodist_py.kernel.ir.edits import Edits
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.proto.errors import InvalidGraphError
from tests.support.loop_programs import control_flow_of_tensorflow_1


def viewed(build: Callable[[], Any]) -> GraphView:
    with control_flow_of_tensorflow_1(), tf.Graph().as_default() as graph:
        build()
    return GraphView(graph.as_graph_def())


def loop_in_a_loop() -> None:
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, tf.negative(y, "deep")), (0, x), name="inner")[1]

    start = tf.identity(tf.constant(1.0), "before")
    _, end = tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, tf.exp(inner(x), "body")), (0, start), name="outer")
    tf.identity(end, "after")
    tf.constant(2.0, name="elsewhere")


def test_an_op_stands_in_the_frames_that_lead_to_it():
    flow = viewed(loop_in_a_loop).control_flow
    assert len(flow.ways_in("outer/inner/deep")) == 2
    assert flow.ways_in("outer/body") == flow.ways_in("outer/inner/deep")[:1]
    assert [flow.ways_in(op) for op in ("before", "after", "elsewhere")] == [(), (), ()]
    assert [op for op in ("before", "after", "elsewhere", "outer/body") if flow.runs_once(op)] == [
        "before",
        "after",
        "elsewhere",
    ]


def test_who_waits_across_the_border_of_a_loop_waits_at_the_border():
    view = viewed(loop_in_a_loop)
    into = {op for op, _ in view.waits("outer/inner/deep", "elsewhere")}
    assert {view.nodes[op].op for op in into} == {"Enter"}
    assert all(len(view.control_flow.ways_in(op)) == 1 for op in into)  # What leads into the outer loop.
    out = {op for _, op in view.waits("elsewhere", "outer/inner/deep")}
    assert out and {view.nodes[op].op for op in out} == {"Exit"}
    assert all(view.control_flow.runs_once(op) for op in out)
    assert list(view.waits("after", "elsewhere")) == [("after", "elsewhere")]
    assert [op for _, op in view.waits("an added op", "outer/body")] == [
        op for _, op in view.waits("elsewhere", "outer/body")
    ]


def test_an_edited_graph_with_edges_across_a_loop_runs():
    view = viewed(loop_in_a_loop)
    edits = Edits()
    edits.add_control("outer/inner/deep", "elsewhere")
    edits.add_control("outer/body", "before")
    edits.add_control("after", "outer/inner/deep")
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        tf.import_graph_def(edits.apply(view).graph_def(), name="")
        assert session.run(graph.get_tensor_by_name("after:0")) > 0.0


def test_what_nothing_leaves_a_loop_after_cannot_be_waited_for_outside():
    def build() -> None:
        tf.while_loop(lambda i: i < 3, lambda i: [(i + 1, tf.exp(1.0, "idle"))[0]], [0], name="loop")
        tf.constant(2.0, name="elsewhere")

    with pytest.raises(InvalidGraphError, match="nothing leaves the loop"):
        list(viewed(build).waits("elsewhere", "loop/idle"))


def test_what_a_branch_returns_depends_on_its_predicate_though_its_constants_do_not():
    def build() -> None:
        is_so = tf.greater(tf.compat.v1.placeholder(tf.float32, [], "given"), 0.0)
        tf.identity(tf.cond(is_so, lambda: tf.constant(1.0), lambda: tf.constant(2.0)), "result")

    view = viewed(build)
    assert "result" in view.dataflow_descendants(["given"])
    assert view.control_flow.runs_once("result")


def loop_in_a_branch() -> None:
    given = tf.compat.v1.placeholder(tf.float32, [], "given")

    def turns() -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, tf.exp(x, "body")), (0, given))[1]

    chosen = tf.cond(tf.greater(given, 0.0, "is_so"), turns, lambda: tf.constant(2.0, name="otherwise"), name="cond")
    tf.identity(chosen, "result")


@pytest.mark.parametrize("op", ["cond/while/body", "cond/otherwise", "cond/while/Exit_1"])
def test_a_branch_ends_where_it_and_its_loops_are_left_for_good(op: str):
    assert viewed(loop_in_a_branch).ends_of_branch(op) == {"cond/Merge"}


def test_an_op_in_no_branch_is_its_own_end():
    assert viewed(loop_in_a_branch).ends_of_branch("result") == {"result"}
    assert viewed(loop_in_a_loop).ends_of_branch("outer/body") == {"outer/body"}


def test_a_predicate_is_one_under_all_names_that_a_branch_gives_it():
    predicates = viewed(loop_in_a_branch).control_flow.predicates
    assert predicates["cond/switch_f"] == predicates["cond/otherwise"] == predicates["cond/while/Enter_1"] == {"is_so"}


def test_what_is_taken_from_a_stack_depends_on_what_was_put_there():
    def build() -> None:
        given = tf.compat.v1.placeholder(tf.float32, [], "given")
        start = tf.constant(1.0)
        _, end = tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x * tf.sin(given + x)), (0, start))
        tf.identity(tf.gradients(end, start)[0], "gradient")

    view = viewed(build)
    pops = [node.name for node in view.of_type({"StackPopV2"})]
    assert pops and set(pops) <= view.dataflow_descendants(["given"])
    assert "gradient" in view.dataflow_descendants(["given"])


@pytest.mark.parametrize(
    ("layouts", "zero", "whole"),
    [
        ((SHARDED, SHARDED), False, SHARDED),
        ((REPLICATED, PARTIAL_MEAN), False, PARTIAL_MEAN),
        ((REPLICATED, PARTIAL_SUM), False, MIXED),
        ((REPLICATED, PARTIAL_SUM), True, PARTIAL_SUM),
        ((PARTIAL_SUM, COUNT), False, PARTIAL_SUM),
        ((REPLICATED, SHARDED), True, MIXED),
        ((PARTIAL_SUM_PLUS, PARTIAL_SUM_PLUS), True, MIXED),
        ((PARTIAL_MEAN, PARTIAL_SUM), True, MIXED),
    ],
)
def test_one_of_several_values_is_what_all_of_them_are(
    layouts: tuple[BatchLayout, ...], zero: bool, whole: BatchLayout
):
    assert joined(layouts, with_zeros=zero) is whole


@pytest.mark.parametrize("taken", BatchLayout)
def test_what_goes_round_is_taken_for_little_more_than_a_few_times(taken: BatchLayout):
    for found in itertools.product(BatchLayout, repeat=4):
        now: BatchLayout | None = taken
        seen = [now := after_turn(now, each) for each in found]
        # What was given up is not taken again.
        assert len({id(one) for one in seen}) <= 3
        assert MIXED not in seen or set(seen[seen.index(MIXED) :]) == {MIXED}
