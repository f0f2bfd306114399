"""Where a replica's share of the examples counts for the gradients of a mean: as they are combined, or from the start.

A replica's mean is over fewer examples than one device's, so all that it passes back is larger. As long as that goes
through linear ops alone, in numbers of a large range, the share may count at the end. Otherwise it counts where
back-propagation begins: each number that is passed back is one device's then, and replicas compute parts of its
gradient. Two things ask for it: float16, in which numbers of more than 65504 are infinite, and a loss scale counts on
that; and custom gradients that are not linear (`cotangents.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import tensorflow as tf

from autodist_py.capture.batch.cotangents import BackPropagation, Nonlinear, Reads
from autodist_py.capture.batch.insertion import Insertion
from autodist_py.capture.batch.layouts.solution import Solution
from autodist_py.capture.batch.mixing import described
from autodist_py.capture.recording.gradients import CustomGradient, Origin
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of
from autodist_py.proto.graph_item import Gradient
from autodist_py.proto.text import some

_HALF = tf.float16
"""bfloat16 has the range of float32, so that in it nothing is infinite for being passed back by a replica."""
_HOLDS_SHARES = frozenset({tf.float32, tf.float64})
"""Types of seeds that may be a share of 1: a third of it, rounded to 11 bits, would be off by one in 4096."""
_TOLD = 3
_OF_EACH = (
    "is not linear in the gradients of examples, which a replica has of a mean over its own, and its share of them "
    "cannot count before: the loss is of half precision, or another value comes of the same back-propagation"
)
_OF_BOTH = (
    "is not linear in the gradient of a mean, and other ops are not in those of single examples, which need the "
    "replica's share before"
)


class _Call(NamedTuple):
    """Gradients that were asked for together, and what their back-propagation begins with."""

    seeds: list[str]
    custom: tuple[CustomGradient, ...]
    gradients: list[Gradient]

    @property
    def markers(self) -> set[str]:
        return {op_of(tensor) for gradient in self.gradients for tensor in gradient.tensors}


@dataclass
class Shares:
    """Lets shares count at the seeds of back-propagation, where they must.

    Attributes:
        refused: for gradients that replicas cannot compute parts of, by which ops.
        unseen: ops of which it is not seen whether they pass gradients on linearly, those of each example by itself.
    """

    graph: GraphView
    insertion: Insertion
    solution: Solution
    back: BackPropagation
    tensor_of: Callable[[str], tf.Tensor]
    refused: dict[Gradient, str] = field(default_factory=dict, init=False)
    unseen: list[str] = field(default_factory=list, init=False)

    def in_parts(
        self, gradients: Sequence[Gradient], origins: Sequence[Origin], reduction_of: Callable[[Gradient], str]
    ) -> tuple[Gradient, ...]:
        """`gradients`, of which those of a mean are in parts where they must be, and their seeds allow it.

        The gradients of one call have their seeds in common, so they are so all, or none.
        """
        calls: dict[tuple[str, ...], _Call] = {}
        for gradient, origin in zip(gradients, origins, strict=True):
            seeds = [name for name in origin.seeds if op_of(name) in self.graph.nodes]
            calls.setdefault(origin.seeds, _Call(seeds, origin.custom, [])).gradients.append(gradient)
        found: set[Gradient] = set()
        for call in calls.values():
            if not call.seeds and not call.custom:
                continue
            if self._needs_parts(call, {reduction_of(gradient) for gradient in call.gradients}) and call.seeds:
                for seed in call.seeds:
                    self.insertion.take_part(seed)
                found.update(call.gradients)
        return tuple(replace(one, in_parts=True) if one in found else one for one in gradients)

    def _needs_parts(self, call: _Call, reductions: set[str]) -> bool:
        """Whether the gradients of a call must be in parts, and may be; what they may not be is noted."""
        told = self.back.nonlinear(call.seeds, call.markers, call.custom)
        of_each, before, sums, unknown = (
            [one for one in told if one.reads is kind] for kind in (Reads.EACH, Reads.BEFORE, Reads.SUM, Reads.UNKNOWN)
        )
        if sums:
            self._refuse(call, sums, "")
        else:
            self.unseen += [one.op for one in unknown if one.op not in self.unseen]
        if sums or reductions == {"sum"}:
            return False
        can = reductions == {"mean"} and self._hold_shares(call) and self._are_for_these(call)
        if of_each and not can:
            self._refuse(call, of_each, _OF_EACH)
        elif of_each and before:
            self._refuse(call, before, _OF_BOTH)
        return can and not before and bool(of_each or unknown or self._is_by_half(call))

    def _refuse(self, call: _Call, told: Sequence[Nonlinear], reason: str) -> None:
        reasons = [described(self.tensor_of(f"{one.op}:0").op, one.reason or reason) for one in told[:_TOLD]]
        variables = some(dict.fromkeys(gradient.variable for gradient in call.gradients))
        sentence = (
            f"back-propagation for {variables} cannot be done by replicas, which have parts of the batch: "
            + "; ".join(reasons)
        )
        for gradient in call.gradients:
            self.refused.setdefault(gradient, sentence)

    def _hold_shares(self, call: _Call) -> bool:
        seeds = map(self.tensor_of, call.seeds)
        return all(seed.dtype in _HOLDS_SHARES and seed.shape.is_fully_defined() for seed in seeds)

    def _is_by_half(self, call: _Call) -> bool:
        """Whether anything between is of float16."""
        markers = call.markers
        between = self.graph.dataflow_descendants(map(op_of, call.seeds)) & self.graph.dataflow_ancestors(markers)
        return any(one.dtype == _HALF for op in between - markers for one in self.tensor_of(f"{op}:0").op.outputs)

    def _are_for_these(self, call: _Call) -> bool:
        """Whether nothing but these gradients comes of the seeds: no other gradient, loss, write or result."""
        reached = self.graph.dataflow_descendants(map(op_of, call.seeds), blocked=call.markers)
        return not any(self.solution.is_read_whole(op) for op in reached)
