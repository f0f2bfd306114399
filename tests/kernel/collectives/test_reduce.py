"""Reductions between the devices of one process equal numpy's."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist_py.kernel.collectives.collective_all_reduce import CollectiveAllReduce
from autodist_py.kernel.collectives.collectives import Collectives
from autodist_py.kernel.collectives.hierarchical_copy import HierarchicalCopyAllReduce
from autodist_py.kernel.collectives.to_one_device import ReductionToOneDevice
from tests.support import kernel_programs
from tests.support.reductions import (
    FLOATS,
    OPS,
    WITHIN_WORKER,
    assert_reduced,
    assert_rows,
    devices_of,
    flat,
    grouped,
    is_float,
    one_of_each,
    rows_of_each,
    run_locally,
)

each_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
each_number = pytest.mark.parametrize("replicas", [2, 3, 4, 5])
COUNTS = ([3, 1], [0, 2, 4], [0, 0, 0], [1, 0, 5, 2])


def reductions_of(dtype):
    return ["sum", "mean"] if dtype.is_floating else ["sum"]


@each_number
@each_op
def test_each_value_of_each_type_and_shape_is_reduced_as_numpy_does(op, replicas):
    batch = one_of_each(replicas)

    def body(collectives, fed):
        made, devices = op(collectives), devices_of(replicas)
        return [
            {kind: made.reduce(values, devices, reduction=kind) for kind in reductions_of(values[0].dtype)}
            for values in grouped(fed, replicas)
        ]

    for results, values in zip(run_locally(replicas, flat(batch), body), batch, strict=True):
        for kind, copies in results.items():
            assert len(copies) == replicas
            assert_reduced(copies, values, kind)


@pytest.mark.parametrize("replicas", [2, 3, 5])
@each_op
def test_a_batch_is_reduced_as_its_values_are_one_by_one(op, replicas):
    batch = {
        kind: [values for values in one_of_each(replicas, seed=1) if kind == "sum" or is_float(values[0])]
        for kind in ("sum", "mean")
    }
    rows = rows_of_each(range(replicas, 0, -1), tf.float32)

    def body(collectives, fed):
        made, devices, results = op(collectives), devices_of(replicas), {}
        sparse = [tf.IndexedSlices(part, indices) for indices, part in grouped(fed[: 2 * replicas], 2)]
        rest = iter(grouped(fed[2 * replicas :], replicas))
        for kind, values in batch.items():
            first, *others = [next(rest) for _ in values]
            first, added, *others = made.batch_reduce([first, sparse, *others], devices, reduction=kind)
            results[kind] = [(one.indices, one.values) for one in added], [first, *others]
        return results

    inputs = [*flat(rows), *flat(batch["sum"]), *flat(batch["mean"])]
    for kind, (added, dense) in run_locally(replicas, inputs, body).items():
        assert_rows(added, rows, kind)
        for results, values in zip(dense, batch[kind], strict=True):
            assert_reduced(results, values, kind)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@each_op
def test_sparse_values_are_all_rows_in_replica_order_and_a_mean_divides_by_the_replicas(op, counts):
    rows = [rows_of_each(counts, dtype) for dtype in (*FLOATS, tf.int32)]
    rows.append(rows_of_each(counts, tf.float32, width=0))

    def body(collectives, fed):
        made, devices = op(collectives), devices_of(len(counts))
        sparse = [
            tf.IndexedSlices(values, indices, tf.constant([4, values.shape[1]], tf.int64))
            for indices, values in grouped(fed, 2)
        ]
        return [
            {
                kind: [
                    (one.indices, one.values, one.dense_shape) for one in made.reduce(parts, devices, reduction=kind)
                ]
                for kind in reductions_of(parts[0].dtype)
            }
            for parts in grouped(sparse, len(counts))
        ]

    inputs = [part for parts in rows for part in flat(parts)]
    for parts, results in zip(rows, run_locally(len(counts), inputs, body), strict=True):
        for kind, copies in results.items():
            assert [copy[2].tolist() for copy in copies] == [[4, parts[0][1].shape[1]]] * len(counts)
            assert_rows([copy[:2] for copy in copies], parts, kind)


@each_op
def test_results_are_delivered_to_the_destinations(op):
    values = [np.full(40, 2.0**index) for index in range(3)]

    def body(collectives, fed):
        made, devices = op(collectives), devices_of(3)
        to_one = made.reduce(fed, devices, destinations="/device:CPU:6")
        to_two = made.batch_reduce([fed, fed], devices, destinations=["/device:CPU:2", "/device:CPU:5"])
        rows = [tf.IndexedSlices(value, tf.range(40)) for value in fed]
        sparse = made.reduce(rows, devices, destinations=["/device:CPU:4"])
        assert [one.device for one in to_one] == ["/device:CPU:6"]
        assert [[one.device for one in results] for results in to_two] == [["/device:CPU:2", "/device:CPU:5"]] * 2
        assert [one.values.device for one in sparse] == ["/device:CPU:4"]
        return [*to_one, *to_two[0], *to_two[1]], [one.values for one in sparse]

    dense, sparse = run_locally(3, values, body)
    for result in dense:
        np.testing.assert_array_equal(result, np.full(40, 7.0))
    assert [result.tolist() for result in sparse] == [np.concatenate(values).tolist()]


@each_op
def test_an_all_reduce_leaves_each_replicas_result_on_its_device(op):
    with tf.Graph().as_default():
        fed = [tf.compat.v1.placeholder(tf.float32, [200]) for _ in range(3)]
        made = op(Collectives(kernel_programs.topology(3), 1))
        batch = made.batch_reduce([fed, fed], devices_of(3), reduction="mean")
        results = [made.reduce(fed, devices_of(3)), *batch]
        assert [[one.device for one in copies] for copies in results] == [devices_of(3)] * 3


def devices_that_add(op, replicas, **options):
    with tf.Graph().as_default() as graph:
        fed = [tf.compat.v1.placeholder(tf.float32, [1000]) for _ in range(replicas)]
        op.batch_reduce([fed, fed], devices_of(replicas), **options)
        added = [node for node in graph.as_graph_def().node if node.op in ("AddN", "AddV2")]
    return [int(node.device[-1]) for node in added], [len(node.input) for node in added]


def test_one_device_adds_all_values_up_where_it_is_told_to_or_else_at_the_first_destination():
    assert devices_that_add(ReductionToOneDevice("/device:CPU:3"), 2) == ([3, 3], [2, 2])
    assert devices_that_add(ReductionToOneDevice(), 3, destinations=["/device:CPU:1"]) == ([1, 1], [3, 3])


def test_values_are_accumulated_by_the_function_that_is_given():
    op = ReductionToOneDevice(accumulation_fn=lambda values: tf.reduce_max(tf.stack(values), axis=0))
    values = [np.array([1.0, 5.0]), np.array([4.0, -2.0])]
    results = run_locally(2, values, lambda collectives, fed: op.reduce(fed, devices_of(2)))
    assert [result.tolist() for result in results] == [[4.0, 5.0]] * 2


def test_a_tree_adds_neighbours_first_and_each_pack_has_another_root():
    assert devices_that_add(HierarchicalCopyAllReduce(), 5) == ([0, 2, 0, 0], [2, 2, 2, 2])
    added, _ = devices_that_add(HierarchicalCopyAllReduce(3), 4)
    assert added == [0, 2, 0, 1, 3, 1, 2, 0, 2]


def made_by(op, count, size=100):
    collectives = Collectives(kernel_programs.topology(2), 1)
    with tf.Graph().as_default():
        batch = [[tf.compat.v1.placeholder(tf.float32, [size]) for _ in range(2)] for _ in range(count)]
        op(collectives).batch_reduce(batch, devices_of(2))
    return len(collectives.made)


@pytest.mark.parametrize(
    ("bytes_per_pack", "size", "count", "collectives"),
    [(0, 100, 5, 1), (400, 100, 5, 5), (800, 100, 5, 3), (799, 100, 5, 5), (128, 100, 2, 8), (0, 300_000, 2, 2)],
)
def test_a_batch_is_packed_as_far_as_buffers_hold_it_and_larger_values_are_cut(
    bytes_per_pack, size, count, collectives
):
    assert made_by(lambda made: CollectiveAllReduce(made, bytes_per_pack=bytes_per_pack), count, size) == collectives


def test_local_replicas_that_are_added_up_before_need_no_collective_of_one_worker():
    assert made_by(lambda made: CollectiveAllReduce(made, local=ReductionToOneDevice()), 3) == 0


@pytest.mark.parametrize("op", WITHIN_WORKER.values(), ids=WITHIN_WORKER)
def test_a_value_of_unknown_shape_is_reduced_by_itself_where_no_collective_is_needed(op):
    with tf.Graph().as_default() as graph:
        fed = [tf.compat.v1.placeholder(tf.float32, [None]) for _ in range(3)]
        results = op(Collectives(kernel_programs.topology(3), 1)).batch_reduce([fed], devices_of(3), reduction="mean")
    with kernel_programs.session(graph) as running:
        (copies,) = running.run(results, {one: np.full(4, index) for index, one in enumerate(fed)})
    assert [copy.tolist() for copy in copies] == [[1.0] * 4] * 3


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    op=st.sampled_from(list(OPS.values())),
    lengths=st.lists(st.integers(0, 4), min_size=2, max_size=5),
    axis=st.integers(-3, 2),
    dtype=st.sampled_from([*FLOATS, tf.int32, tf.bool, tf.int64]),
)
def test_a_gather_puts_the_replicas_tensors_together_along_an_axis(op, lengths, axis, dtype):
    rng = np.random.default_rng(sum(lengths))
    values = []
    for length in lengths:
        shape = [2, 3, 2]
        shape[axis] = length
        values.append(rng.integers(0, 9, size=shape).astype(dtype.as_numpy_dtype))
    results = run_locally(
        len(lengths), values, lambda made, fed: op(made).gather(fed, devices_of(len(lengths)), axis=axis)
    )
    assert len(results) == len(lengths)
    for result in results:
        np.testing.assert_array_equal(result, np.concatenate(values, axis=axis))


@each_op
def test_a_broadcast_is_the_value_on_each_destination(op):
    def body(collectives, fed):
        copies = op(collectives).broadcast(fed[0], devices_of(4))
        assert [copy.device for copy in copies] == devices_of(4)
        return copies

    for copy in run_locally(2, [np.array([1.5, -0.0])], body):
        assert copy.tobytes() == np.array([1.5, -0.0]).tobytes()
