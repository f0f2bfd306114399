"""What is traced as a function, with the variables that it uses bound to names: for all doors that trace functions."""

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from autodist_py.capture import tf_adapter
from autodist_py.kernel.ir.graph import READS_VARIABLE
from autodist_py.kernel.ir.names import op_of, parse, unique_names
from autodist_py.proto.errors import CaptureError


class VariableUses:
    """Which variables the traced ops use: their handles, and the paths that Keras gives them.

    Args:
        container_of: the variable that Keras knows, of one that is a component of it.
    """

    def __init__(self, container_of: Callable[[Any], Any] = lambda variable: variable) -> None:
        self._container_of = container_of
        self.by_handle: dict[int, Any] = {}
        self.paths: dict[int, str] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(tf_adapter.handle_uses(self._on_use))
            if "keras" in sys.modules:
                stack.enter_context(self._keras_paths(sys.modules["keras"]))
            yield

    def _on_use(self, variable: Any) -> None:
        known = self.by_handle.get(id(variable._handle))
        if known is None or tf_adapter.is_lazy_read(known):
            self.by_handle[id(variable._handle)] = variable

    def _keras_paths(self, keras: Any) -> Any:
        original = keras.Variable.value

        def value(variable: Any) -> Any:
            inner = original.fget(variable)
            self.paths[id(variable._value)] = variable.path
            return inner

        return tf_adapter.patched(keras.Variable, "value", property(value))

    def name(self, variable: Any) -> str:
        """A variable's path, or the name that its creator gave it."""
        return op_name(self.paths.get(id(self._container_of(variable))) or parse(variable.name).op)


class NewVariables:
    """Makes the variables that a traced function makes when it is first called, as Keras does, outside of its graph.

    Args:
        are_allowed: whether there may be any. As in tf.function, only in a first trace.
        make: makes one of a creator and its arguments.
    """

    def __init__(self, *, are_allowed: bool, make: Callable[..., Any] = lambda creator, **given: creator(**given)):
        self._are_allowed, self._make = are_allowed, make
        self.are_made = False

    def create(self, creator: Callable[..., Any], **kwargs: Any) -> Any:
        """A creator of variables, for `tf.variable_creator_scope`.

        Raises:
            CaptureError: it would be made for every program, or begins with what is computed from a variable, or from
                what the function is given.
        """
        with tf.init_scope():
            initial = self._initial_value(kwargs.get("initial_value"))
            if not self._are_allowed or initial is None:
                raise CaptureError(
                    f"a variable ({kwargs.get('name') or 'without a name'}) is created inside the step, which would "
                    "make it anew for every program. To keep one, create it before the step is first called, or once. "
                    "Its initial value is computed neither from what the step is given nor from a variable; a function "
                    "may read variables: tf.Variable(lambda: ...)"
                )
            self.are_made = True
            return self._make(creator, **{**kwargs, "initial_value": initial})

    def _initial_value(self, given: Any) -> Any:
        """What a variable begins with that is made outside: no tensor of the function; None: nothing is known."""
        if not self._are_allowed or not tf.is_symbolic_tensor(given):
            return given
        static = tf.get_static_value(given)
        return tf_adapter.computed_outside(given) if static is None else static


@dataclass(frozen=True, slots=True)
class BoundGraph:
    """A traced function, as a graph of one device.

    Attributes:
        graph: what was traced.
        definition: the same, with variables as `VarHandleOp`s, whose results wait for nothing but what they read.
        named: the variables' names, by those of the placeholders of their handles in `graph`.
        original: the other way round.
        variables: the variables, by their names.
        state: the other tensors that the function closes over, by the names of their placeholders.
        run_ops: the ops that must run because of what they do, in order; a read does nothing by itself.
    """

    graph: Any
    definition: tf.compat.v1.GraphDef
    named: Mapping[str, str]
    original: Mapping[str, str]
    variables: Mapping[str, tf.Variable]
    state: Mapping[str, tf.Tensor]
    run_ops: tuple[str, ...]

    def tensor(self, name: str) -> tf.Tensor:
        """The tensor of `graph` that is called so in `definition`."""
        tensor = parse(name)
        return self.graph.get_tensor_by_name(f"{self.original.get(tensor.op, tensor.op)}:{tensor.output}")


def bound_graph(graph: Any, uses: VariableUses) -> BoundGraph:
    """The function that was traced into `graph`, whose variables `uses` has seen.

    Raises:
        CaptureError: it captures values that are computed at each call.
    """
    if graph.deferred_external_captures:
        raise CaptureError(
            "the step captures values that are computed at each call (a deferred capture); pass them as arguments"
        )
    definition = graph.as_graph_def()
    handles = {
        inner.op.name: uses.by_handle[id(outer)] for outer, inner in graph.captures if id(outer) in uses.by_handle
    }
    taken = {node.name for node in definition.node if node.name not in handles}
    named = dict(zip(handles, unique_names([uses.name(v) for v in handles.values()], taken), strict=True))
    _bind_variables(definition, named, handles)
    _free_results(definition, {tensor.op.name for tensor in graph.outputs})
    must_run = {op.name for op in graph.control_outputs if op.type not in READS_VARIABLE}
    return BoundGraph(
        graph=graph,
        definition=definition,
        named=named,
        original={variable: op for op, variable in named.items()},
        variables={named[op]: variable for op, variable in handles.items()},
        state={inner.op.name: outer for outer, inner in graph.captures if inner.op.name not in handles},
        run_ops=tuple(op.name for op in graph.get_operations() if op.name in must_run),
    )


def _free_results(graph: tf.compat.v1.GraphDef, results: Collection[str]) -> None:
    """Let results be ready before the updates are: tf.function's tracing makes each wait for all that must run."""
    for node in graph.node:
        if node.name in results and node.op == "Identity":
            del node.input[1:]


def _bind_variables(graph: tf.compat.v1.GraphDef, named: Mapping[str, str], handles: Mapping[str, Any]) -> None:
    """Turn the placeholders of captured handles into `VarHandleOp`s of the variables' names."""
    for node in graph.node:
        if node.name in handles:
            variable = handles[node.name]
            node.op, node.name = "VarHandleOp", named[node.name]
            node.attr.clear()
            node.attr["dtype"].type = variable.dtype.base_dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(variable.shape.as_proto())
            node.attr["shared_name"].s = node.name.encode()
        for index, name in enumerate(node.input):
            if op_of(name) in named:
                node.input[index] = str(parse(name)._replace(op=named[op_of(name)]))


def op_name(text: str) -> str:
    """`text` as the name of an op: what TensorFlow does not allow in one becomes `_`."""
    cleaned = re.sub(r"[^A-Za-z0-9_.\\/-]", "_", text)
    return cleaned if re.match(r"[A-Za-z0-9.]", cleaned) else f"v{cleaned}"
