"""All that the executor and the variables' copies use of TensorFlow's private modules."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import func_graph as func_graph_module
from tensorflow.python.ops import resource_variable_ops as variable_ops

SessionInterface: type = session.SessionInterface
"""What `tf.compat.v1.train.Saver` takes for a session."""

Body = Callable[[Sequence[tf.Tensor], Callable[[tf.Tensor], tf.Tensor]], tuple[list[tf.Tensor], list[tf.Operation]]]


def flat_function(name: str, specs: Sequence[tf.TensorSpec], body: Body) -> Callable[[Sequence[tf.Tensor]], list[Any]]:
    """A TensorFlow function of flat tensors, without automatic control dependencies.

    Args:
        name: what the function is called in profiles.
        specs: the types of its inputs.
        body: builds it: from the inputs, and a function that captures an eager tensor, to its outputs and to the ops
            that must run beside them.

    Returns:
        A callable that runs the function eagerly on a list of tensors.
    """
    must_run: list[tf.Operation] = []
    graph = func_graph_module.FuncGraph(name)

    def build(*inputs: tf.Tensor) -> list[tf.Tensor]:
        outputs, ops = body(inputs, graph.capture)
        must_run.extend(ops)
        return outputs

    func_graph_module.func_graph_from_py_func(
        name, build, list(specs), {}, func_graph=graph, add_control_dependencies=False
    )
    graph.control_outputs.extend(must_run)
    function = concrete_function.ConcreteFunction.from_func_graph(graph, None, {}, shared_func_graph=False)
    captured = function.captured_inputs
    call = function._call_flat

    def run(inputs: Sequence[tf.Tensor]) -> list[Any]:
        return tf.nest.flatten(call(list(inputs), captured))

    return run


def uninitialized_variable(name: str, dtype: tf.DType, shape: tf.TensorShape, *, trainable: bool) -> tf.Variable:
    """An eager variable without a value."""
    return variable_ops.UninitializedVariable(name=name, dtype=dtype, shape=shape, trainable=trainable)


def fetch_handler(graph: tf.Graph, fetches: Any) -> Any:
    """TensorFlow's own reading of a structure of fetches, with `fetches()`, `targets()` and `build_results()`."""
    return session._FetchHandler(graph, fetches, {})


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


def eagerly() -> AbstractContextManager[None]:
    """What is done within happens eagerly, also while a `tf.Graph` is the default (which `tf.init_scope` stays in)."""
    return context.eager_mode()


def register_functions(library: Any) -> list[str]:
    """Make a graph's library functions callable in the eager context; returns their names.

    Importing a graph into a function registers what the graph calls in the graph alone.
    """
    for function in library.function:
        context.context().add_function_def(function)
    return [function.signature.name for function in library.function]


def forget_functions(names: Sequence[str]) -> None:
    """Undo `register_functions`."""
    for name in names:
        context.context().remove_function(name)
