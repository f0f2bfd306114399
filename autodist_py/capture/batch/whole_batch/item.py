"""The program in which nothing is a replica's own mixture: what `WholeBatch` found, put into its graph."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import tensorflow as tf

from autodist_py.capture.batch.insertion import Insertion
from autodist_py.capture.batch.layouts.regions import Sources
from autodist_py.capture.batch.layouts.shown import known_values
from autodist_py.capture.batch.whole_batch.moments import tell_together
from autodist_py.capture.batch.whole_batch.solver import WholeBatch
from autodist_py.capture.batch.whole_batch.values import REDUCTIONS, NotFollowedError
from autodist_py.kernel.analysis.batch_layout.layouts import COUNT, PARTIAL_MEAN, PARTIAL_SUM, REPLICATED, SHARDED
from autodist_py.kernel.ir.graph import SHOWS, GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.ir.node import reads_of
from autodist_py.proto.graph_item import Gradient, GraphItem, Output

_COMBINED = {REPLICATED: "mean", PARTIAL_MEAN: "mean", PARTIAL_SUM: "sum"}
_BACKWARD = ("gradient_tape/", "gradients/")
"""Scopes of back-propagation, by a tape and by `tf.gradients`."""
_RESULTS = {**REDUCTIONS, COUNT: "sum", REPLICATED: "same"}


def of_whole_batch(
    item: GraphItem,
    graph: GraphView,
    insertion: Insertion,
    tensor_of: Callable[[str], tf.Tensor],
    batch: str,
    *,
    draws_of_all: bool = False,
    of_replicas: frozenset[str] = frozenset(),
    shows_ops: bool = False,
) -> GraphItem:
    """`item`, whose gradients are parts of sums over examples, however its losses mix them.

    Args:
        item: what was captured, without statistics.
        graph: its graph.
        insertion: what puts statistics into it.
        tensor_of: a tensor of it by its name; only its shape and type are used.
        batch: whether workers are given the same ("global"), or each its own part ("local").
        draws_of_all: whether each replica draws the random numbers of all examples, and takes those of its own.
        of_replicas: the ops of layers whose statistics are each replica's own.
        shows_ops: whether the values of ops are results too, after the others.

    Raises:
        NotFollowedError: an op cannot be computed of the whole batch.
    """
    markers = {op_of(tensor) for gradient in item.gradients for tensor in gradient.tensors}
    writers = {writer for variable in item.variables for writer in variable.update_ops}
    writers |= {node.name for node in graph.of_type(SHOWS)}
    shapes = {
        str(parse(graph.nodes[op_of(tensor)].input[0])): shape
        for gradient in item.gradients
        for tensor, shape in zip(gradient.tensors, _shapes(gradient, item), strict=True)
    }
    results = [*shapes, *(output.tensor for output in item.outputs)]
    sources = Sources.of(item, graph, markers, batch)
    found = WholeBatch(
        graph, sources, tensor_of, writers, shapes, results, draws_of_all=draws_of_all, of_replicas=of_replicas
    )
    found.solve()
    for tensor in results:
        if op_of(tensor) in found.own:
            found.refuse(op_of(tensor), "is a result, of which batch_statistics says that each replica has its own")
    gradients = tuple(_combined(gradient, graph, found, tensor_of) for gradient in item.gradients)
    for op, index in _told_same(graph, found, markers, tensor_of):
        insertion.combine(op, index, "same")
    of_all = tell_together(found, insertion)
    for (op, index), reduction in sorted(found.edges.items()):
        insertion.combine(op, index, reduction, found.shapes.of(graph.nodes[op].input[index]))
    for op in sorted(found.drawn):
        insertion.draw_alike(op)
    for tensor, value in found.values.items():
        insertion.read_value(tensor, value)
    outputs = tuple(_result(output, found, insertion, of_all) for output in item.outputs)
    if not shows_ops:
        ends = {*writers, *markers, *item.run_ops, *(op_of(output.tensor) for output in outputs)}
        insertion.drop_unread(of_all, ends)
    else:
        told = set(map(op_of, found.values))  # Nothing reads them: they may fail on a replica's shapes.
        known = known_values(graph, graph.nodes.keys() - told, found.layout, tensor_of)
        outputs += tuple(output for output in known if _is_shown(output, found))
    return replace(
        item,
        graph_def=insertion.graph_def().SerializeToString(deterministic=True),
        gradients=gradients,
        outputs=outputs,
        statistics=tuple(insertion.statistics),
        local_ops=(),
        normalizing_ops=tuple(sorted(name for name in found.own & of_replicas if not name.startswith(_BACKWARD))),
        mixtures=(),
        inseparable_ops=(),
    )


def _told_same(
    graph: GraphView, found: WholeBatch, markers: Collection[str], tensor_of: Callable[[str], tf.Tensor]
) -> Iterator[tuple[str, int]]:
    """What ops read that is the same on all replicas though it comes of what is not, as the length of a row does.

    So does what the markers of gradients pass on, at which these are combined: it is not told.
    """

    def reads_differing(op: str) -> bool:
        reads = enumerate(reads_of(graph.nodes[op]))
        return any(found.layout(read) is not REPLICATED and (op, index) not in found.edges for index, read in reads)

    same = {
        op for op in found.found.keys() - markers - found.own if REPLICATED in found.found[op] and reads_differing(op)
    }
    for op in sorted(graph.dataflow_consumers(same)):
        if set(found.found[op]) != {REPLICATED}:
            continue
        for index, read in enumerate(reads_of(graph.nodes[op])):
            if op_of(read) not in same or found.layout(read) is not REPLICATED or str(parse(read)) in found.values:
                continue
            is_number = tensor_of(read).dtype not in (tf.resource, tf.variant)
            if is_number and tensor_of(read).shape.rank is not None:  # Else nothing can be said of it.
                yield op, index


def _shapes(gradient: Gradient, item: GraphItem) -> Iterator[tf.TensorShape]:
    """Those of the gradient's tensors: of its values; of a sparse one's indices, values and dense shape."""
    shape = item.variable(gradient.variable).shape
    if not gradient.is_sparse:
        yield tf.TensorShape(shape)
        return
    yield tf.TensorShape([None])
    yield tf.TensorShape([None, *shape[1:]])
    yield tf.TensorShape([len(shape)])


def _is_shown(output: Output, found: WholeBatch) -> bool:
    """Whether a value can be shown: one of unknown size that is the same on all may be made of a replica's sizes."""
    if op_of(output.tensor) in found.of_replicas:
        return False
    is_fixed = output.shape is not None and None not in output.shape
    return output.reduction != "same" or is_fixed or op_of(output.tensor) in found.whole


def _result(output: Output, found: WholeBatch, insertion: Insertion, of_all: Mapping[str, str]) -> Output:
    if op_of(output.tensor) in of_all:
        return replace(output, tensor=of_all[op_of(output.tensor)], reduction="same")
    layout = found.layout(output.tensor)
    reduction, shape = _RESULTS[layout], found.shapes.of(output.tensor)
    if reduction != "shape":
        sizes = tuple(shape.as_list()) if shape.is_fully_defined() else output.shape
        return replace(output, reduction=reduction, shape=sizes)
    return replace(output, tensor=insertion.combined(output.tensor, reduction), reduction="same")


def _combined(
    gradient: Gradient, graph: GraphView, found: WholeBatch, tensor_of: Callable[[str], tf.Tensor]
) -> Gradient:
    """The gradient as a sum over replicas of what each has."""
    markers = [op_of(tensor) for tensor in gradient.tensors]
    raw = [graph.nodes[marker].input[0] for marker in markers]
    layouts = [found.layout(tensor) for tensor in raw]
    if not gradient.is_sparse:
        (tensor,), (layout,) = raw, layouts
        if layout is PARTIAL_MEAN or (layout is REPLICATED and not found.is_whole(tensor)):
            return replace(gradient, reduction="mean")  # So is that of what all have alike.
        if layout not in (PARTIAL_SUM, COUNT):
            raise NotFollowedError(f"the gradient of '{gradient.variable}' is no sum over examples ('{tensor}')")
        return replace(gradient, reduction="sum")
    (indices, values, _), (of_indices, of_values, of_shape) = raw, layouts
    rows = tensor_of(values).shape[:1].as_list()
    if of_shape is not REPLICATED:
        raise NotFollowedError(f"the gradient of '{gradient.variable}' has a shape that depends on examples")
    is_fixed = of_indices is REPLICATED and not found.is_whole(indices) and rows != [None]
    if is_fixed and of_values in _COMBINED:
        return replace(gradient, reduction=_COMBINED[of_values], indices="same", rows=rows[0])
    are_whole = all(map(found.has_whole_rows, (indices, values)))
    for marker, tensor, layout in zip(markers[:2], raw[:2], layouts[:2], strict=True):
        if found.has_whole_rows(tensor):
            found.edges[marker, 0] = "cut" if are_whole else "own"
        elif layout is not SHARDED:
            raise NotFollowedError(
                f"the rows of the gradient of '{gradient.variable}' are none of examples ('{tensor}')"
            )
    return replace(gradient, reduction="sum", indices="", rows=None)
