"""All that the executor and the variables' copies use of TensorFlow's private modules."""

import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.function.polymorphism import function_type as function_type_lib
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session as c_api
from tensorflow.python.client import session
from tensorflow.python.data.experimental.ops import distribute
from tensorflow.python.eager import context, record
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import auto_control_deps_utils, c_api_util, importer, ops, stack, tensor_shape
from tensorflow.python.framework import func_graph as func_graph_module
from tensorflow.python.ops import resource_variable_ops as variable_ops
from tensorflow.tsl.profiler.protobuf import xplane_pb2


class ProfiledEvent(NamedTuple):
    """What a thread did, from when on, and for how long, in microseconds."""

    name: str
    thread: int
    start_us: float
    duration_us: float


def profiled(space: bytes) -> Iterator[ProfiledEvent]:
    """The events in what TensorFlow's profiler has written (XSpace)."""
    for plane in xplane_pb2.XSpace.FromString(space).planes:
        for line in plane.lines:
            for event in line.events:
                start = line.timestamp_ns / 1e3 + event.offset_ps / 1e6
                name = plane.event_metadata[event.metadata_id].name
                yield ProfiledEvent(name, line.id, start, event.duration_ps / 1e6)


SessionInterface: type = session.SessionInterface
"""What `tf.compat.v1.train.Saver` takes for a session."""


def default_session(session: Any) -> AbstractContextManager[Any]:
    """`session` is what `eval()` and `run()` use within the context."""
    context_manager: AbstractContextManager[Any] = stack.default_session(session)
    return context_manager


class GraphFunction:
    """A TensorFlow function of flat tensors, which is registered for as long as this object, or a graph, calls it."""

    def __init__(self, name: str, captured: Sequence[tf.Tensor], count: int, callees: "Sequence[GraphFunction]" = ()):
        """A function of the eager context, which is registered by now.

        Args:
            name: its name there.
            captured: what it is given behind its arguments.
            count: how many results it has.
            callees: the functions that it calls.
        """
        self._runtime = context.context()
        # It counts who uses the function, and removes the last one's from the context.
        self._function: Any = atomic_function.AtomicFunction(
            name, self._runtime, function_type_lib.FunctionType([]), [each._function for each in callees]
        )
        # Counted once more, but at the end of Python: no function is removed then, as threads may still run it.
        key = (self._runtime.function_scope_id, self._function.name)
        atomic_function.RUNTIME_FUNCTION_REFS[key] += 1
        weakref.finalize(self, _release, key).atexit = False
        self._name, self._captured, self._count = name.encode(), list(captured), count

    def __call__(self, tensors: Sequence[tf.Tensor]) -> list[Any]:
        """Run it eagerly."""
        with record.stop_recording():
            return self._runtime.call_function(self._name, [*tensors, *self._captured], self._count) or []

    def in_graph(
        self, tensors: Sequence[Any], results: Sequence[tf.TensorSpec], only_read: Collection[tf.Tensor]
    ) -> tf.Operation:
        """An op of the default graph that runs it.

        Args:
            tensors: its arguments.
            results: the types of its results.
            only_read: those of the resources it is given that it does not write.
        """
        graph = tf.compat.v1.get_default_graph()
        graph._add_function_recursive(self._function)
        given = [*tensors, *self._captured]
        reads = {id(tensor) for tensor in only_read}
        with record.stop_recording():
            op = atomic_function.partitioned_call_op(
                self._name,
                given,
                is_stateful=True,
                tout=[spec.dtype.as_datatype_enum for spec in results],
                config=self._runtime.function_call_options.config_proto_serialized,
            )
        for output, spec in zip(op.outputs, results, strict=True):
            output.set_shape(spec.shape)
        ops.set_int_list_attr(
            op,
            auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR,
            [index for index, tensor in enumerate(given) if id(tensor) in reads],
        )
        return op


def _release(key: tuple[int, bytes]) -> None:
    atomic_function.RUNTIME_FUNCTION_REFS[key] -= 1


def traced_function(
    name: str, specs: Sequence[tf.TensorSpec], body: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]
) -> GraphFunction:
    """A TensorFlow function of flat tensors, without automatic control dependencies.

    Args:
        name: what the function is called in profiles.
        specs: the types of its inputs.
        body: builds it, from the inputs to the outputs.
    """
    graph = func_graph_module.FuncGraph(name)
    with graph.as_default():
        inputs = _placeholders(specs)
        outputs = body(inputs)
    return _registered(graph, inputs, [tensor._as_tf_output() for tensor in outputs], [])


def graph_function(
    name: str,
    definition: tf.compat.v1.GraphDef,
    inputs: Sequence[tuple[str, tf.TensorSpec]],
    captured: Mapping[str, tf.Tensor],
    outputs: Sequence[str],
    targets: Sequence[str],
    callees: Sequence[GraphFunction] = (),
) -> GraphFunction:
    """A graph as a TensorFlow function, without automatic control dependencies.

    `tf.import_graph_def` makes a Python object for every op, which costs five times as much as all the rest; here the
    graph stays in TensorFlow's runtime.

    Args:
        name: what the function is called in profiles.
        definition: the graph, without the ops that `inputs` and `captured` stand for.
        inputs: the tensors of it that a call gives, by name (`op:0`), with their types.
        captured: tensors, eager ones or of the default graph, that stand for others of its tensors.
        outputs: the tensors whose values a call returns.
        targets: the ops that must run beside.
        callees: the registered functions of its library.
    """
    graph = func_graph_module.FuncGraph(name)
    with graph.as_default():
        placeholders = _placeholders([spec for _, spec in inputs])
        given = dict(zip((name for name, _ in inputs), placeholders, strict=True))
        given |= {name: graph.capture(tensor) for name, tensor in captured.items()}
    options = c_api_util.ScopedTFImportGraphDefOptions()
    importer._PopulateTFImportGraphDefOptions(options.options, "", given, [*outputs, *targets], False)
    buffer = c_api.TF_NewBufferFromString(definition.SerializeToString())
    try:
        with graph._c_graph.get() as c_graph:
            results = c_api_util.ScopedTFImportGraphDefResults(
                c_api.TF_GraphImportGraphDefWithResults(c_graph, buffer, options.options)
            )
    finally:
        c_api.TF_DeleteBuffer(buffer)
    return _registered(
        graph,
        placeholders,
        c_api.TF_ImportGraphDefResultsReturnOutputs(results.results),
        c_api.TF_ImportGraphDefResultsReturnOperations(results.results),
        callees,
    )


def _placeholders(specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    return [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]


def _registered(
    graph: Any,
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[Any],
    targets: Sequence[Any],
    callees: Sequence[GraphFunction] = (),
) -> GraphFunction:
    """Register all of `graph` as a function; `outputs` and `targets` are handles of the C API."""
    name = f"{graph.name}_{uuid.uuid4().hex[:12]}"
    arguments = [tensor._as_tf_output() for tensor in (*inputs, *graph.internal_captures)]
    with graph._c_graph.get() as c_graph:
        definition = c_api.TF_GraphToFunction_wrapper(
            c_graph, name, False, None, arguments, list(outputs), [], list(targets), [], None, ""
        )
    context.context().add_c_function(definition)
    c_api.TF_DeleteFunction(definition)
    return GraphFunction(name, graph.external_captures, len(outputs), callees)


def uninitialized_variable(name: str, dtype: tf.DType, shape: tf.TensorShape, *, trainable: bool) -> tf.Variable:
    """An eager variable without a value."""
    return variable_ops.UninitializedVariable(name=name, dtype=dtype, shape=shape, trainable=trainable)


class _FetchHandler(session._FetchHandler):
    """TensorFlow's own, which asks the graph itself, not what keeps other sessions from fetching."""

    def _assert_fetchable(self, graph: tf.Graph, op: tf.Operation) -> None:
        if not type(graph).is_fetchable(graph, op):
            super()._assert_fetchable(graph, op)


def fetch_handler(graph: tf.Graph, fetches: Any) -> Any:
    """TensorFlow's own reading of a structure of fetches, with `fetches()`, `targets()` and `build_results()`."""
    return _FetchHandler(graph, fetches, {})


@contextmanager
def run_metadata(message: Any) -> Iterator[None]:
    """Fill `message`, a RunMetadata (or None), with what is collected about the functions run within the context."""
    if message is None:
        yield
        return
    context.context().enable_run_metadata()
    try:
        yield
        message.CopyFrom(context.context().export_run_metadata())
    finally:
        context.context().disable_run_metadata()


def global_seed() -> int | None:
    """The seed that `tf.random.set_seed` was given; None where it was not called."""
    return context.global_seed()


def memory_limit(device: str) -> int | None:
    """The bytes that TensorFlow may use on a device of this process, such as `/device:GPU:0`; None: not known.

    For a CPU it is no limit, but a fixed number that TensorFlow plans with.
    """
    runtime = context.context()
    runtime.ensure_initialized()
    devices = pywrap_tfe.TFE_ContextListDevices(runtime._handle)
    try:
        limits = {
            c_api.TF_DeviceListName(devices, index): c_api.TF_DeviceListMemoryBytes(devices, index)
            for index in range(c_api.TF_DeviceListCount(devices))
        }
    finally:
        c_api.TF_DeleteDeviceList(devices)
    own = tf.DeviceSpec.from_string(runtime.host_address_space()).make_merged_spec(tf.DeviceSpec.from_string(device))
    return limits.get(own.to_string()) or None


def eagerly() -> AbstractContextManager[None]:
    """What is done within happens eagerly, also while a `tf.Graph` is the default (which `tf.init_scope` stays in)."""
    return context.eager_mode()


def end_resource(op: tf.Operation, shared_name: str) -> None:
    """The iterator or queue of that name on this machine's CPU, which programs of ours have made of `op`, is gone."""
    attributes = {name: op.get_attr(name) for name in op.node_def.attr if not name.startswith("_")}
    with eagerly(), tf.device("/device:CPU:0"):
        handle = getattr(tf.raw_ops, op.type)(**{**attributes, "shared_name": shared_name})
        if "Queue" in op.type:
            tf.raw_ops.QueueCloseV2(handle=handle, cancel_pending_enqueues=True)
        tf.raw_ops.DestroyResourceOp(resource=handle)


def variable_of_no_strategy(value: Any, dtype: tf.DType, name: str) -> tf.Variable:
    """A variable that no strategy and no creator scope around it makes."""
    return variable_ops.ResourceVariable(value, trainable=False, dtype=dtype, name=name)


@contextmanager
def shapes_of_tensorflow_2() -> Iterator[None]:
    """The sizes of a TensorShape are numbers within, as they are not after `tf.compat.v1.disable_v2_behavior()`."""
    before = tensor_shape._TENSORSHAPE_V2_OVERRIDE
    tensor_shape._TENSORSHAPE_V2_OVERRIDE = True
    try:
        yield
    finally:
        tensor_shape._TENSORSHAPE_V2_OVERRIDE = before


def registered_functions(library: Any) -> list[GraphFunction]:
    """Make a graph's library functions callable in the eager context, for as long as the result is kept.

    Importing a graph into a function registers what the graph calls in the graph alone.
    """
    for function in library.function:
        context.context().add_function_def(function)
    return [GraphFunction(each.signature.name, [], len(each.signature.output_arg)) for each in library.function]


def sharded(dataset: tf.data.Dataset, policy: Any, *, num_shards: int, index: int) -> tf.data.Dataset:
    """Shard `index` of `dataset`, by tf.data's rewriting of its graph; `policy` is an AutoShardPolicy.

    Raises:
        NotFoundError: the policy is to share out files, and the dataset reads none.
    """
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return distribute._AutoShardDataset(dataset.with_options(options), num_shards, index)
