"""All that `autodist_py.distribute` uses of TensorFlow's private modules."""

from collections.abc import Callable, Iterator, Sequence
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
)
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import composite_tensor
from tensorflow.python.ops import resource_variable_ops

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
    for holder in (variable, getattr(variable, "_handle", None)):
        reference = getattr(holder, "_distributed_container", None)
        if reference is not None:
            return reference()
    return variable


def handle_of(variable: Any) -> Any:
    """The resource tensor of a variable, without making an op."""
    return variable._handle


def is_sync_on_read(variable: Any) -> bool:
    """Whether each replica has its own value of `variable`, until it is read outside of `run`."""
    return distribute_utils.is_sync_on_read(variable)


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
