"""`DistributionStrategy`: what TensorFlow 1.9 to 1.12 asked of a strategy, over a strategy of `tf.distribute`.

It owns the names and the localities. What is computed, and where, is the strategy's that it stands before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import tensorflow as tf

from autodist_py.distribute import tf_adapter
from autodist_py.distribute.destination import destination_of
from autodist_py.distribute.lazy_per_replica import LazyPerReplica
from autodist_py.distribute.locality import N, Takes, locality_of, located, of_variable
from autodist_py.distribute.tower_dataset import TowerDataset

_VIEW = "_autodist_towers"
_REDUCE_FIRST = "Reduce it first: reduce('sum', value, destinations=variable)"
_CALLED = Takes("call_for_each_tower(): args", "TMVN", "")
_SUMMED = "A value that all towers have alike is not added up: reduce it by 'mean', or what each tower has"
_BROADCAST = Takes("broadcast(): tensor", "N", "It is on several devices already. Give one tensor: fetch(value)")
_UPDATED = Takes("update(): var", "V", "Give a variable that was made in the strategy's scope")
_UPDATE = Takes("update(): args", "MVN", _REDUCE_FIRST)
_UPDATE_NON_SLOT = Takes("update_non_slot(): args", "MVN", _REDUCE_FIRST)
_FETCHED = Takes("fetch(): val", "MVN", "It is another value on each tower: unwrap() gives all, reduce() combines them")


def view_of(strategy: tf.distribute.Strategy) -> "DistributionStrategy":
    """The `DistributionStrategy` before a strategy of `tf.distribute`, always the same one."""
    return vars(strategy).get(_VIEW) or DistributionStrategy(strategy)


@tf_adapter.left_as_it_is
class DistributionStrategy:
    """Towers, each of which runs one copy of a model on one slice of the data, and what they do together.

    Its methods, but for `scope` and `unwrap`, are called in a cross-tower context: in `with d.scope():`, or in what is
    given to `merge_call`. Each takes values of the localities that docs/distribute.md lists, and refuses others.

    Args:
        strategy: of `tf.distribute`, on one machine.

    Raises:
        ValueError: `strategy` is one of several workers.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        if tf_adapter.is_of_several_workers(strategy):
            raise ValueError(
                f"the tower API is that of the devices of one machine; received {strategy}. Use tf.distribute's names "
                "for several workers: strategy.run, strategy.reduce"
            )
        self._strategy = strategy
        vars(strategy)[_VIEW] = self

    @property
    def extended(self) -> Any:
        """What optimizers use of the strategy: `optimizer._distributed_apply(d, ...)` may be called."""
        return self._strategy.extended

    @property
    def num_towers(self) -> int:
        """The number of towers, to average over them."""
        return int(self._strategy.num_replicas_in_sync)

    @property
    def is_single_tower(self) -> bool:
        """Whether there is one tower."""
        return self.num_towers == 1

    @property
    def worker_devices(self) -> Sequence[str]:
        """The devices of the towers, in order. The default strategy raises a RuntimeError."""
        return tuple(self.extended.worker_devices)

    @property
    def parameter_devices(self) -> Sequence[str]:
        """The devices of the variables. The default strategy raises a RuntimeError."""
        return tuple(self.extended.parameter_devices)

    @property
    def worker_device_index(self) -> Any:
        """Each tower's number, of locality T; of one tower 0. They are tensors in a tf.function, and ints elsewhere."""
        self._require_cross_tower("worker_device_index")
        as_value = tf.constant if tf_adapter.is_in_function() else int
        numbers = tuple(as_value(number) for number in range(self.num_towers))
        return 0 if self.is_single_tower else tf_adapter.PerReplica(numbers)

    @contextmanager
    def scope(self) -> Iterator["DistributionStrategy"]:
        """Make variables as the strategy does, in its cross-tower context."""
        with self._strategy.scope():
            yield self

    def distribute_dataset(self, dataset: Any) -> TowerDataset:
        """The elements of `dataset`, a tf.data.Dataset or a function that returns one, dealt out to the towers.

        A batch is one tower's, and what is too little for all towers is left out at the end.

        Raises:
            ValueError: it is no dataset.
        """
        found = dataset() if callable(dataset) else dataset
        if not isinstance(found, tf.data.Dataset):
            raise ValueError(
                f"distribute_dataset() takes a tf.data.Dataset, or a function that returns one; received {found!r}. "
                "Make one: tf.data.Dataset.from_tensor_slices(...)"
            )
        return TowerDataset(found, self.num_towers)

    def call_for_each_tower(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `fn` returns on each tower, merged: T, but for what is one and the same object on all.

        In a tf.function it is called once for all towers, and compiled. Elsewhere it is called once for each.

        Args:
            fn: runs in a tower context.
            args: T, M, V or N, or structures of them; each tower is given its own.
            kwargs: likewise. `run_concurrently` has no effect: towers are called one after the other.
        """
        kwargs.pop("run_concurrently", None)
        self._require_cross_tower("call_for_each_tower")
        _CALLED.require((args, kwargs), self.num_towers)
        return self._strategy.run(fn, args, kwargs)

    def broadcast(self, tensor: Any, destinations: Any = None) -> Any:
        """`tensor`, an N, on all towers: M. On the devices of a variable V(variable), on one device N."""
        self._require_cross_tower("broadcast")
        _BROADCAST.require(tensor, self.num_towers)
        return self._placed(tensor, destinations, "broadcast")

    def reduce(self, aggregation: Any, value: Any, destinations: Any = None) -> Any:
        """The towers' values of `value`, a T, in one: M. At a variable V(variable), on one device N.

        Args:
            aggregation: "sum" or "mean", or the same of tf.VariableAggregation or tf.distribute.ReduceOp.
            value: T. By "mean" others, too: each tower has the mean already.
            destinations: None: all towers; a variable; a device; or a list of one or of all towers' devices.

        Raises:
            ValueError: another aggregation, locality or destination.
        """
        self._require_cross_tower("reduce")
        operation = _reduce_op(aggregation)
        return tf.nest.map_structure(lambda leaf: self._reduced("reduce", operation, leaf, destinations), value)

    def batch_reduce(self, aggregation: Any, value_destination_pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
        """What `reduce` gives for each pair of a value and its destinations, in one batch."""
        self._require_cross_tower("batch_reduce")
        operation = _reduce_op(aggregation)
        return [self._reduced("batch_reduce", operation, *pair) for pair in value_destination_pairs]

    def update(self, var: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `fn(component, *args, **kwargs)` returns on each device of `var`, merged: V(var).

        Args:
            var: a variable that was made in the scope.
            fn: is given the component of a device, and what M, V or N arguments are there.
            args: M, V or N, and never T.
            kwargs: likewise. `grouped=False`: returns a tuple of what `fn` returns on each device.

        Raises:
            ValueError: a value has another locality.
        """
        grouped = kwargs.pop("grouped", True)
        self._require_cross_tower("update")
        _UPDATED.require(var, self.num_towers)
        is_component = not isinstance(var, tf_adapter.DistributedVariable) and tf_adapter.container_of(var) is not var
        if is_component or not self.extended.variable_created_in_scope(var):
            raise ValueError(f"update(): var takes a variable of the strategy; received {var}. {_UPDATED.way_out}")
        _UPDATE.require((args, kwargs), self.num_towers)
        return located(self.extended.update(var, fn, args, kwargs, group=grouped), of_variable(var))

    def non_slot_devices(self, var_list: Sequence[Any]) -> Any:
        """The devices of variables that are no variable's slots; of the default strategy, one of the variables."""
        return self.extended.non_slot_devices(var_list)

    def update_non_slot(self, destinations: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `fn` returns on each of the `non_slot_devices`, merged: M. Arguments are those of `update`.

        Raises:
            ValueError: other destinations, or a T.
        """
        grouped = kwargs.pop("grouped", True)
        self._require_cross_tower("update_non_slot")
        if not (tf_adapter.is_default(self._strategy) or self._are_non_slot(destinations)):
            raise ValueError(
                f"update_non_slot(): destinations takes the non-slot devices; received {destinations!r}. Give what "
                "non_slot_devices(var_list) returns"
            )
        _UPDATE_NON_SLOT.require((args, kwargs), self.num_towers)
        return self.extended.update_non_slot(destinations, fn, args, kwargs, group=grouped)

    def colocate_vars_with(self, var: Any) -> Any:
        """A context manager: variables that are made in it are on the devices of `var`, or on `non_slot_devices`."""
        # Of mirrored variables all are on the non-slot devices.
        return nullcontext() if self._are_non_slot(var) else self.extended.colocate_vars_with(var)

    @contextmanager
    def tower_local_var_scope(self, reduce_method: Any) -> Iterator[None]:
        """Variables that are made within are each tower's own; reading them elsewhere reduces them by "sum" or "mean".

        Raises:
            ValueError: another method.
        """
        aggregation = tf.VariableAggregation[_reduce_op(reduce_method).name]

        def create(creator: Callable[..., Any], **kwargs: Any) -> Any:
            own = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": aggregation}
            return creator(**{**kwargs, **own, "trainable": False})

        with tf.variable_creator_scope(create):
            yield

    def read_var(self, v: Any) -> Any:
        """The value of the variable `v`, an N; of a tower-local one, what its values are reduced to."""
        self._require_cross_tower("read_var")
        return self.extended.read_var(v)

    def fetch(self, val: Any, destination: str | None = None, fn: Callable[[Any], Any] = lambda x: x) -> tf.Tensor:
        """`fn(val)`, computed where `val` is, on the device `destination`: an N.

        Args:
            val: M, V or N; or a tower-local variable, which is reduced.
            destination: a device; None: where `val` is.
            fn: is given one of the components of `val`.

        Raises:
            ValueError: `val` is T.
        """
        self._require_cross_tower("fetch")
        value = self.read_var(val) if isinstance(val, tf_adapter.SyncOnReadVariable) else val
        _FETCHED.require(value, self.num_towers)
        components = self.unwrap(value)
        wanted = None if destination is None else tf_adapter.device_named(destination)
        source = next((one for one in components if tf_adapter.device_of(one) == wanted), components[0])
        with tf.device(tf_adapter.device_of(source)):
            computed = fn(source)
        with tf.device(destination):
            return tf.identity(computed)

    def unwrap(self, value: Any) -> list[Any]:
        """The components of `value`, one for each tower or device; of an N, itself alone."""
        return list(self._strategy.experimental_local_results(value))

    def group(self, value: Any, name: str | None = None) -> Any:
        """One op that runs all components of `value`."""
        return self._strategy.group(value, name)

    def configure(self, session_config: tf.compat.v1.ConfigProto | None = None) -> None:
        """Have sessions of `session_config`, if it is given, see the CPUs of all towers."""
        if session_config is not None and not self.is_single_tower:
            session_config.CopyFrom(self._strategy.update_config_proto(session_config))
            cpus = sum("CPU" in device for device in self.worker_devices)
            session_config.device_count["CPU"] = max(cpus, session_config.device_count["CPU"])

    def _require_cross_tower(self, method: str) -> None:
        if tf.distribute.get_strategy() is not self._strategy:
            raise RuntimeError(f"{method} is used outside of its strategy's scope; use it in `with d.scope():`")
        if not tf.distribute.in_cross_replica_context():
            raise RuntimeError(
                f"{method} is used in a tower context, in which each tower is by itself; use it in a function that is "
                "given to get_tower_context().merge_call()"
            )

    def _are_non_slot(self, devices: Any) -> bool:
        is_mirrored = isinstance(devices, tuple) and not tf_adapter.is_default(self._strategy)
        return is_mirrored and devices == tuple(self.non_slot_devices(()))

    def _reduced(self, method: str, operation: tf.distribute.ReduceOp, value: Any, destinations: Any) -> Any:
        kinds = "T" if operation == tf.distribute.ReduceOp.SUM else "TMVN"
        Takes(f"{method}(): value", kinds, _SUMMED).require(value, self.num_towers)
        if locality_of(value).kind != "T":  # Of one tower it is the sum; else it is the mean.
            return self._placed(value, destinations, method)
        there = destination_of(method, destinations, self._strategy)
        return located(self.extended.reduce_to(operation, _of_tensors(value), there.target), there.locality)

    def _placed(self, value: Any, destinations: Any, method: str) -> Any:
        """`value`, one and the same everywhere, at `destinations`."""
        there = destination_of(method, destinations, self._strategy)
        if self.is_single_tower:
            return tf_adapter.as_value(value)
        placed = located(self.extended.broadcast_to(tf_adapter.as_value(value), there.target), there.locality)
        return self.unwrap(placed)[0] if there.locality == N else placed


def _of_tensors(value: Any) -> Any:
    """`value`, a T, as TensorFlow reduces it: a function may have returned each tower's number."""
    if not isinstance(value, tf_adapter.PerReplica) or isinstance(value, LazyPerReplica):
        return value
    return tf_adapter.PerReplica(tuple(one if tf.is_tensor(one) else tf.constant(one) for one in value.values))


def _reduce_op(aggregation: Any) -> tf.distribute.ReduceOp:
    name = str(getattr(aggregation, "name", aggregation)).upper()
    if name not in ("SUM", "MEAN"):
        raise ValueError(f"towers' values are reduced by 'sum' or 'mean'; received {aggregation!r}")
    return tf.distribute.ReduceOp[name]
