"""The local program: a compiled graph as one TensorFlow function over the user's own variables."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from autodist_py import tf_adapter
from autodist_py.kernel.ir.fragment import TensorSpec
from autodist_py.kernel.ir.graph import READS_VARIABLE, SHARED_BY_NAME, VARIABLE_OP, GraphView, rename_functions
from autodist_py.kernel.ir.names import KERNEL_SCOPE, captured_name, op_of, parse
from autodist_py.kernel.pipeline import CompiledProgram
from autodist_py.kernel.program import ServerFunction


class Executor:
    """Runs a compiled program, step by step, in the eager context."""

    def __init__(
        self,
        program: CompiledProgram,
        variables: Mapping[tuple[str, int], tf.Variable],
        state: Mapping[str, tf.Tensor],
        *,
        name: str = "step",
        namespace: str = "",
        is_op: bool = False,
    ):
        """Import the program's graph.

        Args:
            program: what to run.
            variables: for each variable of the program and local replica, the one to read and write.
            state: for each of its "state" inputs, the tensor to use (tables, iterators, constants).
            name: what the step is called in profiles.
            namespace: programs of one namespace share the iterators and queues that their graphs make; "": this one
                has its own.
            is_op: whether it is run as one of a graph's ops (`add_to_graph`), so that what writes after it must wait
                for what it reads. TensorFlow inlines it, and then has others wait only for those ops that must run.
        """
        self._program, self._name, self._namespace = program, name, namespace
        self._given = {f"{op}:0": tensor for op, tensor in state.items()}
        self._given |= {
            f"{bound.op}:0": variables[bound.variable, bound.replica].handle
            for bound in program.variables
            if (bound.variable, bound.replica) in variables
        }
        feeds = [TensorSpec(name, tf.as_dtype(source.dtype), source.shape) for name, source in program.feeds]
        reads = [node.name for node in program.graph.of_type(READS_VARIABLE)] if is_op else []
        self._run = self._function(name, program.graph, feeds, program.fetches, [*program.run_ops, *reads])

    def run(self, feeds: Sequence[tf.Tensor]) -> list[Any]:
        """One step: a value for each of the program's fetches, from a tensor for each of the program's feeds."""
        return self._run(feeds)

    def add_to_graph(self, feeds: Sequence[tf.Tensor]) -> tf.Operation:
        """An op of the default graph that runs a step; its results are those of `run`."""
        results = [tf.TensorSpec(output.shape, tf.as_dtype(output.dtype)) for output in self._program.fetched]
        writes = self._program.graph.writes
        served = {f"{bound.op}:0" for bound in self._program.variables if bound.variable in self._program.held}
        only_read = [
            tensor
            for name, tensor in self._given.items()
            if not writes.get(op_of(name), True) and name not in served  # A server writes what it holds.
        ]
        return self._run.in_graph(feeds, results, only_read)

    def server_function(self, function: ServerFunction) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]:
        """What the program's worker runs as a server, with the user's variables."""
        return self._function(f"{self._name}_server", function.graph, function.takes, function.gives, function.run_ops)

    def _function(
        self, name: str, view: GraphView, feeds: Sequence[TensorSpec], fetches: Sequence[str], run_ops: Sequence[str]
    ) -> tf_adapter.GraphFunction:
        inputs = [(_spelt(feed.name), tf.TensorSpec(feed.shape, feed.dtype)) for feed in feeds]
        given = {op_of(name) for name in (*self._given, *(name for name, _ in inputs))}
        handles = {node.name for node in view.of_type({VARIABLE_OP})}  # One that is not given is not used.
        graph = view.without(given | handles).graph_def()
        _own_functions(graph, suffix=uuid.uuid4().hex[:12])
        if self._namespace:
            _share_by_name(graph, self._namespace)
        callees = tf_adapter.registered_functions(graph.library)
        return tf_adapter.graph_function(name, graph, inputs, self._given, list(map(_spelt, fetches)), run_ops, callees)


def _spelt(tensor: str) -> str:
    """The tensor's name with the number of the result."""
    name = parse(tensor)
    return f"{name.op}:{name.output}"


def _share_by_name(graph: tf.compat.v1.GraphDef, namespace: str) -> None:
    """Name iterators and queues. Else each program has its own, though one fills a queue, and another reads it."""
    for node in graph.node:
        if node.op in SHARED_BY_NAME and not node.name.startswith(f"{KERNEL_SCOPE}/"):
            own = node.attr["shared_name"].s.decode()
            node.attr["shared_name"].s = shared_name(namespace, captured_name(node.name), own).encode()


def shared_name(namespace: str, op: str, own: str) -> str:
    """What programs of a namespace call the iterator or queue that a captured op makes, by its own name or the op's."""
    return f"{namespace}/{own or op}"


def _own_functions(graph: tf.compat.v1.GraphDef, *, suffix: str) -> None:
    """Rename library functions to what no other program has: TensorFlow registers them by name."""
    renamed = {function.signature.name: f"{function.signature.name}_{suffix}" for function in graph.library.function}
    if not renamed:
        return
    for function in graph.library.function:
        function.signature.name = renamed[function.signature.name]
        for node in function.node_def:
            rename_functions(node, renamed)
    for node in graph.node:
        rename_functions(node, renamed)
