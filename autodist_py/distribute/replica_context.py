"""The context in which a replica function is traced once, for all replicas of a strategy."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py.capture.doors.replica_function import ReplicaTrace
from autodist_py.distribute import tf_adapter
from autodist_py.distribute.lazy_per_replica import LazyPerReplica, added, joined


class _Active(threading.local):
    context: "TracedReplicaContext | None" = None


_active = _Active()


def tracing_context(strategy: Any) -> "TracedReplicaContext | None":
    """The context in which a function is being traced, in this thread, for the replicas of `strategy`."""
    found = _active.context
    return found if found is not None and found.strategy is strategy else None


class TracedReplicaContext(tf_adapter.ReplicaContext):
    """A `tf.distribute.ReplicaContext` that stands for all replicas at once: the replica's number is a tensor.

    Variables are the first replica's components in it; the kernel gives each replica its own.
    """

    def __init__(self, strategy: Any, trace: ReplicaTrace):
        placement = strategy.extended.placement
        super().__init__(strategy, placement.first)
        self.trace = trace
        self.num_replicas: int = strategy.num_replicas_in_sync
        self.num_local = len(strategy.extended.worker_devices)
        self._is_alone: bool = placement.is_alone
        self._reads_local = False
        self.fed: list[Sequence[Any]] = []
        """For each part that it makes, in order, what each replica of this process is fed."""
        numbers = range(placement.first, placement.first + self.num_local)
        self._number = self._fed_number("replica_id_in_sync_group", numbers)
        self._first = 0 if self._is_alone else self._fed_number("first_replica_of_worker", [numbers[0]] * len(numbers))

    def _fed_number(self, name: str, numbers: Sequence[int]) -> Any:
        self.fed.append([tf.constant(number, tf.int32) for number in numbers])
        return self.trace.part(tf.TensorSpec([], tf.int32), name)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Trace in this context."""
        before, _active.context = _active.context, self
        try:
            with self:
                yield
        finally:
            _active.context = before

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        """The replica's number, an int32 scalar."""
        return self._number

    @property
    def devices(self) -> list[Any]:
        """The devices of the replica: as it stands for all, that of the first."""
        return [self.strategy.extended.worker_devices[:1]]

    def all_reduce_values(self, reduce_op: tf.distribute.ReduceOp, value: Any) -> Any:
        """The sum, or the mean, of the replicas' values of each tensor in `value`."""
        return tf.nest.map_structure(lambda each: self._reduced(reduce_op, tf_adapter.as_value(each)), value)

    def _reduced(self, reduce_op: tf.distribute.ReduceOp, own: Any) -> Any:
        total = added(self.trace, own, self.num_replicas)
        if reduce_op != tf.distribute.ReduceOp.MEAN:
            return total
        if isinstance(total, tf.IndexedSlices):
            return tf.IndexedSlices(total.values / self.num_replicas, total.indices, total.dense_shape)
        return total / self.num_replicas

    def _merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        self.trace.branches.around("merge_call() is called")
        merged = tf.nest.map_structure(self.merged, (tuple(args), dict(kwargs)))
        self._reads_local = False
        with tf_adapter.cross_replica_context(self.strategy), self.trace.together.for_all():
            result = merge_fn(self.strategy, *merged[0], **merged[1])

        def of_replica(leaf: Any) -> Any:
            if isinstance(leaf, tf.Tensor) and self.trace.has(leaf):
                self._share(leaf)
            return self.own(leaf)

        return tf.nest.map_structure(of_replica, result)

    def _share(self, leaf: tf.Tensor) -> None:
        """A merge_call returns `leaf`: it is one value of all replicas, or of those of a worker."""
        given = self._first if self._reads_local else None
        if self.num_local > 1 if self._reads_local else leaf.graph is not self.trace.graph:
            self.trace.require_received(leaf, given=given)
        if leaf.graph is not self.trace.graph:
            return  # Of a branch: it is not known to be one.
        if self._reads_local:
            self.trace.share_here(leaf)
        else:
            self.trace.share(leaf)

    def merged(self, leaf: Any) -> Any:
        """What replicas' values of `leaf` are in a cross-replica context: one where it is one, else a PerReplica."""
        if isinstance(leaf, tf_adapter.DistributedVariable):
            return leaf
        if isinstance(leaf, tf.Variable) and not tf_adapter.is_lazy_read(leaf):
            return tf_adapter.container_of(leaf)
        is_read = tf_adapter.is_lazy_read(leaf) or isinstance(leaf, tf.IndexedSlices)
        value = tf_adapter.as_value(leaf) if is_read else leaf
        flat = tf.nest.flatten(value, expand_composites=True)
        differs = any(self.trace.has(each) and not self.trace.is_one_here(each) for each in flat)
        return self._lazy(value) if differs else value

    def _lazy(self, value: Any) -> LazyPerReplica:
        is_one = all(map(self.trace.is_one_for_all, tf.nest.flatten(value, expand_composites=True)))
        return LazyPerReplica(self.trace, value, self.num_replicas, self._local, is_one=is_one)

    def _local(self) -> Sequence[Any]:
        """The numbers of this worker's replicas. What is computed from their values is the worker's own."""
        if self._is_alone:
            return range(self.num_local)
        self._reads_local = True
        return [self._first + position for position in range(self.num_local)]

    @property
    def _position(self) -> tf.Tensor:
        """The replica's number among those of its worker."""
        return self._number - self._first

    def own(self, leaf: Any) -> Any:
        """What a replica has of `leaf`, a value of a cross-replica context."""
        if isinstance(leaf, LazyPerReplica):
            return leaf.own
        if isinstance(leaf, tf_adapter.DistributedVariable) or not isinstance(leaf, tf_adapter.DistributedValues):
            return leaf
        first, *others = leaf.values
        if all(each is first for each in others):
            return first
        return tf.nest.map_structure(
            lambda *each: tf.gather(tf.stack(each), self._position), *leaf.values, expand_composites=True
        )

    def _traced_own(self, value: Any) -> Any:
        """What a replica has of `value`, as tensors of the trace."""
        return tf.nest.map_structure(tf.identity, self.own(value), expand_composites=True)

    def own_arguments(self, args: Sequence[Any], kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a replica has of arguments of a cross-replica context."""
        own: tuple[tuple[Any, ...], dict[str, Any]] = tf.nest.map_structure(self.own, (tuple(args), dict(kwargs or {})))
        return own

    def mirrored(self, value: Any, destinations: Any = None) -> Any:
        """`value`, the same on all replicas, as a cross-replica context has it on `destinations`; None: on all."""
        num_devices = self.num_local if destinations is None else len(tf_adapter.devices_of(destinations))
        return value if num_devices == 1 else tf_adapter.Mirrored((value,) * self.num_local)

    def updated(self, leaf: Any) -> Any:
        """What an update returns in a cross-replica context for `leaf`, which it has returned for a component."""
        if isinstance(leaf, tf.Variable) and not tf_adapter.is_lazy_read(leaf):
            return tf_adapter.container_of(leaf)
        value = tf_adapter.as_value(leaf) if tf_adapter.is_lazy_read(leaf) else leaf
        return self.mirrored(value) if tf.is_tensor(value) else value

    def reduce_to(self, reduce_op: tf.distribute.ReduceOp, value: Any, destinations: Any) -> Any:
        """`value` of a cross-replica context, reduced."""
        if isinstance(value, tf_adapter.SyncOnReadVariable):
            with self.trace.together.for_each():
                value = self._lazy(value.values[0].read_value())
        if isinstance(value, LazyPerReplica):
            total = self._reduced(reduce_op, value.own)
            if isinstance(destinations, tf_adapter.DistributedVariable):
                self.trace.is_update(destinations, total)
            return self.mirrored(total, destinations)
        if not isinstance(value, tf_adapter.DistributedValues):
            if self._is_alone:
                return tf_adapter.reduce_non_distributed_value(reduce_op, value, destinations, self.num_replicas)
            return self.mirrored(self._reduced_over_workers(reduce_op, value), destinations)
        if tf_adapter.is_mirrored(value) and reduce_op == tf.distribute.ReduceOp.MEAN:
            return value
        if tf_adapter.is_mirrored(value) and not self._is_alone:
            raise ValueError(f"a value that all replicas have alike, {value}, is not added up; reduce it by MEAN")
        if not self._is_alone:
            return self.reduce_to(reduce_op, self._lazy(self._traced_own(value)), destinations)
        total = sum(value.values[1:], value.values[0])
        mean = total / self.num_replicas if reduce_op == tf.distribute.ReduceOp.MEAN else total
        return self.mirrored(mean, destinations)

    def _reduced_over_workers(self, reduce_op: tf.distribute.ReduceOp, value: Any) -> tf.Tensor:
        """`value`, which each worker has once, reduced: each counts once, whatever the number of its replicas."""
        total = self._reduced(tf.distribute.ReduceOp.SUM, tf.convert_to_tensor(value))
        num_workers = self.num_replicas // self.num_local
        once = total // self.num_local if total.dtype.is_integer else total / self.num_local
        return once / num_workers if reduce_op == tf.distribute.ReduceOp.MEAN else once

    def gather_to(self, value: Any, destinations: Any, axis: Any) -> Any:
        """`value` of a cross-replica context, gathered along `axis`."""
        if isinstance(value, LazyPerReplica):
            return self.mirrored(joined(self.trace, value.own, axis, self.num_replicas), destinations)
        if self._is_alone:
            return self.mirrored(tf.concat(value.values, axis), destinations)
        if isinstance(value, tf_adapter.DistributedValues):
            return self.gather_to(self._lazy(self._traced_own(value)), destinations, axis)
        if self.num_local > 1:
            raise ValueError(
                f"{value} is one value of each worker, of several replicas; gather what each replica has: give it to "
                "merge_call"
            )
        return self.mirrored(joined(self.trace, tf.convert_to_tensor(value), axis, self.num_replicas), destinations)

    def note_update(self, variable: Any, args: Sequence[Any]) -> None:
        """An optimizer updates `variable` by `args`: what is combined for them is its gradient."""
        for leaf in tf.nest.flatten(tuple(args)):
            self.trace.is_update(variable, leaf.own if isinstance(leaf, LazyPerReplica) else leaf)

    def _update(
        self,
        variable: Any,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        # A variable is assigned what it has aggregated, so it is no gradient. TensorFlow aggregates no numbers.
        if variable.aggregation == tf.VariableAggregation.SUM:
            args = [value if tf.is_tensor(value) else self._summed(value, variable.dtype) for value in args]
        return self.update(variable, function, args, kwargs)

    def _summed(self, value: Any, dtype: tf.DType) -> Any:
        """The sum of a number or an array, of which each worker counts once."""
        if not self._is_alone:
            return tf.convert_to_tensor(value, dtype) * (self.num_replicas // self.num_local)
        if self.num_replicas > 1 and np.any(value):
            raise ValueError(
                f"{value} is no tensor, and is assigned to a variable that adds up what replicas assign. Give it "
                "tf.constant(...), of which each replica adds its own"
            )
        return value

    def update(self, variable: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """What `function` returns of the replica's component of `variable`, and of its own values of the arguments."""
        own = self.own_arguments(args, kwargs)
        component = variable.values[0] if isinstance(variable, tf_adapter.DistributedVariable) else variable
        with self.trace.together.for_each():
            return function(component, *own[0], **own[1])

    def called_within(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """What `function` returns in a replica context within a cross-replica one, for all replicas."""
        own = self.own_arguments(args, kwargs)
        with self, self.trace.together.for_each():
            result = function(*own[0], **own[1])
        return tf.nest.map_structure(self.merged, result)
