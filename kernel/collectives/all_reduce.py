"""AllReduce: every replica gets the combined gradient, and computes the same update of its own copy.

Dense gradients that travel together (`groups.py` says which) are laid into one buffer, weighted, reduced and split. A
gradient that is larger than a buffer is reduced in pieces, or whole by Horovod. A worker that adds up its replicas'
gradients by itself lays small ones alone into a buffer.

Rows of sparse gradients are gathered (`sparse.py`).
"""

from collections.abc import Sequence

import tensorflow as tf

from autodist_py.kernel.analysis.replica_weights import (
    batch_specs,
    raw_gradient,
    replica_weights,
    summed_as,
    weighted_each,
)
from autodist_py.kernel.collectives import factors, pieces, sparse, sparse_as_dense
from autodist_py.kernel.collectives.collectives import ENGINES, Collectives
from autodist_py.kernel.collectives.local import LOCAL_REDUCTIONS, copied
from autodist_py.kernel.compressors.codec import Wire
from autodist_py.kernel.compressors.coding import Coding
from autodist_py.kernel.events import LOCAL, AllReduceBucket, GatherFactors, ReduceGradients
from autodist_py.kernel.ir import flat_buffers
from autodist_py.kernel.ir.fragment import Fragment, TensorSpec, trace
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import on_replica
from autodist_py.kernel.ir.product import Product
from autodist_py.kernel.ir.state import Recorder
from autodist_py.kernel.program import Program

_LARGE_BYTES = 16_384
"""An op on tensors of so many bytes takes less time than to copy them into a buffer, and out of it."""


def combine(
    program: Program, event: ReduceGradients, view: GraphView, collectives: Collectives
) -> tuple[Fragment, Recorder | None]:
    """The ops that combine the event's gradients over all replicas, and what a compressor keeps from step to step.

    `view` is of the program's graph.

    The fragment's outputs are, for each gradient and then each output, for each local replica, the combined tensors:
    indices, values and dense shape of a sparse gradient; else one.
    """
    devices = [replica.device for replica in program.topology.local_replicas]
    replicas = range(len(devices))
    if isinstance(event, GatherFactors):
        raw = factors.specs(event.factors, view, replicas)
    elif isinstance(event, AllReduceBucket) and event.product is not None:
        raw = factors.specs(event.product.factors, view, replicas)
    else:
        raw = [
            [raw_gradient(gradient, shapes, view, replica) for replica in replicas]
            for gradient, shapes in zip(event.gradients, event.shapes, strict=True)
        ]
    carried = [
        [[TensorSpec(on_replica(replica, output.tensor), event.dtype, output.shape)] for replica in replicas]
        for output in event.outputs
    ]

    def reduce(batch: Sequence[tf.Tensor], values: list[list[list[tf.Tensor]]]) -> list[list[list[tf.Tensor]]]:
        with tf.device(program.topology.host):
            weights = replica_weights(program, batch, event.reduction)
        if isinstance(event, AllReduceBucket) and event.product is not None:
            return [_reduce_pieces(event, event.product, values, weights, devices, collectives)]
        if isinstance(event, AllReduceBucket):
            return _reduce_bucket(program, event, values, weights, devices, collectives, recorder)
        if isinstance(event, GatherFactors):
            return factors.multiplied(program, event, values, weights, devices, collectives)
        return sparse.gathered(program, event, values, weights, devices, collectives)

    recorder = Recorder() if isinstance(event, AllReduceBucket) and event.is_coded else None
    return trace(reduce, [batch_specs(program), raw + carried], scope=event.scope), recorder


def _reduce_bucket(
    program: Program,
    event: AllReduceBucket,
    values: Sequence[Sequence[list[tf.Tensor]]],
    weights: Sequence[tf.Tensor],
    devices: Sequence[str],
    collectives: Collectives,
    recorder: Recorder | None,
) -> list[list[list[tf.Tensor]]]:
    """Sparse gradients of a bucket are made dense, and rows of what is combined."""
    rows = {position: event.gradients[position] for position, shapes in enumerate(event.shapes) if len(shapes) > 1}
    dense = [[tensors[0] for tensors in copies] for copies in values]
    for position, gradient in rows.items():
        dense[position] = sparse_as_dense.as_dense(program, gradient, values[position], devices)
    if recorder is not None:
        combined = _reduce_coded(program, event, dense, weights, devices, collectives, recorder)
    else:
        combined = _reduce_dense(event, dense, weights, devices, collectives)
    for position, gradient in rows.items():
        combined[position] = sparse_as_dense.as_rows(program, gradient, values[position], combined[position], devices)
    return combined


def _reduce_dense(
    event: AllReduceBucket,
    values: Sequence[Sequence[tf.Tensor]],
    weights: Sequence[tf.Tensor],
    devices: Sequence[str],
    collectives: Collectives,
) -> list[list[list[tf.Tensor]]]:
    totals: dict[int, list[tf.Tensor]] = {}
    for positions in _buffers(event, values):
        together = [values[position] for position in positions]
        members = weighted_each(flat_buffers.pack_each(together, devices), weights, devices)
        copies = _totals(event, members, devices, collectives)
        unpacked = flat_buffers.unpack_each(copies, devices, [tuple(own[0].shape) for own in together])
        totals |= dict(zip(positions, unpacked, strict=True))
    return [
        [[tf.cast(tensor, own.dtype)] for own, tensor in zip(raw, totals[position], strict=True)]
        for position, raw in enumerate(values)
    ]


def _buffers(event: AllReduceBucket, values: Sequence[Sequence[tf.Tensor]]) -> list[list[int]]:
    """The gradients of each buffer, by position: all in one where something is told of it to others.

    Where one worker adds up tensors itself, copying a large one into a buffer and out of it takes longer than an op.
    """
    if event.engine != LOCAL or event.local == "nccl":
        return [[*range(len(values))]]
    large = [position for position, own in enumerate(values) if _bytes(own[0]) >= _LARGE_BYTES]
    small = [position for position in range(len(values)) if position not in large]
    return [*([position] for position in large), *([small] if small else [])]


def _bytes(tensor: tf.Tensor) -> int:
    return tensor.shape.num_elements() * tensor.dtype.size


def _reduce_pieces(
    event: AllReduceBucket,
    product: Product,
    values: Sequence[Sequence[list[tf.Tensor]]],
    weights: Sequence[tf.Tensor],
    devices: Sequence[str],
    collectives: Collectives,
) -> list[list[tf.Tensor]]:
    """The one gradient of the event: each piece is reduced while the next one is computed."""
    totals: list[list[tf.Tensor]] = []
    for computed in pieces.computed(event, product, values, devices, collectives):
        members = weighted_each(computed, weights, devices)
        totals.append(_totals(event, members, devices, collectives))
    ((shape,),) = event.shapes
    joined = flat_buffers.join_each(totals, devices, tf.TensorShape(shape))
    return [[tf.cast(tensor, event.dtype)] for tensor in joined]


def _totals(
    event: AllReduceBucket, members: Sequence[tf.Tensor], devices: Sequence[str], collectives: Collectives
) -> list[tf.Tensor]:
    """The sum over all replicas of all workers, on each device."""
    if event.is_local_first and len(members) > 1:
        return _locally_first(event, members, devices, collectives)
    return _sums(event, members, devices, collectives)


def _locally_first(
    event: AllReduceBucket, values: Sequence[tf.Tensor], devices: Sequence[str], collectives: Collectives
) -> list[tf.Tensor]:
    """The sum of all replicas of all workers, on each device: this worker's are added up, and are one member."""
    local = LOCAL_REDUCTIONS[event.local]
    if event.engine == LOCAL:
        return local.on_each(values, devices)
    (total,) = _sums(event, [local.on_first(values, devices)], devices[:1], collectives)
    return copied(total, devices)


def _sums(
    event: AllReduceBucket, members: Sequence[tf.Tensor], devices: Sequence[str], collectives: Collectives
) -> list[tf.Tensor]:
    """The sum over the members of all workers, on each of this worker's."""
    if event.engine == LOCAL:
        return list(members)
    return collectives.sum_of_members(
        members,
        devices,
        hint=ENGINES[event.engine],
        is_each=not event.is_local_first,
        most=max(1, event.synchronizer.bytes_per_pack // members[0].dtype.size),
    )


def _reduce_coded(
    program: Program,
    event: AllReduceBucket,
    gradients: Sequence[Sequence[tf.Tensor]],
    weights: Sequence[tf.Tensor],
    devices: Sequence[str],
    collectives: Collectives,
    recorder: Recorder,
) -> list[list[list[tf.Tensor]]]:
    """As `_reduce_dense`: local replicas are added up, and what leaves the worker is coded."""
    topology = collectives.topology
    wire = Wire(
        topology.workers.index(topology.worker),
        collectives.num_workers,
        lambda value: _sums(event, [value], devices[:1], collectives)[0],
    )
    shares = []
    for weight, device in zip(weights, devices, strict=True):  # Cast once for all gradients.
        with tf.device(device):
            shares.append(tf.cast(weight, summed_as(event.dtype)))
    with tf.device(devices[0]):
        parts = [weighted_each(copies, shares, devices) for copies in gradients]
        if len(devices) > 1:
            parts = [[LOCAL_REDUCTIONS[event.local].on_first(copies, devices)] for copies in parts]
        own = [tf.cast(copies[0], event.dtype) for copies in parts]
        coding = Coding(program, event.compressor, event.gradients, event.dtype, recorder)
        sent, states = coding.compress(own, wire)
        travelled = collectives.gather(sent) if event.compressor.gathers else wire.total(sent)
        totals, after = coding.decompress(travelled, states, wire)
        coding.keep(after, after=[travelled])
    return [[[copy] for copy in copied(total, devices)] for total in totals]
