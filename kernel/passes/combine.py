"""Combine: statistics are what one device would have computed of the whole batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist_py.kernel.combining import Part, combine
from autodist_py.kernel.cross_device_ops.collective import Collectives
from autodist_py.kernel.fragment import trace
from autodist_py.kernel.names import KERNEL_SCOPE, on_replica, op_of
from autodist_py.kernel.passes.launches import with_launches
from autodist_py.kernel.program import Program
from autodist_py.kernel.rewrite import Edits
from autodist_py.kernel.weights import batch_specs
from autodist_py.proto.graph_item import Statistic


@dataclass(frozen=True, slots=True)
class Combine:
    """Statistics are what one device would have computed of the whole batch.

    Requires: a replicated graph in which each statistic is the result of an op of its own (`Identity`: capture makes
        them), whose readers are those that need the combined value.
    Ensures: those ops pass on the combined value, as the statistic's reduction says. Statistics that do not depend on
        one another are combined together.
    """

    name: ClassVar[str] = "combine"

    def __call__(self, program: Program) -> Program:
        if program.is_single:
            return program
        rounds: dict[tuple[int, int], list[Statistic]] = {}
        for statistic in program.item.statistics:
            if statistic.reduction == "same":
                continue
            op = op_of(statistic.tensor)
            rounds.setdefault((program.analysis.stage[op], program.analysis.round[op]), []).append(statistic)
        for (stage, round_), statistics in sorted(rounds.items()):
            program = _combine_round(program, stage, round_, statistics)
        return program


def _combine_round(program: Program, stage: int, round_: int, statistics: Sequence[Statistic]) -> Program:
    """Combine `statistics`, which do not depend on one another."""
    seams = [
        [on_replica(replica, op_of(statistic.tensor)) for replica in range(program.num_local_replicas)]
        for statistic in statistics
    ]
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
    edits = Edits()
    edits.add(fragment.nodes)
    for copies, tensors in zip(seams, fragment.outputs, strict=True):
        for seam, tensor in zip(copies, tensors, strict=True):
            edits.set_input(seam, 0, tensor)
    what = f"statistics {', '.join(statistic.tensor for statistic in statistics)}"
    result = with_launches(program, collectives, rank=(stage, 1, round_), what=what)
    return replace(result, graph=edits.apply(program.graph))
