"""Rules for ops that compute: element by element, reductions, products, and layers made of them."""

from collections.abc import Mapping

import tensorflow as tf

from autodist_py.kernel.extent.values import (
    COUNT,
    DISTINCT,
    FIXED,
    MEAN,
    OTHER,
    PLUS,
    ROWS,
    SAME,
    SHAPE,
    SUM,
    Extent,
    Operands,
    Rule,
)


def _elementwise(operands: Operands) -> Extent:
    return ROWS if ROWS in operands.extents and operands.aligned else OTHER


def _extreme(operands: Operands) -> Extent:
    """Of multiples of a replica's number of examples the larger one is the same one everywhere."""
    return COUNT if set(operands.extents) == {COUNT} else _elementwise(operands)


def _sum_of_terms(operands: Operands) -> Extent:
    kinds = set(operands.extents)
    if kinds <= {MEAN, SAME}:
        return MEAN
    if kinds <= {SUM, COUNT}:
        return SUM
    return PLUS if kinds <= {SUM, COUNT, PLUS, SAME} else _elementwise(operands)


def _product(operands: Operands) -> Extent:
    kinds = set(operands.extents)
    varying = [extent for extent in operands.extents if extent is not SAME]
    if len(varying) == 1 and varying[0] in FIXED | {PLUS}:
        return varying[0]
    if kinds == {MEAN, COUNT}:
        return SUM
    return _elementwise(operands)


def _quotient(operands: Operands) -> Extent:
    over, under = operands.extents
    if tf.as_dtype(operands.node.attr["T"].type).is_integer:
        return _elementwise(operands)
    if under is SAME and over in FIXED | {PLUS}:
        return over
    if over is SUM and under is COUNT:
        return MEAN
    return _elementwise(operands)


def _unary_linear(operands: Operands) -> Extent:
    extent = operands.extents[0]
    if extent is COUNT:
        return SUM
    return extent if extent in (ROWS, SUM, MEAN, PLUS) else OTHER


def _passed(operands: Operands) -> Extent:
    return operands.extents[0]


def _cast(operands: Operands) -> Extent:
    source, target = (tf.as_dtype(operands.node.attr[key].type) for key in ("SrcT", "DstT"))
    extent = operands.extents[0]
    if extent in (ROWS, SHAPE):
        return extent
    if extent is DISTINCT:
        return DISTINCT if source.is_integer and target.is_integer and target.size >= source.size else OTHER
    exact = target != tf.bool and (target.is_floating or not source.is_floating)
    return extent if exact and extent in FIXED | {PLUS} else OTHER


def _bitcast(operands: Operands) -> Extent:
    sizes = {tf.as_dtype(operands.node.attr[key].type).size for key in ("T", "type")}
    return ROWS if operands.extents[0] is ROWS and len(sizes) == 1 else OTHER


def _reduction(over_rows: Extent, *, linear: bool) -> Rule:
    def rule(operands: Operands) -> Extent:
        extent, rank = operands.extents[0], operands.ranks[0]
        if extent is ROWS:
            axes = operands.axes(1, rank)
            if axes is None:
                return OTHER
            if 0 in axes:
                return OTHER if _floors(operands) else over_rows
            return ROWS
        if extent is SHAPE:
            return COUNT if operands.node.op == "Prod" else OTHER
        exact = linear and operands.extents[1] is SAME and not _floors(operands)
        return _unary_linear(operands) if exact else OTHER

    return rule


def _floors(operands: Operands) -> bool:
    """Whether a mean of integers is taken."""
    return operands.node.op == "Mean" and tf.as_dtype(operands.node.attr["T"].type).is_integer


def _matmul(operands: Operands) -> Extent:
    left, right = operands.extents
    turned = [operands.node.attr[key].b for key in ("transpose_a", "transpose_b")]
    if left is ROWS and right is not ROWS:
        return OTHER if turned[0] else ROWS
    if left is ROWS and right is ROWS:
        return SUM if turned[0] and not turned[1] else OTHER
    if left in (SUM, MEAN) and right is SAME:
        return left
    return right if right in (SUM, MEAN) and left is SAME else OTHER


def _batch_matmul(operands: Operands) -> Extent:
    ranks = operands.ranks
    if any(rank is None for rank in ranks):
        return OTHER
    rank = max(rank for rank in ranks if rank is not None)
    return ROWS if rank > 2 and operands.aligned and ROWS in operands.extents else OTHER


def _einsum(operands: Operands) -> Extent:
    terms, _, result = operands.node.attr["equation"].s.decode().partition("->")
    inputs = terms.split(",")
    with_rows = [term for term, extent in zip(inputs, operands.extents, strict=True) if extent is ROWS]
    letters = {term[:1] for term in with_rows}
    if "." in terms or len(letters) != 1:
        return OTHER
    (letter,) = letters
    elsewhere = [term[1:] if extent is ROWS else term for term, extent in zip(inputs, operands.extents, strict=True)]
    if any(letter in term for term in elsewhere) or letter in result[1:]:
        return OTHER
    if result[:1] == letter:
        return ROWS
    return SUM if all(extent in (ROWS, SAME) for extent in operands.extents) else OTHER


def _first_has_rows(operands: Operands) -> Extent:
    return ROWS if operands.extents[0] is ROWS and ROWS not in operands.extents[1:] else OTHER


def _transposed_convolution(operands: Operands) -> Extent:
    sizes, weights, values = operands.extents
    return ROWS if sizes is SHAPE and values is ROWS and weights is not ROWS else OTHER


def _all_have_rows(operands: Operands) -> Extent:
    return ROWS if set(operands.extents) == {ROWS} else OTHER


def _over_last_axis(operands: Operands) -> Extent:
    rank = operands.ranks[0]
    return ROWS if operands.extents[0] is ROWS and rank is not None and rank > 1 else OTHER


def _of_matrices(operands: Operands) -> Extent:
    """Of each matrix by itself: the last two axes."""
    rank = operands.ranks[0]
    return _first_has_rows(operands) if rank is not None and rank > 2 else OTHER


def _arg_reduction(operands: Operands) -> Extent:
    axes = operands.axes(1, operands.ranks[0])
    return ROWS if operands.extents[0] is ROWS and axes is not None and axes[0] > 0 else OTHER


def _batch_norm(operands: Operands) -> tuple[Extent, ...]:
    rows = ROWS if operands.extents[0] is ROWS and set(operands.extents[1:]) == {SAME} else OTHER
    if not operands.node.attr["is_training"].b:
        return (rows, SAME, SAME, SAME, SAME, SAME)
    return (rows, MEAN if rows is ROWS else OTHER, OTHER, OTHER, OTHER, OTHER)


# fmt: off
_ELEMENTWISE = (
    "Abs", "Acos", "Acosh", "Angle", "AsString", "Asin", "Asinh", "Atan", "Atan2", "Atanh", "BesselI0e",
    "BesselI1e", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Bucketize", "Ceil", "ClipByValue",
    "Cos", "Cosh", "Digamma", "Elu", "Equal", "Erf", "Erfc", "Erfinv", "Exp", "Expm1", "Floor", "FloorDiv",
    "FloorMod", "Greater", "GreaterEqual", "Igamma", "Inv", "Invert", "IsFinite", "IsInf", "IsNan",
    "LeakyRelu", "LeftShift", "Less", "LessEqual", "Lgamma", "Log", "Log1p", "LogicalAnd", "LogicalNot",
    "LogicalOr", "Mod", "MulNoNan", "Ndtri", "NextAfter", "NotEqual", "Pow",
    "Reciprocal", "Relu", "Relu6", "RightShift", "Rint", "Round", "Rsqrt", "Select", "SelectV2", "Selu",
    "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Square", "SquaredDifference",
    "StringLength", "StringLower", "StringToHashBucketFast", "StringToNumber", "StringUpper", "Tan", "Tanh",
    "TruncateDiv", "TruncateMod", "Xdivy", "Xlog1py", "Xlogy",
)
_MATRICES = (
    "Cholesky", "LogMatrixDeterminant", "MatrixBandPart", "MatrixDeterminant", "MatrixDiagPart", "MatrixDiagPartV2",
    "MatrixDiagPartV3", "MatrixInverse",
)
# fmt: on

ARITHMETIC: Mapping[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(("Maximum", "Minimum"), _extreme),
    **dict.fromkeys(("Add", "AddV2", "AddN", "Complex", "Sub"), _sum_of_terms),
    **dict.fromkeys(("Conj", "Imag", "Neg", "Real"), _unary_linear),
    **dict.fromkeys(("CheckNumerics", "EnsureShape", "Identity", "PreventGradient", "StopGradient"), _passed),
    **dict.fromkeys(("BiasAdd", "Conv2D", "Conv3D", "DepthwiseConv2dNative"), _first_has_rows),
    **dict.fromkeys(
        ("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"), _transposed_convolution
    ),
    **dict.fromkeys(("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D", "LRN"), _first_has_rows),
    **dict.fromkeys(("ResizeBilinear", "ResizeNearestNeighbor"), _first_has_rows),
    **dict.fromkeys(("Softmax", "LogSoftmax", "TopKV2"), _over_last_axis),
    **dict.fromkeys(("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"), _all_have_rows),
    **dict.fromkeys(("ArgMax", "ArgMin", "Cumsum", "Cumprod"), _arg_reduction),
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _batch_matmul),
    **dict.fromkeys(("All", "Any", "Max", "Min", "Prod"), _reduction(OTHER, linear=False)),
    **dict.fromkeys(_MATRICES, _of_matrices),
    "Bitcast": _bitcast,
    "Cast": _cast,
    "Div": _quotient,
    "DivNoNan": _quotient,
    "Einsum": _einsum,
    "FusedBatchNormV3": _batch_norm,
    "InTopKV2": lambda operands: ROWS if operands.extents == (ROWS, ROWS, SAME) else OTHER,
    "L2Loss": lambda operands: SUM if operands.extents[0] is ROWS else OTHER,
    "MatMul": _matmul,
    "Mean": _reduction(MEAN, linear=True),
    "Mul": _product,
    "Rank": lambda _: SAME,
    "RealDiv": _quotient,
    "Sum": _reduction(SUM, linear=True),
}
"""The rules, by op type."""
