"""The local program: a compiled graph as one TensorFlow function over the user's own variables."""

import uuid
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from autodist_py import tf_adapter
from autodist_py.kernel.graph_view import rename_functions
from autodist_py.kernel.names import op_of, parse
from autodist_py.kernel.pipeline import CompiledProgram


class Executor:
    """Runs a compiled program, step by step, in the eager context."""

    def __init__(
        self,
        program: CompiledProgram,
        variables: Mapping[tuple[str, int], tf.Variable],
        state: Mapping[str, tf.Tensor],
        *,
        name: str = "step",
    ):
        """Import the program's graph.

        Args:
            program: what to run.
            variables: for each variable of the program and local replica, the one to read and write.
            state: for each of its "state" inputs, the tensor to use (tables, iterators, constants).
            name: what the step is called in profiles.
        """
        self._feeds = [source for source in program.item.inputs if source.kind == "feed"]
        graph = _own_functions(program.graph, suffix=uuid.uuid4().hex[:12])
        names = tf_adapter.register_functions(graph.library)
        weakref.finalize(self, tf_adapter.forget_functions, names)

        def body(inputs: Sequence[tf.Tensor], capture: Any) -> tuple[list[tf.Tensor], list[tf.Operation]]:
            given = {f"{source.name}:0": tensor for source, tensor in zip(self._feeds, inputs, strict=True)}
            given |= {f"{op}:0": capture(tensor) for op, tensor in state.items()}
            given |= {
                f"{bound.op}:0": capture(variables[bound.variable, bound.replica].handle)
                for bound in program.variables
                if (bound.variable, bound.replica) in variables
            }
            return _import(program, graph, given)

        specs = [tf.TensorSpec(source.shape, tf.as_dtype(source.dtype)) for source in self._feeds]
        self._run = tf_adapter.flat_function(name, specs, body)

    def run(self, feeds: Sequence[tf.Tensor]) -> list[Any]:
        """One step: a value for each of the item's outputs, from a tensor for each of its inputs of kind "feed"."""
        return self._run(feeds)


def _import(
    program: CompiledProgram, source: tf.compat.v1.GraphDef, given: Mapping[str, tf.Tensor]
) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    bound = {op_of(name) for name in given}
    graph = tf.compat.v1.GraphDef(versions=source.versions, library=source.library)
    used: set[str] = set()
    for node in source.node:
        if node.name in bound:
            continue
        graph.node.append(node)
        used.update(op_of(name) for name in node.input)
        if any(name.startswith("^") and op_of(name) in bound for name in node.input):
            kept = [name for name in node.input if not (name.startswith("^") and op_of(name) in bound)]
            graph.node[-1].ClearField("input")
            graph.node[-1].input.extend(kept)
    fetches = [f"{parse(name).op}:{parse(name).output}" for name in program.fetches]
    fetched = [name for name in fetches if name not in given]
    elements = tf.import_graph_def(
        graph,
        input_map={name: tensor for name, tensor in given.items() if op_of(name) in used},
        return_elements=[*fetched, *program.run_ops],
        name="",
    )
    tensors = dict(zip(fetched, elements, strict=False)) | dict(given)
    return [tensors[name] for name in fetches], elements[len(fetched) :]


def _own_functions(graph: tf.compat.v1.GraphDef, *, suffix: str) -> tf.compat.v1.GraphDef:
    """`graph` with library functions under names that no other program has: TensorFlow registers them by name."""
    renamed = {function.signature.name: f"{function.signature.name}_{suffix}" for function in graph.library.function}
    if not renamed:
        return graph
    result = tf.compat.v1.GraphDef()
    result.CopyFrom(graph)
    for function in result.library.function:
        function.signature.name = renamed[function.signature.name]
        for node in function.node_def:
            rename_functions(node, renamed)
    for node in result.node:
        rename_functions(node, renamed)
    return result
