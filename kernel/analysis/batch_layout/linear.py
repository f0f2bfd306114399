"""The rule for ops that move, repeat or add up elements of values of fixed shape: a sum of such stays a sum."""

from collections.abc import Callable, Mapping, Sequence

from autodist_py.kernel.analysis.batch_layout.layouts import (
    COUNT,
    MIXED,
    PARTIAL_MEAN,
    PARTIAL_SUM,
    PARTIAL_SUM_PLUS,
    REPLICATED,
    BatchLayout,
    Operands,
)

_Values = Callable[[Sequence[int]], Sequence[int]]


def _at(*positions: int) -> _Values:
    return lambda inputs: positions


def _all(inputs: Sequence[int]) -> Sequence[int]:
    return inputs


def _but_last(inputs: Sequence[int]) -> Sequence[int]:
    return inputs[:-1]


def _second_half(inputs: Sequence[int]) -> Sequence[int]:
    return inputs[len(inputs) // 2 :]


# fmt: off
_VALUES: Mapping[str, _Values] = {
    **dict.fromkeys((
        "BroadcastTo", "Cumsum", "Diag", "DiagPart", "ExpandDims", "GatherNd", "GatherV2", "MatrixBandPart",
        "MatrixDiag", "MatrixDiagPart", "MirrorPad", "Pad", "Reshape", "ReverseV2", "Roll", "SegmentSum", "Slice",
        "SplitV", "Squeeze", "StridedSlice", "Tile", "Transpose", "Unpack", "UnsortedSegmentSum",
    ), _at(0)),
    **dict.fromkeys(("MatrixDiagPartV3", "PadV2"), _at(0, 2)),
    **dict.fromkeys(("MatrixSolve", "MatrixTriangularSolve", "ScatterNd", "Split"), _at(1)),
    **dict.fromkeys(("FFT", "FFT2D", "IFFT", "IFFT2D", "IRFFT", "IRFFT2D", "RFFT", "RFFT2D"), _at(0)),
    **dict.fromkeys(("TensorScatterAdd", "TensorScatterSub", "TensorScatterUpdate"), _at(0, 2)),
    "BiasAdd": _all,
    "ConcatV2": _but_last,
    "DynamicStitch": _second_half,
    "MatrixDiagV3": _at(0, 4),
    "Pack": _all,
    "StridedSliceGrad": _at(4),
    **dict.fromkeys(("Select", "SelectV2"), _at(1, 2)),
}
# fmt: on
"""For op types whose results are linear in some of their inputs together, which of them."""
_PRODUCTS = frozenset({"BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul"})
"""Op types whose results are linear in each of their inputs by itself."""
LINEAR = _VALUES.keys() | _PRODUCTS


def linear_layout(operands: Operands) -> BatchLayout:
    """What an op makes of sums and means over examples, of fixed shape, that it is linear in; else MIXED.

    What depends on no example is a mean, too; beside a sum it is a term that counts once.
    """
    positions = range(len(operands.layouts))
    values = _VALUES.get(operands.node.op)
    if values is not None:
        linear = set(values(positions))
    else:
        varying = [at for at in positions if operands.layouts[at] is not REPLICATED]
        linear = set(varying) if operands.node.op in _PRODUCTS and len(varying) == 1 else set()
    if any(operands.layouts[at] is not REPLICATED for at in positions if at not in linear):
        return MIXED
    kinds = {operands.layouts[at] for at in linear}
    if kinds <= {PARTIAL_MEAN, REPLICATED}:
        return PARTIAL_MEAN
    if kinds <= {PARTIAL_SUM, COUNT}:
        return PARTIAL_SUM
    return PARTIAL_SUM_PLUS if kinds <= {PARTIAL_SUM, COUNT, PARTIAL_SUM_PLUS, REPLICATED} else MIXED
