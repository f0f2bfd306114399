"""sparse as dense: of whatever shape and type a table and its indices are, and however a step makes these."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.kernel.collectives.sparse_as_dense import is_fewer_bytes
from autodist_py.kernel.events import GatherRows
from autodist_py.kernel.ir.dataflow import analyse
from autodist_py.kernel.ir.graph import functions_of
from autodist_py.kernel.ir.names import op_of
from autodist_py.proto.compressors import compressor_of
from tests.support import capture_steps, kernel_programs
from tests.support.densified import executed, least_examples, scaled, stepping, strategy_of

RATE = tf.constant(0.1, tf.float64)


def looking_up(shape, index=tf.int64, *, dtype=tf.float64, through=lambda ids, rate: ids):
    """A step on one table, and that table."""
    table = tf.Variable(tf.cast(np.random.default_rng(1).normal(size=shape), dtype), name="table")

    def step(ids, rate):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, through(ids, rate)) ** 2)
        scaled(table, tape.gradient(loss, table), rate)

    return capture_steps.capture(step, tf.zeros([1], index), tf.cast(RATE, dtype)), step, table


@pytest.mark.parametrize(
    ("dtype", "index", "compressor", "spec", "where"),
    [
        (tf.float64, tf.int64, "NoneCompressor", "AUTO", (1, 1)),
        (tf.float32, tf.int64, "NoneCompressor", "AUTO", (1, 1)),
        (tf.float64, tf.int32, "NoneCompressor", "AUTO", (1, 1)),
        (tf.float64, tf.int64, "HorovodCompressor", "AUTO", (1, 1)),
        (tf.float64, tf.int64, "NoneCompressor", "AUTO", (1, 1, 1, 1)),
        (tf.float64, tf.int64, "NoneCompressor", "AUTO", (2, 1)),
        (tf.float64, tf.int64, "NoneCompressor", "RING", (2, 1)),
    ],
    ids=["plain", "of-float32", "indices-of-32-bits", "half", "four-workers", "added-up-first", "one-ring"],
)
def test_what_counts_are_the_bytes_that_this_program_would_send(dtype, index, compressor, spec, where):
    shape, (replicas, *_) = (20, 2), where
    item = looking_up(shape, index, dtype=dtype)[0].item
    least = next(
        ids
        for ids in range(0, 10_000, replicas)
        if is_fewer_bytes(
            shape,
            ids,
            item=dtype.size,
            index=index.size,
            compressor=compressor_of(compressor, "compressor"),
            workers=len(where),
            members=sum(where) if spec == "RING" else len(where),
        )
    )
    assert least_examples(item, where, batch="local", compressor=compressor, spec=spec) == least


@pytest.mark.parametrize("batch", ["global", "local"])
def test_a_worker_that_only_serves_has_no_part_of_the_batch(batch):
    item = stepping(scaled)[0].item
    topology = kernel_programs.topology(1, 1, 1)
    idle = replace(topology, replicas=(replace(topology.replicas[0], trains=False), *topology.replicas[1:]))

    def is_dense(where, examples):
        given = {"examples": examples, "batch": batch}
        (table, *_) = kernel_programs.gradient_events(item, where, strategy_of(item), **given)
        return not isinstance(table, GatherRows)

    of_a_worker = least_examples(item, (1, 1, 1), batch="local")
    least = next(examples for examples in range(1, 1000) if is_dense(idle, examples))
    assert least == of_a_worker * (2 if batch == "global" else 1)


def asserted(ids, rate):
    with tf.control_dependencies([tf.debugging.assert_non_negative(ids)]):
        return tf.identity(ids)


def by_a_function(ids, rate):
    reversed_ids = tf.function(lambda given: given[::-1]).get_concrete_function(tf.TensorSpec([None], ids.dtype))
    return reversed_ids(ids)


def has_control_edge(node):
    return any(read.startswith("^") for read in node.input)


def calls_function(node):
    return any(functions_of(node))


@pytest.mark.parametrize(("through", "is_met"), [(asserted, has_control_edge), (by_a_function, calls_function)])
def test_the_number_of_ids_is_inferred_whatever_else_the_step_does_with_them(through, is_met):
    item = looking_up((6, 8), through=through)[0].item
    view = analyse(item).captured
    assert any(is_met(view.nodes[op]) for op in view.dataflow_ancestors([op_of(item.gradients[0].tensors[0])]))
    assert least_examples(item, (1, 1)) == least_examples(looking_up((6, 8))[0].item, (1, 1))


@pytest.mark.parametrize("index", [tf.int32, tf.int64])
@pytest.mark.parametrize("shape", [(6,), (6, 0), (6, 2, 3)])
def test_a_table_of_any_shape_is_that_of_one_device(shape, index):
    found, step, table = looking_up(shape, index)
    executor, copies = executed(step, found, {"table": table}, 2)
    plain = tf.function(step)
    for ids in ([0, 3, 3], [5], [2, 2, 1, 0]):
        given = [tf.constant(ids, index), RATE]
        executor.run(given)
        plain(*given)
        for position in range(2):
            np.testing.assert_allclose(copies["table", position], table, rtol=1e-12)


def test_each_replica_lays_its_rows_into_a_table_and_takes_them_out_on_its_own_device():
    item = stepping(scaled)[0].item
    program = kernel_programs.after(
        "lower-collectives", item, kernel_programs.topology(2, 1), strategy_of(item, sparse_as_dense=True)
    )
    for kind in ("ScatterNd", "NotEqual", "Where"):
        nodes = program.graph.nodes.items()
        devices = [node.device for name, node in nodes if node.op == kind and name.startswith("AutoDist/AllReduce/")]
        assert sorted(devices) == ["/device:CPU:0", "/device:CPU:1"], kind
