"""SplitBatch: the replicas' parts are the batch, in its order."""

from functools import cache

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist_py.kernel.ir.names import on_replica, op_of
from autodist_py.proto.graph_item import GraphItem, Input
from tests.support import kernel_programs


def echo(*, rank: int = 1):
    """A program whose output `echo` is its batched input, and that has an input that is no batch."""
    with tf.Graph().as_default() as graph:
        x = kernel_programs.placeholder("x", None, *[2] * (rank - 1), dtype=tf.int64)
        scalar = kernel_programs.placeholder("scalar", dtype=tf.int64)
        echoed = tf.raw_ops.Identity(input=x, name="echo")
        other = tf.raw_ops.Identity(input=scalar, name="other")
        inputs = [
            Input("x", "int64", (None, *[2] * (rank - 1)), batched=True),
            Input("scalar", "int64", (), batched=False),
        ]
        return kernel_programs.captured(graph, inputs=inputs, outputs=[echoed, other])


@cache
def splitter(replicas_of_worker, worker):
    """A function from a batch to what each local replica reads, their row counts, and the total."""
    program = kernel_programs.after("split-batch", echo(), kernel_programs.topology(*replicas_of_worker, worker=worker))
    graph = kernel_programs.import_graph(program.graph)
    tensors = [f"{on_replica(index, 'echo')}:0" for index in range(program.num_local_replicas)]
    assert program.replication.batch is not None
    counts = [
        name if ":" in name else f"{name}:0"
        for name in (*program.replication.batch.rows, program.replication.batch.total)
    ]
    running = kernel_programs.session(graph).make_callable([tensors, counts], feed_list=["x:0"])
    return running


def own_of(parts, counts, batch):
    """The rows that count: one that has none is given one of the batch, if there is any; else each counts for one."""
    for part, count in zip(parts, counts, strict=True):
        assert len(part) == (max(count, 1) if len(batch) else 0)
        assert set(part) <= set(batch)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


@settings(max_examples=120, deadline=None)
@given(rows=st.integers(0, 40), replicas=st.integers(2, 5))
def test_parts_are_contiguous_and_ordered_and_differ_by_one_row_at_most(rows, replicas):
    batch = np.arange(rows) * 3
    parts, (*counts, total) = splitter((replicas,), 0)(batch)
    np.testing.assert_array_equal(np.concatenate(own_of(parts, counts, batch)), batch)
    assert total == (rows or replicas)
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 40), workers=st.sampled_from([(1, 1), (2, 1), (1, 2), (1, 1, 1), (2, 1, 2)]))
def test_the_parts_of_all_workers_together_are_the_global_batch(rows, workers):
    batch = np.arange(rows) + 100
    of_workers = [splitter(workers, worker)(batch) for worker in range(len(workers))]
    together = [part for parts, counts in of_workers for part in own_of(parts, counts[:-1], batch)]
    np.testing.assert_array_equal(np.concatenate(together), batch)
    assert {int(counts[-1]) for _, counts in of_workers} == {rows or sum(workers)}
    assert sum(int(count) for _, counts in of_workers for count in counts[:-1]) == (rows or sum(workers))


@cache
def of_two_batches(replicas):
    """A function from two batches to each replica's part of both, and its number of rows."""
    with tf.Graph().as_default() as graph:
        names = ("x", "y")
        echoed = [tf.raw_ops.Identity(input=kernel_programs.placeholder(name, None), name=f"{name}_") for name in names]
        inputs = [Input(name, "float64", (None,), batched=True, batch=index) for index, name in enumerate(names)]
        item = kernel_programs.captured(graph, inputs=inputs, outputs=echoed)
    program = kernel_programs.after("split-batch", item, kernel_programs.topology(replicas))
    parts = [[f"{on_replica(index, f'{name}_')}:0" for name in names] for index in range(replicas)]
    assert program.replication.batch is not None
    running = kernel_programs.session(kernel_programs.import_graph(program.graph))
    counts = [name if ":" in name else f"{name}:0" for name in program.replication.batch.rows]
    return running.make_callable([parts, counts], feed_list=["x:0", "y:0"])


@settings(max_examples=120, deadline=None)
@given(first=st.integers(0, 24), second=st.integers(1, 24), replicas=st.integers(2, 4))
def test_batches_of_several_sizes_are_cut_in_the_same_proportions(first, second, replicas):
    batches = np.arange(first) * 3.0, np.arange(second) * 3.0
    parts, counts = of_two_batches(replicas)(*batches)
    for batch, own in zip(batches, zip(*parts, strict=True), strict=True):
        assert all(set(part) <= set(batch) for part in own)
        counting = [part for part, count in zip(own, counts, strict=True) if count]
        np.testing.assert_array_equal(np.concatenate(counting), batch)
        if first != second and len(batch) > 1:
            assert all(len(part) != 1 for part in counting), "a single row is paired with any number of others"
    for (one, other), count in zip(parts, counts, strict=True):
        assert not count or len(one) * second == len(other) * first
    assert sum(count > 0 for count in counts) >= min(replicas, max(np.gcd(first, second) // 2, 1))


@pytest.mark.parametrize("where", [kernel_programs.topology(1), kernel_programs.topology(1).alone()])
def test_one_replica_reads_the_whole_batch(where):
    program = kernel_programs.after("split-batch", echo(), where)
    assert program.replication.batch is None
    assert list(kernel_programs.node(program.graph, "AutoDist-Replica-0/echo").input) == ["x"]


def test_rows_of_any_rank_stay_whole_and_an_input_that_is_no_batch_is_given_to_all():
    program = kernel_programs.after("split-batch", echo(rank=3), kernel_programs.topology(2))
    graph = kernel_programs.import_graph(program.graph)
    batch = np.arange(12).reshape(3, 2, 2)
    names = [f"{on_replica(index, name)}:0" for name in ("echo", "other") for index in (0, 1)]
    with kernel_programs.session(graph) as running:
        first, second, *others = running.run(names, {"x:0": batch, "scalar:0": 8})
    np.testing.assert_array_equal(first, batch[:2])
    np.testing.assert_array_equal(second, batch[2:])
    assert others == [8, 8]


def test_a_local_batch_is_split_among_this_workers_replicas_and_counted_over_all_workers():
    program = kernel_programs.after("split-batch", echo(), kernel_programs.topology(2, 3, worker=1), batch="local")
    assert program.replication.batch is not None
    assert len(program.replication.batch.rows) == 3
    (one,) = program.lowered.collectives
    assert one.what == "number of examples"
    (collective,) = (kernel_programs.node(program.graph, name) for name in one.ops)
    assert collective.op == "CollectiveGatherV2"
    assert collective.name in program.graph.ancestors([op_of(program.replication.batch.total)])


def test_a_global_batch_needs_no_collective():
    assert kernel_programs.after("split-batch", echo(), kernel_programs.topology(2, 3)).lowered.collectives == ()


def test_both_spellings_of_a_batched_tensor_are_redirected():
    item = echo()
    definition = tf.compat.v1.GraphDef.FromString(item.graph_def)
    kernel_programs.node(definition, "echo").input[0] = "x:0"
    spelled = GraphItem(
        graph_def=definition.SerializeToString(), variables=(), inputs=item.inputs, outputs=item.outputs
    )
    graph = kernel_programs.after("split-batch", spelled, kernel_programs.topology(2)).graph
    assert kernel_programs.node(graph, "AutoDist-Replica-1/echo").input[0].startswith("AutoDist/Batch/")
