"""Which ops of a step are computed first: those whose results take long to send. `computed_first`.

Of ops that are ready together TensorFlow runs all, side by side. Back-propagation makes two products of what reaches a
layer: the gradient of its weights, and the one that goes on to the layer before. The gradient is to be sent, and the
wire stands still until it is there; so the other product waits for it. Both take as long as before.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import networkx as nx
import tensorflow as tf

from autodist_py.kernel.analysis.replica_weights import dense_bytes
from autodist_py.kernel.events import LOCAL, AllReduceBucket, Event, Exchange, ServerPlans
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse
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
    makers = dict.fromkeys(_makers(program, events))
    rivals = {maker: _rivals(program, maker) - makers.keys() for maker in makers}
    late = set().union(*rivals.values())
    if not late:
        return ()
    graph = _waits(program.analysis.captured, events)
    excluded = _behind_servers(graph, plans) if plans else set()
    # Rivals as late as they may be.
    order = nx.lexicographical_topological_sort(graph, key=late.__contains__)
    place = {one: position for position, one in enumerate(order)}
    return tuple(
        (maker, rival)
        for maker, others in rivals.items()
        for rival in sorted(others, key=place.__getitem__)
        if maker not in excluded and place[maker] < place[rival]
    )


def _makers(program: Program, events: Sequence[Event]) -> Iterator[str]:
    """The products that make large gradients which are sent, in the order in which they are."""
    view = program.analysis.captured
    markers = {op_of(tensor) for gradient in program.item.gradients for tensor in gradient.tensors}
    for event in events:
        if not isinstance(event, AllReduceBucket) or event.engine == LOCAL:
            continue
        for gradient in event.gradients:
            if gradient.is_sparse or 2 * dense_bytes(program, gradient) < event.synchronizer.bytes_per_pack:
                continue  # It shares the bucket with others, and waits for the last one.
            node = view.nodes[op_of(view.nodes[op_of(gradient.tensors[0])].input[0])]
            while node.op in _PASSES_ON and node.name not in markers:
                node = view.nodes[op_of(node.input[0])]
            if _is_product(view, node):
                yield node.name


def _rivals(program: Program, maker: str) -> set[str]:
    """The other products of what `maker` waits for: the later one of its factors."""
    view, depth = program.analysis.captured, program.analysis.depth
    factors = [str(parse(name)) for name in view.nodes[maker].input if not name.startswith("^")]
    later = max(factors, key=lambda factor: depth[op_of(factor)])
    readers = map(view.nodes.__getitem__, view.dataflow_consumers([op_of(later)]))
    reading = (node for node in readers if later in map(str, map(parse, node.input)))
    return {node.name for node in reading if node.name != maker and _is_product(view, node)}


def _is_product(view: GraphView, node: tf.compat.v1.NodeDef) -> bool:
    """Whether it is one, in no loop or branch of TensorFlow 1, into which no wait may lead."""
    return node.op in _PRODUCTS and view.control_flow.runs_once(node.name)


def _waits(view: GraphView, events: Sequence[Event]) -> "nx.DiGraph[str]":
    """What waits for what: ops, and events by their numbers. Each collective also waits for the one before it."""
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


def _behind_servers(graph: "nx.DiGraph[str]", plans: ServerPlans) -> set[str]:
    """All that waits for what servers compute, which waits for more than the graph says."""
    served = set(plans.server_ops)
    for plan in plans.plans:
        served |= plan.mirrored_ops
        served |= {lookup.op for exchange in plan.exchanges for lookup in exchange.lookups}
    found, pending = set(served), list(served)
    while pending:
        for op in graph.succ[pending.pop()]:
            if op not in found:
                found.add(op)
                pending.append(op)
    return found
