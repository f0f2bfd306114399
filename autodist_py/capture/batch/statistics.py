"""What else replicas must exchange, beside gradients: found in the captured graph, before anything is rewritten.

A write that depends on the replica's own examples (a metric, batch-norm's averages), a result, or a normalizer of the
loss is traced back to *statistics*: values that are a sum or mean over examples, or rows of the batch, and so can be
combined exactly. Each is passed on through an op of its own (`Identity`), at which the kernel combines it; all that is
computed from it is then computed alike on every replica, as one device does.

In the computation of a loss, only what does not depend on trained variables is combined so: back-propagation stays a
replica's own. A step of which it is then not known that it is exact is computed of the whole batch (`whole_batch/`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import tensorflow as tf

from autodist_py.capture.batch.cotangents import BackPropagation
from autodist_py.capture.batch.half_precision import HalfPrecision
from autodist_py.capture.batch.insertion import Insertion
from autodist_py.capture.batch.layouts.solution import Solution
from autodist_py.capture.batch.layouts.solver import solve
from autodist_py.capture.batch.mixing import Mixing
from autodist_py.capture.batch.regularizers import Separation
from autodist_py.capture.batch.row_counts import rows_that_do_not_fit
from autodist_py.capture.batch.shares import Shares
from autodist_py.capture.batch.sparse_rows import Rows
from autodist_py.capture.batch.whole_batch.item import of_whole_batch
from autodist_py.capture.batch.whole_batch.layers import ops_of_replicas
from autodist_py.capture.batch.whole_batch.unfused import Unfused, unfused
from autodist_py.capture.batch.whole_batch.values import NotFollowedError
from autodist_py.capture.inexact import inexact
from autodist_py.capture.recording.gradients import Origin
from autodist_py.capture.recording.layers import LayerCall
from autodist_py.capture.recording.user_code import line_of
from autodist_py.kernel.ir.dataflow import drawing_ops
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import Gradient, GraphItem, Statistic

_SHORT = (
    "it returns a row for each example up to the last one that has an entry, and the last ones of a replica's part "
    "have none. Use tf.nn.safe_embedding_lookup_sparse, or an op that is told the number of rows. The rows that it "
    "has, and those that it should have:"
)


def with_statistics(
    item: GraphItem,
    graph: GraphView,
    whole: GraphView,
    origins: Sequence[Origin],
    tensor_of: Callable[[str], tf.Tensor],
    *,
    batch: str,
    layer_calls: Sequence[LayerCall] = (),
    shows_ops: bool = False,
    batch_statistics: str | Mapping[str, str] = "global",
    random: str = "replica",
    num_replicas: int = 1,
) -> GraphItem:
    """`item` with its statistics, and what each gradient and output does with examples.

    Args:
        item: what was captured.
        graph: its graph.
        whole: the graph it was cut from, which has the losses too.
        origins: for each of its gradients, what it is the gradient of.
        tensor_of: a tensor of `whole` by its name; only its shape and type are used.
        batch: whether workers are given the same ("global"), or each its own part ("local").
        layer_calls: of Keras's layers, in order.
        shows_ops: whether the values of ops are results too, after the others.
        batch_statistics: what is mixed where the step mixes examples: "global", those of the whole batch; "replica",
            each replica its own part; or either by layers.
        random: which numbers replicas draw: those that one device draws ("global"), or each its own ("replica").
        num_replicas: how many share a batch.
    """
    draws_of_all = random == "global" and bool(drawing_ops(graph))
    solution = solve(item, whole, [one.losses for one in origins], tensor_of, batch, layer_calls)
    refusal: CaptureError | None = None
    try:
        done = _of_parts(item, graph, whole, origins, tensor_of, solution, shows_ops=shows_ops)
        if batch_statistics == "replica" or (_is_known(done) and not draws_of_all):
            return done
    except CaptureError as error:
        if batch_statistics == "replica":
            raise
        done, refusal = item, error
    try:
        of_all = unfused(item, graph, tensor_of) if num_replicas > 1 else Unfused(item, graph, tensor_of)
        insertion = Insertion(of_all.graph, solution, of_all.tensor_of)
        exact = of_whole_batch(
            of_all.item,
            of_all.graph,
            insertion,
            of_all.tensor_of,
            batch,
            draws_of_all=draws_of_all,
            of_replicas=_of_replicas(of_all.graph, batch_statistics),
            shows_ops=shows_ops,
        )
    except NotFollowedError as error:
        if refusal is not None:
            raise refusal from error
        if _is_training_known(done, graph) and not draws_of_all:
            return done
        numbers = ", and its random numbers are other ones than on one device" if draws_of_all else ""
        told = f"{error}, so that the step is not computed of the whole batch{numbers}"
        return replace(done, mixtures=(told, *done.mixtures))
    _require_always_run(exact.statistics, whole)
    return exact


def _of_replicas(graph: GraphView, batch_statistics: str | Mapping[str, str]) -> frozenset[str]:
    """The ops of layers whose statistics are each replica's own."""
    return frozenset() if isinstance(batch_statistics, str) else ops_of_replicas(graph.nodes, batch_statistics)


def _is_known(item: GraphItem) -> bool:
    """Whether all that `item` computes of its parts is known to be what one device computes, and can be returned."""
    can_be_joined = all(
        output.reduction not in ("mean", "sum") or (output.shape is not None and None not in output.shape)
        for output in item.outputs
    )
    return can_be_joined and not any(inexact(item))


def _is_training_known(item: GraphItem, graph: GraphView) -> bool:
    """Whether only results of `item`, not what it trains and writes, may be other than on one device."""
    if item.mixtures or item.normalizing_ops or item.inseparable_ops:
        return False
    ends = {op_of(tensor) for gradient in item.gradients for tensor in gradient.tensors}
    ends |= {writer for variable in item.variables for writer in variable.update_ops}
    reach = graph.dataflow_ancestors(ends & graph.nodes.keys())
    return all(gradient.reduction for gradient in item.gradients) and reach.isdisjoint(item.local_ops)


def _of_parts(
    item: GraphItem,
    graph: GraphView,
    whole: GraphView,
    origins: Sequence[Origin],
    tensor_of: Callable[[str], tf.Tensor],
    solution: Solution,
    *,
    shows_ops: bool,
) -> GraphItem:
    """`item` with its statistics; what mixes examples mixes those of each replica's own part."""
    losses = [one.losses for one in origins]
    losses = _of_each(item.gradients, losses, whole)
    gradients = tuple(
        replace(gradient, reduction=solution.gradient_reduction(targets))
        for gradient, targets in zip(item.gradients, losses, strict=True)
    )
    if not solution.varies:
        outputs = tuple(replace(output, reduction="same") for output in item.outputs)
        return replace(item, gradients=gradients, outputs=outputs)
    mixing = Mixing(whole, solution, tensor_of)
    mixtures = mixing.told(item.gradients, losses)
    gradients = tuple(  # As the user is told: see `inexact.inexact`.
        replace(gradient, reduction=item.loss_reduction) if targets in mixtures else gradient
        for gradient, targets in zip(gradients, losses, strict=True)
    )
    told = {*mixing.normalizing, *mixing.statistics, *mixing.mixed}
    insertion = Insertion(graph, solution, tensor_of)
    for (op, index), reduction in solution.edges.items():
        if op in graph.nodes:
            insertion.combine(op, index, reduction)
    for op in solution.deltas:
        insertion.combine_change(op)
    half = HalfPrecision(insertion, tensor_of)
    shares = Shares(graph, insertion, solution, BackPropagation(graph, solution, mixing, tensor_of), tensor_of)
    mixed = {gradient for gradient, targets in zip(gradients, losses, strict=True) if targets in mixtures}
    gradients = shares.in_parts(gradients, origins, item.reduction_of)
    gradients = tuple(
        replace(one, reduction=item.loss_reduction) if one in shares.refused else one for one in gradients
    )
    # Of a loss that mixes examples, that its back-propagation does so, too, is nothing new.
    refused = [sentence for gradient, sentence in shares.refused.items() if gradient not in mixed]
    separation = Separation(graph, insertion, solution, tensor_of)
    rows = Rows(graph, whole, insertion, solution, tensor_of)
    synchronized: list[Gradient] = []
    for gradient in gradients:
        is_sum = item.reduction_of(gradient) == "sum"
        if gradient.is_sparse:
            synchronized += rows.apart(gradient, separation if is_sum else None)
            continue
        if is_sum:
            separation.separate(gradient, item.variable(gradient.variable).shape)
        synchronized.append(gradient)
    synchronized = [term for gradient in synchronized for term in half.rounded(gradient)]
    outputs = tuple(
        replace(output, tensor=insertion.result(output.tensor), reduction=solution.result_reduction(output.tensor))
        for output in item.outputs
    )
    joined = [
        f"the result '{output.tensor}' has rows of several inputs, one behind the other, and would come back replica "
        "by replica: return its parts, one for each input, or what it is made from"
        for output in item.outputs
        if solution.is_of_several_batches(output.tensor)
    ]
    for op, all_rows in solution.choices.ending.items():
        if op in graph.nodes:
            line, is_shape = line_of(tensor_of(f"{op}:0").op), not solution.has_rows(all_rows)
            message = f"{op}{f' ({line})' if line else ''}: {_SHORT}"
            insertion.require_all_rows(op, all_rows, is_shape=is_shape, message=message)
    _require_always_run(insertion.statistics, whole)
    if shows_ops:
        outputs += tuple(solution.known_values(graph))
    done = replace(
        item,
        graph_def=insertion.graph_def().SerializeToString(deterministic=True)
        if insertion.is_needed
        else item.graph_def,
        gradients=tuple(synchronized),
        outputs=outputs,
        statistics=tuple(insertion.statistics),
        local_ops=tuple(name for name in solution.local if name not in told),
        normalizing_ops=tuple(mixing.normalizing),
        mixtures=tuple(dict.fromkeys((*mixtures.values(), *refused, *joined))),
        inseparable_ops=tuple(dict.fromkeys((*separation.inseparable, *shares.unseen))),
    )
    return replace(done, mixtures=(*done.mixtures, *rows_that_do_not_fit(done, graph, solution, tensor_of)))


def _of_each(
    gradients: Sequence[Gradient], losses: Sequence[tuple[str, ...]], whole: GraphView
) -> list[tuple[str, ...]]:
    """Of the losses that each gradient was asked for, those that depend on its variable."""
    several = dict.fromkeys(tensor for targets in losses if len(targets) > 1 for tensor in targets)
    made_of = {tensor: whole.dataflow_ancestors({op_of(tensor)} & whole.nodes.keys()) for tensor in several}
    return [
        tuple(tensor for tensor in targets if gradient.variable in made_of.get(tensor, ())) or targets
        for gradient, targets in zip(gradients, losses, strict=True)
    ]


def _require_always_run(statistics: Iterable[Statistic], whole: GraphView) -> None:
    """Refuse statistics that are not computed in each step: replicas would wait for one another.

    Raises:
        CaptureError: the op of the statistic.
    """
    ends = {node.name for node in whole.of_type({"Exit", "Merge"})}
    begins = {node.name for node in whole.of_type({"Enter", "Switch"})}
    for statistic in statistics:
        op = statistic.tensor.rpartition("/statistic_")[0]
        if begins and begins & whole.ancestors({op} & whole.nodes.keys(), blocked=ends):
            raise CaptureError(
                f"'{op}' must be combined over all replicas, and is inside a branch or loop of TensorFlow 1's control "
                "flow, which may not run in each step. Compute it before, or use tf.compat.v1.enable_control_flow_v2()"
            )
