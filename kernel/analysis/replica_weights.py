"""Replicas' raw gradients, and how much each replica's value counts when they are combined."""

import math
from collections.abc import Sequence

import tensorflow as tf

from autodist_py.kernel.ir.fragment import Shape, TensorSpec
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import on_replica, op_of
from autodist_py.kernel.program import Program
from autodist_py.proto.graph_item import Gradient


def are_all_there(program: Program) -> bool:
    """Whether all replicas of the cluster step together, on one batch.

    Then none computes with no example (`some_rows`), as long as there is one.
    """
    return program.options.batch == "global" and program.topology.is_together


def batch_specs(program: Program) -> list[TensorSpec]:
    """What `replica_weights` needs of the graph, as arguments of a fragment: the step's rows, then each replica's."""
    batch = program.replication.batch
    return [] if batch is None else [TensorSpec(name, tf.int64, ()) for name in (batch.total, *batch.rows)]


def some_rows(
    begin: tf.Tensor, count: tf.Tensor, total: tf.Tensor, least: tf.Tensor | int = 1
) -> tuple[tf.Tensor, tf.Tensor]:
    """Where the examples begin and end that a replica computes with: its own, or some of another's if it has none.

    It counts for nothing then (`replica_weights`, `counting_rows`). TensorFlow has ops that fail on an empty tensor.

    Args:
        begin: the number of examples before its own (int64).
        count: of its own.
        total: of all: where it is 0, there is none to compute with.
        least: with how many it computes at least.
    """
    first = tf.maximum(tf.minimum(begin, total - least), 0)
    return first, tf.minimum(first + tf.maximum(count, least), total)


def counting_rows(rows: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """`rows`, but none of a replica whose weight is 0: those that it computed with are another's."""
    return rows[: tf.where(weight > 0, tf.shape(rows)[0], 0)]


def own_rows(value: tf.Tensor, places: Sequence[tf.Tensor], message: str) -> tf.Tensor:
    """The rows of a replica's examples, of `value`, which has equally many for each example of the batch.

    A single row is for all examples, as an op takes it that pairs it with several.

    Args:
        value: the rows of the whole batch, in its order.
        places: the number of examples of the batch, of those before the replica's, and of the replica's (int64).
        message: of the error where the rows are no multiple of the examples.
    """
    total, begin, count = places
    length = tf.shape(value, out_type=tf.int64)[0]
    each = length // tf.maximum(total, 1)
    is_for_all = tf.equal(length, 1) & (total > 1)
    fits = tf.raw_ops.Assert(condition=is_for_all | tf.equal(each * total, length), data=[message, length, total])
    with tf.control_dependencies([fits]):
        first = tf.where(is_for_all, tf.zeros([], tf.int64), begin * each)
        last = tf.where(is_for_all, tf.ones([], tf.int64), (begin + count) * each)
        return tf.identity(value[first:last])


def cut_rows(value: tf.Tensor, places: Sequence[tf.Tensor]) -> tf.Tensor:
    """A replica's part of the rows of `value`, of which all replicas have all, as large as its share of the examples.

    Args:
        value: the rows.
        places: as in `own_rows`.
    """
    total, begin, count = places
    length = tf.shape(value, out_type=tf.int64)[0]
    return value[length * begin // tf.maximum(total, 1) : length * (begin + count) // tf.maximum(total, 1)]


def replica_weights(program: Program, batch: Sequence[tf.Tensor], reduction: str) -> list[tf.Tensor]:
    """A float64 scalar for each local replica, by which its value counts in the sum over all replicas.

    Args:
        program: says how many replicas there are.
        batch: the tensors that `batch_specs` asked for.
        reduction: "mean": the replica's share of the step's examples; "sum", and "parts" of a mean: 1, and 0 for a
            replica without examples; "add", and "average", of which a server divides the sum: 1.

    Returns:
        The weights. Where nothing is batched, the replicas that compute the same count for one together; so they do
        where a batch has no example at all, as `batch` says then that each has one.
    """
    if reduction in ("add", "average") or (reduction == "parts" and not batch):
        return [tf.ones([], tf.float64)] * program.num_local_replicas
    if not batch:
        alike = program.topology.num_replicas
        if reduction == "sum" and program.options.batch == "local":
            alike = program.num_local_replicas  # Each worker has its own part.
        return [tf.constant(1.0 / alike, tf.float64)] * program.num_local_replicas
    total, *rows = batch
    if reduction in ("sum", "parts"):
        return [tf.cast(own > 0, tf.float64) for own in rows]
    # A worker that takes its steps by itself may have no examples at all.
    return [tf.math.divide_no_nan(tf.cast(own, tf.float64), tf.cast(total, tf.float64)) for own in rows]


def dense_bytes(program: Program, gradient: Gradient) -> int:
    """The bytes that stand for a gradient between workers, if it travels as a dense one."""
    variable = program.item.variable(gradient.variable)
    dtype, shape = tf.as_dtype(variable.dtype), variable.shape
    (synchronizer,) = program.strategy.node(gradient.variable).synchronizers
    compressor = synchronizer.compressor
    if compressor.passes_through or len(program.topology.all_workers) == 1:
        return math.prod(shape) * summed_as(dtype).size
    return compressor.wire_bytes(shape, dtype.size)


_SUMMED = {tf.bfloat16: tf.float32, tf.float16: tf.float32}


def summed_as(dtype: tf.DType) -> tf.DType:
    """The type in which replicas' values are weighted and added up: shares in half precision do not add up to 1."""
    return _SUMMED.get(dtype, dtype)


def weighted(value: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """`value * weight` in the type of sums; 0 where the weight is 0, whatever the value: an empty replica's NaN."""
    dtype = summed_as(value.dtype)
    return tf.math.multiply_no_nan(tf.cast(value, dtype), tf.cast(weight, dtype))


def weighted_each(copies: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """Each replica's value as it counts, on the replica's device."""
    parts = []
    for copy, weight, device in zip(copies, weights, devices, strict=True):
        with tf.device(device):
            parts.append(weighted(copy, weight))
    return parts


def gradient_shapes(program: Program, gradient: Gradient) -> tuple[Shape, ...]:
    """The shapes of the gradient's tensors, as far as they are known."""
    shape = program.item.variable(gradient.variable).shape
    if gradient.is_sparse:
        return (gradient.rows,), (gradient.rows, *shape[1:]), (len(shape),)
    return (shape,)


def raw_gradient(gradient: Gradient, shapes: Sequence[Shape], view: GraphView, replica: int) -> list[TensorSpec]:
    """What the gradient's own ops read on `replica`: the raw gradient's tensors, of the shapes that they are known."""
    markers = (view.nodes[on_replica(replica, op_of(tensor))] for tensor in gradient.tensors)
    return [
        TensorSpec(marker.input[0], tf.as_dtype(marker.attr["T"].type), known)
        for marker, known in zip(markers, shapes, strict=True)
    ]


def weighted_rows(
    gradient: Gradient, indices: tf.Tensor, values: tf.Tensor, weight: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """A replica's rows of a sparse gradient as they count: their indices, and weighted values."""
    if gradient.indices != "same":
        indices, values = counting_rows(indices, weight), counting_rows(values, weight)
    return indices, weighted(values, weight)


def joined_rows(
    gradient: Gradient, parts: Sequence[tuple[tf.Tensor, tf.Tensor]], *, sums: bool = False
) -> tuple[tf.Tensor, tf.Tensor]:
    """The rows of one gradient that several have, of each the indices and weighted values: what one device has.

    Args:
        gradient: says what its indices are for the whole batch.
        parts: those of replicas, or of workers, in order.
        sums: whether rows of one index are added up.
    """
    if gradient.indices == "same":
        rows = parts[0][0], tf.add_n([values for _, values in parts])
    else:
        indices, values = (tf.concat(own, axis=0) if len(own) > 1 else own[0] for own in zip(*parts, strict=True))
        rows = indices, values
    is_repeated = gradient.indices == "distinct" and len(parts) > 1
    return sum_duplicates(*rows) if sums or is_repeated else rows


def sum_duplicates(indices: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Each row once, with the sum of its values, in the order in which rows first occur."""
    distinct, positions = tf.unique(indices)
    return distinct, tf.math.unsorted_segment_sum(values, positions, tf.shape(distinct)[0])
