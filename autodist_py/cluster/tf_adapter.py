"""The runtime's use of TensorFlow's private modules: this process's eager context, as a member of a cluster.

Nothing here imports TensorFlow before it is called: settings, launchers and the coordinator work without it.
"""

import gc
import sys
from collections.abc import Sequence
from typing import Any

from autodist_py.proto.errors import ClusterError

JOB = "worker"

_SHOWN_OBJECTS = 3


def eager_context_is_started() -> bool:
    """Whether anything eager was made in this process; importing TensorFlow, or building a tf.Graph, is not.

    It imports nothing, so any thread may ask while the main thread still imports TensorFlow.
    """
    current = getattr(sys.modules.get("tensorflow.python.eager.context"), "context_safe", lambda: None)()
    return current is not None and current._context_handle is not None


def eager_objects() -> list[str]:
    """What makes the eager context started, for an error message: variables, Keras models and iterators, a few."""
    import tensorflow as tf

    kinds: list[tuple[str, type]] = [("variable", tf.Variable), ("iterator", tf.data.Iterator)]
    if "keras" in sys.modules:
        kinds.insert(0, ("Keras model", sys.modules["keras"].Model))
    found = [
        f"{kind} {getattr(each, 'name', None) or type(each).__name__!r}"
        for kind, base in kinds
        for each in gc.get_objects()
        if issubclass(type(each), base)
    ]
    more = len(found) - _SHOWN_OBJECTS
    return [*found[:_SHOWN_OBJECTS], *([f"{more} more"] if more > 0 else [])]


def require_no_eager_context() -> None:
    """Nothing eager was made in this process yet.

    Raises:
        ClusterError: it names what was.
    """
    if not eager_context_is_started():
        return
    found = ", ".join(eager_objects()) or "an eager operation that ran"
    raise ClusterError(
        "with several workers, AutoDist(...) comes before any eager variable, model or iterator of the script, as it "
        f"makes TensorFlow's eager context a member of the cluster. Found: {found}. "
        "Move AutoDist(...) to the start of the script."
    )


def set_local_devices(cpus: int, gpus: Sequence[int]) -> None:
    """This process has `cpus` logical CPU devices, and of the machine's GPUs those given, in that order.

    Raises:
        ClusterError: the eager context was started with fewer devices, or a GPU is not there.
    """
    import tensorflow as tf

    if eager_context_is_started():
        _check_logical_devices(cpus, len(gpus))
        return
    physical = tf.config.list_physical_devices("GPU")
    missing = [index for index in gpus if index >= len(physical)]
    if missing:
        raise ClusterError(
            f"the resource spec gives this node the GPUs {list(gpus)}; TensorFlow sees {len(physical)} of them, so "
            f"{missing} are not there. Correct the spec, or the machine's drivers and CUDA_VISIBLE_DEVICES."
        )
    if physical:  # Else TensorFlow would put variables of a node without GPUs on the machine's.
        tf.config.set_visible_devices([physical[index] for index in gpus], "GPU")
    host = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(host, [tf.config.LogicalDeviceConfiguration()] * cpus)


def _check_logical_devices(cpus: int, gpus: int) -> None:
    import tensorflow as tf

    for kind, wanted in (("CPU", cpus), ("GPU", gpus)):
        there = len(tf.config.list_logical_devices(kind))
        if there < wanted:
            raise ClusterError(
                f"the number of {kind} devices is fixed by the first eager variable, model or iterator of a process. "
                f"Received: {wanted} in the resource spec, after {there} were made. "
                "Move AutoDist(...) before whatever is made first, or use one process per resource spec."
            )


def start_server(servers: Sequence[str], rank: int, *, cpus: int) -> None:
    """The eager context is task `rank` of the cluster of `servers` (host:port by rank), and its server listens.

    The server lives as long as the process: TensorFlow cannot stop it.

    Raises:
        ClusterError: the server cannot start.
    """
    import tensorflow as tf
    from tensorflow.core.protobuf import tensorflow_server_pb2
    from tensorflow.python.eager import context

    definition: Any = tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec({JOB: list(servers)}).as_cluster_def(),
        job_name=JOB,
        task_index=rank,
        protocol="grpc",
    )
    config = definition.default_session_config
    config.CopyFrom(context.context().config)
    config.device_count["CPU"] = cpus  # The server makes its devices anew, and from this number only.
    config.experimental.collective_group_leader = f"/job:{JOB}/replica:0/task:0"  # Without it collectives hang.
    try:
        context.context().enable_collective_ops(definition)
        context.context().ensure_initialized()
    except tf.errors.OpError as error:
        raise ClusterError(
            f"TensorFlow's server of worker {rank} cannot start on {servers[rank]}: {error.message}"
        ) from error


def task_device(rank: int) -> str:
    """The CPU of the worker of this rank, as a session names it."""
    return f"/job:{JOB}/replica:0/task:{rank}/device:CPU:0"


def server_target() -> str:
    """What a session of this process's server is made with."""
    from tensorflow.python.eager import context

    definition = context.context()._collective_ops_server_def
    return f"grpc://{definition.cluster.job[0].tasks[definition.task_index]}"


def abort_collectives(message: str) -> None:
    """Every collective of this process, waiting or to come, raises tf.errors.AbortedError with `message`."""
    if not eager_context_is_started():
        return
    from tensorflow.python.eager import context
    from tensorflow.python.framework import errors

    context.context().abort_collective_ops(errors.ABORTED, message)


def is_tensorflow_error(error: BaseException) -> bool:
    """Whether TensorFlow's runtime raised it, as it does when a peer is gone. It imports nothing."""
    return _is_of(error, "OpError")


def is_broken_connection(error: BaseException) -> bool:
    """Whether TensorFlow's runtime says that a connection has broken. It imports nothing."""
    return _is_of(error, "UnavailableError")


def _is_of(error: BaseException, kind: str) -> bool:
    base = getattr(sys.modules.get("tensorflow.python.framework.errors_impl"), kind, None)
    return base is not None and isinstance(error, base)
