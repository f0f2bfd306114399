"""One value per replica: what they must have in common, and how they are added, averaged and copied."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

from autodist_py.kernel.collectives.base import Destinations, Reduction, Value
from autodist_py.proto.errors import StrategyError

Accumulation: TypeAlias = Callable[[list[tf.Tensor]], tf.Tensor]


def is_sparse(values: Sequence[Value]) -> bool:
    """Whether these replicas' values are sparse."""
    return isinstance(values[0], tf.IndexedSlices)


def places_of(devices: Sequence[str], destinations: Destinations) -> Sequence[str]:
    """The devices to which results are delivered, where the values are on `devices`.

    Raises:
        StrategyError: there are none.
    """
    if isinstance(destinations, str):
        return [destinations]
    if destinations is None:
        return devices
    if not destinations:
        raise StrategyError("results are delivered to a device at least; got no destinations; None means all replicas")
    return destinations


def require_reducible(values: Sequence[Value], devices: Sequence[str], reduction: Reduction) -> None:
    """Check that the values, one for each of `devices`, can be reduced together.

    Raises:
        StrategyError: they cannot.
    """
    _require_alike(values, devices)
    if reduction not in ("sum", "mean"):
        raise StrategyError(f"a reduction is 'sum' or 'mean'; got '{reduction}'")
    dtype = values[0].dtype
    if reduction == "mean" and not (dtype.is_floating or dtype.is_complex):
        raise StrategyError(f"a mean is of floats; got {dtype.name}; cast the values, or reduce them with 'sum'")
    shapes = [value.values.shape[1:] if is_sparse(values) else value.shape for value in values]
    if not all(shape.is_compatible_with(shapes[0]) for shape in shapes):
        raise StrategyError(
            f"the values of one reduction are of one shape{', but for their rows' if is_sparse(values) else ''}; got "
            f"{', '.join(map(str, shapes))}; reshape them"
        )


def _require_alike(values: Sequence[Value], devices: Sequence[str]) -> None:
    if not values or len(values) != len(devices):
        raise StrategyError(
            f"there is a value for each device; got {len(values)} values for {len(devices)} devices "
            f"({', '.join(devices)}); give one per local replica"
        )
    if len({isinstance(value, tf.IndexedSlices) for value in values}) > 1:
        raise StrategyError(
            "the replicas' values are all dense or all sparse; got "
            f"{', '.join(type(value).__name__ for value in values)}; make the sparse ones dense with "
            "tf.convert_to_tensor"
        )
    dtypes = list(dict.fromkeys(value.dtype.name for value in values))
    if len(dtypes) > 1:
        raise StrategyError(f"the replicas' values are of one type; got {', '.join(dtypes)}; cast them")


def require_axis(values: Sequence[tf.Tensor], devices: Sequence[str], axis: int) -> int:
    """The axis along which the values, one for each of `devices`, can be put together, counted from the first.

    Raises:
        StrategyError: they cannot.
    """
    _require_alike(values, devices)
    if is_sparse(values):
        raise StrategyError("a gather takes tensors; got tf.IndexedSlices; reduce them, or gather their parts")
    rank = values[0].shape.rank
    if rank is None or not -rank <= axis < rank:
        raise StrategyError(
            f"a gather along an axis takes tensors of a known rank that have it; got axis {axis} and shape "
            f"{values[0].shape}; set the shape, or give scalars a dimension with tf.expand_dims"
        )
    return axis % rank


def added(values: Sequence[Value], device: str, accumulate: Accumulation = tf.add_n) -> Value:
    """The sum on `device`: what `accumulate` makes of tensors; of sparse values all rows, in order."""
    with tf.device(device):
        if not is_sparse(values):
            return accumulate(list(values))
        if len(values) == 1:
            return values[0]
        rows = tf.concat([value.values for value in values], axis=0)
        indices = tf.concat([value.indices for value in values], axis=0)
        return tf.IndexedSlices(rows, indices, values[0].dense_shape)


def averaged(total: Value, count: int, device: str, reduction: Reduction) -> Value:
    """The sum of `count` replicas' values, which is on `device`, as the reduction wants it."""
    if reduction == "sum" or count == 1:
        return total
    with tf.device(device):
        if isinstance(total, tf.IndexedSlices):
            return tf.IndexedSlices(total.values / count, total.indices, total.dense_shape)
        return total / count


def delivered(copies: Sequence[Value], devices: Sequence[str], destinations: Sequence[str]) -> list[Value]:
    """On each destination the copy that is there; where none is, one of the first."""
    there = dict(zip(devices, copies, strict=True))
    results = []
    for destination in destinations:
        with tf.device(destination):
            results.append(there[destination] if destination in there else tf.identity(copies[0]))
    return results
