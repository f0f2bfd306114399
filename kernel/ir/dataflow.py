"""What is known of a captured program before anything is rewritten; asked once, on the single-device graph."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import networkx as nx
import tensorflow as tf

from autodist_py.kernel.ir.batched import batched_tensors
from autodist_py.kernel.ir.branch_writes import writes_alike
from autodist_py.kernel.ir.graph import (
    DRAWN_ALIKE,
    ITERATOR_NEXT,
    SEED_INPUT,
    SEEDED_RANDOM,
    STANDS_ONCE,
    TAKES_ELEMENTS,
    WRITES_RESOURCE,
    GraphView,
    functions_of,
)
from autodist_py.kernel.ir.names import op_of
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import Gradient, GraphItem

PYTHON_OPS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
CLOCK = "Timestamp"
"""The op type that returns the time."""
_RANDOM = SEEDED_RANDOM | SEED_INPUT.keys()
_DRAWS = _RANDOM | PYTHON_OPS | {CLOCK}


@dataclass(frozen=True, slots=True)
class Analysis:
    """Facts about a captured program's graph, the same on every worker.

    Attributes:
        item: the program, for one device.
        captured: its graph.
        varying: ops whose results depend on a replica's own examples, its share of them or random numbers, and not
            only on combined gradients and replicated variables.
        of_examples: those of them that depend on examples.
        level: for each op, how many combined gradients follow one another on the way to it: 0 in the forward pass.
        phase: for each op, how many statistics follow one another on the way to it within its level.
        depth: for each op, the number of ops on the longest way to it.
        writes: for each variable's handle op, the ops that write the variable.
        knows_counts: whether each replica can tell by itself what one device has of a "count".
    """

    item: GraphItem
    captured: GraphView
    varying: frozenset[str]
    of_examples: frozenset[str]
    level: dict[str, int]
    phase: dict[str, int]
    depth: dict[str, int]
    writes: dict[str, tuple[str, ...]]
    knows_counts: bool

    def gradient_level(self, gradient: Gradient) -> int:
        """The level at which `gradient` is combined: 1, or more where it is computed from combined ones."""
        return max(self.level[op_of(tensor)] for tensor in gradient.tensors)

    def gradient_depth(self, gradient: Gradient) -> int:
        """The later a gradient is ready in back-propagation, the greater."""
        return max(self.depth[op_of(tensor)] for tensor in gradient.tensors)

    def is_varying(self, gradient: Gradient) -> bool:
        """Whether the replicas' raw gradients are combined: they differ, or are added up whatever they are."""
        if gradient.reduction in ("add", "average"):
            return True
        raw = {op_of(self.captured.nodes[op_of(tensor)].input[0]) for tensor in gradient.tensors}
        return bool(raw & self.varying)


def analyse(item: GraphItem, *, batch: str = "global", is_together: bool = True) -> Analysis:
    """The facts about `item`'s graph.

    Args:
        item: the program.
        batch: whether workers are given the same ("global"), or each its own part ("local").
        is_together: whether all replicas of the cluster step together.
    """
    view = GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def))
    gradients = {op_of(tensor) for gradient in item.gradients for tensor in gradient.tensors}
    statistics = {op_of(statistic.tensor): statistic.reduction for statistic in item.statistics}
    parts = {op for op, reduction in statistics.items() if reduction == "part"}
    own_rows = {op for op, reduction in statistics.items() if reduction in ("own", "cut")}
    combined = gradients | {
        op for op, reduction in statistics.items() if reduction not in ("part", "share", "own", "cut")
    }
    batched = {op_of(tensor.name) for tensor in batched_tensors(item, view)}
    knows_counts = batch == "global" and is_together and bool(batched) and not _parts(item)
    counts = {op for op, reduction in statistics.items() if reduction == "count" and knows_counts}
    exchanged = statistics.keys() - parts - own_rows - counts
    sources = batched | _parts(item) | own_rows
    sources |= {variable.name for variable in item.variables if variable.per_replica}
    if batch == "local":
        sources |= {source.name for source in item.inputs if source.kind == "feed"}
        sources |= {node.name for node in view.of_type(ITERATOR_NEXT)}
    reached: dict[str, tuple[int, int]] = {}
    depth: dict[str, int] = {}
    for name in nx.topological_sort(view.digraph):
        before = view.digraph.pred[name]
        level, phase = max((reached[producer] for producer in before), default=(0, 0))
        reached[name] = (level + 1, 0) if name in gradients else (level, phase + (name in exchanged))
        depth[name] = max((depth[producer] for producer in before), default=0) + 1
    of_examples = view.dataflow_descendants(sources, blocked=combined)
    varying = of_examples | view.dataflow_descendants(random_ops(view) | parts, blocked=combined)
    return Analysis(
        item=item,
        captured=view,
        varying=frozenset(varying),
        of_examples=frozenset(of_examples),
        level={name: level for name, (level, _) in reached.items()},
        phase={name: phase for name, (_, phase) in reached.items()},
        depth=depth,
        writes=view.writes,
        knows_counts=knows_counts,
    )


def varying_writes(item: GraphItem, analysis: Analysis) -> Iterator[tuple[str, str]]:
    """(variable, op that writes it) for every write of what differs between replicas, where it should not."""
    view, drawing = analysis.captured, calling(analysis.captured, _DRAWS)
    for variable in item.variables:
        for writer in variable.update_ops:
            differs = writer in analysis.varying and not variable.per_replica
            if differs and not writes_alike(view, writer, variable.name, analysis.varying, _DRAWS, drawing):
                yield variable.name, writer


def writes_of_own_part(item: GraphItem) -> Iterator[tuple[str, str]]:
    """(variable, op that writes it) for every write of what depends on the examples that this worker was given.

    Random numbers are no examples: all workers draw the same where each runs the same by itself.
    """
    view = GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def))
    examples = {op_of(tensor.name) for tensor in batched_tensors(item, view)}
    examples |= {node.name for node in view.of_type(ITERATOR_NEXT)}
    reached = view.dataflow_descendants(examples)
    for variable in item.variables:
        for writer in variable.update_ops:
            if writer in reached:
                yield variable.name, writer


def made_of_what_is_given(item: GraphItem) -> set[str]:
    """The ops whose results may differ between workers with equal variables: they read data, or draw numbers.

    A number that is fed, such as a learning rate, is no data.
    """
    view = GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def))
    given = {op_of(source.name) for source in item.inputs if source.shape != ()}
    given |= {node.name for node in view.of_type(ITERATOR_NEXT | TAKES_ELEMENTS)}
    return view.dataflow_descendants(given | using(view, _DRAWS))


def require_replicated_writes(item: GraphItem, analysis: Analysis) -> None:
    """Refuse what replicas cannot be kept equal by: state written from what is not combined over them.

    Raises:
        CaptureError: the variable, and the op that writes it.
    """
    for variable, writer in varying_writes(item, analysis):
        raise CaptureError(
            f"variable '{variable}' is written by '{writer}' with what differs between replicas. It is neither a sum "
            "nor a mean over examples, nor computed from such, as metrics and moving averages are. This version "
            "cannot combine such writes: move the write out of the step, or train on one device"
        )
    for node in analysis.captured.of_type(TAKES_ELEMENTS):
        raise CaptureError(
            f"'{node.name}' ({node.op}) takes elements out of a queue in a step that is shared out, where each replica "
            "would take as many as one device. Read them from a tf.data iterator, or take them in a run of their own "
            "and feed them"
        )
    for node in analysis.captured.of_type(WRITES_RESOURCE):
        if node.name in analysis.varying:
            raise CaptureError(
                f"'{node.name}' ({node.op}) writes a table or queue from a replica's own examples, so that it would "
                "differ between workers; move it out of the step, or train on one device"
            )


def standing_once(item: GraphItem, view: GraphView) -> set[str]:
    """Ops that stand once per worker, not once per replica: inputs, iterators, lookup tables, and what makes these.

    Inputs of which each replica is fed its own stand on each.
    """
    return view.ancestors({node.name for node in view.of_type(STANDS_ONCE)} - _parts(item))


def _parts(item: GraphItem) -> set[str]:
    """The inputs of which each replica is fed its own."""
    return {source.name for source in item.inputs if source.kind == "part"}


def random_ops(view: GraphView) -> set[str]:
    """Ops that give another result on each replica though their inputs are equal."""
    return {name for name in using(view, _DRAWS) if DRAWN_ALIKE not in view.nodes[name].attr}


def drawing_ops(view: GraphView) -> set[str]:
    """Ops that draw random numbers by TensorFlow; what Python draws is not seen."""
    return using(view, _RANDOM)


def using(view: GraphView, types: Collection[str]) -> set[str]:
    """Ops of `types`, and those that call a library function in which, or below which, one stands."""
    functions = calling(view, types)
    return {
        node.name
        for node in view.nodes.values()
        if node.op in types or (functions and any(name in functions for _, name in functions_of(node)))
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


def op_types(item: GraphItem) -> dict[str, str]:
    """The type of each op of `item`, by its name."""
    return {node.name: node.op for node in tf.compat.v1.GraphDef.FromString(item.graph_def).node}


def gradient_types(item: GraphItem) -> set[str]:
    """The floating types of the ops that `item`'s gradients are computed by, as "float32"."""
    view = GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def))
    ops = view.dataflow_ancestors(op_of(tensor) for gradient in item.gradients for tensor in gradient.tensors)
    attributes = [
        view.nodes[op].attr[key] for op in ops for key in ("T", "dtype", "DstT") if key in view.nodes[op].attr
    ]
    given = {kind for one in attributes for kind in (one.type, *one.list.type)} - {0}  # A loop has a list of types.
    return {dtype.name for dtype in map(tf.as_dtype, given) if dtype.is_floating}
