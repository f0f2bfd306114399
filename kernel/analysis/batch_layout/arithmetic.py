"""Rules for ops that compute: element by element, reductions, products, and layers made of them."""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from autodist_py.kernel.analysis.batch_layout.layouts import (
    CHOSEN_KEYS,
    COUNT,
    FIXED,
    KEYS,
    MIXED,
    PARTIAL_MEAN,
    PARTIAL_SUM,
    PARTIAL_SUM_PLUS,
    REPLICATED,
    SELECTED_INDICES,
    SHAPE,
    SHARDED,
    TAILED,
    UNIQUE,
    BatchLayout,
    Operands,
    Rule,
)

ADDITIVE = frozenset({"Add", "AddN", "AddV2"})
"""Op types whose result is the sum of their inputs."""


def _elementwise(operands: Operands) -> BatchLayout:
    return SHARDED if SHARDED in operands.layouts and operands.aligned else MIXED


def _extreme(operands: Operands) -> BatchLayout:
    """Of multiples of a replica's number of examples the larger one is the same one everywhere."""
    return COUNT if set(operands.layouts) == {COUNT} else _elementwise(operands)


def _sum_of_terms(operands: Operands) -> BatchLayout:
    kinds = {one for one, value in zip(operands.layouts, operands.constants, strict=True) if not _is_zero(value)}
    if kinds <= {PARTIAL_MEAN, REPLICATED}:
        return PARTIAL_MEAN
    if kinds <= {PARTIAL_SUM, COUNT}:
        return PARTIAL_SUM
    return PARTIAL_SUM_PLUS if kinds <= {PARTIAL_SUM, COUNT, PARTIAL_SUM_PLUS, REPLICATED} else _elementwise(operands)


def _is_zero(value: np.ndarray | None) -> bool:
    """Whether it adds nothing."""
    return value is not None and value.ndim == 0 and not value


def _product(operands: Operands) -> BatchLayout:
    kinds = set(operands.layouts)
    varying = [layout for layout in operands.layouts if layout is not REPLICATED]
    if len(varying) == 1 and varying[0] in FIXED | {PARTIAL_SUM_PLUS}:
        return varying[0]
    if kinds == {PARTIAL_MEAN, COUNT}:
        return PARTIAL_SUM
    return _elementwise(operands)


def _quotient(operands: Operands) -> BatchLayout:
    over, under = operands.layouts
    if tf.as_dtype(operands.node.attr["T"].type).is_integer:
        return _elementwise(operands)
    if under is REPLICATED and over in FIXED | {PARTIAL_SUM_PLUS}:
        return over
    if over is PARTIAL_SUM and under is COUNT:
        return PARTIAL_MEAN
    return _elementwise(operands)


def _unary_linear(operands: Operands) -> BatchLayout:
    layout = operands.layouts[0]
    if layout is COUNT:
        return PARTIAL_SUM
    return layout if layout in (SHARDED, PARTIAL_SUM, PARTIAL_MEAN, PARTIAL_SUM_PLUS) else MIXED


def _passed(operands: Operands) -> BatchLayout:
    return operands.layouts[0]


def _cast(operands: Operands) -> BatchLayout:
    source, target = (tf.as_dtype(operands.node.attr[key].type) for key in ("SrcT", "DstT"))
    layout = operands.layouts[0]
    if layout in (SHARDED, SHAPE, TAILED):
        return layout
    if layout is UNIQUE:
        return layout if source.is_integer and target.is_integer and target.size >= source.size else MIXED
    if layout in (SELECTED_INDICES, KEYS, CHOSEN_KEYS):  # Nobody has as many rows as do not fit.
        return layout if {source, target} <= {tf.int32, tf.int64} else MIXED
    exact = target != tf.bool and (target.is_floating or not source.is_floating)
    return layout if exact and layout in FIXED | {PARTIAL_SUM_PLUS} else MIXED


def _bitcast(operands: Operands) -> BatchLayout:
    sizes = {tf.as_dtype(operands.node.attr[key].type).size for key in ("T", "type")}
    return SHARDED if operands.layouts[0] is SHARDED and len(sizes) == 1 else MIXED


def _reduction(over_rows: BatchLayout, *, linear: bool) -> Rule:
    def rule(operands: Operands) -> BatchLayout:
        layout, rank = operands.layouts[0], operands.ranks[0]
        if layout is SHARDED:
            axes = operands.axes(1, rank)
            if axes is None:
                return MIXED
            if 0 in axes:
                return MIXED if _floors(operands) else over_rows
            return SHARDED
        if layout is SHAPE:
            return COUNT if operands.node.op == "Prod" and operands.axes(1, rank) == [0] else MIXED
        exact = linear and operands.layouts[1] is REPLICATED and not _floors(operands)
        return _unary_linear(operands) if exact else MIXED

    return rule


def _floors(operands: Operands) -> bool:
    """Whether a mean of integers is taken."""
    return operands.node.op == "Mean" and tf.as_dtype(operands.node.attr["T"].type).is_integer


def _matmul(operands: Operands) -> BatchLayout:
    left, right = operands.layouts
    turned = [operands.node.attr[key].b for key in ("transpose_a", "transpose_b")]
    if left is SHARDED and right is not SHARDED:
        return MIXED if turned[0] else SHARDED
    if left is SHARDED and right is SHARDED:
        return PARTIAL_SUM if turned[0] and not turned[1] else MIXED
    if left in (PARTIAL_SUM, PARTIAL_MEAN) and right is REPLICATED:
        return left
    return right if right in (PARTIAL_SUM, PARTIAL_MEAN) and left is REPLICATED else MIXED


def _batch_matmul(operands: Operands) -> BatchLayout:
    ranks = operands.ranks
    if any(rank is None for rank in ranks):
        return MIXED
    rank = max(rank for rank in ranks if rank is not None)
    return SHARDED if rank > 2 and operands.aligned and SHARDED in operands.layouts else MIXED


def _einsum(operands: Operands) -> BatchLayout:
    terms, _, result = operands.node.attr["equation"].s.decode().partition("->")
    inputs = terms.split(",")
    with_rows = [term for term, layout in zip(inputs, operands.layouts, strict=True) if layout is SHARDED]
    letters = {term[:1] for term in with_rows}
    if "." in terms or len(letters) != 1:
        return MIXED
    (letter,) = letters
    elsewhere = [term[1:] if layout is SHARDED else term for term, layout in zip(inputs, operands.layouts, strict=True)]
    if any(letter in term for term in elsewhere) or letter in result[1:]:
        return MIXED
    if result[:1] == letter:
        return SHARDED
    return PARTIAL_SUM if all(layout in (SHARDED, REPLICATED) for layout in operands.layouts) else MIXED


def _first_has_rows(operands: Operands) -> BatchLayout:
    return SHARDED if operands.layouts[0] is SHARDED and SHARDED not in operands.layouts[1:] else MIXED


def _transposed_convolution(operands: Operands) -> BatchLayout:
    sizes, weights, values = operands.layouts
    return SHARDED if sizes is SHAPE and values is SHARDED and weights is not SHARDED else MIXED


def _transformed_images(operands: Operands) -> BatchLayout:
    """Of (images, a transformation for each or one for all, their size, and what is around them)."""
    images, transforms, *others = operands.layouts
    is_apart = transforms is SHARDED or (transforms is REPLICATED and operands.leading[1] == 1)
    return SHARDED if images is SHARDED and is_apart and set(others) <= {REPLICATED} else MIXED


def _all_have_rows(operands: Operands) -> BatchLayout:
    return SHARDED if set(operands.layouts) == {SHARDED} else MIXED


def _over_last_axis(operands: Operands) -> BatchLayout:
    rank = operands.ranks[0]
    return SHARDED if operands.layouts[0] is SHARDED and rank is not None and rank > 1 else MIXED


def _of_vectors(operands: Operands) -> BatchLayout:
    """Of each vector by itself: the last axis."""
    rank = operands.ranks[0]
    return _first_has_rows(operands) if rank is not None and rank > 1 else MIXED


def _of_matrices(operands: Operands) -> BatchLayout:
    """Of each matrix by itself: the last two axes."""
    rank = operands.ranks[0]
    return _first_has_rows(operands) if rank is not None and rank > 2 else MIXED


def _fourier(num_axes: int) -> Rule:
    """Of what is transformed along its last axes."""

    def rule(operands: Operands) -> BatchLayout:
        rank = operands.ranks[0]
        is_apart = rank is not None and rank > num_axes and set(operands.layouts[1:]) <= {REPLICATED}
        return SHARDED if is_apart and operands.layouts[0] is SHARDED else MIXED

    return rule


def _arg_reduction(operands: Operands) -> BatchLayout:
    axes = operands.axes(1, operands.ranks[0])
    return SHARDED if operands.layouts[0] is SHARDED and axes is not None and axes[0] > 0 else MIXED


def _batch_norm(operands: Operands) -> tuple[BatchLayout, ...]:
    rows = SHARDED if operands.layouts[0] is SHARDED and set(operands.layouts[1:]) == {REPLICATED} else MIXED
    if not operands.node.attr["is_training"].b:  # It returns what it is given: mean and variance.
        return (rows, *[REPLICATED if set(operands.layouts[1:]) == {REPLICATED} else MIXED] * 5)
    return (rows, PARTIAL_MEAN if rows is SHARDED else MIXED, MIXED, MIXED, MIXED, MIXED)


# fmt: off
ELEMENTWISE = (
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
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(("Maximum", "Minimum"), _extreme),
    **dict.fromkeys((*ADDITIVE, "Complex", "Sub"), _sum_of_terms),
    **dict.fromkeys(("Conj", "Imag", "Neg", "Real"), _unary_linear),
    **dict.fromkeys(("CheckNumerics", "EnsureShape", "Identity", "PreventGradient", "StopGradient"), _passed),
    **dict.fromkeys(("BiasAdd", "Conv2D", "Conv3D", "DepthwiseConv2dNative"), _first_has_rows),
    **dict.fromkeys(
        ("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"), _transposed_convolution
    ),
    **dict.fromkeys(("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D", "LRN"), _first_has_rows),
    **dict.fromkeys(("ResizeArea", "ResizeBicubic", "ResizeBilinear", "ResizeNearestNeighbor"), _first_has_rows),
    **dict.fromkeys(("ImageProjectiveTransformV2", "ImageProjectiveTransformV3"), _transformed_images),
    **dict.fromkeys(("AdjustHue", "AdjustSaturation", "HSVToRGB", "RGBToHSV"), _of_vectors),
    **dict.fromkeys(("Softmax", "LogSoftmax", "TopKV2"), _over_last_axis),
    **dict.fromkeys(("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"), _all_have_rows),
    **dict.fromkeys(("ArgMax", "ArgMin", "Cumsum", "Cumprod"), _arg_reduction),
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _batch_matmul),
    **dict.fromkeys(("All", "Any", "Max", "Min", "Prod"), _reduction(MIXED, linear=False)),
    **dict.fromkeys(_MATRICES, _of_matrices),
    **dict.fromkeys(("FFT", "IFFT", "IRFFT", "RFFT"), _fourier(1)),
    **dict.fromkeys(("FFT2D", "IFFT2D", "IRFFT2D", "RFFT2D"), _fourier(2)),
    "AdjustContrastv2": lambda operands: MIXED if (operands.ranks[0] or 0) < 4 else _first_has_rows(operands),
    "Bitcast": _bitcast,
    "Cast": _cast,
    "Div": _quotient,
    "DivNoNan": _quotient,
    "Einsum": _einsum,
    "FusedBatchNormV3": _batch_norm,
    "InTopKV2": lambda operands: SHARDED if operands.layouts == (SHARDED, SHARDED, REPLICATED) else MIXED,
    "L2Loss": lambda operands: PARTIAL_SUM if operands.layouts[0] is SHARDED else MIXED,
    "MatMul": _matmul,
    "Mean": _reduction(PARTIAL_MEAN, linear=True),
    "Mul": _product,
    "Rank": lambda _: REPLICATED,
    "RealDiv": _quotient,
    "Sum": _reduction(PARTIAL_SUM, linear=True),
}
"""The rules, by op type."""
