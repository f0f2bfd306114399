"""The function door: a TF2 step function -> GraphItem, with the user's own variables bound to it.

It is long, as tracing, what a traced function may not be, and the binding of its variables read one another's values.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from autodist_py.capture import tf_adapter
from autodist_py.capture.assemble import (
    CaptureOptions,
    assemble,
    mapped_variables,
    reject_gradients_of_examples,
    reject_idle_gradients,
    table_initializers,
)
from autodist_py.capture.doors.bound_graph import NewVariables, VariableUses, bound_graph, op_name
from autodist_py.capture.doors.outside import require_no_strategy
from autodist_py.capture.recording.gradients import GradientRecorder
from autodist_py.capture.recording.layers import LayerRecorder
from autodist_py.capture.recording.replica_contexts import refused_combinations
from autodist_py.capture.shapes import static_shape
from autodist_py.capture.traced import TracedGraph
from autodist_py.kernel.ir.names import unique_names
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import Gradient, GraphItem, Input, Output

_SOME_EXAMPLES = 16
"""As many as most ways to cut a batch into equal parts can do with."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One tensor among a function's arguments: where it stands, and its type; the batch dimension is None.

    `batch` says of which of the step's batches it is; None: it is not batched.
    """

    name: str
    spec: tf.TensorSpec
    batch: int | None


@dataclass(frozen=True, slots=True)
class Result:
    """How results are put back together: the structure, and for each leaf the output that it is (or None)."""

    structure: Any
    leaves: tuple[int | None, ...]

    @property
    def num_values(self) -> int:
        """How many outputs are the step's own results."""
        return len({index for index in self.leaves if index is not None})

    def pack(self, values: Sequence[Any]) -> Any:
        """The structure with `values`, one per output, in it."""
        flat = [None if index is None else values[index] for index in self.leaves]
        return tf.nest.pack_sequence_as(self.structure, flat, expand_composites=True)

    def unpack(self, result: Any) -> list[Any]:
        """The values, one per output, of a `result` of this structure."""
        flat = tf.nest.flatten(result, expand_composites=True)
        values = {index: leaf for index, leaf in zip(self.leaves, flat, strict=True) if index is not None}
        return [values[index] for index in sorted(values)]


@dataclass(frozen=True, slots=True)
class CapturedFunction:
    """A step, captured.

    Attributes:
        item: the single-device program.
        variables: the user's variables, by their names in the item.
        state: tensors the step closes over that are no variables (tables, iterators, large constants), by input name.
        result: how the step's results are put together from the item's outputs.
        user_step: the step as the user wrote it, of its tensor arguments in flat order.
        examples: how many there are in the call that it was captured for; None: not known.
        graph: the graph that was traced, in which ops know the user's lines.
        own: names of inputs that are each worker's own, though the batch is the same for all.
        is_plain: whether a call like this one is known by values alone, for ever: it has no object of the user's.
    """

    item: GraphItem
    variables: Mapping[str, tf.Variable]
    state: Mapping[str, tf.Tensor]
    result: Result
    user_step: Callable[..., Any]
    examples: int | None = None
    graph: tf.Graph | None = None
    own: frozenset[str] = frozenset()
    is_plain: bool = True


def capture_function(
    function: Callable[..., Any],
    arguments: Sequence[Argument],
    structure: Any,
    options: CaptureOptions,
) -> CapturedFunction:
    """Trace `function` once, for one device and any batch size.

    Args:
        function: a Python function or a tf.function; the tf.functions that it calls are traced inline.
        arguments: its tensor arguments.
        structure: `(args, kwargs)` as the user passed them, with `Slot(i)` in the place of the i-th tensor argument.
        options: what the user said about the batch.

    Raises:
        CaptureError: the construct that cannot be captured, and the way out.
    """
    require_no_strategy("the step is called")
    traced = _Trace(function, arguments, mixes_parts=options.mixes_parts)
    traced.run(structure)
    if traced.creates_variables:
        # As tf.function does: the first trace creates variables, the second is the step.
        traced = _Trace(function, arguments, mixes_parts=options.mixes_parts, is_second=True)
        traced.run(structure)
    return _assemble(traced, options, partial(_call, function, structure))


def _call(function: Callable[..., Any], structure: Any, *tensors: tf.Tensor) -> Any:
    args, kwargs = _filled(structure, tensors)
    return tf_adapter.returned(function(*args, **kwargs))


def _filled(structure: Any, tensors: Sequence[tf.Tensor]) -> Any:
    """`structure` with tensors in the place of its slots."""
    return tf.nest.map_structure(lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf, structure)


class _Trace:
    """One trace of a function: the graph, and all that is recorded while it is made."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Argument],
        *,
        mixes_parts: bool,
        is_second: bool = False,
    ):
        self._mixes_parts = mixes_parts
        self._new_variables = NewVariables(are_allowed=not is_second)
        self._function, self._autograph = tf_adapter.unwrap_function(function)
        self.arguments = arguments
        self.graph = tf_adapter.StepGraph(_function_name(self._function))
        self.recorder = GradientRecorder(self.graph)
        self.layers = LayerRecorder(self.graph)
        self.uses = VariableUses()
        names = unique_names([op_name(argument.name) for argument in arguments], ())
        with self.graph.as_default():
            self.placeholders = [
                tf.compat.v1.placeholder(argument.spec.dtype, argument.spec.shape, name=name)
                for argument, name in zip(arguments, names, strict=True)
            ]

    @property
    def creates_variables(self) -> bool:
        """Whether the function has made variables."""
        return self._new_variables.are_made

    def run(self, structure: Any) -> None:
        """Trace the function's body into the graph."""
        args, kwargs = _filled(structure, self.placeholders)
        try:
            with self._recording():
                tf_adapter.trace(self._function, self.graph, args, kwargs, autograph=self._autograph)
        except Exception as error:
            refusal = _refusal(error)
            if refusal is not None:
                raise refusal from error
            if "None" in str(error) and self._is_traced_with_known_sizes(structure):
                error.add_note(
                    "autodist_py traces a step for any batch size: the first dimension of a batched argument is None "
                    "(`x.shape[0]`); `tf.shape(x)[0]` is the number of examples."
                )
            raise

    def _is_traced_with_known_sizes(self, structure: Any) -> bool:
        """Whether the body fails only because it does not know how many examples there are."""
        if not any(argument.batch is not None for argument in self.arguments):
            return False
        graph = tf_adapter.StepGraph("known_sizes")
        with graph.as_default():
            sizes = [
                argument.spec.shape if argument.batch is None else [_SOME_EXAMPLES, *argument.spec.shape[1:]]
                for argument in self.arguments
            ]
            placeholders = [
                tf.compat.v1.placeholder(argument.spec.dtype, size)
                for argument, size in zip(self.arguments, sizes, strict=True)
            ]
        args, kwargs = _filled(structure, placeholders)
        try:
            tf_adapter.trace(self._function, graph, args, kwargs, autograph=self._autograph)
        except Exception:  # It fails anyway: the error is the script's.
            return False
        return True

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Everything that must be seen while the step is traced; undone when it is."""
        with ExitStack() as stack:
            stack.enter_context(self.recorder.active())
            stack.enter_context(self.layers.active())
            if self._mixes_parts:
                stack.enter_context(refused_combinations(self.graph, self.layers.innermost))
            stack.enter_context(self.uses.active())
            stack.enter_context(tf_adapter.inlined_functions(self.graph))
            stack.enter_context(self.graph.as_default())
            stack.enter_context(tf.variable_creator_scope(self._new_variables.create))
            yield


def _refusal(error: BaseException | None) -> CaptureError | None:
    """The CaptureError that `error` is or, autograph having wrapped it in an error of its own, comes from."""
    while error is not None and not isinstance(error, CaptureError):
        error = error.__context__
    return error


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the `index`-th tensor argument in a structure of arguments."""

    index: int


def _assemble(trace: _Trace, options: CaptureOptions, user_step: Callable[..., Any]) -> CapturedFunction:
    graph, uses = trace.graph, trace.uses
    bound = bound_graph(graph, uses)
    outputs: dict[str, Output] = {}
    flat: list[int | None] = []
    results = iter(graph.outputs)
    for leaf in tf_adapter.flat_outputs(graph):
        if leaf is None:
            flat.append(None)
            continue
        tensor = next(results)
        outputs.setdefault(tensor.name, Output(tensor.name, tensor.dtype.name, static_shape(tensor.shape)))
        flat.append(list(outputs).index(tensor.name))
    gradients = tuple(
        Gradient(bound.named[gradient.handle.op.name], tuple(tensor.name for tensor in gradient.tensors))
        for gradient in trace.recorder.gradients
    )
    item = assemble(
        TracedGraph(
            graph=bound.definition,
            variables=mapped_variables(bound.variables),
            gradients=gradients,
            inputs=(
                *(
                    Input(
                        placeholder.op.name,
                        argument.spec.dtype.name,
                        static_shape(argument.spec.shape),
                        batched=argument.batch is not None,
                        batch=argument.batch or 0,
                    )
                    for argument, placeholder in zip(trace.arguments, trace.placeholders, strict=True)
                ),
                *(
                    Input(name, tensor.dtype.name, static_shape(tensor.shape), batched=False, kind="state")
                    for name, tensor in bound.state.items()
                ),
            ),
            outputs=tuple(outputs.values()),
            run_ops=bound.run_ops,
            origins=dict(zip(gradients, (one.origin for one in trace.recorder.gradients), strict=True)),
            tensor_of=bound.tensor,
            layer_calls=trace.layers.calls,
            table_initializers=table_initializers(graph),
        ),
        options,
    )
    reject_idle_gradients(gradients, item)
    written = {variable.name for variable in item.variables if variable.update_ops}
    reject_gradients_of_examples(written & {bound.named[handle.op.name] for handle in trace.recorder.of_examples}, item)
    kept = {variable.name for variable in item.variables}
    return CapturedFunction(
        item=item,
        variables={name: variable for name, variable in bound.variables.items() if name in kept},
        state=bound.state,
        result=Result(graph.structured_outputs, tuple(flat)),
        user_step=user_step,
        graph=graph,
    )


def _function_name(function: Callable[..., Any]) -> str:
    return op_name(getattr(function, "__name__", type(function).__name__))


def step_signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a step: of the Python function inside a tf.function."""
    return inspect.signature(tf_adapter.unwrap_function(function)[0])


def argument_names(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """For every leaf of `(args, kwargs)`, in flat order, its parameter, and a name of its own."""
    bound = signature.bind(*args, **kwargs)
    names = []
    for parameter, value in bound.arguments.items():
        kind = signature.parameters[parameter].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            for position, item in enumerate(value):
                names += _leaf_names(parameter, f"{parameter}_{position}", item)
        elif kind is not inspect.Parameter.VAR_KEYWORD and parameter not in kwargs:
            names += _leaf_names(parameter, parameter, value)
    for name in sorted(kwargs):
        names += _leaf_names(name, name, kwargs[name])
    return names


def _leaf_names(parameter: str, name: str, value: Any) -> list[tuple[str, str]]:
    if not tf.nest.is_nested(value):
        return [(parameter, name)]
    return [(parameter, f"{name}_{index}") for index in range(len(tf.nest.flatten(value)))]
