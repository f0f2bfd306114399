"""Fetch: what is fetched is what one device would have returned for the whole batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist_py.kernel.combining import SUMMED, Part, combine
from autodist_py.kernel.cross_device_ops.collective import Collectives
from autodist_py.kernel.cross_device_ops.rows import TRAVELS
from autodist_py.kernel.fragment import trace
from autodist_py.kernel.names import KERNEL_SCOPE, on_replica, op_of
from autodist_py.kernel.outputs import combined_as, differing
from autodist_py.kernel.passes.launches import with_launches
from autodist_py.kernel.program import Program
from autodist_py.kernel.rewrite import Edits
from autodist_py.kernel.weights import batch_specs
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import Output


@dataclass(frozen=True, slots=True)
class Fetch:
    """Each fetch is what one device would have returned for the whole batch.

    Requires: a replicated graph; each fetch names replica 0's tensor, a shared one, or one that is `combined`.
    Ensures: a fetch that depends on a replica's own examples is, by case:
        1. first dimension unknown, and not summed over: the replicas' rows, in order; of all workers with
            `batch="global"`, else this one's;
        2. known to be a sum or mean over examples: that of all replicas;
        3. another float of fixed shape: combined over all replicas as `fetch_reduction` says;
        4. another value that is drawn, and depends on no example: the first replica's, which is that of one device.
        What is of none of these is refused.
        All others are equal on all replicas, and stay as they are.
    """

    name: ClassVar[str] = "fetch"

    def __call__(self, program: Program) -> Program:
        if program.is_single:
            return program
        stages: dict[int, list[int]] = {}
        for position, output in differing(program):
            if output.tensor not in program.combined:
                stages.setdefault(program.analysis.stage[op_of(output.tensor)], []).append(position)
        for stage, positions in sorted(stages.items()):
            program = _combine_stage(program, stage, positions)
        return program


def _combine_stage(program: Program, stage: int, positions: Sequence[int]) -> Program:
    """Combine the outputs at `positions`, all of which are ready at `stage` of the step."""
    parts = [_part(program, program.item.outputs[position]) for position in positions]
    collectives = Collectives(program.place, program.next_instance_key)
    fragment = trace(
        lambda batch, values: [copies[0] for copies in combine(program, parts, batch, values, collectives)],
        [batch_specs(program), [part.specs for part in parts]],
        scope=f"{KERNEL_SCOPE}/Fetch/stage_{stage}",
    )
    fetches = list(program.fetches)
    for position, tensor in zip(positions, fragment.outputs, strict=True):
        fetches[position] = tensor
    what = f"fetches {', '.join(program.item.outputs[position].tensor for position in positions)}"
    edits = Edits()
    edits.add(fragment.nodes)
    result = with_launches(program, collectives, rank=(stage, 2), what=what)
    return replace(result, graph=edits.apply(program.graph), fetches=tuple(fetches))


def _part(program: Program, output: Output) -> Part:
    dtype = tf.as_dtype(output.dtype)
    reduction = combined_as(program, output)
    if reduction == "rows" and len(program.place.workers) > 1 and dtype not in TRAVELS:
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
    copies = tuple(on_replica(replica, output.tensor) for replica in range(program.num_local_replicas))
    return Part(copies, dtype, output.shape, reduction)


def _is_firsts(program: Program, output: Output) -> bool:
    """Whether the first replica's value is that of one device, and workers can be told it."""
    can_travel = tf.as_dtype(output.dtype) in SUMMED or len(program.place.workers) == 1
    return op_of(output.tensor) not in program.analysis.of_examples and can_travel
