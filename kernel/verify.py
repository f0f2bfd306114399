"""The invariants of a program's graph, checked after every pass.

1. Names of ops are unique.
2. Every input is an op of the graph; control inputs come last.
3. Every function that is called is in the library.
4. Data and control edges have no cycle (loops of TensorFlow 1 aside).
5. Fetches and ops to run are in the graph.
6. An op of one replica reads no op of another replica: what crosses goes through the kernel's own ops.
7. Collectives are launched in one order: each waits for the one before it.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import networkx as nx
import tensorflow as tf

from autodist_py.kernel.graph_view import BACK_EDGE, GraphView, functions_of, has_function_attribute
from autodist_py.kernel.names import op_of, replica_of
from autodist_py.kernel.printer import format_node
from autodist_py.kernel.program import Launch, Program
from autodist_py.proto.errors import InvalidGraphError


def verify(program: Program) -> None:
    """Check the invariants above.

    Raises:
        InvalidGraphError: the first one that does not hold, with the op and what stands around it.
    """
    index: dict[str, int] = {}
    for position, node in enumerate(program.graph.node):
        if index.setdefault(node.name, position) != position:
            raise InvalidGraphError(f"two ops have the name '{node.name}': {format_node(node)}")
    producers = [_producers(node, index) for node in program.graph.node]
    _check_replicas(program.graph, list(index), producers)
    _check_calls(program.graph)
    _check_acyclic(program.graph, producers)
    for name in (*program.fetches, *program.run_ops):
        if op_of(name) not in index:
            raise InvalidGraphError(f"'{name}' is to be fetched or run, but no op of the graph makes it")
    if program.ordered:
        _check_order(program.graph, index, program.launches)


def _producers(node: tf.compat.v1.NodeDef, index: Mapping[str, int]) -> list[int]:
    """The positions of the ops that `node` waits for."""
    controls_began = False
    producers = []
    for name in node.input:
        is_control = name[0] == "^"
        if controls_began and not is_control:
            raise InvalidGraphError(f"data input '{name}' comes after a control input: {format_node(node)}")
        controls_began = is_control
        position = index.get(name)
        if position is None:
            position = index.get(op_of(name))
        if position is None:
            raise InvalidGraphError(f"input '{name}' is no op of the graph: {format_node(node)}")
        producers.append(position)
    return producers


def _check_replicas(graph: tf.compat.v1.GraphDef, names: Sequence[str], producers: Sequence[Sequence[int]]) -> None:
    scopes = [name.partition("/")[0] for name in names]
    replica_of_scope = {scope: replica_of(f"{scope}/") for scope in set(scopes)}
    replicas = [replica_of_scope[scope] for scope in scopes]
    for position, here in enumerate(replicas):
        if here is None:
            continue
        for producer in producers[position]:
            if replicas[producer] != here and replicas[producer] is not None:
                around = neighbourhood(GraphView(graph), graph.node[position])
                raise InvalidGraphError(f"an op of replica {here} reads replica {replicas[producer]}:\n{around}")


def _check_calls(graph: tf.compat.v1.GraphDef) -> None:
    library = {function.signature.name for function in graph.library.function}
    calls: dict[str, bool] = {}  # by op type, whose nodes have the same attributes
    for node in graph.node:
        if node.op not in calls:
            calls[node.op] = has_function_attribute(node)
        if not calls[node.op]:
            continue
        for attribute, function in functions_of(node):
            if function not in library:
                raise InvalidGraphError(
                    f"{attribute} names '{function}', which is not in the library: {format_node(node)}"
                )


def _check_acyclic(graph: tf.compat.v1.GraphDef, producers: Sequence[Sequence[int]]) -> None:
    """Take away ops that wait for nothing until none is left; what cannot be taken away waits for itself."""
    back_edges = {position for position, node in enumerate(graph.node) if node.op in BACK_EDGE}
    waits = [0] * len(producers)
    consumers: list[list[int]] = [[] for _ in producers]
    for position, read in enumerate(producers):
        for producer in read:
            if producer not in back_edges:
                waits[position] += 1
                consumers[producer].append(position)
    ready = [position for position, count in enumerate(waits) if not count]
    taken = 0
    while ready:
        taken += 1
        for consumer in consumers[ready.pop()]:
            waits[consumer] -= 1
            if not waits[consumer]:
                ready.append(consumer)
    if taken < len(producers):
        view = GraphView(graph)
        cycle = [edge[0] for edge in nx.find_cycle(view.digraph)]
        listed = "\n".join(format_node(view.nodes[name]) for name in cycle)
        raise InvalidGraphError(f"the graph has a cycle of {len(cycle)} ops:\n{listed}")


def _check_order(graph: tf.compat.v1.GraphDef, index: Mapping[str, int], launches: tuple[Launch, ...]) -> None:
    for earlier, later in itertools.pairwise(launches):
        for op in later.ops:
            missing = {f"^{name}" for name in earlier.ops} - set(graph.node[index[op]].input)
            if missing:
                raise InvalidGraphError(
                    f"collective '{op}' does not wait for {', '.join(sorted(missing))}: "
                    "workers could launch them in different orders"
                )


def neighbourhood(view: GraphView, node: tf.compat.v1.NodeDef) -> str:
    """`node` as text, between what it reads and what reads it."""

    def lines() -> Iterator[str]:
        for producer in dict.fromkeys(map(op_of, node.input)):
            yield f"    {format_node(view.nodes[producer])}"
        yield f"  > {format_node(node)}"
        for consumer in sorted(view.digraph.succ[node.name]):
            yield f"    {format_node(view.nodes[consumer])}"

    return "\n".join(lines())
