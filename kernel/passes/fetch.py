"""Fetch: what is fetched is what one device would have returned for the whole batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist_py.kernel.cross_device_ops.collective import CARRIED, Collectives
from autodist_py.kernel.fragment import TensorSpec, trace
from autodist_py.kernel.names import KERNEL_SCOPE, on_replica, op_of
from autodist_py.kernel.passes.launches import with_launches
from autodist_py.kernel.program import Program
from autodist_py.kernel.rewrite import Edits
from autodist_py.kernel.weights import batch_specs, replica_weights, weighted
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import Output


@dataclass(frozen=True, slots=True)
class Fetch:
    """Each fetch is what one device would have returned for the whole batch.

    Requires: a replicated graph; each fetch names replica 0's tensor, or a shared one.
    Ensures: a fetch that depends on a replica's own examples is, by case:
        1. first dimension unknown: the replicas' rows, in order; of all workers with `batch="global"`, else this one's;
        2. a float of fixed shape: combined over all replicas as `fetch_reduction` says;
        3. anything else: the first replica's (of the cluster, where the network can carry it; else of this worker).
        All others are equal on all replicas, and stay as they are.
    """

    name: ClassVar[str] = "fetch"

    def __call__(self, program: Program) -> Program:
        if program.is_single:
            return program
        stages: dict[int, list[int]] = {}
        for position, output in enumerate(program.item.outputs):
            op = op_of(output.tensor)
            if op in program.analysis.varying and op not in program.shared:
                stages.setdefault(program.analysis.stage[op], []).append(position)
        for stage, positions in sorted(stages.items()):
            program = _combine_stage(program, stage, positions)
        return program


def _combine_stage(program: Program, stage: int, positions: Sequence[int]) -> Program:
    """Combine the outputs at `positions`, all of which are ready at `stage` of the step."""
    outputs = [program.item.outputs[position] for position in positions]
    collectives = Collectives(program.place, program.next_instance_key)
    fragment = trace(
        lambda batch, values: _combine(program, outputs, batch, values, collectives),
        [batch_specs(program), [_copies(program, output) for output in outputs]],
        scope=f"{KERNEL_SCOPE}/Fetch/stage_{stage}",
    )
    fetches = list(program.fetches)
    for position, tensor in zip(positions, fragment.outputs, strict=True):
        fetches[position] = tensor
    what = f"fetches {', '.join(output.tensor for output in outputs)}"
    edits = Edits()
    edits.add(fragment.nodes)
    result = with_launches(program, collectives, rank=(stage, 1), what=what)
    return replace(result, graph=edits.apply(program.graph), fetches=tuple(fetches))


def _copies(program: Program, output: Output) -> list[TensorSpec]:
    dtype = tf.as_dtype(output.dtype)
    return [
        TensorSpec(on_replica(replica, output.tensor), dtype, output.shape)
        for replica in range(program.num_local_replicas)
    ]


def _combine(
    program: Program,
    outputs: Sequence[Output],
    batch: Sequence[tf.Tensor],
    values: Sequence[Sequence[tf.Tensor]],
    collectives: Collectives,
) -> list[tf.Tensor]:
    with tf.device(program.place.host):
        weights = replica_weights(program, batch, program.options.fetch_reduction)
        results: dict[int, tf.Tensor] = {}
        summed: dict[tf.DType, dict[int, tf.Tensor]] = {}
        for position, (output, copies) in enumerate(zip(outputs, values, strict=True)):
            if _is_batched(output):
                results[position] = _gather(program, output, copies, collectives)
            elif not copies[0].shape.is_fully_defined():
                raise CaptureError(
                    f"result '{output.tensor}' has the shape {copies[0].shape} and differs between replicas; only the "
                    "first dimension, the batch, may be unknown. Return it with the batch first, or with a static shape"
                )
            elif tf.as_dtype(output.dtype) in CARRIED:
                part = _contribution(program, copies, weights)
                summed.setdefault(part.dtype, {})[position] = part
            else:
                results[position] = tf.identity(copies[0])
        for parts in summed.values():
            results |= _sum_together(parts, collectives)
        return [tf.cast(results[position], outputs[position].dtype) for position in range(len(outputs))]


def _sum_together(parts: Mapping[int, tf.Tensor], collectives: Collectives) -> dict[int, tf.Tensor]:
    """The sums over workers of `parts`, which are of one type, by one collective."""
    total = collectives.sum_over_workers(tf.concat([tf.reshape(part, [-1]) for part in parts.values()], axis=0))
    pieces = tf.split(total, [part.shape.num_elements() for part in parts.values()])
    return {
        position: tf.reshape(piece, part.shape) for (position, part), piece in zip(parts.items(), pieces, strict=True)
    }


def _is_batched(output: Output) -> bool:
    return output.shape is not None and len(output.shape) > 0 and output.shape[0] is None


def _gather(program: Program, output: Output, copies: Sequence[tf.Tensor], collectives: Collectives) -> tf.Tensor:
    """Case 1."""
    rows = tf.concat(copies, axis=0)
    if program.options.batch == "local" or collectives.num_workers == 1:
        return rows
    if rows.dtype not in CARRIED:
        raise CaptureError(
            f"result '{output.tensor}' is of type {rows.dtype.name}, and its rows are on several workers, whose "
            f"collectives carry {', '.join(sorted(kind.name for kind in CARRIED))}. Leave it out of the "
            "step's results, or return what it is made from"
        )
    return collectives.gather_rows([tf.cast(rows, CARRIED[rows.dtype])])[0]


def _contribution(program: Program, copies: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]) -> tf.Tensor:
    """What this worker adds to the sum: cases 2 and 3."""
    if copies[0].dtype.is_floating:
        return tf.add_n([weighted(copy, weight) for copy, weight in zip(copies, weights, strict=True)])
    value = tf.cast(copies[0], CARRIED[copies[0].dtype])
    holds_first = program.place.local_replicas[0].index == 0
    return value if holds_first else tf.zeros_like(value)
