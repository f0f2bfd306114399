"""Partition: what cannot be cut is refused, by name, or left whole."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py.proto.errors import StrategyError
from autodist_py.proto.strategy import VariableStrategy
from autodist_py.proto.synchronizers import PSSynchronizer
from tests.support.cutting import SERVED, Cutting, captured, cut, node_of, require_same

pytestmark = pytest.mark.usefixtures("keras_of_float64")


def stepping(optimizer: keras.optimizers.Optimizer) -> Callable[..., Any]:
    w = keras.Variable(np.linspace(-1, 1, 6).reshape(3, 2), dtype="float64", name="w")
    optimizer.build([w])

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(x, w.value) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, w.value), w)])
        return loss

    return step


def refused() -> dict[str, tuple[Callable[..., Any], str]]:
    table = tf.Variable(np.arange(12.0).reshape(6, 2), name="w")

    def rows_in_their_order(x: tf.Tensor) -> Any:
        """Each row is scaled by what belongs to its example."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(table, [5, 0, 5, 2]) ** 2) * tf.reduce_mean(x)
        gradient = tape.gradient(loss, table)
        table.scatter_sub(tf.IndexedSlices(gradient.values * x[:, 1:2], gradient.indices))
        return loss

    def rows_returned(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(table, [5, 0, 5, 2]) ** 2) * tf.reduce_mean(x)
        gradient = tape.gradient(loss, table)
        table.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
        return gradient.indices

    def rows_of_two(x: tf.Tensor) -> Any:
        gradients = []
        for ids in ([0, 5], [5, 0]):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.gather(table, ids) ** 2) * tf.reduce_mean(x)
            gradients.append(tape.gradient(loss, table))
        one, other = gradients
        table.scatter_sub(tf.IndexedSlices(one.values - other.values, one.indices))
        return loss

    def columns_of_rows(x: tf.Tensor) -> Any:
        """A sum over the columns alone, of which there is one row."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(table, [3]) ** 2) * tf.reduce_mean(x)
        gradient = tape.gradient(loss, table)
        norm = tf.sqrt(tf.reduce_sum(gradient.values**2, axis=1, keepdims=True))
        table.scatter_sub(tf.IndexedSlices(gradient.values / (1.0 + norm), gradient.indices))
        return loss

    def as_many_as_rows(x: tf.Tensor) -> Any:
        """A sum for each row of the table: there are as many ids as rows."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(table, [5, 0, 5, 2, 1, 1]) ** 2) * tf.reduce_mean(x)
        gradient = tape.gradient(loss, table)
        sums = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, tf.raw_ops.Size(input=gradient.indices))
        table.assign_sub(0.1 * sums)
        return loss

    def rows_of_the_table(how_many: Callable[[tf.Tensor], tf.Tensor]) -> Callable[..., Any]:
        """A sum for each row of the table: their number is found in the gradient's shape in a way of its own."""

        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.gather(table, [5, 0, 5, 2]) ** 2) * tf.reduce_mean(x)
            gradient = tape.gradient(loss, table)
            number = how_many(gradient.dense_shape)
            table.assign_sub(0.1 * tf.math.unsorted_segment_sum(gradient.values, gradient.indices, number))
            return loss

        return step

    def in_a_loop(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(table**2) * tf.reduce_mean(x)
        gradient = tape.gradient(loss, table)
        for _ in tf.range(2):
            table.assign_sub(0.1 * gradient)
        return loss

    by_rows = r"' is made of rows of its gradient"
    return {
        "rows in their order": (rows_in_their_order, r"'mul\w*' \(Mul\)"),
        "rows returned": (rows_returned, r"a result is made of rows of its gradient"),
        "rows of two": (rows_of_two, r"'sub\w*' \(Sub\)"),
        "columns of rows": (columns_of_rows, rf"'Sum\w*{by_rows}"),
        "as many as rows": (as_many_as_rows, rf"'UnsortedSegmentSum{by_rows}"),
        "new axis": (rows_of_the_table(lambda shape: tf.squeeze(shape[tf.newaxis, 0])), by_rows),
        "reversed": (rows_of_the_table(lambda shape: shape[::-1][1]), by_rows),
        "loop": (in_a_loop, r"'\w*while\w*' \(\w*While\)"),
    }


REFUSED = (
    "rows in their order",
    "rows returned",
    "rows of two",
    "columns of rows",
    "as many as rows",
    "new axis",
    "reversed",
    "loop",
)


@pytest.mark.parametrize("what", REFUSED)
def test_an_update_that_is_not_element_wise_is_refused_by_name_or_left_whole(what):
    cases = refused()
    assert tuple(cases) == REFUSED
    function, message = cases[what]
    step = captured(function, np.ones((4, 3)))
    (name,) = (variable.name for variable in step.item.trainable_variables)
    node = node_of(step.item, name, Cutting(0, (2, 1)))
    with pytest.raises(StrategyError, match=rf"variable '{name}' cannot be cut into shards: .*{message}"):
        cut(step.item, [node])
    program = cut(step.item, [node], strict=False)
    assert program.cuts.left_whole.keys() == {name}
    assert program.strategy.node(name) == VariableStrategy(name, SERVED)
    require_same(step, program, [(np.full((4, 3), number),) for number in (1.0, 2.0, 3.0)])
    own = PSSynchronizer("127.0.0.2:CPU:0")
    program = cut(step.item, [VariableStrategy(name, own, node.partitioner, node.part_config, node.part_sizes)])
    assert program.strategy.node(name) == VariableStrategy(name, own), "its builder says what becomes of it"


def whole() -> dict[str, Callable[..., Any]]:
    """Steps that read a variable whole between its writes, or make its update of all of its gradient."""
    w = tf.Variable(np.linspace(-1, 1, 6).reshape(3, 2), name="w")

    def descent(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(x, w) ** 2)
        return loss, tape.gradient(loss, w)

    def reads_between(x: tf.Tensor) -> Any:
        loss, gradient = descent(x)
        w.assign_sub(0.1 * gradient)
        seen = tf.linalg.trace(tf.matmul(w, w, transpose_a=True))
        w.assign_sub(0.01 * w)
        later = tf.linalg.trace(tf.matmul(w, w, transpose_a=True))
        w.assign_sub(0.01 * w + 0.1 * seen)
        return loss, seen, later, tf.reduce_sum(tf.matmul(x, w))

    def of_a_statistic(x: tf.Tensor) -> Any:
        """The update is made of a mean over the examples."""
        loss, gradient = descent(x)
        w.assign_sub(0.1 * gradient + 0.01 * w * tf.reduce_mean(x))
        return loss

    def laid_out_flat(x: tf.Tensor) -> Any:
        loss, gradient = descent(x)
        flat = tf.cumsum(tf.reshape(gradient, [-1]))
        change = tf.reshape(flat, [3, 2])
        tf.raw_ops.ResourceApplyGradientDescent(var=w.handle, alpha=tf.constant(0.1, tf.float64), delta=change)
        return loss

    return {
        "read between": reads_between,
        "of a statistic": of_a_statistic,
        "laid out flat": laid_out_flat,
        "adafactor": stepping(keras.optimizers.Adafactor(0.1)),
    }


@pytest.mark.parametrize("what", ["read between", "of a statistic", "laid out flat", "adafactor"])
def test_what_needs_the_whole_is_computed_of_what_shards_bring_together(what):
    step = captured(whole()[what], np.ones((4, 3)))
    (name,) = (variable.name for variable in step.item.trainable_variables)
    program = cut(step.item, [node_of(step.item, name, Cutting(0, (2, 1)))])
    assert name in {shards.variable for shards in program.cuts.shards}
    require_same(step, program, [(np.linspace(-1, number, 12).reshape(4, 3),) for number in (1.0, 2.0, -3.0)])


def test_a_shard_is_written_again_when_it_has_been_read():
    step = captured(whole()["read between"], np.ones((4, 3)))
    (variable,) = step.item.trainable_variables
    program = cut(step.item, [node_of(step.item, variable.name, Cutting(0, (2, 1)))])
    for shard in program.cuts.shards[0].names:
        reads = [f"{shard}/{new}" for new in ("new_0", "new_1", "new")]
        writes = program.item.variable(shard).update_ops
        assert len(writes) == len(variable.update_ops) == len(reads)
        for at, (write, read) in enumerate(zip(writes, reads, strict=True)):
            behind = program.graph.ancestors([write])
            assert behind & {*reads} == {*reads[:at]}
            assert write in program.graph.ancestors([read])


def test_state_that_is_made_of_other_state_is_cut_too():
    step = captured(stepping(keras.optimizers.Adam(0.1, amsgrad=True)), np.ones((4, 3)))
    (name,) = (variable.name for variable in step.item.trainable_variables)
    program = cut(step.item, [node_of(step.item, name, Cutting(0, (2, 1)))])
    assert len(program.cuts.shards) == 4
    assert [shards.variable for shards in program.cuts.shards if shards.is_whole] == [name]
    require_same(step, program, [(np.full((4, 3), number),) for number in (1.0, 2.0, -3.0)])
