"""Gradients that are cast from float16: what replicas add up to is rounded as on one device.

Replicas compute parts of one device's gradient, as their shares count where back-propagation begins (`shares.py`).
Their sum is taken in float32; where one device has cast it from float16, it is rounded to float16 again.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import tensorflow as tf

from autodist_py.capture.batch.insertion import Insertion
from autodist_py.capture.batch.layouts.table import Edge
from autodist_py.kernel.ir.names import op_of
from autodist_py.proto.graph_item import Gradient

_HALF = tf.float16
_SUM = "AddN"
_PASSES_ON = frozenset({"ExpandDims", "Identity", "PreventGradient", "Reshape", "Squeeze", "Transpose"})
"""Op types whose result has the numbers of their first input."""


class HalfPrecision:
    """Lets sums be rounded as one device's are."""

    def __init__(
        self,
        insertion: Insertion,
        tensor_of: Callable[[str], tf.Tensor],
    ):
        self._insertion, self._tensor_of = insertion, tensor_of

    def rounded(self, gradient: Gradient) -> list[Gradient]:
        """The gradients in the place of one; what reads it reads their sum, each rounded as it is on one device.

        Rows that are gathered are no sums of several replicas.
        """
        position = 1 if gradient.is_sparse else 0
        marker = op_of(gradient.tensors[position])
        terms = list(self._terms((marker, 0)))
        if not any(map(self._is_from_half, terms)) or (gradient.is_sparse and gradient.indices != "same"):
            return [gradient]
        if gradient.is_sparse and len(terms) > 1:
            return [gradient]
        dtype = self._tensor_of(gradient.tensors[position]).dtype
        found = []
        for number, (op, index) in enumerate(terms):
            is_from_half = self._is_from_half((op, index))
            own = self._insertion.pass_on(f"{marker}/term_{number}", self._read((op, index)), dtype)
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
