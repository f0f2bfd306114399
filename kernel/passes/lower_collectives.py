"""LowerCollectives: gradients, statistics and results are combined over all replicas, as the schedule lists them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist_py.kernel.analysis.replica_weights import (
    batch_specs,
    cut_rows,
    own_rows,
    replica_weights,
    weighted,
)
from autodist_py.kernel.collectives import all_reduce
from autodist_py.kernel.collectives.collectives import Collectives
from autodist_py.kernel.collectives.reductions import SUMMED, Part, combine
from autodist_py.kernel.collectives.rows import TRAVELS
from autodist_py.kernel.events import FetchResults, ReduceGradients, ReduceStatistics
from autodist_py.kernel.ir.edits import Edits
from autodist_py.kernel.ir.fragment import Fragment, TensorSpec, trace
from autodist_py.kernel.ir.names import KERNEL_SCOPE, on_replica, op_of
from autodist_py.kernel.ir.state import Recorder
from autodist_py.kernel.program import Invariant, Program
from autodist_py.kernel.runner import Contract
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import Output, Statistic

_NO_ROWS_OF_EXAMPLES = (
    "is paired row by row with examples, and does not have equally many rows for each; its rows, and the examples:"
)


@dataclass(frozen=True, slots=True)
class LowerCollectives:
    """Gradients, statistics and results are combined over all replicas before anything reads them.

    Each recorded gradient's tensors, and each statistic, are the results of ops of their own (`Identity`: capture makes
    them), so that all that reads one reads it there.

    Ensures: these ops pass on
        1. of a gradient of a variable that lives on the workers, the combined one, as far as its compressor keeps it:
            the sum over replicas, each weighted by its share of the examples (loss "mean"), or plain ("sum");
        2. of a statistic, what one device would have computed of the whole batch; of a "part", which is not combined,
            each replica's share; of an "own", or "cut", which has rows of the whole batch, some of these. A "count"
            takes no message where every replica knows by itself of how many examples the step is.
        A fetch that depends on a replica's own examples is, by case:
        3. first dimension unknown, and not summed over: the replicas' rows, in order; of all workers with
            `batch="global"`, else this one's;
        4. known to be a sum or mean over examples: that of all replicas;
        5. another float of fixed shape: combined over all replicas as `fetch_reduction` says;
        6. another value that is drawn, and depends on no example: the first replica's, which is that of one device.
        What is of none of these is refused. All others are equal on all replicas, and stay as they are.

    Example, on worker 0 of two: `w -= mean(x)`.

        - 0/gradient/w = Identity(0/mean)
        + AllReduce/1 = ops(Batch, 0/mean)
        + 0/gradient/w = Identity(AllReduce/1)
    """

    name: ClassVar[str] = "lower-collectives"
    contract: ClassVar[Contract] = Contract(
        requires={Invariant.REPLICATED, Invariant.SCHEDULED, Invariant.READ, Invariant.SPLIT},
        ensures={Invariant.REDUCED},
    )

    def __call__(self, program: Program) -> Program:
        if program.is_single:
            return program
        edits, item = Edits(), program.item
        collectives = Collectives(program.topology, program.lowered.next_instance_key)
        combined: dict[str, str] = {}
        kept: list[Recorder] = []
        for position, event in enumerate(program.schedule.events):
            collectives.event = position
            match event:
                case ReduceGradients():
                    combined |= _lower_gradients(program, event, edits, collectives, kept)
                case ReduceStatistics():
                    _lower_statistics(program, event, edits, collectives)
                case FetchResults():
                    combined |= _lower_fetches(program, event, edits, collectives)
        if parts := [statistic for statistic in item.statistics if statistic.reduction == "part"]:
            _pass_on_parts(program, parts, edits)
        if owns := [statistic for statistic in item.statistics if statistic.reduction in ("own", "cut")]:
            _pass_on_own_rows(program, owns, edits)
        counts = [statistic for statistic in item.statistics if statistic.reduction == "count"]
        if counts and program.analysis.knows_counts:
            _pass_on_counts(program, counts, edits)
        fetched = [(output, name) for output, names in program.fetched() for name in names]
        program = collectives.noted(program)
        states = (*program.lowered.compressor_states, *(state for one in kept for state in one.compressor_states))
        return replace(
            program,
            graph=edits.apply(program.graph),
            fetches=tuple(
                fetch if output.per_replica else combined.get(output.tensor, fetch) for output, fetch in fetched
            ),
            run_ops=(*program.run_ops, *(op for one in kept for op in one.writers)),
            lowered=replace(program.lowered, compressor_states=states),
        )


def _lower_gradients(
    program: Program, event: ReduceGradients, edits: Edits, collectives: Collectives, kept: list[Recorder]
) -> dict[str, str]:
    """Case 1. Returns the tensors that stand for the outputs which travel along; `kept` has what compressors keep."""
    fragment, recorder = all_reduce.combine(program, event, program.graph, collectives)
    kept += [] if recorder is None else [recorder]
    edits.add(fragment.nodes)
    count = len(event.gradients)
    for gradient, copies in zip(event.gradients, fragment.outputs[:count], strict=True):
        for replica, tensors in enumerate(copies):
            for marker, tensor in zip(gradient.tensors, tensors, strict=True):
                edits.set_input(on_replica(replica, op_of(marker)), 0, tensor)
    along = zip(event.outputs, fragment.outputs[count:], strict=True)
    return {output.tensor: copies[0][0] for output, copies in along}


# -- Statistics -------------------------------------------------------------------------------------------------------


def _lower_statistics(program: Program, event: ReduceStatistics, edits: Edits, collectives: Collectives) -> None:
    markers = [_markers(program, statistic.tensor) for statistic in event.statistics]
    parts = [
        Part(
            tuple(program.graph.nodes[marker].input[0] for marker in copies),
            tf.as_dtype(statistic.dtype),
            statistic.shape,
            statistic.reduction,
        )
        for statistic, copies in zip(event.statistics, markers, strict=True)
    ]
    fragment = trace(
        lambda batch, values: combine(program, parts, batch, values, collectives),
        [batch_specs(program), [part.specs for part in parts]],
        scope=event.scope,
    )
    _pass_on(markers, fragment, edits)


def _pass_on_parts(program: Program, statistics: Sequence[Statistic], edits: Edits) -> None:
    """Let each replica pass on its share of its own value, which is there without a message."""
    markers = [_markers(program, statistic.tensor) for statistic in statistics]
    replicas = program.topology.local_replicas

    def parts(batch: Sequence[tf.Tensor], values: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        with tf.device(program.topology.host):
            shares = replica_weights(program, batch, "mean")
        own: list[list[tf.Tensor]] = []
        for copies in values:
            own.append([])
            for replica, copy, share in zip(replicas, copies, shares, strict=True):
                with tf.device(replica.device):
                    own[-1].append(tf.cast(weighted(copy, share), copy.dtype))
        return own

    specs = [
        [TensorSpec(program.graph.nodes[marker].input[0], tf.as_dtype(one.dtype), one.shape) for marker in copies]
        for one, copies in zip(statistics, markers, strict=True)
    ]
    fragment = trace(parts, [batch_specs(program), specs], scope=f"{KERNEL_SCOPE}/Statistics/parts")
    _pass_on(markers, fragment, edits)


def _pass_on_own_rows(program: Program, statistics: Sequence[Statistic], edits: Edits) -> None:
    """Let each replica pass on the rows of its own examples, of the rows of the whole batch that it has."""

    def own(statistic: Statistic, copy: tf.Tensor, place: Sequence[tf.Tensor]) -> tf.Tensor:
        if statistic.reduction == "cut":
            return cut_rows(copy, place)
        return own_rows(copy, place, f"{op_of(statistic.tensor)} {_NO_ROWS_OF_EXAMPLES}")

    _pass_on_by_place(program, statistics, own, edits, scope=f"{KERNEL_SCOPE}/Statistics/own")


def _pass_on_counts(program: Program, statistics: Sequence[Statistic], edits: Edits) -> None:
    """Let each replica pass on as many times its own count as the batch has times the examples it computes with."""

    def count(_: Statistic, copy: tf.Tensor, place: Sequence[tf.Tensor]) -> tf.Tensor:
        total, _, own = (tf.cast(one, tf.float64 if copy.dtype.is_floating else tf.int64) for one in place)
        value = tf.cast(copy, total.dtype) * total
        own = tf.maximum(own, 1)
        return tf.cast(value / own if copy.dtype.is_floating else value // own, copy.dtype)

    _pass_on_by_place(program, statistics, count, edits, scope=f"{KERNEL_SCOPE}/Statistics/counts")


def _pass_on_by_place(
    program: Program,
    statistics: Sequence[Statistic],
    passed: Callable[[Statistic, tf.Tensor, Sequence[tf.Tensor]], tf.Tensor],
    edits: Edits,
    *,
    scope: str,
) -> None:
    """Let each replica pass on what `passed` makes of what it has, without a message.

    `passed` is told the number of examples of the batch, of those before the replica's, and of the replica's (int64).
    """
    markers = [_markers(program, statistic.tensor) for statistic in statistics]
    batch, replicas = program.replication.batch, program.topology.local_replicas
    names = () if batch is None else batch.places

    def traced(places: Sequence[tf.Tensor], values: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        total, begins, counts = places[0], places[1 : len(replicas) + 1], places[len(replicas) + 1 :]
        taken: list[list[tf.Tensor]] = []
        for statistic, copies in zip(statistics, values, strict=True):
            taken.append([])
            for replica, copy, *place in zip(replicas, copies, begins, counts, strict=True):
                with tf.device(replica.device):
                    taken[-1].append(passed(statistic, copy, (total, *place)))
        return taken

    specs = [
        [TensorSpec(program.graph.nodes[marker].input[0], tf.as_dtype(one.dtype), one.shape) for marker in copies]
        for one, copies in zip(statistics, markers, strict=True)
    ]
    fragment = trace(traced, [[TensorSpec(name, tf.int64, ()) for name in names], specs], scope=scope)
    _pass_on(markers, fragment, edits)


def _markers(program: Program, tensor: str) -> list[str]:
    """The ops that pass a statistic on, on each local replica."""
    return [on_replica(replica, op_of(tensor)) for replica in range(program.num_local_replicas)]


def _pass_on(markers: Sequence[Sequence[str]], fragment: Fragment, edits: Edits) -> None:
    """Let the markers pass on what the fragment makes."""
    edits.add(fragment.nodes)
    for copies, tensors in zip(markers, fragment.outputs, strict=True):
        for marker, tensor in zip(copies, tensors, strict=True):
            edits.set_input(marker, 0, tensor)


# -- Results ----------------------------------------------------------------------------------------------------------


def _lower_fetches(program: Program, event: FetchResults, edits: Edits, collectives: Collectives) -> dict[str, str]:
    """Cases 3 to 6. Returns the tensors that stand for the outputs."""
    replicas = range(program.num_local_replicas)
    parts = [
        _part(program, output, reduction, replicas)
        for output, reduction in zip(event.outputs, event.reductions, strict=True)
    ]
    fragment = trace(
        lambda batch, values: [copies[0] for copies in combine(program, parts, batch, values, collectives)],
        [batch_specs(program), [part.specs for part in parts]],
        scope=event.scope,
    )
    edits.add(fragment.nodes)
    return {output.tensor: tensor for output, tensor in zip(event.outputs, fragment.outputs, strict=True)}


def _part(program: Program, output: Output, reduction: str, replicas: Iterable[int]) -> Part:
    dtype = tf.as_dtype(output.dtype)
    if reduction == "rows" and len(program.topology.workers) > 1 and dtype not in TRAVELS:
        raise CaptureError(
            f"result '{output.tensor}' is of type {dtype.name}, and its rows are on several workers, whose "
            f"collectives carry {', '.join(sorted(kind.name for kind in TRAVELS))}. Leave it out of the "
            "step's results, or return what it is made from"
        )
    if reduction not in ("rows", "local rows") and (output.shape is None or None in output.shape):
        raise CaptureError(
            f"result '{output.tensor}' has the shape {tf.TensorShape(output.shape)} and differs between replicas; only "
            "the first dimension, the batch, may be unknown"
            + (f", and this is a {output.reduction} over it" if output.reduction in ("mean", "sum", "same") else "")
            + ". Return it with the batch first, or with a static shape"
        )
    if reduction == "first" and not output.reduction and not _is_firsts(program, output):
        raise CaptureError(
            f"result '{output.tensor}' is of type {dtype.name}, differs between replicas, and is neither rows, a sum "
            "nor a mean over examples, nor computed from such, as far as its graph shows. Return what it is made from, "
            "or compute it from the results outside of the step"
        )
    copies = tuple(on_replica(replica, output.tensor) for replica in replicas)
    return Part(copies, dtype, output.shape, reduction)


def _is_firsts(program: Program, output: Output) -> bool:
    """Whether the first replica's value is that of one device, and workers can be told it."""
    can_travel = tf.as_dtype(output.dtype) in SUMMED or len(program.topology.workers) == 1
    return op_of(output.tensor) not in program.analysis.of_examples and can_travel
