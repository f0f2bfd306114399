"""Collectives of real workers with several replicas each equal numpy's, and are the same on all of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.kernel.collectives.collectives import Collectives
from tests.support import kernel_programs
from tests.support.cluster_pool import UNEVEN_WORKERS, Cluster, Shape
from tests.support.reductions import assert_summed, devices_of, one_of_each

EVEN_WORKERS = Shape("2-workers-2+2-replicas", (2, 2))
on_workers = pytest.mark.parametrize(
    "cluster",
    [UNEVEN_WORKERS, pytest.param(EVEN_WORKERS, marks=pytest.mark.slow)],
    ids=lambda shape: shape.name,
    indirect=True,
    scope="module",
)
COUNTS = ([3, 0, 2, 1], [0, 0, 5, 0], [0, 0, 0, 0])


def on_worker(replicas: Sequence[int], method: str, values: Any, **arguments: Any) -> list[Any]:
    """What the collective makes of this worker's part of `values`, which are for each value one per member."""
    from autodist_py import tf_adapter
    from autodist_py.cluster.member import WorkerCluster
    from autodist_py.kernel.collectives.rows import gathered_rows

    cluster = WorkerCluster.of_process
    assert cluster is not None
    collectives = Collectives(kernel_programs.topology(*replicas, worker=cluster.rank), cluster.next_instance_key)
    members = replicas if arguments.get("is_each") else [1] * len(replicas)
    first = sum(members[: cluster.rank])
    own = [[tf.constant(one) for one in copies[first : first + members[cluster.rank]]] for copies in values]
    devices = devices_of(members[cluster.rank])

    def body(inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        batch = tf.nest.pack_sequence_as(own, inputs)
        if method == "sum_of_members":
            results = [collectives.sum_of_members(copies, devices, hint="ring", **arguments) for copies in batch]
        elif method == "rows":
            results = [[gathered_rows(copies[0], collectives)] for copies in batch]
        else:
            results = [[getattr(collectives, method)(copies[0])] for copies in batch]
        return tf.nest.flatten(results)

    flat = tf.nest.flatten(own)
    run = tf_adapter.traced_function("collectives", [tf.TensorSpec(one.shape, one.dtype) for one in flat], body)
    for _ in range(2):  # A key stands for what it stood for in the first run.
        results = run(flat)
    cluster.next_instance_key = collectives.next_key
    return tf.nest.pack_sequence_as(own, [one.numpy() for one in results])


def everywhere(cluster: Cluster, method: str, values: Any, **arguments: Any) -> list[list[Any]]:
    """For each of `values` what all members of the cluster have."""
    found = cluster.run(on_worker, replicas=cluster.shape.replicas, method=method, values=values, **arguments)
    return [[copy for copies in of_worker for copy in copies] for of_worker in zip(*found, strict=True)]


@pytest.mark.parametrize("most", [1 << 20, 64], ids=["whole", "in-pieces"])
@pytest.mark.parametrize("is_each", [True, False], ids=["replicas", "workers"])
@on_workers
def test_the_values_of_all_members_are_summed(cluster, is_each, most):
    members = cluster.shape.num_replicas if is_each else cluster.shape.num_workers
    batch = one_of_each(members)
    for copies, values in zip(
        everywhere(cluster, "sum_of_members", batch, is_each=is_each, most=most), batch, strict=True
    ):
        assert len(copies) == members
        assert_summed(copies, values)


@on_workers
def test_the_rows_of_all_workers_are_gathered_whatever_number_one_has(cluster):
    rng = np.random.default_rng(0)
    kinds = (np.float32, tf.bfloat16.as_numpy_dtype, np.int8, np.uint16, np.int32, np.uint64, bool, np.complex64)
    values = [
        [rng.integers(0, 9, size=(count, 2)).astype(kind) for count in counts[: cluster.shape.num_workers]]
        for kind in (*kinds, np.complex128)
        for counts in COUNTS
    ]
    for copies, parts in zip(everywhere(cluster, "rows", values), values, strict=True):
        for copy in copies:
            assert copy.dtype == parts[0].dtype
            np.testing.assert_array_equal(copy, np.concatenate(parts))


@on_workers
def test_the_first_workers_value_is_broadcast_bit_by_bit(cluster):
    kinds = (np.float32, tf.bfloat16.as_numpy_dtype, np.float16, np.float64, np.int32, np.int64, np.uint8, bool)
    workers = range(cluster.shape.num_workers)
    values = [[np.array([-0.0, 3 + worker, 1]).astype(kind) for worker in workers] for kind in kinds]
    values += [[np.zeros(shape) + worker for worker in workers] for shape in ((), (0, 2))]
    for copies, parts in zip(everywhere(cluster, "broadcast", values), values, strict=True):
        for copy in copies:
            assert (copy.dtype, copy.shape, copy.tobytes()) == (parts[0].dtype, parts[0].shape, parts[0].tobytes())


@pytest.mark.parametrize(("most", "collectives"), [(100, 1), (99, 2), (32, 4), (1 << 20, 1)])
def test_what_is_larger_than_a_collective_may_be_is_cut(most, collectives):
    made = Collectives(kernel_programs.topology(2), 1)
    with tf.Graph().as_default():
        members = [tf.compat.v1.placeholder(tf.float32, [100]) for _ in range(2)]
        made.sum_of_members(members, devices_of(2), hint="ring", is_each=True, most=most)
    assert len(made.made) == collectives


@pytest.mark.parametrize("hint", ["ring", "nccl"])
@pytest.mark.parametrize("is_each", [True, False])
def test_the_engine_of_a_collective_is_the_one_that_is_asked_for(is_each, hint):
    count = 2 if is_each else 1
    with tf.Graph().as_default() as graph:
        members = [tf.compat.v1.placeholder(tf.float32, [4]) for _ in range(count)]
        made = Collectives(kernel_programs.topology(2, 2), 1)
        made.sum_of_members(members, devices_of(count), hint=hint, is_each=is_each, most=9)
    hints = [node.attr["communication_hint"].s for node in graph.as_graph_def().node if "Collective" in node.op]
    assert [one for one in hints if one] == [hint.encode()] * count


def test_all_workers_make_the_same_collectives_in_the_same_order():
    def made(worker):
        topology = kernel_programs.topology(2, 1, 3, worker=worker)
        count = len(topology.local_replicas)
        collectives = Collectives(topology, 7)
        with tf.Graph().as_default() as graph:
            for kind in (tf.float32, tf.int32):
                members = [tf.compat.v1.placeholder(kind, [60]) for _ in range(count)]
                collectives.sum_of_members(members, devices_of(count), hint="ring", is_each=True, most=32)
            collectives.gather_rows([tf.compat.v1.placeholder(tf.float32, [None])])
            collectives.broadcast(members[0])

        def described(name):
            op = graph.get_operation_by_name(name)
            keys = [tf.get_static_value(source) for source in op.inputs if source.op.type == "Const"]
            return op.type.replace("Recv", "").replace("Send", ""), [int(key) for key in keys if np.ndim(key) == 0]

        assert all(len({str(described(name)) for name in one.ops}) == 1 for one in collectives.made)
        return [described(one.ops[0]) for one in collectives.made], collectives.next_key

    first = made(0)
    assert made(1) == first
    assert made(2) == first
    assert len(first[0]) == 2 * 2 + 2 + 1
