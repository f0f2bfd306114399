"""What is known of a captured program before anything is rewritten; asked once, on the single-device graph."""

from collections.abc import Collection
from dataclasses import dataclass

import networkx as nx
import tensorflow as tf

from autodist_py.kernel.batch import batched_tensors
from autodist_py.kernel.graph_view import ITERATOR_NEXT, SEEDED_RANDOM, WRITES_RESOURCE, GraphView, functions_of
from autodist_py.kernel.names import op_of
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import Gradient, GraphItem

PYTHON_OPS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})


@dataclass(frozen=True, slots=True)
class Analysis:
    """Facts about the captured graph, the same on every worker.

    Attributes:
        captured: the graph.
        varying: ops whose results depend on a replica's own examples or random numbers, and not only on combined
            gradients and replicated variables.
        stage: for each op, how many combined gradients follow one another on the way to it: 0 in the forward pass.
        depth: for each op, the number of ops on the longest way to it.
        writes: for each variable's handle op, the ops that write the variable.
    """

    captured: GraphView
    varying: frozenset[str]
    stage: dict[str, int]
    depth: dict[str, int]
    writes: dict[str, tuple[str, ...]]

    def gradient_stage(self, gradient: Gradient) -> int:
        """The stage at which `gradient` is combined: 1, or more where it is computed from combined ones."""
        return max(self.stage[op_of(tensor)] for tensor in gradient.tensors)

    def gradient_depth(self, gradient: Gradient) -> int:
        """The later a gradient is ready in back-propagation, the greater."""
        return max(self.depth[op_of(tensor)] for tensor in gradient.tensors)


def analyse(item: GraphItem, *, batch: str = "global") -> Analysis:
    """The facts about `item`'s graph, whose workers are given the same ("global"), or each its own part ("local")."""
    view = GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def))
    combined = {op_of(tensor) for gradient in item.gradients for tensor in gradient.tensors}
    sources = {op_of(tensor.name) for tensor in batched_tensors(item, view)} | _random(view)
    if batch == "local":
        sources |= {source.name for source in item.inputs if source.kind == "feed"}
        sources |= {node.name for node in view.of_type(ITERATOR_NEXT)}
    stage: dict[str, int] = {}
    depth: dict[str, int] = {}
    for name in nx.topological_sort(view.digraph):
        before = view.digraph.pred[name]
        stage[name] = max((stage[producer] for producer in before), default=0) + (name in combined)
        depth[name] = max((depth[producer] for producer in before), default=0) + 1
    varying = view.dataflow_descendants(sources, blocked=combined)
    return Analysis(view, frozenset(varying), stage, depth, view.writes)


def require_replicated_writes(item: GraphItem, analysis: Analysis) -> None:
    """Refuse what this version cannot keep equal: state written from a replica's own examples, not through a gradient.

    Raises:
        CaptureError: the variable, and the op that writes it.
    """
    for variable in item.variables:
        for writer in variable.update_ops:
            if writer in analysis.varying:
                raise CaptureError(
                    f"variable '{variable.name}' is written by '{writer}' with a value that depends on a replica's own "
                    "examples, and not through a gradient (as batch-norm statistics and metrics are). This version "
                    "cannot combine such writes over replicas: move the write out of the step, or train on one device"
                )
    for node in analysis.captured.of_type(WRITES_RESOURCE):
        if node.name in analysis.varying:
            raise CaptureError(
                f"'{node.name}' ({node.op}) writes a table or queue from a replica's own examples, so that it would "
                "differ between workers; move it out of the step, or train on one device"
            )


def _random(view: GraphView) -> set[str]:
    """Ops that give another result on each replica though their inputs are equal."""
    functions = calling(view, SEEDED_RANDOM | PYTHON_OPS)
    return {
        node.name
        for node in view.nodes.values()
        if node.op in SEEDED_RANDOM | PYTHON_OPS or any(name in functions for _, name in functions_of(node))
    }


def calling(view: GraphView, types: Collection[str]) -> set[str]:
    """Library functions in which, or below which, an op of `types` stands."""
    calls = {
        name: {called for node in function.node_def for _, called in functions_of(node)}
        for name, function in view.library.items()
    }
    found = {name for name, function in view.library.items() if any(node.op in types for node in function.node_def)}
    while callers := {name for name, called in calls.items() if called & found} - found:
        found |= callers
    return found
