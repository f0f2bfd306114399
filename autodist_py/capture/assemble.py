"""From a traced graph and what was recorded of it to a GraphItem: shared by all doors of capture."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from autodist_py.capture.batch.statistics import with_statistics
from autodist_py.capture.canonical import canonical
from autodist_py.capture.joints import take_joints_apart
from autodist_py.capture.replica_state import require_no_own_state
from autodist_py.capture.shapes import full_shape
from autodist_py.capture.traced import TracedGraph
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import ASSIGNED, KERNEL_SCOPE, REPLICA_SCOPE, is_reserved, op_of
from autodist_py.proto.errors import AutoDistError, CaptureError
from autodist_py.proto.graph_item import Gradient, GraphItem, Statistic, Variable
from autodist_py.proto.text import some

_CHOICES = {
    "batch": ("global", "local"),
    "loss_reduction": ("mean", "sum"),
    "fetch_reduction": ("mean", "sum"),
    "batch_statistics": ("global", "replica"),
    "random": ("replica", "global"),
}


def require_choices(given: Mapping[str, str | Mapping[str, str]]) -> None:
    """Refuse what is no choice of the user's, among `AutoDist`'s arguments by name.

    Raises:
        AutoDistError: which may be chosen, or which cannot be chosen together.
    """
    for name, value in given.items():
        for one in (value,) if isinstance(value, str) else value.values():
            if one not in _CHOICES[name]:
                raise AutoDistError(f"{name} must be one of {', '.join(_CHOICES[name])}; received {one!r}")
    if (given["random"], given["batch_statistics"]) == ("global", "replica"):
        raise AutoDistError(
            'random="global" computes random numbers of the whole batch, and batch_statistics="replica" nothing. '
            "Leave one of them out"
        )


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What the user said about the batch.

    Attributes:
        loss_reduction: what a loss does over examples, "mean" or "sum", where that is not seen.
        batch: whether workers are given the same batch ("global"), or each its own part ("local").
        shows_ops: whether the values of ops are results too, after the user's own, where it is known what they are for
            the whole batch.
        batch_statistics: what a step that mixes the examples of a batch mixes: those of the whole batch ("global"), or
            each replica its own part ("replica"); or either by names of layers.
        random: which random numbers replicas draw: those that one device draws ("global"), or each its own ("replica").
        num_workers: how many workers train.
        num_replicas: how many replicas share a batch.
    """

    loss_reduction: str = "mean"
    batch: str = "global"
    shows_ops: bool = False
    batch_statistics: str | Mapping[str, str] = "global"
    random: str = "replica"
    num_workers: int = 1
    num_replicas: int = 1

    @property
    def mixes_parts(self) -> bool:
        """Whether what mixes the examples of a batch has those of a replica's own part only."""
        return self.num_replicas > 1 and self.batch_statistics == "replica"


def assemble(traced: TracedGraph, options: CaptureOptions, *, shares_all: bool = True) -> GraphItem:
    """The GraphItem: the ops that are needed, in canonical form, and of the gradients those that train or are fetched.

    Values that replicas must exchange beside the gradients pass through ops of their own: see `statistics.py`.

    Args:
        traced: what was traced.
        options: what the user said about the batch.
        shares_all: whether replicas share what trains nothing, too, or one worker runs it alone.

    Raises:
        CaptureError: a gradient trains and is also differentiated through (MAML); or an op has a name of the kernel's,
            or may hold state of its own, which replicas would not have in common.
    """
    needed = _needed(traced)
    gradients = _training(needed)
    if options.num_replicas > 1 and (gradients or shares_all):
        require_no_own_state(needed.item, needed.view, needed.whole, needed.traced.tensor_of)
    item = replace(needed.item, gradients=gradients, loss_reduction=options.loss_reduction, savers=tuple(traced.savers))
    origins = tuple(needed.traced.origins[gradient] for gradient in gradients)
    return with_statistics(
        item,
        needed.view,
        needed.whole,
        origins,
        needed.traced.tensor_of,
        batch=options.batch,
        layer_calls=needed.traced.layer_calls,
        shows_ops=options.shows_ops,
        batch_statistics=options.batch_statistics,
        random=options.random,
        num_replicas=options.num_replicas,
    )


def assemble_marked(traced: TracedGraph, statistics: Iterable[Statistic]) -> GraphItem:
    """The GraphItem of a program that says itself what is combined: its gradients, and these statistics, are marked.

    Raises:
        CaptureError: an op has a name of the kernel's.
    """
    needed = _needed(traced)
    used = tuple(one for one in statistics if op_of(one.tensor) in needed.view.nodes)
    return replace(needed.item, gradients=needed.recorded, statistics=used)


def assemble_averaged(
    traced: TracedGraph, options: CaptureOptions, *, replicas_to_aggregate: int, first_tokens: int
) -> GraphItem:
    """The GraphItem of a program whose updates wait for `replicas_to_aggregate` gradients.

    All else is each replica's own. A part of the graph that needs none of these gradients is as any other.

    Raises:
        CaptureError: a gradient that was computed beside trains, too; or an op has a name of the kernel's.
    """
    averaged = tuple(one for one in traced.gradients if one.reduction == "average")
    needed = _needed(replace(traced, gradients=averaged))
    beside = [one for one in traced.gradients if one.reduction != "average"]
    markers = {op_of(tensor) for one in needed.recorded for tensor in one.tensors}
    writers = {writer for names in needed.view.writes.values() for writer in names}
    for gradient in beside:
        own = {op_of(tensor) for tensor in gradient.tensors} & needed.view.nodes.keys()
        if trained := writers & needed.view.dataflow_descendants(own, blocked=markers):
            raise CaptureError(
                f"the gradient of '{gradient.variable}' trains ('{min(trained)}') beside SyncReplicasOptimizer, whose "
                "workers take their steps by themselves. Train every variable by the one optimizer, or by another "
                "AutoDist"
            )
    if not needed.recorded:
        return assemble(replace(traced, gradients=()), options, shares_all=False)
    return replace(
        needed.item,
        gradients=needed.recorded,
        savers=tuple(traced.savers),
        replicas_to_aggregate=replicas_to_aggregate,
        first_tokens=first_tokens,
    )


@dataclass(frozen=True, slots=True)
class _Needed:
    """What a traced program needs of its graph.

    Attributes:
        traced: the program, whose joints are taken apart.
        whole: its graph.
        view: the ops that are needed, and the inputs, in canonical form.
        recorded: those of its gradients of which a part is needed.
        item: the program of these ops, without what is combined.
    """

    traced: TracedGraph
    whole: GraphView
    view: GraphView
    recorded: tuple[Gradient, ...]
    item: GraphItem


def _needed(traced: TracedGraph) -> _Needed:
    _require_own_names(traced)
    traced = take_joints_apart(traced)
    whole = GraphView(traced.graph)
    ops = whole.ancestors([*(op_of(output.tensor) for output in traced.outputs), *traced.run_ops])
    recorded = tuple(one for one in traced.gradients if any(op_of(name) in ops for name in one.tensors))
    ops |= whole.ancestors(op_of(name) for gradient in recorded for name in gradient.tensors)
    graph = canonical(traced.graph, ops | {source.name for source in traced.inputs})
    view = GraphView(graph)
    variables = (variable for variable in traced.variables if variable.name in view.nodes)
    item = GraphItem(
        graph_def=graph.SerializeToString(deterministic=True),
        variables=tuple(replace(variable, update_ops=view.writes[variable.name]) for variable in variables),
        inputs=traced.inputs,
        outputs=traced.outputs,
        run_ops=traced.run_ops,
        table_initializers=tuple(_filling(whole, traced.table_initializers, ops)),
    )
    return _Needed(traced, whole, view, recorded, item)


def _filling(whole: GraphView, initializers: Iterable[str], needed: Set[str]) -> Iterator[str]:
    """Those of the initializers whose table, which an initializer is given first, is needed."""
    for name in initializers:
        tables = [op_of(read) for read in whole.nodes[name].input if not read.startswith("^")][:1]
        if needed & set(tables):
            yield name


def _require_own_names(traced: TracedGraph) -> None:
    """Refuse ops of the user's whose names are the kernel's."""
    for node in traced.graph.node:
        if is_reserved(node.name):
            raise CaptureError(
                f"'{node.name}' is named as what autodist_py adds to a graph (under '{KERNEL_SCOPE}/', or with "
                f"'{REPLICA_SCOPE}' or '{ASSIGNED}'). The two could not be told apart. Give the op, the variable or "
                "the name scope another name"
            )


def _training(needed: _Needed) -> tuple[Gradient, ...]:
    """Those of the recorded gradients that reach a write or a result other than through another gradient.

    So do those that another loss reads behind a `tf.stop_gradient`: they are data to it, and those of the whole batch.
    """
    view, recorded = needed.view, needed.recorded
    writers = {writer for names in view.writes.values() for writer in names}
    ends = writers | {op_of(output.tensor) for output in needed.traced.outputs}
    markers = {op_of(tensor): gradient for gradient in recorded for tensor in gradient.tensors}
    read_by_markers = {
        op_of(name) for marker in markers for name in view.nodes[marker].input if not name.startswith("^")
    }
    stops = {node.name for node in view.of_type(("StopGradient",))}
    to_ends = view.dataflow_ancestors(ends, blocked=markers)
    to_markers = view.dataflow_ancestors(read_by_markers, blocked=markers)
    through = view.dataflow_ancestors(read_by_markers - stops, blocked=markers.keys() | stops) - stops
    training = []
    for gradient in recorded:
        own = {op_of(tensor) for tensor in gradient.tensors}
        readers = view.dataflow_consumers(own)
        is_read = bool(own & read_by_markers or readers & through)
        outer = _outer(needed, gradient, _readers(view, own, markers) if is_read else ())
        is_data = bool(readers & to_markers) and not outer
        if not (own & ends or readers & to_ends or is_data):
            continue
        if outer:
            raise CaptureError(
                f"the gradient of variable '{gradient.variable}' trains it (or is fetched), and the loss by which "
                f"'{outer}' is trained is computed through it, as in MAML. Combining it before its use would change "
                "what is passed back through it. Give the other loss tf.stop_gradient(gradient), if it is only data "
                "there, or train this step on one device"
            )
        training.append(gradient)
    return tuple(training)


def _readers(view: GraphView, own: Collection[str], markers: Mapping[str, Gradient]) -> tuple[Gradient, ...]:
    """The gradients that are computed from the markers `own`."""
    reached = view.dataflow_descendants(own, blocked=markers.keys() - own)
    return tuple(markers[name] for name in view.dataflow_consumers(reached) & (markers.keys() - own))


def _outer(needed: _Needed, inner: Gradient, readers: Collection[Gradient]) -> str:
    """A variable on which `inner` depends, and whose gradient was passed back through `inner`; "": there is none.

    A tape says what it passed through. `tf.gradients` passes through all that the loss is made of: such a gradient
    reads `inner` (it is one of the `readers`), or the loss is linear in `inner`.
    """
    own = {op_of(tensor) for tensor in inner.tensors}
    origins = {one: needed.traced.origins[one] for one in needed.recorded if one is not inner}
    passed = [one for one, origin in origins.items() if own.intersection(map(op_of, origin.through or ()))]
    untold = [one for one, origin in origins.items() if origin.through is None]
    if untold:
        stops = {node.name for node in needed.whole.of_type(("StopGradient",))}
        reached = needed.whole.dataflow_descendants(own, blocked=stops)
        passed += [one for one in untold if not reached.isdisjoint(map(op_of, origins[one].losses))]
    depends_on = needed.whole.dataflow_ancestors(own) if passed else ()
    outer = [one.variable for one in passed if one.variable in depends_on]
    return min((*outer, *(one.variable for one in untold if one in readers)), default="")


def reject_idle_gradients(recorded: Sequence[Gradient], item: GraphItem) -> None:
    """Refuse a step that computes gradients and trains nothing.

    Raises:
        CaptureError: none of the `recorded` gradients reaches a variable or a result of `item`.
    """
    if recorded and not item.gradients:
        names = ", ".join(dict.fromkeys(gradient.variable for gradient in recorded))
        raise CaptureError(
            f"the step computes gradients (of {names}), but none of them reaches a variable or a result, so nothing "
            "would train. Apply them in the step: optimizer.apply_gradients(zip(gradients, variables))"
        )


def reject_gradients_of_examples(of_examples: Set[str], item: GraphItem) -> None:
    """Refuse a step that trains by what vectorized loops computed: nothing there is the gradient of a whole loss.

    Args:
        of_examples: the variables that are written, and whose gradients were computed in vectorized loops.
        item: what was captured.

    Raises:
        CaptureError: no other gradient of one of these variables trains it.
    """
    if idle := of_examples - {gradient.variable for gradient in item.gradients}:
        raise CaptureError(
            f"the gradients of {some(sorted(idle))} are computed in a vectorized loop (tape.jacobian, "
            "tf.vectorized_map), one for each example, say, and are not combined over replicas. To clip those of "
            "single examples, compute a factor for each, and then the gradient of the weighted loss: "
            "tape.gradient(tf.reduce_mean(tf.stop_gradient(factors) * losses), variables)"
        )


def table_initializers(graph: tf.Graph) -> tuple[str, ...]:
    """The ops that fill lookup tables, as the graph's collection has them."""
    found = graph.get_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS)
    return tuple(op.name for op in found if op is not None)  # Of a table that was made eagerly there is none.


def aggregation_name(value: Any) -> str:
    """A `tf.VariableAggregation`, of TensorFlow 1 or 2, by the name that GraphItems use."""
    return str(value.name)


def mapped_variables(variables: Mapping[str, tf.Variable]) -> tuple[Variable, ...]:
    """GraphItem variables for TensorFlow's, by the names they have in the graph."""
    return tuple(
        Variable(
            name=name,
            dtype=variable.dtype.base_dtype.name,
            shape=full_shape(name, variable.shape),
            trainable=bool(variable.trainable),
            aggregation=aggregation_name(variable.aggregation),
        )
        for name, variable in variables.items()
    )
