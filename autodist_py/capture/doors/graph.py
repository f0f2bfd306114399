"""The graph door: TF1-style code built in `scope()` -> GraphItems, one for each signature of feeds and fetches."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist_py.capture import tf_adapter
from autodist_py.capture.assemble import (
    CaptureOptions,
    aggregation_name,
    assemble,
    assemble_averaged,
    reject_gradients_of_examples,
    reject_idle_gradients,
    table_initializers,
)
from autodist_py.capture.doors.outside import SessionGuard
from autodist_py.capture.recording.gradients import GradientRecorder
from autodist_py.capture.recording.layers import LayerRecorder
from autodist_py.capture.recording.replica_contexts import refused_combinations
from autodist_py.capture.shapes import full_shape, static_shape
from autodist_py.capture.traced import TracedGraph
from autodist_py.kernel.ir.graph import VARIABLE_OP, GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import Gradient, GraphItem, Input, Output, Variable

_NOT_YET = frozenset(
    {
        "IteratorGetNext",
        "LookupTableFindV2",
        "Placeholder",
        "QueueDequeueManyV2",
        "QueueDequeueUpToV2",
        "QueueDequeueV2",
    }
)
"""Op types by which an initial value is fed, or read from what a script has yet to fill: nobody can make it before."""

_REFERENCE_VARIABLES = frozenset({"Variable", "VariableV2", "AutoReloadVariable", "TemporaryVariable"})


@dataclass(frozen=True, slots=True)
class Signature:
    """What one kind of `session.run` asks for: names in the graph."""

    feeds: tuple[str, ...]
    fetches: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(slots=True)
class Synchronized:
    """What a SyncReplicasOptimizer says of when workers wait.

    Attributes:
        replicas_to_aggregate: how many gradients an update waits for.
        num_replicas: how many replicas it is told that there are.
        first_tokens: how many tokens there are at the start, until a session is made.
    """

    replicas_to_aggregate: int
    num_replicas: int
    first_tokens: int = 0


class GraphScope:
    """A graph that is captured: what is recorded while it is built, and the items that are cut out of it."""

    def __init__(self, graph: tf.Graph, options: CaptureOptions, *, seed: int | None):
        self.graph = graph
        self._recorder = GradientRecorder(graph)
        self._layers = LayerRecorder(graph)
        self._savers: list[Any] = []
        self.synchronized: Synchronized | None = None
        """What a SyncReplicasOptimizer of the graph says."""
        self.num_workers = options.num_workers
        self._seed = seed
        self._mixes_parts = options.mixes_parts
        self._guard = SessionGuard(graph, self._gradient_tensors) if options.num_workers > 1 else None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record gradients, make resource variables, and trace tf.functions inline, while the user builds the graph."""
        if self._seed is not None and self.graph.seed is None:
            self.graph.seed = self._seed
        with ExitStack() as stack:
            if self._guard is not None:
                stack.enter_context(self._guard.active())
            stack.enter_context(tf_adapter.scope_noted(self.graph, self))
            stack.enter_context(self._recorder.active())
            stack.enter_context(self._layers.active())
            stack.enter_context(tf_adapter.savers_built(self._note_saver))
            stack.enter_context(tf_adapter.resource_variables())
            if self._mixes_parts:
                stack.enter_context(refused_combinations(self.graph, self._layers.innermost))
            stack.enter_context(tf_adapter.inlined_functions(self.graph))
            yield

    def averaged(self, variable: Any, gradient: tf.Tensor) -> tf.Tensor:
        """See GradientRecorder."""
        return self._recorder.averaged(variable, gradient)

    def _note_saver(self, saver: Any) -> None:
        if tf.compat.v1.get_default_graph() is self.graph:
            self._savers.append(saver)

    def close(self) -> None:
        """Let go of the graph: sessions of TensorFlow's may train with it."""
        if self._guard is not None:
            self._guard.close()

    def variables(self) -> dict[str, Variable]:
        """The graph's variables by name.

        Raises:
            CaptureError: a reference variable, or one without a static shape.
        """
        known = self._known_variables()
        found = {}
        for op in self.graph.get_operations():
            if op.type in _REFERENCE_VARIABLES:
                raise CaptureError(
                    f"variable '{op.name}' is a reference variable ({op.type}), which TensorFlow cannot use across "
                    "functions; make it in scope(), where variables are others by default, not with use_resource=False"
                )
            if op.type == VARIABLE_OP:
                found[op.name] = _variable(op, known.get(op.name))
        return found

    def _known_variables(self) -> dict[str, Any]:
        """The objects of the graph's variables, by name."""
        return {
            op_of(variable.handle.name): variable
            for collection in (tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, tf.compat.v1.GraphKeys.LOCAL_VARIABLES)
            for variable in self.graph.get_collection(collection)
            if tf_adapter.is_variable(variable)
        }

    def initializers(self) -> dict[str, str]:
        """For each variable whose initial value nothing need be fed, read or filled for, the op that assigns it."""
        view = GraphView(self.graph.as_graph_def())
        return {
            name: variable.initializer.name
            for name, variable in self._known_variables().items()
            if variable.initializer is not None
            and not {view.nodes[op].op for op in view.ancestors([variable.initializer.name])} & _NOT_YET
        }

    def item(self, options: CaptureOptions) -> GraphItem:
        """The whole training graph: all updates that a recorded gradient reaches, with all that they need.

        Raises:
            CaptureError: gradients were computed, and none of them reaches a variable, or those of single examples.
        """
        definition = self.graph.as_graph_def()
        view = GraphView(definition)
        gradients = self._gradients()
        reached = view.dataflow_descendants({op_of(tensor) for g in gradients for tensor in g.tensors})
        updates = tuple(
            node.name
            for node in definition.node
            if node.name in reached and any(node.name in writers for writers in view.writes.values())
        )
        placeholders = tuple(op.outputs[0].name for op in self.graph.get_operations() if op.type == "Placeholder")
        needed = view.ancestors(updates)
        fed = tuple(name for name in placeholders if op_of(name) in needed)
        item = self.cut(Signature(fed, (), updates), options)
        reject_idle_gradients(gradients, item)
        reject_gradients_of_examples({op_of(handle.name) for handle in self._recorder.of_examples}, item)
        return item

    def cut(self, signature: Signature, options: CaptureOptions) -> GraphItem:
        """The part of the graph that `signature` runs, with its feeds as inputs.

        Raises:
            CaptureError: a placeholder is needed and not fed, or a tensor cannot be fed.
        """
        definition = self.graph.as_graph_def()
        inputs = tuple(self._input(name) for name in signature.feeds)
        _feed(definition, self.graph, signature.feeds)
        view = GraphView(definition)
        needed = view.ancestors([*map(op_of, signature.fetches), *signature.targets])
        fed = {source.name for source in inputs}
        missing = sorted(n for n in needed if view.nodes[n].op == "Placeholder" and n not in fed)
        if missing:
            raise CaptureError(f"placeholder '{missing[0]}' must be fed for what is run; add it to feed_dict")
        traced = TracedGraph(
            graph=definition,
            variables=tuple(self.variables().values()),
            gradients=self._gradients(),
            inputs=inputs,
            outputs=tuple(map(self._output, signature.fetches)),
            run_ops=signature.targets,
            origins=dict(zip(self._gradients(), (one.origin for one in self._recorder.gradients), strict=True)),
            tensor_of=self._tensor,
            layer_calls=self._layers.calls,
            table_initializers=table_initializers(self.graph),
            savers=tuple(self._saver_defs()),
        )
        if self.synchronized is None:
            return assemble(traced, options, shares_all=False)
        return assemble_averaged(
            traced,
            options,
            replicas_to_aggregate=self.synchronized.replicas_to_aggregate,
            first_tokens=self.synchronized.first_tokens,
        )

    def _tensor(self, name: str) -> tf.Tensor:
        tensor = parse(name)
        return self.graph.get_tensor_by_name(f"{tensor.op}:{tensor.output}")

    def _saver_defs(self) -> Iterator[bytes]:
        """Of the savers that were made in the scope, and of those that are in the graph's collection."""
        known = [*self._savers, *self.graph.get_collection(tf.compat.v1.GraphKeys.SAVERS)]
        definitions = [saver.as_saver_def() for saver in {id(saver): saver for saver in known}.values()]
        for definition in definitions:
            if definition is not None:  # One that is yet to be built has none.
                yield bytes(definition.SerializeToString(deterministic=True))

    def _gradient_tensors(self) -> list[str]:
        return [tensor.name for gradient in self._recorder.gradients for tensor in gradient.tensors]

    def _gradients(self) -> tuple[Gradient, ...]:
        return tuple(
            Gradient(op_of(gradient.handle.name), tuple(tensor.name for tensor in gradient.tensors), gradient.reduction)
            for gradient in self._recorder.gradients
        )

    def _input(self, name: str) -> Input:
        tensor = self.graph.get_tensor_by_name(name)
        shape = static_shape(tensor.shape)
        return Input(
            op_of(name), tensor.dtype.base_dtype.name, shape, batched=shape is not None and shape[:1] == (None,)
        )

    def _output(self, name: str) -> Output:
        tensor = self.graph.get_tensor_by_name(name)
        return Output(name, tensor.dtype.base_dtype.name, static_shape(tensor.shape))


def _feed(definition: tf.compat.v1.GraphDef, graph: tf.Graph, feeds: Sequence[str]) -> None:
    """Put a placeholder in the place of every op whose result is fed."""
    tensors: Mapping[str, Any] = {op_of(name): graph.get_tensor_by_name(name) for name in feeds}
    for node in definition.node:
        tensor = tensors.get(node.name)
        if tensor is None or node.op == "Placeholder":
            continue
        if len(tensor.op.outputs) != 1:
            raise CaptureError(
                f"tensor '{tensor.name}' cannot be fed: its op '{node.op}' has {len(tensor.op.outputs)} results; "
                "feed a placeholder, or the result of an op that has one"
            )
        node.op = "Placeholder"
        node.ClearField("input")
        node.attr.clear()
        node.attr["dtype"].type = tensor.dtype.base_dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())


def _variable(op: tf.Operation, variable: Any) -> Variable:
    return Variable(
        name=op.name,
        dtype=tf.as_dtype(op.get_attr("dtype")).name,
        shape=full_shape(op.name, tf.TensorShape(op.get_attr("shape"))),
        trainable=bool(getattr(variable, "trainable", False)),
        aggregation=aggregation_name(getattr(variable, "aggregation", tf.VariableAggregation.NONE)),
        definition=_definition(variable),
    )


def _definition(variable: Any) -> bytes:
    if variable is None:
        return b""
    with variable.graph.as_default():
        return bytes(variable.to_proto().SerializeToString(deterministic=True))
