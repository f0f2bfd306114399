"""LookUp: rows are looked up in a variable itself where that makes no difference, and nowhere else."""

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.kernel.pipeline import compile
from autodist_py.program.executor import Executor
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer
from tests.support import kernel_programs
from tests.support.capture_steps import capture

USES = ("rows", "shape", "tied", "columns", "returned", "written", "short", "all", "conditional")


def stepping(use):
    """A step that looks rows up in what it has read of a table, and uses the table in another way, too, perhaps."""
    table = tf.Variable(np.arange(12.0).reshape(6, 2), name="table")

    def step(ids):
        with tf.GradientTape() as tape:
            whole = tf.convert_to_tensor(table)
            places = tf.cast(ids, tf.int16) if use == "short" else ids
            rows = tf.raw_ops.GatherV2(params=whole, indices=places, axis=1 if use == "columns" else 0)
            loss = tf.reduce_mean(rows**2)
            if use == "tied":
                loss += tf.reduce_sum(whole)
        gradient = tape.gradient(loss, table)
        if use == "all":
            table.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        elif use == "conditional":
            change = tf.IndexedSlices(0.1 * gradient.values, gradient.indices)
            if loss > 20.0:
                table.scatter_sub(change)
        elif isinstance(gradient, tf.IndexedSlices):
            table.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, tf.cast(gradient.indices, tf.int32)))
        else:
            table.assign_sub(0.1 * gradient)
        results = [loss]
        if use == "written":
            results.append(tf.raw_ops.GatherV2(params=table, indices=ids, axis=0))
        if use == "shape":
            results.append(tf.raw_ops.Shape(input=whole, out_type=tf.int64) + 1)
        if use == "returned":
            results.append(whole)
        return results

    return step


def looked_up(use):
    ids = tf.constant([0, 1, 1], tf.int32)
    found = capture(stepping(use), ids)
    item = kernel_programs.after("look-up", found.item, kernel_programs.topology(1)).item
    nodes = {node.name: node for node in tf.compat.v1.GraphDef.FromString(item.graph_def).node}
    return found, nodes


@pytest.mark.parametrize("use", ["rows", "shape"])
def test_where_only_rows_are_used_the_whole_is_not_read(use):
    _, nodes = looked_up(use)
    users = {node.op for node in nodes.values() if "table" in node.input}
    assert users == {"ResourceGather", "ResourceScatterSub"}
    (gather,) = (node for node in nodes.values() if node.op == "ResourceGather")
    (scatter,) = (node for node in nodes.values() if node.op == "ResourceScatterSub")
    assert f"^{gather.name}" in scatter.input, "the rows are those of before the update"


@pytest.mark.parametrize("use", sorted(set(USES) - {"rows", "shape"}))
def test_where_more_is_used_or_not_rows_are_written_the_graph_is_left_as_it_is(use):
    found, nodes = looked_up(use)
    before = tf.compat.v1.GraphDef.FromString(found.item.graph_def).node
    assert {name: node.op for name, node in nodes.items()} == {node.name: node.op for node in before}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("use", USES)
def test_steps_are_those_of_tensorflow(use, replicas):
    found, _ = looked_up(use)
    plain = tf.function(stepping(use))
    copies = {("table", position): tf.Variable(np.arange(12.0).reshape(6, 2)) for position in range(replicas)}
    strategy = Strategy((VariableStrategy("table", AllReduceSynchronizer()),), ("127.0.0.1:CPU:0",))
    executor = Executor(compile(found.item, strategy, kernel_programs.topology(replicas)), copies, found.state)
    for ids in ([0, 1, 1], [1, 0, 1], [1, 1, 1]):
        results = [np.array(one) for one in executor.run([tf.constant(ids)])]
        for one, wanted in zip(results, plain(tf.constant(ids)), strict=True):
            np.testing.assert_allclose(one, wanted, rtol=0.0 if replicas == 1 else 1e-12)


def test_an_index_out_of_range_is_the_error_that_it_was():
    found, _ = looked_up("rows")
    strategy = Strategy((VariableStrategy("table", AllReduceSynchronizer()),), ("127.0.0.1:CPU:0",))
    value = tf.Variable(np.arange(12.0).reshape(6, 2))
    executor = Executor(compile(found.item, strategy, kernel_programs.topology(1)), {("table", 0): value}, found.state)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"= 7 is not in \[0, 6\)"):
        executor.run([tf.constant([0, 7, 1])])
