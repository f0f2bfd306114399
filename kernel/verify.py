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
from collections.abc import Iterator

import networkx as nx
import tensorflow as tf

from autodist_py.kernel.graph_view import GraphView, functions_of
from autodist_py.kernel.names import op_of, replica_of
from autodist_py.kernel.printer import format_node
from autodist_py.kernel.program import Launch, Program
from autodist_py.proto.errors import InvalidGraphError


def verify(program: Program) -> None:
    """Check the invariants above.

    Raises:
        InvalidGraphError: the first one that does not hold, with the op and what stands around it.
    """
    seen: set[str] = set()
    for node in program.graph.node:
        if node.name in seen:
            raise InvalidGraphError(f"two ops have the name '{node.name}': {format_node(node)}")
        seen.add(node.name)
    view = GraphView(program.graph)
    for node in program.graph.node:
        _check_node(view, node)
    _check_acyclic(view)
    for name in (*program.fetches, *program.run_ops):
        if op_of(name) not in view.nodes:
            raise InvalidGraphError(f"'{name}' is to be fetched or run, but no op of the graph makes it")
    if program.ordered:
        _check_order(view, program.launches)


def _check_node(view: GraphView, node: tf.compat.v1.NodeDef) -> None:
    controls_began = False
    here = replica_of(node.name)
    for name in node.input:
        producer = op_of(name)
        if producer not in view.nodes:
            raise InvalidGraphError(f"input '{name}' is no op of the graph: {format_node(node)}")
        if controls_began and not name.startswith("^"):
            raise InvalidGraphError(f"data input '{name}' comes after a control input: {format_node(node)}")
        controls_began = name.startswith("^")
        there = replica_of(producer)
        if here is not None and there is not None and here != there:
            raise InvalidGraphError(f"an op of replica {here} reads replica {there}:\n{neighbourhood(view, node)}")
    for attribute, function in functions_of(node):
        if function not in view.library:
            raise InvalidGraphError(f"{attribute} names '{function}', which is not in the library: {format_node(node)}")


def _check_acyclic(view: GraphView) -> None:
    if nx.is_directed_acyclic_graph(view.digraph):
        return
    cycle = [edge[0] for edge in nx.find_cycle(view.digraph)]
    nodes = "\n".join(format_node(view.nodes[name]) for name in cycle)
    raise InvalidGraphError(f"the graph has a cycle of {len(cycle)} ops:\n{nodes}")


def _check_order(view: GraphView, launches: tuple[Launch, ...]) -> None:
    for earlier, later in itertools.pairwise(launches):
        for op in later.ops:
            missing = {f"^{name}" for name in earlier.ops} - set(view.nodes[op].input)
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
