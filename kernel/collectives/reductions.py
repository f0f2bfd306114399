"""Values that replicas computed of their own examples, combined to what one device would have computed of all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist_py.kernel.analysis.replica_weights import counting_rows, replica_weights, summed_as, weighted
from autodist_py.kernel.collectives.collectives import CARRIED, Collectives
from autodist_py.kernel.collectives.rows import gathered_rows
from autodist_py.kernel.ir.fragment import TensorSpec
from autodist_py.kernel.program import Program

_AS_NUMBERS = {tf.complex64: tf.float32, tf.complex128: tf.float64, tf.uint64: tf.int64}
"""Types that are added up as numbers of another type, bit by bit: pairs of floats, and integers modulo 2**64."""

SUMMED = frozenset({*CARRIED, *_AS_NUMBERS})
"""The types of which sums over replicas are taken."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the captured graph whose copies are to be combined.

    Attributes:
        copies: its name on each local replica.
        dtype: its type.
        shape: its shape; static, but for the first dimension of rows.
        reduction: "sum", "mean", "add", "rows", "share" or "moments", as a GraphItem's statistics say; "local rows",
            this worker's; or "first", the first replica's.
    """

    copies: tuple[str, ...]
    dtype: tf.DType
    shape: tuple[int | None, ...] | None
    reduction: str

    @property
    def specs(self) -> list[TensorSpec]:
        """The copies, as arguments of a fragment."""
        return [TensorSpec(copy, self.dtype, self.shape) for copy in self.copies]


def combine(
    program: Program,
    parts: Sequence[Part],
    batch: Sequence[tf.Tensor],
    values: Sequence[Sequence[tf.Tensor]],
    collectives: Collectives,
) -> list[list[tf.Tensor]]:
    """For each part and local replica the combined value; those of one type are summed by one collective.

    Args:
        program: says how many replicas there are.
        parts: what to combine.
        batch: the tensors that `batch_specs` asked for.
        values: for each part the local replicas' copies.
        collectives: what moves data between workers.
    """
    with tf.device(program.topology.host):
        moments = [position for position, part in enumerate(parts) if part.reduction == "moments"]
        results = _moments_together(program, batch, {position: values[position] for position in moments}, collectives)
        summed: dict[tf.DType, dict[int, tf.Tensor]] = {}
        for position, (part, copies) in enumerate(zip(parts, values, strict=True)):
            if position in results:
                continue
            if part.reduction in ("local rows", "rows"):
                weights = replica_weights(program, batch, "sum")
                rows = tf.concat([counting_rows(*one) for one in zip(copies, weights, strict=True)], axis=0)
                results[position] = rows if part.reduction == "local rows" else gathered_rows(rows, collectives)
            elif part.dtype in SUMMED:
                own = _contribution(program, part, batch, [_numbers(copy) for copy in copies])
                summed.setdefault(own.dtype, {})[position] = own
            else:
                results[position] = tf.identity(copies[0])  # It is the same everywhere.
        for owns in summed.values():
            results |= _sum_together(owns, collectives)
        totals = [_of_type(results[position], part.dtype) for position, part in enumerate(parts)]
        is_shared_out = any(part.reduction == "share" for part in parts)
        shares = replica_weights(program, batch, "mean") if is_shared_out else []
        return [
            [tf.cast(tf.cast(total, tf.float64) * share, part.dtype) for share in shares]
            if part.reduction == "share"
            else [total] * len(part.copies)
            for part, total in zip(parts, totals, strict=True)
        ]


def _numbers(value: tf.Tensor) -> tf.Tensor:
    """`value` in a type that collectives add up."""
    return tf.bitcast(value, _AS_NUMBERS[value.dtype]) if value.dtype in _AS_NUMBERS else value


def _of_type(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """What `_numbers` was given, of what it made of it."""
    if value.dtype == _AS_NUMBERS.get(dtype):
        return tf.bitcast(value, dtype)
    return tf.cast(value, dtype)


def _sum_together(parts: Mapping[int, tf.Tensor], collectives: Collectives) -> dict[int, tf.Tensor]:
    """The sums over workers of `parts`, which are of one type, by one collective."""
    total = collectives.sum_over_workers(tf.concat([tf.reshape(part, [-1]) for part in parts.values()], axis=0))
    pieces = tf.split(total, [part.shape.num_elements() for part in parts.values()])
    return {
        position: tf.reshape(piece, part.shape) for (position, part), piece in zip(parts.items(), pieces, strict=True)
    }


def _moments_together(
    program: Program, batch: Sequence[tf.Tensor], parts: Mapping[int, Sequence[tf.Tensor]], collectives: Collectives
) -> dict[int, tf.Tensor]:
    """Of all examples what `parts` have of a replica's each, a mean and a variance: of one type, by one gather.

    Sums of squares would do by one sum, but lose what a variance is smaller than the square of its mean.
    """
    found: dict[int, tf.Tensor] = {}
    by_type: dict[tf.DType, dict[int, tf.Tensor]] = {}
    for position, copies in parts.items():
        dtype = summed_as(copies[0].dtype)
        by_type.setdefault(dtype, {})[position] = tf.cast(tf.stack(copies), dtype)
    for dtype, of_replicas in by_type.items():
        weights = tf.cast(tf.stack(replica_weights(program, batch, "mean")), dtype)
        own = {position: _joined(copies, weights) for position, copies in of_replicas.items()}
        if collectives.num_workers > 1:
            told = [tf.reduce_sum(weights)[tf.newaxis], *(tf.reshape(one, [-1]) for one in own.values())]
            everyone = collectives.gather(tf.concat(told, axis=0))
            pieces = tf.split(everyone[:, 1:], [one.shape.num_elements() for one in own.values()], axis=1)
            own = {
                position: _joined(tf.reshape(piece, [-1, *one.shape]), everyone[:, 0])
                for (position, one), piece in zip(own.items(), pieces, strict=True)
            }
        found |= own
    return found


def _joined(parts: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """The mean and the variance of all examples, given those of each of several parts, and how much each counts.

    Chan, Golub and LeVeque (1979), Updating formulae and a pairwise algorithm for computing sample variances.

    Args:
        parts: by part, mean or variance, and whatever else.
        weights: by part.
    """

    def mean_of(values: tf.Tensor) -> tf.Tensor:
        counts = tf.reshape(weights, [-1, *[1] * (values.shape.rank - 1)])
        total = tf.reduce_sum(tf.math.multiply_no_nan(values, counts), axis=0)
        return tf.math.divide_no_nan(total, tf.reduce_sum(weights))

    means, variances = tf.unstack(parts, axis=1)
    mean = mean_of(means)
    return tf.stack([mean, mean_of(variances + tf.math.squared_difference(means, mean))])


def _contribution(program: Program, part: Part, batch: Sequence[tf.Tensor], copies: Sequence[tf.Tensor]) -> tf.Tensor:
    """What this worker adds to the sum over workers."""
    dtype = copies[0].dtype
    if part.reduction == "first":
        value = tf.cast(copies[0], CARRIED[dtype])
        is_first = program.topology.local_replicas[0] == program.topology.first
        return value if is_first else tf.zeros_like(value)
    weights = replica_weights(program, batch, part.reduction if part.reduction in ("mean", "add") else "sum")
    if dtype.is_floating:
        return tf.add_n([weighted(copy, weight) for copy, weight in zip(copies, weights, strict=True)])
    carried = [tf.cast(copy, CARRIED[dtype]) for copy in copies]
    return tf.add_n(
        [tf.where(weight > 0, copy, tf.zeros_like(copy)) for copy, weight in zip(carried, weights, strict=True)]
    )
