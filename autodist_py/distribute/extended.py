"""How mirrored strategies are implemented: TensorFlow's own, but replica functions are traced once and compiled."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from autodist_py.config.settings import Settings
from autodist_py.diagnostics.pass_dump import dumps
from autodist_py.distribute import tf_adapter
from autodist_py.distribute.compiled_function import call_once
from autodist_py.distribute.placement import ClusterPlacement, LocalPlacement, Placement
from autodist_py.distribute.replica_context import tracing_context
from autodist_py.distribute.served_placement import ServedPlacement
from autodist_py.kernel.program import Options
from autodist_py.program.build import Compiler, Kernel
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.text import shown
from autodist_py.strategy_builders.base import StrategyBuilder


class CompiledExtended(tf_adapter.MirroredExtended):
    """`MirroredExtended` whose replicas are made by the kernel, on the devices of its `placement`.

    While a replica function is traced, it stands in one replica context: variables, Keras's optimizers and
    `all_reduce` ask `_use_merge_call`, and go straight on, so that all that replicas tell one another arrives here.
    """

    placement: Placement
    _clones: WeakKeyDictionary[Any, Any]

    @property
    def _context(self) -> Any:
        return tracing_context(self._container_strategy())

    @property
    def is_traced(self) -> bool:
        """Whether a replica function is being traced, in this thread."""
        return self._context is not None

    def _use_merge_call(self) -> bool:
        return self._context is None and super()._use_merge_call()

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if self._context is None:
            return super()._replica_ctx_all_reduce(reduce_op, value, options)
        return self._context.all_reduce_values(reduce_op, value)

    def _replica_ctx_update(
        self, variable: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Any, group: bool
    ) -> Any:
        if self._context is None:
            return super()._replica_ctx_update(variable, function, args, kwargs, group)
        self._context.note_update(variable, args)
        return self._context.update(variable, function, args, kwargs)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        context = self._context
        if context is None:
            self.placement.begin_step()
            return super()._reduce_to(reduce_op, value, destinations, options)
        return tf.nest.map_structure(lambda each: context.reduce_to(reduce_op, each, destinations), value)

    def _batch_reduce_to(self, reduce_op: Any, pairs: Sequence[tuple[Any, Any]], options: Any) -> Any:
        if self._context is None:
            self.placement.begin_step()
            return super()._batch_reduce_to(reduce_op, pairs, options)
        return [self._reduce_to(reduce_op, value, destinations, options) for value, destinations in pairs]

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: Any, options: Any) -> Any:
        if self._context is None:
            self.placement.begin_step()
        is_one = self.placement.is_alone and not isinstance(value, tf_adapter.DistributedValues)
        if self._context is None or is_one:
            return super()._gather_to_implementation(value, destinations, axis, options)
        return self._context.gather_to(value, destinations, axis)

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        if self._context is None or isinstance(tensor, float | int):
            return super()._broadcast_to(tensor, destinations)
        return self._context.mirrored(tf_adapter.as_value(tensor), destinations)

    def _update(self, variable: Any, function: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        if self._context is None:
            is_distributed = isinstance(variable, tf_adapter.DistributedVariable)
            with tf_adapter.updated_times(len(tf_adapter.components_of(variable)) if is_distributed else 1):
                return super()._update(variable, function, args, kwargs, group)
        if not tf_adapter.is_tensorflows(function):  # Those have a gradient reduced to its variable, or assign a value.
            self._context.note_update(variable, args)
        with tf_adapter.update_context():
            result = self._context.update(variable, function, args, kwargs)
        return self._of_update(result, group)

    def _update_non_slot(
        self, colocate_with: Any, function: Callable[..., Any], args: Any, kwargs: Any, group: bool
    ) -> Any:
        context = self._context
        if context is None:
            with tf_adapter.updated_times(len(colocate_with) if isinstance(colocate_with, tuple) else 1):
                return super()._update_non_slot(colocate_with, function, args, kwargs, group)
        own = context.own_arguments(args, kwargs)
        with tf_adapter.update_context(), context.trace.together.for_each():
            result = function(*own[0], **own[1])
        return self._of_update(result, group)

    def _of_update(self, result: Any, group: bool) -> Any:
        """What an update returns whose function returns `result`: one value for all, or a list with one for each."""
        if group:
            return tf.nest.map_structure(self._context.updated, result)
        return tf.nest.map_structure(lambda leaf: [leaf] * len(self.worker_devices), result)

    @tf_adapter.do_not_convert
    def _call_for_each_replica(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        kwargs = kwargs or {}
        if self._context is not None:  # In a merge_call: `Strategy.reduce` along an axis does so.
            return self._context.called_within(function, args, kwargs)
        if isinstance(function, tf_adapter.Function):
            return self._compiled(function)(*args, **kwargs)
        if not tf_adapter.is_in_function():  # A session may fetch one op of a replica; one op for all would run all.
            return super()._call_for_each_replica(function, args, kwargs)
        return self._called_once(tf_adapter.converted(function), args, kwargs)

    def _called_once(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        with tf_adapter.unconverted():
            return call_once(self._container_strategy(), function, args, kwargs)

    def _compiled(self, function: Any) -> Any:
        """The tf.function `function`, whose body all replicas run together."""
        if function not in self._clones:
            inner = tf_adapter.body_of(function)

            @tf_adapter.do_not_convert
            def body(*args: Any, **kwargs: Any) -> Any:
                return self._called_once(inner, args, kwargs)

            self._clones[function] = tf_adapter.clone(function, body)
        return self._clones[function]


class CompiledMirroredExtended(CompiledExtended):
    """Of several devices of this machine."""

    _kind = "mirrored"
    _numbers = itertools.count()

    def __init__(
        self,
        strategy: Any,
        devices: Sequence[str] | None,
        cross_device_ops: Any,
        *,
        strategy_builder: StrategyBuilder,
        options: Options,
    ):
        super().__init__(strategy, devices, cross_device_ops or tf.distribute.ReductionToOneDevice())
        self._clones = WeakKeyDictionary()
        observers = dumps(Settings.from_environment().dump_dir, f"{self._kind}-{next(self._numbers)}")
        self.placement = LocalPlacement(self.worker_devices, strategy_builder, Kernel(options, observers))


class CentralExtended(CompiledMirroredExtended):
    """Of several devices of this machine, whose variables are there once, on the device of the parameters."""

    _kind = "central-storage"

    def __init__(
        self,
        strategy: Any,
        devices: Sequence[str] | None,
        parameter_device: str | None,
        *,
        strategy_builder: StrategyBuilder,
        options: Options,
    ):
        super().__init__(strategy, devices, None, strategy_builder=strategy_builder, options=options)
        only = self.worker_devices[0] if len(self.worker_devices) == 1 else "/device:CPU:0"
        self._parameter_device = tf_adapter.device_named(parameter_device or only)

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        return central_or_own(self, super()._create_variable, self._parameter_device, next_creator, kwargs)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Where variables are."""
        return (self._parameter_device,)

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[str, ...]:
        """Where variables are that are no variable's slots: `update_non_slot` calls its function once."""
        return self.parameter_devices


def central_or_own(
    extended: Any, own: Callable[..., Any], device: str, next_creator: Callable[..., Any], kwargs: Any
) -> Any:
    """A variable that all replicas have together, on `device`; by `own`, if it is to be each replica's own."""
    beside = kwargs.get("colocate_with")
    is_own = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
    if is_own or not (beside is None or isinstance(beside, tf_adapter.CentralVariable)):
        return own(next_creator, **kwargs)
    return tf_adapter.central_variable(extended, device, next_creator, {**kwargs, "colocate_with": None})


class CompiledMultiWorkerExtended(CompiledExtended, tf_adapter.CollectiveAllReduceExtended):
    """Of the devices of several workers, which have joined a cluster, and whose servers run.

    What is reduced and gathered outside of `run` TensorFlow's own collectives combine.
    """

    _local_or_standalone_client_mode = True  # Nothing of the runtime is configured here.
    _enable_check_health = False

    def __init__(self, strategy: Any, communication: Any, compiler: Compiler, options: Options):
        self._devices_of_worker = compiler.cluster.resources.workers[compiler.cluster.rank]
        resolver = tf_adapter.cluster_resolver(compiler.cluster.rank)
        tf_adapter.CollectiveAllReduceExtended.__init__(self, strategy, resolver, communication)
        self._clones = WeakKeyDictionary()
        self.placement = ClusterPlacement(compiler, len(self.worker_devices), options)

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        node = self._devices_of_worker
        kind, number = ("GPU", len(node.gpus)) if node.gpus else ("CPU", max(1, len(node.cpus)))
        return tuple(f"{worker_device}/device:{kind}:{index}" for index in range(number)), kind

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        are_all = all(isinstance(each, tf_adapter.DistributedValues) for each in tf.nest.flatten(value))
        is_mean = self._context is None and reduce_op == tf.distribute.ReduceOp.MEAN
        if is_mean and tf.nest.is_nested(value) and are_all:
            return value  # As MirroredStrategy does: Keras's fit asks it of batches, whose shapes it wants.
        return super()._reduce_to(reduce_op, value, destinations, options)


class ServedExtended(CompiledMultiWorkerExtended):
    """Of the devices of several workers, whose variables may live on servers, or in shards."""

    placement: ServedPlacement

    def __init__(self, strategy: Any, communication: Any, compiler: Compiler, options: Options):
        super().__init__(strategy, communication, compiler, options)
        self.placement = ServedPlacement(compiler, self.worker_devices, options)

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        return central_or_own(self, super()._create_variable, self.worker_devices[0], next_creator, kwargs)

    def _local_results(self, value: Any) -> Any:
        for each in tf.nest.flatten(value):
            if isinstance(each, tf_adapter.CentralVariable):
                _ = each.values  # It is noted that they may be read.
        return super()._local_results(value)

    @tf_adapter.do_not_convert
    def _call_for_each_replica(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        is_plain = not isinstance(function, tf_adapter.Function) and not tf_adapter.is_in_function()
        if is_plain and not tf_adapter.is_tensorflows(function):
            raise CaptureError(
                "run() of an AutoDistStrategy is given a tf.function, or is called in one, as the function is compiled "
                f"for all replicas. Received: {shown(function)}. Give it tf.function(...)"
            )
        return super()._call_for_each_replica(function, args, kwargs)

    def _update(self, variable: Any, function: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        given = tf.nest.flatten((args, kwargs))
        if self._context is None and any(isinstance(each, tf_adapter.PerReplica) for each in given):
            if isinstance(variable, tf_adapter.CentralVariable):
                variable.note_write()
            self.placement.separate(variable, variable.name, "extended.update")
        return super()._update(variable, function, args, kwargs, group)
