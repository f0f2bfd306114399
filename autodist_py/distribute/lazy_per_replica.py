"""What replicas hand to a `merge_call`: a value for each, of which all are computed only where they are read."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import tensorflow as tf

from autodist_py.capture.doors.replica_function import ReplicaTrace
from autodist_py.distribute import tf_adapter


class LazyPerReplica(tf_adapter.PerReplica):
    """A PerReplica of the values that the replicas have of one tensor of a replica function, traced once.

    Reducing or gathering it combines them without making each known to each. Who reads `values` has them gathered.
    """

    def __init__(
        self,
        trace: ReplicaTrace,
        own: Any,
        num_replicas: int,
        local: Callable[[], Sequence[Any]],
        *,
        is_one: bool = False,
    ):
        """The replicas' values of `own`, of which there are `num_replicas`; `values` are those of the `local` numbers.

        `is_one`: all replicas of this process have the same, so nothing is gathered.
        """
        self.own = own
        """The replica's own value: a tensor, or a composite of tensors."""
        self._trace, self._num_replicas, self._local = trace, num_replicas, local
        self._is_one = is_one
        self._gathered: tuple[Any, ...] = ()

    @property
    def _values(self) -> tuple[Any, ...]:
        if not self._gathered:
            flat = tf.nest.flatten(self.own, expand_composites=True)
            local = self._local()
            if self._is_one or len(local) == 1 < self._num_replicas:
                return (self.own,) * len(local)
            columns = [gathered_values(self._trace, tensor, self._num_replicas, local) for tensor in flat]
            self._gathered = tuple(
                tf.nest.pack_sequence_as(self.own, [column[position] for column in columns], expand_composites=True)
                for position in range(len(local))
            )
        return self._gathered


def gathered_values(
    trace: ReplicaTrace, tensor: tf.Tensor, num_replicas: int, numbers: Sequence[Any]
) -> Sequence[tf.Tensor]:
    """The values of `tensor`, of a static rank, that the replicas of these `numbers` have, on each replica."""
    if tensor.shape.is_fully_defined():
        stacked = trace.rows(tf.expand_dims(tensor, 0))
        return [tf.gather(stacked, number) for number in numbers]
    shapes = tf.ensure_shape(trace.rows(tf.expand_dims(tf.shape(tensor), 0)), [num_replicas, tensor.shape.rank])
    flat = trace.rows(tf.reshape(tensor, [-1]))
    ends = tf.cumsum(tf.reduce_prod(shapes, axis=1))
    found = []
    for number in numbers:
        shape, end = tf.gather(shapes, number), tf.gather(ends, number)
        value = tf.reshape(flat[end - tf.reduce_prod(shape) : end], shape)
        value.set_shape(tensor.shape)
        found.append(value)
    return found


def added(trace: ReplicaTrace, value: Any, num_replicas: int) -> Any:
    """The sum of the replicas' values of a tensor, or of IndexedSlices."""
    if isinstance(value, tf.IndexedSlices):
        if value.values.shape[1:].is_fully_defined():
            return trace.added(value)
        raise ValueError(
            f"IndexedSlices are added up if all but the number of their rows is static; the values have the shape "
            f"{value.values.shape}. Give them one: tf.ensure_shape"
        )
    if value.shape.is_fully_defined():
        return trace.added(value)
    return reduce(tf.add, gathered_values(trace, value, num_replicas, range(num_replicas)))


def joined(trace: ReplicaTrace, value: tf.Tensor, axis: Any, num_replicas: int) -> tf.Tensor:
    """The replicas' values of `value`, one after the other along `axis`."""
    axis, rank = tf.get_static_value(axis), value.shape.rank
    if axis is None:
        raise ValueError("values are gathered along an axis that is known when the function is traced; it is a tensor")
    if rank is None:
        raise ValueError(
            "values are gathered if they have the same rank on all replicas. It is not known when the function is "
            "traced, or replicas were given values of different ranks. Give the value its rank: tf.ensure_shape"
        )
    if rank == 0:
        raise ValueError("scalars are not gathered, as they have no axis; use tf.expand_dims(value, 0)")
    axis = int(axis) % rank
    rest = [*value.shape[:axis], *value.shape[axis + 1 :]]
    if None in rest:
        return tf.concat(gathered_values(trace, value, num_replicas, range(num_replicas)), axis)
    if axis == 0:
        return trace.rows(value)
    order = [axis, *(each for each in range(rank) if each != axis)]
    back = [order.index(each) for each in range(rank)]
    return tf.transpose(trace.rows(tf.transpose(value, order)), back)
