"""Gradients that back-propagation computes in float16: what replicas pass back, and add up to, is as on one device.

Numbers of more than 65504 are infinite in float16, which a loss scale counts on. A replica's mean is over fewer
examples than one device's, so all that it passes back would be larger, and infinite at a smaller scale. So where
float16 follows, the replica's share of the examples counts where back-propagation begins, not where gradients are
combined: each number that is passed back is one device's, and what replicas compute are parts of its gradient. Their
sum is taken in float32; where one device has cast it from float16, it is rounded to float16 again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import tensorflow as tf

from autodist_py.capture.combination import Combination, Edge
from autodist_py.capture.insertion import Insertion
from autodist_py.capture.traced import Origin
from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.names import op_of
from autodist_py.proto.graph_item import Gradient

_HALF = tf.float16
"""bfloat16 has the range of float32, so that in it nothing is infinite for being passed back by a replica."""
_HOLDS_SHARES = frozenset({tf.float32, tf.float64})
"""Types of seeds that may be a share of 1: a third of it, rounded to 11 bits, would be off by one in 4096."""
_SUM = "AddN"
_PASSES_ON = frozenset({"ExpandDims", "Identity", "PreventGradient", "Reshape", "Squeeze", "Transpose"})
"""Op types whose result has the numbers of their first input."""


class HalfPrecision:
    """Lets shares count at the seeds of back-propagation, and sums be rounded as one device's are."""

    def __init__(
        self,
        graph: GraphView,
        insertion: Insertion,
        combination: Combination,
        tensor_of: Callable[[str], tf.Tensor],
    ):
        self._graph, self._insertion, self._combination = graph, insertion, combination
        self._tensor_of = tensor_of

    def in_parts(
        self, gradients: Sequence[Gradient], origins: Sequence[Origin], reduction_of: Callable[[Gradient], str]
    ) -> tuple[Gradient, ...]:
        """`gradients`, of which those of a mean are in parts where they are computed by float16 from known seeds.

        The gradients of one call have their seeds in common, so they are so all, or none.
        """
        calls: dict[tuple[str, ...], list[Gradient]] = {}
        for gradient, origin in zip(gradients, origins, strict=True):
            calls.setdefault(origin.seeds, []).append(gradient)
        found: set[Gradient] = set()
        for names, together in calls.items():
            seeds = [name for name in names if op_of(name) in self._graph.nodes]
            of_means = all(reduction_of(gradient) == "mean" for gradient in together)
            hold_shares = all(self._tensor_of(seed).dtype in _HOLDS_SHARES for seed in seeds)
            if (
                seeds
                and of_means
                and hold_shares
                and self._is_by_half(seeds, together)
                and self._are_for_these(seeds, together)
            ):
                for seed in seeds:
                    self._insertion.take_part(seed)
                found.update(together)
        return tuple(replace(one, in_parts=True) if one in found else one for one in gradients)

    def _is_by_half(self, seeds: Sequence[str], gradients: Sequence[Gradient]) -> bool:
        """Whether anything between is of float16."""
        seams = {op_of(tensor) for gradient in gradients for tensor in gradient.tensors}
        between = self._graph.dataflow_descendants(map(op_of, seeds)) & self._graph.dataflow_ancestors(seams)
        return any(one.dtype == _HALF for op in between - seams for one in self._tensor_of(f"{op}:0").op.outputs)

    def _are_for_these(self, seeds: Sequence[str], gradients: Sequence[Gradient]) -> bool:
        """Whether nothing but `gradients` comes of the seeds: no other gradient, loss, write or result."""
        seams = {op_of(tensor) for gradient in gradients for tensor in gradient.tensors}
        reached = self._graph.dataflow_descendants(map(op_of, seeds), blocked=seams)
        return not any(self._combination.is_read_whole(op) for op in reached)

    def rounded(self, gradient: Gradient) -> list[Gradient]:
        """The gradients in the place of one; what reads it reads their sum, each rounded as it is on one device.

        Rows that are gathered are no sums of several replicas.
        """
        position = 1 if gradient.is_sparse else 0
        seam = op_of(gradient.tensors[position])
        terms = list(self._terms((seam, 0)))
        if not any(map(self._is_from_half, terms)) or (gradient.is_sparse and gradient.indices != "same"):
            return [gradient]
        if gradient.is_sparse and len(terms) > 1:
            return [gradient]
        dtype = self._tensor_of(gradient.tensors[position]).dtype
        found = []
        for number, (op, index) in enumerate(terms):
            is_from_half = self._is_from_half((op, index))
            own = self._insertion.pass_on(f"{seam}/term_{number}", self._read((op, index)), dtype)
            total = own
            if is_from_half:
                narrow = self._insertion.cast(f"{own}/in_float16", own, dtype, _HALF)
                total = self._insertion.cast(f"{own}/rounded", narrow, _HALF, dtype)
            self._insertion.read(op, index, total)
            tensors = [*gradient.tensors[:position], f"{own}:0", *gradient.tensors[position + 1 :]]
            found.append(replace(gradient, tensors=tuple(tensors)))
        return found

    def _terms(self, edge: Edge) -> Iterator[Edge]:
        """Where the terms of what is read there are read, which TensorFlow has added up for this reader alone."""
        pending = [edge]
        while pending:
            edge = pending.pop()
            node = self._insertion.nodes[op_of(self._read(edge))]
            if node.op == _SUM and self._insertion.readers(node.name) == 1:
                pending += [(node.name, index) for index in reversed(range(node.attr["N"].i))]
            else:
                yield edge

    def _is_from_half(self, edge: Edge) -> bool:
        """Whether a cast from float16 is read there, in whatever shape."""
        node = self._insertion.nodes[op_of(self._read(edge))]
        while node.op in _PASSES_ON:
            node = self._insertion.nodes[op_of(node.input[0])]
        return node.op == "Cast" and node.attr["SrcT"].type == _HALF.as_datatype_enum

    def _read(self, edge: Edge) -> str:
        """What is read there now."""
        op, index = edge
        return self._insertion.nodes[op].input[index]
