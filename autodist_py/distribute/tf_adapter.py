"""All that `autodist_py.distribute` uses of TensorFlow's private modules."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    cross_device_ops,
    device_util,
    distribute_lib,
    distribute_utils,
    mirrored_strategy,
    values,
    values_util,
)
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import composite_tensor
from tensorflow.python.ops import resource_variable_ops

from autodist_py.proto.errors import CaptureError

CollectiveAllReduceExtended = collective_all_reduce_strategy.CollectiveAllReduceExtended
DatasetV1Adapter = dataset_ops.DatasetV1Adapter
DistributedValues = values.DistributedValues
DistributedVariable = values.DistributedVariable
Function = polymorphic_function.Function
Mirrored = values.Mirrored
MirroredExtended = mirrored_strategy.MirroredExtended
PerReplica = values.PerReplica
ReplicaContext = distribute_lib.ReplicaContext
SyncOnReadVariable = values.SyncOnReadVariable

reduce_non_distributed_value = cross_device_ops.reduce_non_distributed_value
regroup = distribute_utils.regroup
do_not_convert = tf.autograph.experimental.do_not_convert


def used_outside(name: str) -> CaptureError:
    """The refusal of a function that would find an old value of the variable of that name."""
    return CaptureError(
        f"variable '{name}' is on a server, or in shards. A tf.function reads or writes it outside of run(), where it "
        "would find an old value. Do that in the function that is given to run(), or eagerly, between steps"
    )


class _Updates(threading.local):
    number = 1


_updates = _Updates()


@contextmanager
def updated_times(number: int) -> Iterator[None]:
    """Outside of `run`, in this thread, the function of an update is called that many times within."""
    before, _updates.number = _updates.number, number
    try:
        yield
    finally:
        _updates.number = before


class CentralVariable(values.MirroredVariable):
    """A variable that all replicas have together: of one component, which each of them reads.

    Attributes:
        is_separate: each replica has its own, after all.
        is_used: a compiled function has used it as one.
        lives_elsewhere: it is on a server, or in shards, so that a function which reads it here finds an old value.
    """

    is_separate = is_used = lives_elsewhere = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._readers: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
        """The graphs of functions that have read or written it outside of `run`."""
        self._writers: weakref.WeakSet[tf.Graph] = weakref.WeakSet()
        """Those of them that write it for all replicas."""

    def is_read_in_function(self) -> bool:
        """Whether a function that may run again has it outside of `run`. Keras traces some that never run."""
        return _are_alive(self._readers)

    def is_written_in_function(self) -> bool:
        """Whether a function that may run again writes it outside of `run`."""
        return _are_alive(self._writers)

    @property
    def is_aggregated(self) -> bool:
        """Whether what replicas assign is made one value for all."""
        return self._aggregation in (tf.VariableAggregation.MEAN, tf.VariableAggregation.SUM)

    @property
    def values(self) -> Any:
        """The components."""
        self._note_read()
        return self._values

    @property
    def handle(self) -> Any:
        """The resource of the component that a replica or an update has, which may write by it."""
        replica_id = values_util.get_current_replica_id_as_int()
        if replica_id is None:  # TensorFlow refuses it, but for saving.
            return super().handle
        self.note_write()
        return self._get_replica(replica_id).handle

    def _get_cross_replica(self) -> Any:
        self._note_read()
        return super()._get_cross_replica()

    def separate(self, further: Sequence[Any]) -> None:
        """From now on each replica has its own value, the `further` ones these variables."""
        for one in further:
            one.handle._distributed_container = weakref.ref(self)
        self._values = (self._primary, *further)
        self.is_separate = True

    def _get_replica(self, replica_id: int) -> Any:
        self._note_read()
        return self._values[replica_id if self.is_separate else 0]

    def note_write(self) -> None:
        """A value is about to be written."""
        if is_in_function() and not self._distribute_strategy.extended.is_traced:
            self._writers.add(tf.compat.v1.get_default_graph())
        several = _updates.number > 1 and distribute_lib.get_update_replica_id() is not None
        if several and not self.is_separate:
            raise CaptureError(
                f"variable '{self.name}' is there once for all replicas. An update outside of run() calls its function "
                f"{_updates.number} times, once for each component or device, and would write it as often. Write it "
                "after that update, or in one of its own: extended.update(variable, ...)"
            )

    def _update(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        self.note_write()
        return super()._update(update_fn, value, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        assign = getattr(part, "assign", None)  # Of the component, past `_update`.
        if assign is None or self._distribute_strategy.extended.is_traced:
            return part

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.note_write()
            return assign(*args, **kwargs)

        part.assign = noted
        return part

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        strategy, extended = self._distribute_strategy, self._distribute_strategy.extended
        is_apart = strategy.num_replicas_in_sync > 1 and not extended.is_traced
        if is_apart and self._aggregation == tf.VariableAggregation.NONE:
            # Replicas run one after the other: else each would write what the one before has written.
            extended.placement.separate(self, self.name, "run")
        return super()._update_replica(update_fn, value, **kwargs)

    def _note_read(self) -> None:
        """A value is about to be read, or written."""
        if is_in_function() and not self._distribute_strategy.extended.is_traced:
            if self.lives_elsewhere:
                raise used_outside(self.name)
            self._readers.add(tf.compat.v1.get_default_graph())


def _are_alive(graphs: weakref.WeakSet[tf.Graph]) -> bool:
    if graphs:
        gc.collect()  # A graph refers to itself.
    return bool(graphs)


_CENTRAL = {**distribute_utils.VARIABLE_CLASS_MAPPING, tf.VariableSynchronization.ON_WRITE: CentralVariable}


def central_variable(extended: Any, device: str, creator: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """The variable of which `creator` makes the one component on `device`, by what a variable's creator is given."""

    def components(**kwargs: Any) -> list[Any]:
        with tf.device(device):
            initial_value = extended._get_variable_creator_initial_value(
                replica_id=0, device=device, primary_var=None, **kwargs
            )
            with context.device_policy(context.DEVICE_PLACEMENT_SILENT), record.stop_recording():
                return [creator(**{**kwargs, "initial_value": initial_value})]

    strategy = extended._container_strategy()
    policies = distribute_utils.VARIABLE_POLICY_MAPPING
    return distribute_utils.create_mirrored_variable(strategy, components, _CENTRAL, policies, **kwargs)


class Devices(values.DistributedValues):
    """Several devices, as destinations of a value."""

    def __init__(self, names: Sequence[str]):
        super().__init__(names)

    @property
    def _devices(self) -> tuple[str, ...]:
        return tuple(self._values)


def cluster_resolver(rank: int) -> Any:
    """The cluster that this process has joined as the worker of that rank; of nobody, where it has joined none."""
    definition = context.context()._collective_ops_server_def
    jobs = {} if definition is None else {job.name: dict(job.tasks) for job in definition.cluster.job}
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), task_type=next(iter(jobs), ""), task_id=rank, rpc_layer="grpc"
    )


def container_of(variable: Any) -> Any:
    """The distributed variable that `variable` is a component of; `variable` itself, where it is of none."""
    if isinstance(variable, DistributedVariable):  # Which asks its component for what it has not.
        return variable
    for holder in (variable, getattr(variable, "_handle", None)):
        reference = getattr(holder, "_distributed_container", None)
        if reference is not None:
            return reference()
    return variable


def components_of(variable: Any) -> Any:
    """The components of a distributed variable, which are not read."""
    return variable._values


def handle_of(variable: Any) -> Any:
    """The resource tensor of a variable, without making an op."""
    return variable._handle


def is_sync_on_read(variable: Any) -> bool:
    """Whether each replica has its own value of `variable`, until it is read outside of `run`."""
    return distribute_utils.is_sync_on_read(variable)


def is_separate(variable: Any) -> bool:
    """Whether each replica has its own value of `variable`, after all."""
    return isinstance(variable, CentralVariable) and variable.is_separate


def stays_one(variable: Any) -> bool:
    """Whether replicas have `variable` together, and make one value of those that they write."""
    is_central = isinstance(variable, CentralVariable) and not variable.is_separate
    return is_central and variable.aggregation != tf.VariableAggregation.NONE


def is_mirrored(value: Any) -> bool:
    """Whether the replicas' values of `value` are kept equal."""
    return distribute_utils.is_mirrored(value)


def is_of_tensors(value: Any) -> bool:
    """Whether `value` is a tensor, or a composite of tensors, and nothing that holds state."""
    if isinstance(value, tf.Variable) or not isinstance(value, tf.Tensor | composite_tensor.CompositeTensor):
        return False
    leaves = tf.nest.flatten(value, expand_composites=True)
    return all(tf.is_tensor(each) and each.dtype not in (tf.resource, tf.variant) for each in leaves)


def is_lazy_read(variable: Any) -> bool:
    """Whether `variable` is what an assignment returns."""
    return isinstance(variable, resource_variable_ops._UnreadVariable)


def devices_of(destinations: Any) -> Sequence[str]:
    """The devices that `destinations`, a variable, a value or a device's name, stands for."""
    return cross_device_ops.get_devices_from(destinations)


@contextmanager
def cross_replica_context(strategy: Any) -> Iterator[None]:
    """What is done within is done for all replicas of `strategy` together."""
    distribute_lib._push_per_thread_mode(distribute_lib._CrossReplicaThreadMode(strategy))
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


def update_context() -> Any:
    """What is done within is done to the first replica's components."""
    return distribute_lib.UpdateContext(0)


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` through autograph, if what calls it is."""
    return autograph.tf_convert(function, ag_ctx.control_status_ctx())


def body_of(function: Any) -> Callable[..., Any]:
    """The Python function inside the tf.function `function`, through autograph if that is so."""
    body = function.python_function
    return autograph.tf_convert(body, ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)) if function._autograph else body


def unconverted() -> Any:
    """What is called within the context is not converted by autograph."""
    return ag_ctx.ControlStatusCtx(ag_ctx.Status.DISABLED)


def clone(function: Any, body: Callable[..., Any]) -> Any:
    """A tf.function like `function` that runs `body`."""
    return function._clone(python_function=body)


def on_gradient(op: tf.Operation, called: Callable[..., Any]) -> None:
    """`called` is called when a tape around `op` computes a gradient through it."""
    record.record_operation("AutoDistReplicas", list(op.outputs), list(op.inputs), called)


def runs_eagerly() -> bool:
    """Whether ops are run as they are made."""
    return context.executing_eagerly()


def is_tensorflows(function: Callable[..., Any]) -> bool:
    """Whether it is a function of TensorFlow's, by which a strategy reduces along an axis."""
    return str(getattr(function, "__module__", "")).startswith("tensorflow.")


def is_in_function() -> bool:
    """Whether a function is traced: ops are neither run as they are made, nor fetched by a session one by one."""
    return bool(tf.compat.v1.get_default_graph().building_function)


def left_as_it_is(target: Any) -> Any:
    """A function, or a class with its methods, that autograph calls as it is; it converts what these are given."""
    for function in filter(callable, vars(target).values()) if isinstance(target, type) else [target]:
        autograph.autograph_artifact(function)
    return target


def current_device() -> str:
    """The whole name of the device that ops are put on."""
    return str(device_util.current())


def is_default(strategy: Any) -> bool:
    """Whether `strategy` is that of no scope."""
    return strategy is distribute_lib._get_default_strategy()


def is_of_several_workers(strategy: Any) -> bool:
    """Whether replicas of `strategy` are on several machines, or may be."""
    return bool(strategy.extended._in_multi_worker_mode())


def as_value(leaf: Any) -> Any:
    """`leaf`, a tensor, a variable or a number, as what ops read; likewise the parts of IndexedSlices."""
    if not isinstance(leaf, tf.IndexedSlices):
        return tf.convert_to_tensor(leaf)
    shape = None if leaf.dense_shape is None else tf.convert_to_tensor(leaf.dense_shape)
    return tf.IndexedSlices(tf.convert_to_tensor(leaf.values), tf.convert_to_tensor(leaf.indices), shape)


def device_named(name: str) -> str:
    """The whole name of a device."""
    return str(device_util.canonicalize_without_job_and_task(name))


def device_of(value: Any) -> str | None:
    """The whole name of the device of `value`; None: of none in particular."""
    name = getattr(value, "device", None)
    return device_named(name) if name else None
