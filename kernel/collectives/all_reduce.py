"""AllReduce: every replica gets the combined gradient, and computes the same update of its own copy.

Dense gradients that travel together (`groups.py` says which) are laid into one buffer, weighted, reduced and split. A
gradient that is larger than a buffer is reduced in pieces, or whole by Horovod.

Sparse gradients are gathered: the rows of all replicas, in replica order, with each replica's values weighted. Of one
lookup these are the rows of one device, in its order; of several lookups in one table, the same rows grouped by
replica. A worker adds up its rows of one index before it sends them where that makes no difference to the update.
There they may travel as a dense gradient instead (`sparse_as_dense.py`). Rows that all replicas have are added up, as
dense gradients are, and of indices that are distinct in the whole batch each comes once.
"""

from collections.abc import Sequence
from typing import Literal, cast

import tensorflow as tf

from autodist_py.kernel.analysis.replica_weights import (
    batch_specs,
    joined_rows,
    raw_gradient,
    replica_weights,
    sum_duplicates,
    summed_as,
    weighted,
)
from autodist_py.kernel.analysis.row_access import adds_rows_up
from autodist_py.kernel.collectives import sparse_as_dense
from autodist_py.kernel.collectives.buckets import reduce_pack
from autodist_py.kernel.collectives.collective_all_reduce import CollectiveAllReduce
from autodist_py.kernel.collectives.collectives import Collectives, on_each
from autodist_py.kernel.collectives.members import is_coded, is_local_first
from autodist_py.kernel.collectives.to_one_device import ReductionToOneDevice
from autodist_py.kernel.compressors.codec import Wire
from autodist_py.kernel.compressors.coding import Coding
from autodist_py.kernel.compressors.rounding import rounded, travelling
from autodist_py.kernel.events import GatherRows, ReduceGradients
from autodist_py.kernel.ir.fragment import Fragment, TensorSpec, trace
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import on_replica
from autodist_py.kernel.ir.state import Recorder
from autodist_py.kernel.program import Program


def combine(
    program: Program, event: ReduceGradients, view: GraphView, collectives: Collectives, recorder: Recorder
) -> Fragment:
    """The ops that combine the event's gradients over all replicas; `view` is of the program's graph.

    What the compressor keeps from step to step is `recorder`'s.

    The fragment's outputs are, for each gradient and then each output, for each local replica, the combined tensors:
    indices, values and dense shape of a sparse gradient; else one.
    """
    replicas = range(program.num_local_replicas)
    raw = [[raw_gradient(program, gradient, view, replica) for replica in replicas] for gradient in event.gradients]
    carried = [
        [[TensorSpec(on_replica(replica, output.tensor), event.dtype, output.shape)] for replica in replicas]
        for output in event.outputs
    ]

    def reduce(batch: Sequence[tf.Tensor], values: list[list[list[tf.Tensor]]]) -> list[list[list[tf.Tensor]]]:
        with tf.device(program.topology.host):
            weights = replica_weights(program, batch, event.reduction)
        if isinstance(event, GatherRows):
            return [_reduce_sparse(program, event, values[0], weights, collectives)]
        devices = [replica.device for replica in program.topology.local_replicas]
        rows = {position: gradient for position, gradient in enumerate(event.gradients) if gradient.is_sparse}
        dense = [[tensors[0] for tensors in copies] for copies in values]
        for position, gradient in rows.items():
            dense[position] = sparse_as_dense.as_dense(program, gradient, values[position], devices)
        if is_coded(program, event.gradients):
            combined = _reduce_coded(program, event, dense, weights, collectives, recorder)
        else:
            combined = _reduce_dense(program, event, dense, weights, collectives)
        for position, gradient in rows.items():
            combined[position] = sparse_as_dense.as_rows(
                program, gradient, values[position], combined[position], devices
            )
        return combined

    return trace(reduce, [batch_specs(program), raw + carried], scope=event.scope)


def _reduce_dense(
    program: Program,
    event: ReduceGradients,
    values: Sequence[Sequence[tf.Tensor]],
    weights: Sequence[tf.Tensor],
    collectives: Collectives,
) -> list[list[list[tf.Tensor]]]:
    devices = [replica.device for replica in program.topology.local_replicas]
    operation = _operation(program, event, collectives)
    reduced = reduce_pack(
        values, devices, devices, lambda buffers: operation.reduce(_weighted(buffers, weights, devices), devices)
    )
    return [
        [[tf.cast(tensor, own.dtype)] for own, tensor in zip(raw, copies, strict=True)]
        for raw, copies in zip(values, reduced, strict=True)
    ]


def _operation(program: Program, event: ReduceGradients, collectives: Collectives) -> CollectiveAllReduce:
    """What reduces dense tensors."""
    engine = event.engine if event.travels else "RING"
    adds_up = is_local_first(event.synchronizer, coded=is_coded(program, event.gradients))
    return CollectiveAllReduce(
        collectives,
        implementation=cast(Literal["RING", "NCCL", "HOROVOD"], engine),
        local=ReductionToOneDevice() if adds_up else None,
        bytes_per_pack=event.synchronizer.bytes_per_pack,
    )


def _reduce_coded(
    program: Program,
    event: ReduceGradients,
    gradients: Sequence[Sequence[tf.Tensor]],
    weights: Sequence[tf.Tensor],
    collectives: Collectives,
    recorder: Recorder,
) -> list[list[list[tf.Tensor]]]:
    """As `_reduce_dense`: local replicas are added up, and what leaves the worker is coded."""
    topology = collectives.topology
    devices = [replica.device for replica in topology.local_replicas]
    between = _operation(program, event, collectives)
    wire = Wire(
        topology.workers.index(topology.worker), collectives.num_workers, lambda value: between.sums([value])[0]
    )
    shares = []
    for weight, device in zip(weights, devices, strict=True):  # Cast once for all gradients.
        with tf.device(device):
            shares.append(tf.cast(weight, summed_as(event.dtype)))
    with tf.device(devices[0]):
        parts = [_weighted(copies, shares, devices) for copies in gradients]
        if len(devices) > 1:
            parts = ReductionToOneDevice().batch_reduce(parts, devices, destinations=devices[:1])
        own = [tf.cast(copies[0], event.dtype) for copies in parts]
        coding = Coding(program, event.compressor, event.gradients, event.dtype, recorder)
        sent, states = coding.compress(own, wire)
        travelled = collectives.gather(sent) if event.compressor.gathers else wire.total(sent)
        totals, after = coding.decompress(travelled, states, wire)
        coding.keep(after, after=[travelled])
    return [[[copy] for copy in on_each(total, devices)] for total in totals]


def _weighted(copies: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    parts = []
    for copy, weight, device in zip(copies, weights, devices, strict=True):
        with tf.device(device):
            parts.append(weighted(copy, weight))
    return parts


def _reduce_sparse(
    program: Program,
    event: ReduceGradients,
    gradients: Sequence[Sequence[tf.Tensor]],
    weights: Sequence[tf.Tensor],
    collectives: Collectives,
) -> list[list[tf.Tensor]]:
    replicas = program.topology.local_replicas
    (gradient,) = event.gradients
    parts = []
    for replica, (indices, values, _), weight in zip(replicas, gradients, weights, strict=True):
        with tf.device(replica.device):
            parts.append((indices, weighted(values, weight)))
    with tf.device(replicas[0].device):
        dtype, travels = gradients[0][1].dtype, collectives.num_workers > 1
        sums_before = travels and gradient.indices != "same" and adds_rows_up(program, gradient)
        sums = program.options.sum_duplicates or sums_before
        indices, values = joined_rows(gradient, parts, sums=sums)
        if travels:
            half = travelling(event.compressor, dtype)
            if gradient.indices == "same":
                sent = values if half == dtype else rounded(values, half, collectives.num_workers)
                values = collectives.sum_rows(sent)
            else:
                indices, values = collectives.gather_rows([indices, rounded(values, half, 1)])
                if program.options.sum_duplicates or gradient.indices == "distinct":
                    indices, values = sum_duplicates(indices, tf.cast(values, dtype))
        values = tf.cast(values, dtype)
    combined = []
    shape = program.item.variable(gradient.variable).shape  # A branch that was not taken has no other.
    for replica, (_, _, dense_shape) in zip(replicas, gradients, strict=True):
        with tf.device(replica.device):
            combined.append([tf.identity(indices), tf.identity(values), tf.constant(shape, dense_shape.dtype)])
    return combined
