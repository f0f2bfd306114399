"""Reductions over real workers with several replicas each equal numpy's of all replicas' values."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import kernel_programs
from tests.support.cluster_pool import UNEVEN_WORKERS, Cluster, Shape
from tests.support.reductions import (
    FLOATS,
    OVER_WORKERS,
    assert_reduced,
    assert_rows,
    devices_of,
    is_float,
    one_of_each,
    rows_of_each,
)

EVEN_WORKERS = Shape("2-workers-2+2-replicas", (2, 2))
on_workers = pytest.mark.parametrize(
    "cluster",
    [UNEVEN_WORKERS, pytest.param(EVEN_WORKERS, marks=pytest.mark.slow)],
    ids=lambda shape: shape.name,
    indirect=True,
    scope="module",
)
each_op = pytest.mark.parametrize("op", OVER_WORKERS)
COUNTS = ([3, 0, 2, 1], [0, 0, 5, 0], [0, 0, 0, 0])


def on_worker(replicas: Sequence[int], method: str, op: str, values: Any, **arguments: Any) -> list[Any]:
    """What the op makes of this worker's part of `values`, one per replica of the cluster, for each of its replicas.

    Where `values` is a list of lists it is a batch of such; a pair is indices and rows of a sparse value.
    """
    from autodist_py import tf_adapter
    from autodist_py.cluster.member import WorkerCluster
    from autodist_py.kernel.collectives.collectives import Collectives

    cluster = WorkerCluster.of_process
    assert cluster is not None
    topology = kernel_programs.topology(*replicas, worker=cluster.rank)
    first = sum(replicas[: cluster.rank])
    own = tf.nest.map_structure(
        tf.constant, [copies[first : first + replicas[cluster.rank]] for copies in values], expand_composites=True
    )
    collectives = Collectives(topology, cluster.next_instance_key)
    devices = devices_of(len(topology.local_replicas))
    shapes: list[Any] = []

    def body(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        batch = [
            [tf.IndexedSlices(one[1], one[0]) if isinstance(one, tuple) else one for one in copies]
            for copies in tf.nest.pack_sequence_as(own, inputs)
        ]
        made = OVER_WORKERS[op](collectives)
        if method == "batch_reduce":
            results = made.batch_reduce(batch, devices, **arguments)
        elif method == "broadcast":
            results = [made.broadcast(copies[0], devices) for copies in batch]
        else:
            results = [getattr(made, method)(copies, devices, **arguments) for copies in batch]
        results = [
            [(one.indices, one.values) if isinstance(one, tf.IndexedSlices) else one for one in copies]
            for copies in results
        ]
        shapes.append(results)
        return tf.nest.flatten(results)

    flat = tf.nest.flatten(own)
    specs = [tf.TensorSpec(value.shape, value.dtype) for value in flat]
    run = tf_adapter.traced_function("reductions", specs, body)
    for _ in range(2):  # A key stands for what it stood for in the first run.
        results = run(flat)
    cluster.next_instance_key = collectives.next_key
    return tf.nest.pack_sequence_as(shapes[0], [one.numpy() for one in results])


def everywhere(cluster: Cluster, method: str, op: str, values: Any, **arguments: Any) -> list[list[Any]]:
    """For each of `values` what all replicas of the cluster have."""
    replicas = cluster.shape.replicas
    found = cluster.run(on_worker, replicas=replicas, method=method, op=op, values=values, **arguments)
    return [[copy for copies in of_worker for copy in copies] for of_worker in zip(*found, strict=True)]


@pytest.mark.parametrize("method", ["reduce", "batch_reduce"])
@each_op
@on_workers
def test_values_of_all_workers_are_reduced(cluster, op, method):
    for kind in ("sum", "mean"):
        batch = one_of_each(cluster.shape.num_replicas)
        batch = [values for values in batch if kind == "sum" or is_float(values[0])]
        for copies, values in zip(everywhere(cluster, method, op, batch, reduction=kind), batch, strict=True):
            assert len(copies) == cluster.shape.num_replicas
            assert_reduced(copies, values, kind)


@each_op
@on_workers
def test_rows_of_all_workers_are_gathered_whatever_number_a_replica_has(cluster, op):
    for kind in ("sum", "mean"):
        types = [*FLOATS, *([tf.int32] if kind == "sum" else [])]
        rows = [
            rows_of_each(counts[: cluster.shape.num_replicas], dtype, width=width)
            for dtype, counts in [(dtype, COUNTS[position % 3]) for position, dtype in enumerate(types)]
            for width in (2, 0)
        ] + [rows_of_each(counts[: cluster.shape.num_replicas], tf.float32) for counts in COUNTS]
        for copies, parts in zip(everywhere(cluster, "reduce", op, rows, reduction=kind), rows, strict=True):
            assert len(copies) == cluster.shape.num_replicas
            assert_rows(copies, parts, kind)


@pytest.mark.parametrize("axis", [0, -1])
@on_workers
def test_tensors_of_different_lengths_are_gathered_along_an_axis(cluster, axis):
    rng = np.random.default_rng(0)
    values = []
    kinds = (np.float32, tf.bfloat16.as_numpy_dtype, np.int8, np.uint16, np.int32, np.uint64, bool, np.complex64)
    for kind in (*kinds, np.complex128):
        for counts in COUNTS:
            shapes = [(count, 2) if axis == 0 else (2, 3, count) for count in counts[: cluster.shape.num_replicas]]
            values.append([rng.integers(0, 9, size=shape).astype(kind) for shape in shapes])
    for copies, parts in zip(everywhere(cluster, "gather", "ring", values, axis=axis), values, strict=True):
        for copy in copies:
            assert copy.dtype == parts[0].dtype
            np.testing.assert_array_equal(copy, np.concatenate(parts, axis=axis))


@on_workers
def test_the_first_workers_value_is_broadcast_bit_by_bit(cluster):
    kinds = (np.float32, tf.bfloat16.as_numpy_dtype, np.float16, np.float64, np.int32, np.int64, np.uint8, bool)
    replicas = range(cluster.shape.num_replicas)
    values = [[np.array([-0.0, 3 + replica, 1]).astype(kind) for replica in replicas] for kind in kinds]
    values += [[np.zeros(shape) + replica for replica in replicas] for shape in ((), (0, 2))]
    for copies, parts in zip(everywhere(cluster, "broadcast", "ring", values), values, strict=True):
        for copy in copies:
            assert (copy.dtype, copy.shape, copy.tobytes()) == (parts[0].dtype, parts[0].shape, parts[0].tobytes())


@each_op
@on_workers
def test_results_for_one_destination_need_no_other_replicas_result(cluster, op):
    values = one_of_each(cluster.shape.num_replicas, seed=2)
    found = everywhere(cluster, "batch_reduce", op, values, destinations="/device:CPU:0")
    for copies, parts in zip(found, values, strict=True):
        assert len(copies) == cluster.shape.num_workers
        assert_reduced(copies, parts, "sum")
