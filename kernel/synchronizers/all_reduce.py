"""AllReduce: every replica gets the combined gradient, and computes the same update of its own copy.

Dense gradients that travel together (`grouping.py` says which) are laid into one buffer, weighted, reduced and split. A
gradient that is larger than a buffer is reduced in pieces, or whole by Horovod.

Sparse gradients are gathered: the rows of all replicas, in replica order, with each replica's values weighted. Of one
lookup these are the rows of one device, in its order; of several lookups in one table, the same rows grouped by
replica. A worker adds up its rows of one index before it sends them where that makes no difference to the update.
There they may travel as a dense gradient instead (`densifying.py`). Rows that all replicas have are added up, as dense
gradients are, and of indices that are distinct in the whole batch each comes once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

import tensorflow as tf

from autodist_py.kernel.compressors.codec import Wire
from autodist_py.kernel.compressors.rounding import rounded, travelling
from autodist_py.kernel.cross_device_ops.choice import fitting
from autodist_py.kernel.cross_device_ops.collective import Collectives, on_each
from autodist_py.kernel.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from autodist_py.kernel.cross_device_ops.copying import ReductionToOneDevice
from autodist_py.kernel.cross_device_ops.packs import reduce_pack
from autodist_py.kernel.fragment import Fragment, TensorSpec, trace
from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.memory import Recorder
from autodist_py.kernel.names import on_replica
from autodist_py.kernel.program import Program
from autodist_py.kernel.synchronizers import densifying
from autodist_py.kernel.synchronizers.coding import Coding, compressor_for
from autodist_py.kernel.synchronizers.grouping import LOCAL_FIRST, Group
from autodist_py.kernel.synchronizers.lookups import adds_rows_up
from autodist_py.kernel.weights import batch_specs, joined_rows, raw_gradient, replica_weights, sum_duplicates, weighted
from autodist_py.proto.errors import StrategyError

_ENGINES: Mapping[str, Literal["RING", "NCCL", "HOROVOD"]] = {
    "AUTO": "RING",
    "RING": "RING",
    "NCCL": "NCCL",
    "HOROVOD": "HOROVOD",
}
"""By spec. Where AUTO stands for another engine than RING, that is the spec (`autodist_py/engines.py`)."""


def combine(program: Program, group: Group, view: GraphView, collectives: Collectives, recorder: Recorder) -> Fragment:
    """The ops that combine `group` over all replicas; `view` is of the program's graph.

    What the compressor keeps from step to step is `recorder`'s.

    The fragment's outputs are, for each gradient and then each output, for each local replica, the combined tensors:
    indices, values and dense shape of a sparse gradient; else one.
    """
    replicas = range(program.num_local_replicas)
    raw = [[raw_gradient(program, gradient, view, replica) for replica in replicas] for gradient in group.gradients]
    carried = [
        [[TensorSpec(on_replica(replica, output.tensor), group.dtype, output.shape)] for replica in replicas]
        for output in group.outputs
    ]

    def reduce(batch: Sequence[tf.Tensor], values: list[list[list[tf.Tensor]]]) -> list[list[list[tf.Tensor]]]:
        with tf.device(program.place.host):
            weights = replica_weights(program, batch, group.reduction)
        if group.is_sparse:
            return [_reduce_sparse(program, group, values[0], weights, collectives)]
        devices = [replica.device for replica in program.place.local_replicas]
        rows = {position: gradient for position, gradient in enumerate(group.gradients) if gradient.is_sparse}
        dense = [[tensors[0] for tensors in copies] for copies in values]
        for position, gradient in rows.items():
            dense[position] = densifying.densified(program, gradient, values[position], devices)
        if _is_coded(program, group):
            combined = _reduce_coded(program, group, dense, weights, collectives, recorder)
        else:
            combined = _reduce_dense(program, group, dense, weights, collectives)
        for position, gradient in rows.items():
            combined[position] = densifying.as_rows(program, gradient, values[position], combined[position], devices)
        return combined

    return trace(reduce, [batch_specs(program), raw + carried], scope=group.scope)


def _reduce_dense(
    program: Program,
    group: Group,
    values: Sequence[Sequence[tf.Tensor]],
    weights: Sequence[tf.Tensor],
    collectives: Collectives,
) -> list[list[list[tf.Tensor]]]:
    devices = [replica.device for replica in program.place.local_replicas]
    operation = _operation(program, group, collectives)
    reduced = reduce_pack(
        values, devices, devices, lambda buffers: operation.reduce(_weighted(buffers, weights, devices), devices)
    )
    return [
        [[tf.cast(tensor, own.dtype)] for own, tensor in zip(raw, copies, strict=True)]
        for raw, copies in zip(values, reduced, strict=True)
    ]


def _operation(program: Program, group: Group, collectives: Collectives) -> CollectiveAllReduce:
    """What reduces dense tensors: with AUTO and HOROVOD local replicas are added up first, else each is a member.

    Raises:
        StrategyError: the engine that is asked for does not fit the devices, and nothing else may be used.
    """
    requested = CollectiveAllReduce(
        collectives,
        implementation=_ENGINES[group.synchronizer.spec],
        local=ReductionToOneDevice() if group.synchronizer.spec in LOCAL_FIRST else None,
        bytes_per_pack=group.synchronizer.bytes_per_pack,
    )
    everyone = [replica.device for replica in program.place.everyone]
    try:
        fits = fitting(requested, everyone, strict=program.options.strict).op
    except StrategyError as error:
        raise StrategyError(f"{group}: {error}, or AutoDist(strict=False), which does") from None
    return cast(CollectiveAllReduce, fits)  # Without NCCL it is another of its kind.


def _is_coded(program: Program, group: Group) -> bool:
    """Whether the group's gradients are coded: if one of them is."""
    return any(compressor_for(program, gradient) is not None for gradient in group.gradients)


def _reduce_coded(
    program: Program,
    group: Group,
    gradients: Sequence[Sequence[tf.Tensor]],
    weights: Sequence[tf.Tensor],
    collectives: Collectives,
    recorder: Recorder,
) -> list[list[list[tf.Tensor]]]:
    """As `_reduce_dense`: local replicas are added up, and what leaves the worker is coded."""
    place = collectives.place
    devices = [replica.device for replica in place.local_replicas]
    between = replace(_operation(program, group, collectives), local=ReductionToOneDevice())
    wire = Wire(place.workers.index(place.worker), collectives.num_workers, lambda value: between.sums([value])[0])
    with tf.device(devices[0]):
        parts = [_weighted(copies, weights, devices) for copies in gradients]
        local = ReductionToOneDevice().batch_reduce(parts, devices, destinations=devices[:1])
        own = [tf.cast(copies[0], group.dtype) for copies in local]
        coding = Coding(program, group.compressor, group.gradients, group.dtype, recorder)
        sent, states = coding.compress(own, wire)
        travelled = collectives.gather(sent) if group.compressor.gathers else wire.total(sent)
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
    group: Group,
    gradients: Sequence[Sequence[tf.Tensor]],
    weights: Sequence[tf.Tensor],
    collectives: Collectives,
) -> list[list[tf.Tensor]]:
    replicas = program.place.local_replicas
    (gradient,) = group.gradients
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
            half = travelling(group.compressor, dtype)
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
