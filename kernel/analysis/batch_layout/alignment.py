"""Whether each operand of an op has the examples of another where they meet, or none: no size may span them by chance.

The rules of `along` ask where examples stand. A value that all replicas have may be as long as the batch there: beside
a replica's rows it would be broadcast, refused, or contracted with other examples. So its size must be 1 there.
"""

from collections.abc import Callable, Mapping, Sequence

from autodist_py.kernel.analysis.batch_layout.along import Along
from autodist_py.kernel.analysis.batch_layout.arithmetic import ADDITIVE, ELEMENTWISE
from autodist_py.kernel.analysis.batch_layout.layouts import Operands

_Axes = Sequence[frozenset[int]]
"""For each data input, the axes along its examples."""


def is_aligned(operands: Operands, reads: Sequence[Along | None]) -> bool:
    """Whether what the op reads meets only at the same examples."""
    axes = [frozenset() if read is None else read.axes for read in reads]
    rule = _RULES.get(operands.node.op)
    if rule is None or not any(axes):
        return True
    if len(operands.shapes) < len(axes):
        return False
    known = [
        shape.rank is not None and all(axis < shape.rank for axis in own)
        for own, shape in zip(axes, operands.shapes, strict=True)
    ]
    return all(known) and rule(operands, axes)


def _broadcast(operands: Operands, axes: _Axes) -> bool:
    """Of what is broadcast: counted from the last axis, others have examples at the same place, or the size 1."""
    ranks = [len(shape) for shape in operands.shapes]
    places = {axis - rank for own, rank in zip(axes, ranks, strict=True) for axis in own}
    return all(
        place + rank in own or place + rank < 0 or shape[place + rank] == 1
        for place in places
        for own, rank, shape in zip(axes, ranks, operands.shapes, strict=True)
    )


def _alike(operands: Operands, axes: _Axes) -> bool:
    """Of what is put together: all have examples along the same axes."""
    parts = axes[: len(axes) - (operands.node.op == "ConcatV2")]
    return len(set(parts)) == 1


def _select(operands: Operands, axes: _Axes) -> bool:
    """Of an old choice, whose condition may have one entry for each row."""
    return len({shape.rank for shape in operands.shapes}) == 1 and _broadcast(operands, axes)


def _bias(operands: Operands, axes: _Axes) -> bool:
    """Of a vector that is added along an axis, which is none of examples."""
    rank = operands.ranks[0] or 0
    place = 1 if operands.node.attr["data_format"].s == b"NCHW" else rank - 1
    return place not in axes[0] or bool(axes[1])


def _matmul(operands: Operands, axes: _Axes) -> bool:
    """Of matrices: examples are summed over with the same ones, or stand where the other has none."""
    rank = operands.ranks[0]
    if rank is None or set(operands.ranks) != {rank}:
        return False
    keys = ("transpose_a", "transpose_b") if operands.node.op == "MatMul" else ("adj_x", "adj_y")
    turned = [operands.node.attr[key].b for key in keys]
    inner = (rank - 2 if turned[0] else rank - 1, rank - 1 if turned[1] else rank - 2)
    for own, other, at, across, shape in zip(axes, axes[::-1], inner, inner[::-1], operands.shapes[::-1], strict=True):
        for axis in own:
            if axis < rank - 2:
                meets = axis in other or shape[axis] == 1
            elif axis == at:
                meets = across in other
            else:
                meets = not other
            if not meets:
                return False
    return True


def _einsum(operands: Operands, axes: _Axes) -> bool:
    """Of labelled axes: one label is that of the examples, wherever it stands."""
    terms = operands.node.attr["equation"].s.decode().partition("->")[0].split(",")
    if "." in "".join(terms):
        return False
    labels = {term[axis] for term, own in zip(terms, axes, strict=True) for axis in own}
    return len(labels) == 1 and all(
        (term[axis] in labels) == (axis in own)
        for term, own in zip(terms, axes, strict=True)
        for axis in range(len(term))
    )


_Rule = Callable[[Operands, _Axes], bool]
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys((*ELEMENTWISE, *ADDITIVE), _broadcast),
    **dict.fromkeys(("Complex", "Div", "DivNoNan", "Maximum", "Minimum", "Mul", "RealDiv", "Sub"), _broadcast),
    **dict.fromkeys(("SelectV2", "SoftmaxCrossEntropyWithLogits"), _broadcast),
    **dict.fromkeys(("ConcatV2", "Pack", "SparseSoftmaxCrossEntropyWithLogits"), _alike),
    **dict.fromkeys(("BatchMatMulV2", "BatchMatMulV3", "MatMul"), _matmul),
    "BiasAdd": _bias,
    "Einsum": _einsum,
    "Select": _select,
}
