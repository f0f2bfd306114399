"""Unbranch: a branch over variables that live apart is taken apart, and computes what it computed; others stay."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.kernel.events import Exchange
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.passes.partition import Partition
from autodist_py.kernel.passes.unbranch import Unbranch
from autodist_py.kernel.pipeline import compile, start
from autodist_py.kernel.program import Options, Program
from autodist_py.kernel.verify import verify
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from tests.support import kernel_programs
from tests.support.cutting import Step, captured, require_same, shard_values

DEVICES = ("127.0.0.1:CPU:0", "127.0.0.2:CPU:0")
SERVERS = tuple(map(PSSynchronizer, DEVICES))
STEPS = [(np.linspace(-1, number, 12).reshape(4, 3),) for number in (1.0, 2.0, -3.0, 0.5, 1.5)]


class Model:
    """A matrix and a table, each with a momentum of its own, and a number of steps."""

    def __init__(self) -> None:
        self.w = tf.Variable(np.linspace(-1, 1, 6).reshape(3, 2), name="w")
        self.table = tf.Variable(np.arange(8.0).reshape(4, 2) / 8, name="table")
        self.sums = [tf.Variable(tf.zeros_like(one), trainable=False) for one in (self.w, self.table)]
        self.count = tf.Variable(0, trainable=False, name="count")

    def gradients(self, x: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
        self.count.assign_add(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ self.w + tf.gather(self.table, [0, 2, 2, 1])) ** 2)
        return loss, tape.gradient(loss, [self.w, self.table])


def both_sides_write(m: Model, x: tf.Tensor) -> Any:
    """One side reads what it has written, and the other writes the same variables."""
    loss, (of_w, of_table) = m.gradients(x)

    def apply() -> tf.Tensor:
        m.sums[0].assign_add(of_w)
        m.w.assign_sub(0.1 * m.sums[0])
        m.sums[0].assign(0.5 * m.w)
        m.w.assign_add(0.01 * m.sums[0])
        m.table.assign_sub(0.1 * tf.convert_to_tensor(of_table))
        return tf.norm(m.w)

    def wait() -> tf.Tensor:
        m.sums[0].assign(3.0 * m.sums[0] - m.w)
        m.table.assign(1.001 * m.table)
        m.w.assign_sub(0.001 * m.sums[0])
        return tf.norm(m.table) * 2.0

    seen = tf.cond(m.count % 2 == 0, apply, wait)
    m.w.assign_sub(0.01 * seen * m.w)
    return loss, seen


def branches_in_branches(m: Model, x: tf.Tensor) -> Any:
    loss, (of_w, of_table) = m.gradients(x)
    if m.count % 2 == 0:
        if tf.reduce_sum(of_w**2) > 0.5:
            m.w.assign_sub(0.1 * of_w)
            m.table.assign_sub(0.1 * tf.convert_to_tensor(of_table))
        else:
            m.w.assign_sub(0.2 * of_w)
        m.sums[1].assign_add(tf.convert_to_tensor(of_table))
    else:
        m.sums[1].assign(m.sums[1] / 2.0)
    return loss


def own_ops_of_optimizers(m: Model, x: tf.Tensor) -> Any:
    loss, (of_w, of_table) = m.gradients(x)
    rate, momentum = tf.constant(0.1, tf.float64), tf.constant(0.9, tf.float64)

    def apply() -> tf.Operation:
        given = {"lr": rate, "momentum": momentum}
        dense = tf.raw_ops.ResourceApplyMomentum(var=m.w.handle, accum=m.sums[0].handle, grad=of_w, **given)
        rows = tf.raw_ops.ResourceSparseApplyMomentum(
            var=m.table.handle, accum=m.sums[1].handle, grad=of_table.values, indices=of_table.indices, **given
        )
        return tf.group(dense, rows)

    tf.cond(m.count % 3 != 1, apply, tf.no_op)
    return loss


def rows(m: Model, x: tf.Tensor) -> Any:
    loss, (of_w, of_table) = m.gradients(x)
    if m.count % 2 == 1:
        m.w.assign_sub(0.1 * of_w)
        m.table.scatter_sub(tf.IndexedSlices(0.1 * of_table.values, of_table.indices))
    else:
        distinct, places = tf.unique(of_table.indices)
        summed = tf.math.unsorted_segment_sum(of_table.values, places, tf.size(distinct))
        m.table.scatter_update(tf.IndexedSlices(tf.gather(m.table, distinct) - 0.2 * summed, distinct))
    return loss


def infinite_where_it_is_not_taken(m: Model, x: tf.Tensor) -> Any:
    loss, (of_w, of_table) = m.gradients(x)
    if m.count % 2 == 0:
        scale = tf.math.log(tf.cast(m.count % 2, tf.float64) - 1.0 + 2.0)
        m.w.assign_sub(of_w * (0.1 + scale))
        m.table.assign_sub(0.1 * tf.convert_to_tensor(of_table) / tf.cast(1 - m.count % 2, tf.float64))
    return loss


TAKEN_APART = (both_sides_write, branches_in_branches, own_ops_of_optimizers, rows, infinite_where_it_is_not_taken)


def stepping(update: Callable[[Model, tf.Tensor], Any]) -> Step:
    model = Model()
    return captured(lambda x: update(model, x), STEPS[0][0])


def strategy(step: Step, kind: str) -> Strategy:
    trained = step.item.trainable_variables
    nodes = {
        "one server": [VariableStrategy(one.name, SERVERS[0]) for one in trained],
        "collectives": [VariableStrategy(one.name, AllReduceSynchronizer()) for one in trained],
        "servers": [VariableStrategy(one.name, SERVERS[at % 2]) for at, one in enumerate(trained)],
        "mixed": [
            VariableStrategy(one.name, (SERVERS[0], AllReduceSynchronizer())[at % 2]) for at, one in enumerate(trained)
        ],
        "shards": [VariableStrategy.partitioned(one, 0, SERVERS) for one in trained],
        "columns": [VariableStrategy.partitioned(one, 1, SERVERS) for one in trained],
    }
    return Strategy(tuple(nodes[kind]), DEVICES)


def unbranched(step: Step, kind: str, *, strict: bool = True) -> Program:
    program = start(step.item, strategy(step, kind), kernel_programs.topology(1, 1), Options(strict=strict))
    program = Unbranch()(program)
    verify(program)
    return program


def types(program: Program) -> set[str]:
    return {node.op for node in program.graph.nodes.values()}


@pytest.mark.parametrize("kind", ["servers", "mixed", "shards", "columns"])
@pytest.mark.parametrize("update", TAKEN_APART, ids=lambda update: update.__name__)
def test_a_branch_over_what_lives_apart_is_taken_apart_and_computes_the_same(update, kind):
    step = stepping(update)
    assert "If" in types(start(step.item, strategy(step, kind), kernel_programs.topology(1, 1), Options()))
    program = unbranched(step, kind)
    assert not program.cuts.whole_branches
    assert "If" not in types(program)
    require_same(step, program, STEPS)
    if kind in ("shards", "columns"):
        cut = Partition()(program)
        verify(cut)
        assert {"w", "table"} <= {shards.variable for shards in cut.cuts.shards}
        assert shard_values(cut, step.values).keys() > step.values.keys()
        require_same(step, cut, STEPS)


@pytest.mark.parametrize("kind", ["one server", "collectives"])
def test_a_branch_over_what_lives_in_one_place_stays(kind):
    step = stepping(both_sides_write)
    program = unbranched(step, kind)
    assert program.item is step.item
    assert not program.cuts.whole_branches


def asserts(m: Model, of_w: tf.Tensor) -> tf.Tensor:
    tf.debugging.assert_positive(m.count - 1)
    return of_w


def draws(m: Model, of_w: tf.Tensor) -> tf.Tensor:
    return of_w * tf.random.uniform([], dtype=tf.float64)


def checks(m: Model, of_w: tf.Tensor) -> tf.Tensor:
    return tf.debugging.check_numerics(of_w, "not finite")


def divides(m: Model, of_w: tf.Tensor) -> tf.Tensor:
    return of_w * tf.cast(6 // m.count, tf.float64)


def looks_up(m: Model, of_w: tf.Tensor) -> tf.Tensor:
    return of_w * tf.reduce_sum(tf.gather(m.table, [m.count - 2]))


def loops(m: Model, of_w: tf.Tensor) -> tf.Tensor:
    for _ in tf.range(m.count):
        of_w = 0.9 * of_w
    return of_w


KEPT = {
    asserts: r"'Assert\w*' \(Assert\) of the branch might fail, or do something",
    draws: r"\(RandomUniform\) of the branch might fail, or do something",
    checks: r"\(CheckNumerics\) of the branch might fail",
    divides: r"\(FloorDiv\) of the branch fails where it divides by 0",
    looks_up: r"\(ResourceGather\) of the branch might look for what is not there",
    loops: r"\(StatelessWhile\) of the branch might fail|\(While\) of the branch",
}


@pytest.mark.parametrize("how", KEPT, ids=lambda how: how.__name__)
def test_a_branch_that_might_fail_where_it_is_not_taken_is_refused_or_its_variables_left_whole(how):
    def update(m: Model, x: tf.Tensor) -> Any:
        loss, (of_w, of_table) = m.gradients(x)
        if m.count % 2 == 0:
            m.w.assign_sub(0.1 * how(m, of_w))
            m.table.assign_sub(0.1 * tf.convert_to_tensor(of_table))
        return loss

    step = stepping(update)
    program = unbranched(step, "shards")
    with pytest.raises(StrategyError, match=rf"is in the branch .*which cannot be taken apart: .*{KEPT[how]}"):
        Partition()(program)
    left = Partition()(unbranched(step, "shards", strict=False))
    assert left.cuts.left_whole.keys() == {"w", "table"}


def test_a_result_that_may_have_another_shape_keeps_a_branch_whole():
    def update(m: Model, x: tf.Tensor) -> Any:
        loss, (of_w, of_table) = m.gradients(x)

        def apply() -> tf.Tensor:
            m.w.assign_sub(0.1 * of_w)
            m.table.assign_sub(0.1 * tf.convert_to_tensor(of_table))
            return tf.reshape(of_w, [-1])

        return loss, tf.reduce_sum(tf.cond(m.count % 2 == 0, apply, lambda: of_w[0]))

    (why,) = unbranched(stepping(update), "servers").cuts.whole_branches.values()
    assert "may have another shape on either side" in why


def test_the_second_side_uses_a_variable_after_the_first_and_what_waits_for_the_branch_after_both():
    step = stepping(both_sides_write)
    program = unbranched(step, "servers")
    view = program.graph
    (name,) = (node.name for node in GraphView(tf.compat.v1.GraphDef.FromString(step.item.graph_def)).of_type({"If"}))
    users = view.dataflow_consumers(["w"])
    first = {op for op in users if f"{name}/then/" in op}
    second = {op for op in users if f"{name}/else/" in op}
    assert first & {*view.writes["w"]} and second & {*view.writes["w"]}
    for op in second:
        behind = view.ancestors([op])
        assert first & {*view.writes["w"]} <= behind, op
        assert op not in view.writes["w"] or first <= behind, op
    assert first | second <= view.ancestors([name])


def averages(m: Model, x: tf.Tensor) -> Any:
    loss, (of_w, of_table) = m.gradients(x)
    m.w.assign_sub(0.1 * of_w)
    m.table.assign_sub(0.1 * tf.convert_to_tensor(of_table))
    if m.count % 2 == 0:
        for mean, weight in zip(m.sums, (m.w, m.table), strict=True):
            mean.assign_add(0.5 * (weight - mean))
    return loss


def test_a_branch_that_averages_what_two_servers_hold_takes_one_update_of_each():
    step = stepping(averages)
    where = replace(kernel_programs.topology(1, 1), servers={device: rank for rank, device in enumerate(DEVICES)})
    program = compile(step.item, strategy(step, "servers"), where, Options(channel="c"))
    exchanges = [one for one in program.schedule.events if isinstance(one, Exchange) and not one.lookups]
    assert sorted(one.server for one in exchanges) == [0, 1]
    assert not any(one.read_before for one in exchanges)
