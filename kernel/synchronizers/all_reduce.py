"""AllReduce: every replica gets the combined gradient, and computes the same update of its own copy.

Dense gradients of one group and dtype are flattened into one buffer, weighted, reduced and split. Sparse gradients are
gathered: the rows of all replicas, in replica order, with each replica's values weighted. Of one lookup these are the
rows of one device, in its order; of several lookups in one table, the same rows grouped by replica.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist_py.kernel.cross_device_ops.collective import REDUCIBLE, Collectives
from autodist_py.kernel.fragment import Fragment, trace
from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.names import KERNEL_SCOPE, op_of
from autodist_py.kernel.program import Program
from autodist_py.kernel.weights import batch_specs, raw_gradient, replica_weights, sum_duplicates, weighted
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient
from autodist_py.proto.synchronizers import AllReduceSynchronizer

_LOCAL_FIRST = frozenset({"AUTO"})
_ONE_RING = frozenset({"RING"})


@dataclass(frozen=True, slots=True)
class Group:
    """Gradients that are reduced together: the same synchronizer, stage, reduction, and (dense ones) dtype.

    Gradients of one stage do not depend on one another's combined values (a generator's would on its discriminator's).
    """

    synchronizer: AllReduceSynchronizer
    stage: int
    reduction: str
    dtype: tf.DType
    gradients: tuple[Gradient, ...]

    @property
    def is_sparse(self) -> bool:
        """Whether this is a sparse gradient, which is a group by itself."""
        return self.gradients[0].is_sparse

    @property
    def scope(self) -> str:
        """The name scope of the group's ops."""
        if self.is_sparse:
            return f"{KERNEL_SCOPE}/AllReduce/{op_of(self.gradients[0].tensors[1])}"
        spec, number = self.synchronizer.spec, self.synchronizer.group
        return f"{KERNEL_SCOPE}/AllReduce/{spec}_group_{number}_stage_{self.stage}_{self.reduction}_{self.dtype.name}"

    def rank(self, program: Program) -> tuple[int, ...]:
        """Where the group's collective stands among others: by stage, then when its last gradient is ready."""
        return (self.stage, 0, max(program.analysis.gradient_depth(gradient) for gradient in self.gradients))

    def __str__(self) -> str:
        names = ", ".join(gradient.variable for gradient in self.gradients)
        return f"{'sparse' if self.is_sparse else 'dense'} gradients of {names}"


def groups(program: Program) -> Iterator[Group]:
    """The gradients of `program` that are synchronized by AllReduce, as they are reduced together."""
    dense: dict[tuple[AllReduceSynchronizer, int, str, tf.DType], list[Gradient]] = {}
    graph = program.analysis.captured
    for gradient in program.item.gradients:
        raw = {op_of(graph.nodes[op_of(tensor)].input[0]) for tensor in gradient.tensors}
        if not raw & program.analysis.varying:
            continue  # It is computed from replicated values alone (a regularizer's): equal on all replicas.
        synchronizer = program.strategy.node(gradient.variable).synchronizer
        if not isinstance(synchronizer, AllReduceSynchronizer):
            continue
        dtype = tf.as_dtype(program.item.variable(gradient.variable).dtype)
        stage = program.analysis.gradient_stage(gradient)
        _check(synchronizer, gradient, dtype)
        key = (synchronizer, stage, gradient.reduction or program.item.loss_reduction, dtype)
        if gradient.is_sparse:
            yield Group(*key, (gradient,))
        else:
            dense.setdefault(key, []).append(gradient)
    for key, gradients in dense.items():
        yield Group(*key, tuple(gradients))


def _check(synchronizer: AllReduceSynchronizer, gradient: Gradient, dtype: tf.DType) -> None:
    if synchronizer.spec not in _LOCAL_FIRST | _ONE_RING:
        raise StrategyError(
            f"variable '{gradient.variable}': all_reduce_spec '{synchronizer.spec}' cannot run on CPU devices; "
            "use AUTO or RING"
        )
    if synchronizer.compressor != "NoneCompressor":
        raise StrategyError(
            f"variable '{gradient.variable}': compressor '{synchronizer.compressor}' is not available yet; "
            "use NoneCompressor"
        )
    if dtype not in REDUCIBLE:
        raise StrategyError(
            f"variable '{gradient.variable}' is of type {dtype.name}, which collectives do not carry; "
            f"they carry {', '.join(sorted(kind.name for kind in REDUCIBLE))}"
        )


def combine(program: Program, group: Group, view: GraphView, collectives: Collectives) -> Fragment:
    """The ops that combine `group` over all replicas; `view` is of the program's graph.

    The fragment's outputs are, for each gradient, for each local replica, the combined tensors: one of a dense
    gradient; indices, values and dense shape of a sparse one.
    """
    raw = [
        [raw_gradient(program, gradient, view, replica) for replica in range(program.num_local_replicas)]
        for gradient in group.gradients
    ]

    def reduce(batch: Sequence[tf.Tensor], gradients: list[list[list[tf.Tensor]]]) -> list[list[list[tf.Tensor]]]:
        with tf.device(program.place.host):
            weights = replica_weights(program, batch, group.reduction)
        if group.is_sparse:
            return [_reduce_sparse(program, group.gradients[0], gradients[0], weights, collectives)]
        dense = [[tensors[0] for tensors in copies] for copies in gradients]
        return _reduce_dense(program, group, dense, weights, collectives)

    return trace(reduce, [batch_specs(program), raw], scope=group.scope)


def _reduce_dense(
    program: Program,
    group: Group,
    gradients: Sequence[Sequence[tf.Tensor]],
    weights: Sequence[tf.Tensor],
    collectives: Collectives,
) -> list[list[list[tf.Tensor]]]:
    replicas = program.place.local_replicas
    buffers = []
    for position, replica in enumerate(replicas):
        with tf.device(replica.device):
            buffers.append(weighted(_pack([copies[position] for copies in gradients]), weights[position]))
    if group.synchronizer.spec in _ONE_RING:
        combined = collectives.ring_over_replicas(buffers)
    else:
        combined = collectives.sum_over_replicas(buffers)
    shapes = [tuple(copies[0].shape) for copies in gradients]
    unpacked = []
    for replica, buffer in zip(replicas, combined, strict=True):
        with tf.device(replica.device):
            unpacked.append(_unpack(buffer, shapes))
    return [[[tensor] for tensor in copies] for copies in zip(*unpacked, strict=True)]


def _pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    flat = tf.constant([-1])
    return tf.concat([tensor if tensor.shape.rank == 1 else tf.reshape(tensor, flat) for tensor in tensors], axis=0)


def _unpack(buffer: tf.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[tf.Tensor]:
    if len(shapes) == 1:
        return [buffer]
    distinct = {shape: tf.constant(shape, tf.int32) for shape in dict.fromkeys(shapes) if len(shape) != 1}
    parts = tf.split(buffer, [tf.TensorShape(shape).num_elements() for shape in shapes])
    return [
        tf.reshape(part, distinct[shape]) if shape in distinct else part
        for part, shape in zip(parts, shapes, strict=True)
    ]


def _reduce_sparse(
    program: Program,
    gradient: Gradient,
    gradients: Sequence[Sequence[tf.Tensor]],
    weights: Sequence[tf.Tensor],
    collectives: Collectives,
) -> list[list[tf.Tensor]]:
    replicas = program.place.local_replicas
    parts = []
    for replica, (indices, values, _), weight in zip(replicas, gradients, weights, strict=True):
        with tf.device(replica.device):
            parts.append((indices, weighted(values, weight)))
    with tf.device(replicas[0].device):
        indices, values = (tf.concat(rows, axis=0) if len(rows) > 1 else rows[0] for rows in zip(*parts, strict=True))
        if program.options.sum_duplicates:
            indices, values = sum_duplicates(indices, values)
        indices, values = collectives.gather_rows([indices, values])
        if program.options.sum_duplicates and collectives.num_workers > 1:
            indices, values = sum_duplicates(indices, values)
    combined = []
    shape = program.item.variable(gradient.variable).shape  # A branch that was not taken has no other.
    for replica, (_, _, dense_shape) in zip(replicas, gradients, strict=True):
        with tf.device(replica.device):
            combined.append([tf.identity(indices), tf.identity(values), tf.constant(shape, dense_shape.dtype)])
    return combined
