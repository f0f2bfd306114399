"""Fetch: what is fetched is what one device would have returned for the whole batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist_py.kernel.cross_device_ops.collective import REDUCIBLE, Collectives
from autodist_py.kernel.fragment import TensorSpec, trace
from autodist_py.kernel.names import KERNEL_SCOPE, on_replica, op_of
from autodist_py.kernel.passes.launches import with_launches
from autodist_py.kernel.program import Program
from autodist_py.kernel.rewrite import Edits
from autodist_py.kernel.weights import batch_specs, replica_weights, weighted
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
        results: list[tf.Tensor | None] = [None] * len(outputs)
        weights = replica_weights(program, batch, program.options.fetch_reduction)
        summed: dict[tf.DType, list[int]] = {}
        for position, (output, copies) in enumerate(zip(outputs, values, strict=True)):
            dtype = tf.as_dtype(output.dtype)
            if _is_batched(output):
                results[position] = _gather(program, copies, collectives)
            elif dtype in REDUCIBLE:
                summed.setdefault(dtype, []).append(position)
            else:
                results[position] = tf.identity(copies[0])
        for positions in summed.values():
            parts = [_contribution(program, values[position], weights) for position in positions]
            total = collectives.sum_over_workers(tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0))
            pieces = tf.split(total, [part.shape.num_elements() for part in parts])
            for position, part, piece in zip(positions, parts, pieces, strict=True):
                results[position] = tf.reshape(piece, part.shape)
    return results


def _is_batched(output: Output) -> bool:
    return output.shape is not None and len(output.shape) > 0 and output.shape[0] is None


def _gather(program: Program, copies: Sequence[tf.Tensor], collectives: Collectives) -> tf.Tensor:
    rows = tf.concat(copies, axis=0)
    if program.options.batch == "local" or rows.dtype not in REDUCIBLE:
        return rows
    return collectives.gather_rows([rows])[0]


def _contribution(program: Program, copies: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]) -> tf.Tensor:
    """What this worker adds to the sum: cases 2 and 3."""
    if copies[0].dtype.is_floating:
        return tf.add_n([weighted(copy, weight) for copy, weight in zip(copies, weights, strict=True)])
    holds_first = program.place.local_replicas[0].index == 0
    return tf.identity(copies[0]) if holds_first else tf.zeros_like(copies[0])
