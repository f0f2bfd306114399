"""Combine: statistics are what one device would have computed of the whole batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist_py.kernel.combining import Part, combine
from autodist_py.kernel.cross_device_ops.collective import Collectives
from autodist_py.kernel.fragment import Fragment, TensorSpec, trace
from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.names import KERNEL_SCOPE, on_replica, op_of
from autodist_py.kernel.passes.launches import with_launches
from autodist_py.kernel.program import Program
from autodist_py.kernel.rewrite import Edits
from autodist_py.kernel.weights import batch_specs, replica_weights, weighted
from autodist_py.proto.graph_item import Statistic


@dataclass(frozen=True, slots=True)
class Combine:
    """Statistics are what one device would have computed of the whole batch.

    Requires: a replicated graph in which each statistic is the result of an op of its own (`Identity`: capture makes
        them), whose readers are those that need the combined value.
    Ensures: those ops pass on the combined value, as the statistic's reduction says; of a "part", which is not
        combined, each replica's share. Statistics that do not depend on one another are combined together.
    """

    name: ClassVar[str] = "combine"

    def __call__(self, program: Program) -> Program:
        if program.is_single:
            return program
        rounds: dict[tuple[int, int], list[Statistic]] = {}
        for statistic in program.item.statistics:
            if statistic.reduction in ("part", "same"):
                continue
            op = op_of(statistic.tensor)
            rounds.setdefault((program.analysis.stage[op], program.analysis.round[op]), []).append(statistic)
        for (stage, round_), statistics in sorted(rounds.items()):
            program = _combine_round(program, stage, round_, statistics)
        parts = [statistic for statistic in program.item.statistics if statistic.reduction == "part"]
        return _with_parts(program, parts) if parts else program


def _with_parts(program: Program, statistics: Sequence[Statistic]) -> Program:
    """Let each replica pass on its share of its own value, which is there without a message."""
    seams = _seams(program, statistics)
    replicas = program.place.local_replicas

    def parts(batch: Sequence[tf.Tensor], values: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        with tf.device(program.place.host):
            shares = replica_weights(program, batch, "mean")
        own: list[list[tf.Tensor]] = []
        for copies in values:
            own.append([])
            for replica, copy, share in zip(replicas, copies, shares, strict=True):
                with tf.device(replica.device):
                    own[-1].append(tf.cast(weighted(copy, share), copy.dtype))
        return own

    specs = [
        [TensorSpec(program.graph.nodes[seam].input[0], tf.as_dtype(one.dtype), one.shape) for seam in copies]
        for one, copies in zip(statistics, seams, strict=True)
    ]
    fragment = trace(parts, [batch_specs(program), specs], scope=f"{KERNEL_SCOPE}/Combine/parts")
    return replace(program, graph=_read_by(program, seams, fragment))


def _seams(program: Program, statistics: Sequence[Statistic]) -> list[list[str]]:
    """The ops that pass them on, on each local replica."""
    return [
        [on_replica(replica, op_of(statistic.tensor)) for replica in range(program.num_local_replicas)]
        for statistic in statistics
    ]


def _read_by(program: Program, seams: Sequence[Sequence[str]], fragment: Fragment) -> GraphView:
    """The graph in which the seams pass on what the fragment makes."""
    edits = Edits()
    edits.add(fragment.nodes)
    for copies, tensors in zip(seams, fragment.outputs, strict=True):
        for seam, tensor in zip(copies, tensors, strict=True):
            edits.set_input(seam, 0, tensor)
    return edits.apply(program.graph)


def _combine_round(program: Program, stage: int, round_: int, statistics: Sequence[Statistic]) -> Program:
    """Combine `statistics`, which do not depend on one another."""
    seams = _seams(program, statistics)
    parts = [
        Part(
            tuple(program.graph.nodes[seam].input[0] for seam in copies),
            tf.as_dtype(statistic.dtype),
            statistic.shape,
            statistic.reduction,
        )
        for statistic, copies in zip(statistics, seams, strict=True)
    ]
    collectives = Collectives(program.place, program.next_instance_key)
    fragment = trace(
        lambda batch, values: combine(program, parts, batch, values, collectives),
        [batch_specs(program), [part.specs for part in parts]],
        scope=f"{KERNEL_SCOPE}/Combine/stage_{stage}_round_{round_}",
    )
    what = f"statistics {', '.join(statistic.tensor for statistic in statistics)}"
    result = with_launches(program, collectives, rank=(stage, 1, round_), what=what)
    return replace(result, graph=_read_by(program, seams, fragment))
