"""What reductions refuse, what is used instead, and that all workers make the same collectives."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.kernel.collectives.collective_all_reduce import CollectiveAllReduce
from autodist_py.kernel.collectives.collectives import Collectives
from autodist_py.kernel.collectives.hierarchical_copy import HierarchicalCopyAllReduce
from autodist_py.kernel.collectives.nccl import NcclAllReduce
from autodist_py.kernel.collectives.to_one_device import ReductionToOneDevice
from autodist_py.kernel.topology import Replica, Topology, is_gpu
from autodist_py.proto.errors import StrategyError
from tests.support import kernel_programs
from tests.support.reductions import OPS, devices_of

each_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
GPUS = ["/device:GPU:0", "/device:GPU:1"]
UNKNOWN: Any = "MPI"
ROWS = "rows"
"""Stands for a sparse value where a test gives values that are made in its graph."""


def on_gpus(*replicas_of_worker: int) -> Topology:
    replicas = [(rank, index) for rank, count in enumerate(replicas_of_worker) for index in range(count)]
    return Topology(
        0, tuple(Replica(number, rank, f"/device:GPU:{index}") for number, (rank, index) in enumerate(replicas))
    )


def rows():
    return tf.IndexedSlices(tf.ones([3, 2]), tf.range(3))


def refused(op, values, *, replicas=2, method="reduce", **arguments):
    with tf.Graph().as_default(), pytest.raises(StrategyError) as raised:
        made = op(Collectives(kernel_programs.topology(replicas), 1)) if callable(op) else op
        values = [rows() if value is ROWS else tf.constant(value) for value in values]
        if method == "batch_reduce":
            values = [[tf.ones([2])] * replicas, values]
        getattr(made, method)(values, devices_of(replicas), **arguments)
    return str(raised.value)


@pytest.mark.parametrize(
    ("values", "arguments", "message"),
    [
        ([], {}, "there is a value for each device; got 0 values for 2 devices (/device:CPU:0, /device:CPU:1); give o"),
        ([np.ones(2)] * 3, {}, "there is a value for each device; got 3 values for 2 devices"),
        (
            [np.ones(2), ROWS],
            {},
            "all dense or all sparse; got SymbolicTensor, IndexedSlices; make the sparse ones dense",
        ),
        ([np.ones(2), np.ones(2, int)], {}, "are of one type; got float64, int64; cast them"),
        ([np.ones((2, 3)), np.ones((3, 2))], {}, "of one reduction are of one shape; got (2, 3), (3, 2); reshape them"),
        ([np.ones(2, int)] * 2, {"reduction": "mean"}, "a mean is of floats; got int64; cast the values, or reduce th"),
        ([np.ones(2)] * 2, {"reduction": "max"}, "a reduction is 'sum' or 'mean'; got 'max'"),
        ([np.ones(2)] * 2, {"destinations": []}, "delivered to a device at least; got no destinations; None means all"),
    ],
)
@pytest.mark.parametrize("method", ["reduce", "batch_reduce"])
@each_op
def test_values_that_do_not_go_together_are_refused(op, method, values, arguments, message):
    assert message in refused(op, values, method=method, **arguments)


@pytest.mark.parametrize(
    ("values", "axis", "message"),
    [
        (
            [np.ones(()), np.ones(())],
            0,
            "that have it; got axis 0 and shape (); set the shape, or give scalars a dimen",
        ),
        ([np.ones((1, 2))] * 2, 2, "got axis 2 and shape (1, 2)"),
        ([np.ones((1, 2))] * 2, -3, "got axis -3 and shape (1, 2)"),
        ([np.ones(1), np.ones(1, int)], 0, "are of one type; got float64, int64; cast them"),
    ],
)
@each_op
def test_what_has_no_such_axis_is_not_gathered(op, values, axis, message):
    assert message in refused(op, values, method="gather", axis=axis)


@each_op
def test_rows_are_not_gathered_but_reduced(op):
    assert "a gather takes tensors; got tf.IndexedSlices; reduce them" in refused(op, [ROWS, ROWS], method="gather")


def test_a_function_of_ones_own_accumulates_no_rows():
    message = refused(ReductionToOneDevice(accumulation_fn=tf.add_n), [ROWS, ROWS])
    assert "an accumulation_fn is for tensors" in message
    assert "got tf.IndexedSlices; reduce these by a ReductionToOneDevice without one" in message


def test_collectives_refuse_what_they_do_not_carry_and_devices_of_others():
    strings, ones = ["a"] * 2, [np.ones(2)] * 3
    assert "carry bfloat16, float16, float32, float64, int32, int64; got string; cast" in refused(
        CollectiveAllReduce, strings
    )
    assert (
        "over the replicas of its topology, here on /device:CPU:0, /device:CPU:1; got values on /device:CPU:0, /devi"
        in (refused(lambda _: CollectiveAllReduce(Collectives(kernel_programs.topology(2), 1)), ones, replicas=3))
    )
    with tf.Graph().as_default():
        unknown = [tf.compat.v1.placeholder(tf.float32, [None, 2]) for _ in range(2)]
        made = CollectiveAllReduce(Collectives(kernel_programs.topology(2), 1))
        with pytest.raises(StrategyError, match=r"static shapes.* got \(None, 2\), \(None, 2\); set the shapes"):
            made.reduce(unknown, devices_of(2))
        with pytest.raises(StrategyError, match=r"static but for the axis; got float32, \(None, .*\), axis 1"):
            made.gather(unknown, devices_of(2), axis=1)
        with pytest.raises(StrategyError, match=r"a broadcast carries .*; got float32, \(None, 2\); cast the value"):
            made.broadcast(unknown[0], devices_of(2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HierarchicalCopyAllReduce(-1), "num_packs of HierarchicalCopyAllReduce is 0 .* got -1; use 1"),
        (lambda: NcclAllReduce(-2), "num_packs of NcclAllReduce is 0 .* got -2; use 1"),
        (lambda: CollectiveAllReduce(Collectives(kernel_programs.topology(2), 1), bytes_per_pack=-1), "got -1; use 0"),
        (
            lambda: CollectiveAllReduce(Collectives(kernel_programs.topology(2), 1), UNKNOWN),
            "is RING, NCCL, HOROVOD; got 'MPI'",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(make, message):
    with pytest.raises(StrategyError, match=message):
        make()


@pytest.mark.parametrize("method", ["reduce", "batch_reduce"])
@pytest.mark.parametrize("op", [lambda _: NcclAllReduce(), lambda made: CollectiveAllReduce(made, "NCCL")])
def test_nccl_is_refused_on_cpus(op, method):
    message = refused(op, [np.ones(2, np.float32)] * 2, method=method)
    assert "runs on GPUs only; got /device:CPU:0, /device:CPU:1; use " in message


def nodes_on_gpus(op, method, values, **arguments):
    with tf.Graph().as_default() as graph:
        getattr(op, method)(values(), GPUS, **arguments)
    return graph.as_graph_def().node


def tensors(dtype=tf.float32):
    return [tf.compat.v1.placeholder(dtype, [100]) for _ in GPUS]


def test_nccl_reduces_between_all_gpus_and_batches_in_packs():
    nodes = [
        node
        for node in nodes_on_gpus(NcclAllReduce(2), "batch_reduce", lambda: [tensors(), tensors()])
        if node.op == "NcclAllReduce"
    ]
    names = [node.attr["shared_name"].s for node in nodes]
    assert [node.device for node in nodes] == GPUS * 2
    assert names[0] == names[1] != names[2] == names[3]
    assert {(node.attr["num_devices"].i, node.attr["reduction"].s) for node in nodes} == {(2, b"sum")}


def test_what_is_no_all_reduce_of_tensors_takes_copies_not_nccl():
    to_one = nodes_on_gpus(NcclAllReduce(), "reduce", tensors, destinations="/device:GPU:0")
    sparse = nodes_on_gpus(NcclAllReduce(), "reduce", lambda: [rows(), rows()])
    assert {node.op for node in (*to_one, *sparse)} & {"NcclAllReduce", "AddN", "ConcatV2"} == {"AddN", "ConcatV2"}
    with pytest.raises(StrategyError, match="carries float16, float32, float64, int32, int64; got bfloat16; cast"):
        nodes_on_gpus(NcclAllReduce(), "reduce", lambda: tensors(tf.bfloat16))


def test_the_engine_of_a_collective_is_the_one_that_is_asked_for():
    for local in (None, ReductionToOneDevice()):
        op = CollectiveAllReduce(Collectives(on_gpus(2, 2), 1), "NCCL", local)
        nodes = nodes_on_gpus(op, "reduce", tensors)
        hints = [node.attr["communication_hint"].s for node in nodes if node.op == "CollectiveReduceV2"]
        assert hints == [b"nccl"] * (1 if local else 2)


def test_nccl_waits_for_all_results_where_one_is_wanted():
    nodes = nodes_on_gpus(NcclAllReduce(), "on_first", tensors)
    sums = [node.name for node in nodes if node.op == "NcclAllReduce"]
    (first,) = (node for node in nodes if node.op == "Identity")
    assert [name.removeprefix("^") for name in first.input] == sums
    assert len(sums) == len(GPUS)
    assert first.device == GPUS[0]


def test_an_operation_is_shown_without_the_collectives_that_it_uses():
    collectives = Collectives(on_gpus(2, 1), 1)
    assert str(CollectiveAllReduce(collectives)) == (
        "CollectiveAllReduce(implementation='RING', local=None, bytes_per_pack=0)"
    )


def test_a_gpu_is_known_by_each_of_its_names():
    gpus = ["/device:GPU:0", "/job:worker/replica:0/task:1/device:GPU:1", "GPU:3", "/gpu:0", "10.0.0.1:GPU:0"]
    assert [is_gpu(device) for device in gpus] == [True] * len(gpus)
    assert [is_gpu(device) for device in ["/device:CPU:0", "/cpu:1", "GPU.example.org:CPU:0", ""]] == [False] * 4


@pytest.mark.parametrize("local", [None, HierarchicalCopyAllReduce()])
def test_all_workers_make_the_same_collectives_in_the_same_order(local):
    def made(worker):
        topology = kernel_programs.topology(2, 1, 3, worker=worker)
        collectives = Collectives(topology, 7)
        count = len(topology.local_replicas)
        with tf.Graph().as_default() as graph:
            made = CollectiveAllReduce(collectives, local=local, bytes_per_pack=200)
            dense = [[tf.compat.v1.placeholder(kind, [60]) for _ in range(count)] for kind in (tf.float32, tf.int32)]
            rows = [
                tf.IndexedSlices(*(tf.compat.v1.placeholder(kind, [None]) for kind in (tf.float32, tf.int64)))
                for _ in range(count)
            ]
            made.batch_reduce([dense[0], rows, dense[1]], devices_of(count))
            made.gather(dense[0], devices_of(count))
            made.broadcast(dense[0][0], devices_of(count))

        def described(name):
            op = graph.get_operation_by_name(name)
            keys = [tf.get_static_value(source) for source in op.inputs if source.op.type == "Const"]
            return op.type.replace("Recv", "").replace("Send", ""), [int(key) for key in keys if np.ndim(key) == 0]

        assert all(len({str(described(name)) for name in one.ops}) == 1 for one in collectives.made)
        return [described(one.ops[0]) for one in collectives.made], collectives.next_key

    first = made(0)
    assert made(1) == first
    assert made(2) == first
    assert len(first[0]) == 2 * 2 + 2 + 2 + 1
