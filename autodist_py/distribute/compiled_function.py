"""A replica function that is traced once, compiled for all replicas of a strategy, and called as one op."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from autodist_py.capture.doors.bound_graph import NewVariables
from autodist_py.capture.doors.replica_function import CapturedReplicaFunction, ReplicaTrace
from autodist_py.distribute import tf_adapter
from autodist_py.distribute.replica_context import TracedReplicaContext
from autodist_py.kernel.ir.names import on_replica
from autodist_py.kernel.pipeline import CompiledProgram, compile
from autodist_py.kernel.program import Options
from autodist_py.kernel.topology import Replica, Topology
from autodist_py.program.executor import Executor
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from autodist_py.strategy_builders.base import build_strategy

_HERE = "127.0.0.1"


def call_once(strategy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Trace `function` once for all replicas of `strategy`, and run it on each, in the default graph.

    Returns:
        What it returns, regrouped: tensors as PerReplica, but for those that a `merge_call` has returned.

    Raises:
        CaptureError: a variable is used or made in a way that replicas cannot.
    """
    return _Traced(strategy, function, args, kwargs).called()


class _Traced:
    """A replica function, traced: what each replica is fed, and what is returned."""

    def __init__(self, strategy: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        self._strategy = strategy
        self._name = getattr(function, "__name__", type(function).__name__)
        self._trace = ReplicaTrace(self._name, tf_adapter.container_of, tf_adapter.is_sync_on_read)
        self._context = TracedReplicaContext(strategy, self._trace)
        self._fed: list[Sequence[Any]] = [[tf.constant(one, tf.int32) for one in range(self._context.num_replicas)]]
        """For each part, in order, what each replica is fed."""
        given = tf.nest.map_structure(self._entered, (tuple(args), dict(kwargs)))
        # A tf.function around it that sees variables made traces it again, and refuses those made then.
        new = NewVariables(are_allowed=True, make=self._variable)
        self._result: Any = None

        def body() -> list[tf.Tensor]:
            with self._context.active():
                self._result = tf.nest.map_structure(self._returned, function(*given[0], **given[1]))
            return [leaf for leaf in self._leaves() if self._trace.has(leaf)]

        with self._trace.tracing(new.create):
            self._trace.run(body)

    def _entered(self, leaf: Any) -> Any:
        """What the function is given for an argument: a part, where replicas have values of their own."""
        if isinstance(leaf, tf_adapter.DistributedVariable) or not isinstance(leaf, tf_adapter.DistributedValues):
            return leaf

        def part(*values: Any) -> tf.Tensor:
            shape = tf.TensorShape(values[0].shape)
            for value in values[1:]:
                shape = shape.most_specific_compatible_shape(value.shape)
            self._fed.append(values)
            return self._trace.part(tf.TensorSpec(shape, values[0].dtype), "part")

        if not all(tf.is_tensor(each) for each in tf.nest.flatten(leaf.values, expand_composites=True)):
            raise CaptureError(
                f"each replica is given an object of its own, {leaf.values}; a function that is compiled for all of "
                "them takes tensors. Give it tf.constant(...) of the values, or call run() on no tf.function"
            )
        return tf.nest.map_structure(part, *leaf.values, expand_composites=True)

    def _variable(self, creator: Callable[..., Any], **kwargs: Any) -> Any:
        with tf_adapter.cross_replica_context(self._strategy):
            return creator(**kwargs)  # The strategy's, as run() is called in its scope.

    def _returned(self, leaf: Any) -> Any:
        """A result of the function, as what replicas return together is made of."""
        if isinstance(leaf, tf_adapter.DistributedVariable):
            return leaf
        if isinstance(leaf, tf.Variable) and not tf_adapter.is_lazy_read(leaf):
            return tf_adapter.container_of(leaf)
        return tf.convert_to_tensor(leaf) if tf_adapter.is_lazy_read(leaf) else leaf

    def _leaves(self) -> list[Any]:
        return tf.nest.flatten(self._result, expand_composites=True)

    def called(self) -> Any:
        """The results of an op of the default graph that runs it on all replicas."""
        captured = self._trace.captured()
        program = self._compiled(captured)
        executor = Executor(program, dict(self._bound(program, captured)), captured.state, name=self._name)
        fed = {
            on_replica(position, part): value
            for part, values in zip(captured.parts, self._fed, strict=True)
            for position, value in enumerate(values)
        }
        ran = executor.add_to_graph([fed[name] for name, _ in program.feeds])
        tf_adapter.on_gradient(ran, self._refuse_gradient)
        fetched = list(self._fetched(program, ran.outputs))
        results = iter(captured.results)
        values: list[list[Any]] = []
        for leaf in self._leaves():
            if self._trace.has(leaf):
                values.append(fetched[next(results)])
            else:
                values.append([ran if isinstance(leaf, tf.Operation) else leaf] * self._context.num_replicas)
        return tf_adapter.regroup(
            tuple(
                tf.nest.pack_sequence_as(self._result, [value[position] for value in values], expand_composites=True)
                for position in range(self._context.num_replicas)
            )
        )

    def _refuse_gradient(self, *_: Any) -> Any:
        raise CaptureError(
            f"a gradient is computed through run({self._name}), whose replicas are one compiled program. Compute it in "
            f"'{self._name}': with the tape, and what it watches, in the function that is given to run()"
        )

    def _compiled(self, captured: CapturedReplicaFunction) -> CompiledProgram:
        devices = [tf.DeviceSpec.from_string(device) for device in self._strategy.extended.worker_devices]
        numbers = {kind: [one.device_index for one in devices if one.device_type == kind] for kind in ("CPU", "GPU")}
        node = NodeSpec(_HERE, gpus=tuple(sorted(numbers["GPU"])), cpus=tuple(sorted(numbers["CPU"])))
        resources = ResourceSpec((node,))
        built = build_strategy(self._strategy.extended.strategy_builder, captured.item, resources)
        replicas = tuple(
            Replica(index, 0, f"/device:{one.device_type}:{one.device_index}") for index, one in enumerate(devices)
        )
        topology = Topology(0, replicas, dict.fromkeys(node.devices, 0))
        return compile(captured.item, built, topology, Options(keeps_copies=True, folds_seeds=False))

    def _bound(
        self, program: CompiledProgram, captured: CapturedReplicaFunction
    ) -> Iterator[tuple[tuple[str, int], tf.Variable]]:
        """For each variable of the program and replica, the component that is the replica's."""
        for bound in program.variables:
            first = captured.variables[bound.variable]
            container = tf_adapter.container_of(first)
            components = container.values if isinstance(container, tf_adapter.DistributedVariable) else None
            if components is not None and tf_adapter.handle_of(components[0]) is not tf_adapter.handle_of(first):
                raise CaptureError(
                    f"'{bound.variable}' is another replica's component of a variable: a replica reads and writes its "
                    "own. Use the variable itself, which stands for the replica's component in run()"
                )
            yield (bound.variable, bound.replica), first if components is None else components[bound.replica]

    def _fetched(self, program: CompiledProgram, tensors: Sequence[tf.Tensor]) -> Iterator[list[tf.Tensor]]:
        """Of each of the item's outputs the value of each replica: one and the same, where it is shared."""
        values: dict[str, list[tf.Tensor]] = {output.tensor: [] for output in program.item.outputs}
        for output, tensor in zip(program.fetched, tensors, strict=True):
            values[output.tensor].append(tensor)
        for output in program.item.outputs:
            own = values[output.tensor]
            yield own if output.per_replica else own * self._context.num_replicas
