"""Which ops of a step are computed first: those whose results take long to send. `computed_first`.

Of ops that are ready together TensorFlow runs all, side by side. Back-propagation makes two products of what reaches a
layer: the gradient of its weights, which is to be sent, and the one that goes on to the layer before. The wire stands
still until the first is there; so the second waits for it. Both take as long as before, and what is sent goes earlier.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import networkx as nx
import tensorflow as tf

from autodist_py.kernel.analysis.replica_weights import dense_bytes
from autodist_py.kernel.collectives.collectives import bucket_bytes
from autodist_py.kernel.events import LOCAL, AllReduceBucket, Event, Exchange, ServerPlans
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of
from autodist_py.kernel.program import Program

_PRODUCTS = frozenset(
    {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"}
    | {"Conv2DBackpropInput", "Conv2DBackpropFilter", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"}
)
"""Op types that take nearly all of the time of back-propagation."""
_PASSES_ON = frozenset({"Cast", "Identity", "Reshape", "Sum", "Transpose"})
"""Op types by which what such an op has made becomes a gradient."""


def computed_first(program: Program, events: Sequence[Event], plans: ServerPlans | None) -> tuple[tuple[str, str], ...]:
    """Pairs of ops of the captured graph: the one that is computed first, and the one that waits for it.

    All of them go forward in one order of what ops and events wait for already; so no wait leads back to itself.

    Args:
        program: the captured one.
        events: in the order in which they are issued.
        plans: how the step is divided between workers and servers.
    """
    view = program.analysis.captured
    rivals = {maker: _rivals(program, maker) for maker in _makers(program, events)}
    if not any(rivals.values()):
        return ()
    graph = _waits(view, events)
    # What servers compute waits for more than the graph says, as do the products behind it.
    served = set().union(*(nx.descendants(graph, op) for op in plans.server_ops)) if plans else set()
    late = {rival for others in rivals.values() for rival in others}
    ordered = nx.lexicographical_topological_sort(graph, key=late.__contains__)
    place = {one: position for position, one in enumerate(ordered)}
    return tuple(
        (maker, rival)
        for maker, others in rivals.items()
        for rival in sorted(others, key=place.__getitem__)
        if maker not in served and place[maker] < place[rival]
    )


def _makers(program: Program, events: Sequence[Event]) -> Iterator[str]:
    """The products that make large gradients which are sent, in the order in which they are."""
    view = program.analysis.captured
    for event in events:
        if not isinstance(event, AllReduceBucket) or event.engine == LOCAL:
            continue
        for gradient in event.gradients:
            if gradient.is_sparse or 2 * dense_bytes(program, gradient) < bucket_bytes(event.synchronizer):
                continue  # It shares the bucket with others, and waits for the last one.
            node = view.nodes[op_of(gradient.tensors[0])]
            while node.op in _PASSES_ON:
                node = view.nodes[op_of(node.input[0])]
            if _is_product(view, node):
                yield node.name


def _rivals(program: Program, maker: str) -> list[str]:
    """The other products of what `maker` waits for: the later one of its factors."""
    view = program.analysis.captured
    factors = [op_of(name) for name in view.nodes[maker].input if not name.startswith("^")]
    readers = view.dataflow_consumers([max(factors, key=program.analysis.depth.__getitem__)])
    return [one for one in readers if one != maker and _is_product(view, view.nodes[one])]


def _is_product(view: GraphView, node: tf.compat.v1.NodeDef) -> bool:
    """Whether it is one, in no loop or branch of TensorFlow 1, into which no wait may lead."""
    return node.op in _PRODUCTS and view.control_flow.runs_once(node.name)


def _waits(view: GraphView, events: Sequence[Event]) -> "nx.DiGraph[str]":
    """What waits for what: ops, and events by their numbers; those that are collectives also for one another."""
    graph: nx.DiGraph[str] = nx.DiGraph(view.digraph)
    collectives = []
    for position, event in enumerate(events):
        number = f"|{position}"  # No op has that in its name.
        graph.add_edges_from((op_of(needed), number) for needed in event.needs)
        graph.add_edges_from((number, op_of(given)) for given in event.gives)
        if not isinstance(event, Exchange):
            collectives.append(number)
    graph.add_edges_from(pairwise(collectives))
    return graph
