"""How a tensor depends on a replica's examples: what its value for the whole batch is, given its values on replicas.

An abstract interpretation: each op's extent follows from those of its inputs by a rule for its op type. A rule claims
only what holds for every value; what no rule knows is `OTHER`. The tables own the knowledge about op types.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
import tensorflow as tf

from autodist_py.kernel.graph_view import GraphView
from autodist_py.kernel.names import parse


class Extent(Enum):
    """What the value for the whole batch is, from the values on the replicas."""

    SAME = "same"
    """Equal on all replicas, and to that of one device."""
    ROWS = "rows"
    """The replicas' values one after the other along axis 0."""
    SUM = "sum"
    """Their sum; the shape is fixed."""
    MEAN = "mean"
    """Their mean, weighted by examples; the shape is fixed."""
    COUNT = "count"
    """Their sum; on each replica the number of its examples, times a factor that is the same everywhere."""
    SHAPE = "shape"
    """A vector that begins with a COUNT; the rest is the same everywhere."""
    PLUS = "plus"
    """Their sum, but what does not depend on examples, a term of each, is counted once; the shape is fixed."""
    OTHER = "other"
    """Not known."""


SAME, ROWS, SUM, MEAN, COUNT, SHAPE, PLUS, OTHER = Extent
FIXED = frozenset({SUM, MEAN, COUNT})
"""Extents of values that can be combined by one reduction."""

Rule = Callable[["Operands"], Extent | tuple[Extent, ...]]


@dataclass(frozen=True)
class Operands:
    """One op, and what is known of its data inputs."""

    node: tf.compat.v1.NodeDef
    extents: tuple[Extent, ...]
    ranks: tuple[int | None, ...]
    leading: tuple[int | None, ...]
    """The static size of each input's first dimension; None where it is unknown."""
    row_elements: int | None
    """The number of elements of one row of the first input; None where it is unknown."""
    constants: tuple[np.ndarray | None, ...]

    def integers(self, index: int) -> list[int] | None:
        """The constant input `index` as integers; None where it is no constant."""
        value = self.constants[index] if -len(self.constants) <= index < len(self.constants) else None
        return None if value is None else [int(one) for one in np.reshape(value, [-1])]

    def axes(self, index: int, rank: int | None) -> list[int] | None:
        """The constant input `index` as axes of a tensor of `rank`, counted from 0; None where they are not known."""
        values = self.integers(index)
        if values is None or (rank is None and any(value < 0 for value in values)):
            return None
        return [value + (rank or 0) if value < 0 else value for value in values]

    @property
    def aligned(self) -> bool:
        """Whether broadcasting keeps the rows of all inputs that have rows along axis 0, and nothing else there."""
        ranks = [rank for rank in self.ranks if rank is not None]
        if len(ranks) < len(self.ranks):
            return False
        return max(ranks) > 0 and all(
            own == max(ranks) if extent is ROWS else own < max(ranks) or size == 1
            for extent, own, size in zip(self.extents, ranks, self.leading, strict=True)
        )


def _elementwise(operands: Operands) -> Extent:
    return ROWS if ROWS in operands.extents and operands.aligned else OTHER


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
    if not tf.as_dtype(operands.node.attr["T"].type).is_floating:
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
    return operands.node.op == "Mean" and not tf.as_dtype(operands.node.attr["T"].type).is_floating


def _shape(operands: Operands) -> Extent:
    return SHAPE if operands.extents[0] is ROWS else SAME if operands.extents[0] in FIXED else OTHER


def _size(operands: Operands) -> Extent:
    return COUNT if operands.extents[0] is ROWS else SAME if operands.extents[0] in FIXED else OTHER


def _like(operands: Operands) -> Extent:
    return ROWS if operands.extents[0] is ROWS else SAME if operands.extents[0] in FIXED else OTHER


def _expand_dims(operands: Operands) -> Extent:
    extent, rank = operands.extents[0], operands.ranks[0]
    if extent in FIXED:
        return extent
    axes = operands.axes(1, None if rank is None else rank + 1)
    return ROWS if extent is ROWS and axes is not None and axes[0] > 0 else OTHER


def _squeeze(operands: Operands) -> Extent:
    extent, rank = operands.extents[0], operands.ranks[0]
    if extent in FIXED:
        return extent
    axes = list(operands.node.attr["squeeze_dims"].list.i)
    if extent is not ROWS or rank is None or not axes:
        return OTHER
    return OTHER if 0 in [axis % rank for axis in axes] else ROWS


def _reshape(operands: Operands) -> Extent:
    extent, target = operands.extents
    if extent in FIXED:
        return extent if target is SAME else OTHER
    if extent is ROWS and target is SHAPE:
        return ROWS
    sizes = operands.integers(1)
    if extent is ROWS and sizes is not None and sizes[:1] == [-1]:
        # [-1, d, ...] keeps whole examples together where one example has the elements of whole new rows.
        inner = int(np.prod(sizes[1:]))
        whole = inner == 1 or (inner > 0 and operands.row_elements is not None and operands.row_elements % inner == 0)
        return ROWS if whole else OTHER
    return OTHER


def _strided_slice(operands: Operands) -> Extent:
    extent, rank = operands.extents[0], operands.ranks[0]
    if any(one is not SAME for one in operands.extents[1:]):
        return OTHER
    masks = {
        key: operands.node.attr[f"{key}_mask"].i for key in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    begin, end, stride = (operands.integers(index) for index in (1, 2, 3))
    if extent is SHAPE:
        if begin is None or end is None or stride != [1] or masks["ellipsis"] or masks["new_axis"]:
            return OTHER
        first = 0 if masks["begin"] & 1 else begin[0]
        if first < 0 and operands.leading[0] is not None:
            first += operands.leading[0]
        if masks["shrink_axis"] & 1:
            return COUNT if first == 0 else SAME if first > 0 else OTHER
        return SHAPE if first == 0 else SAME if first > 0 else OTHER
    if extent is not ROWS or stride is None:
        return extent if extent in (SUM, MEAN) else OTHER
    if masks["ellipsis"] & 1:
        kept = bin(masks["new_axis"]).count("1")
        return ROWS if rank is not None and rank > len(stride) - 1 - kept else OTHER
    if masks["new_axis"] & 1 or masks["shrink_axis"] & 1:
        return OTHER
    return ROWS if masks["begin"] & masks["end"] & 1 and stride[0] == 1 else OTHER


def _pack(operands: Operands) -> Extent:
    axis = operands.node.attr["axis"].i
    first, *rest = operands.extents
    if first is COUNT and operands.ranks[0] == 0 and all(extent is SAME for extent in rest):
        return SHAPE
    if set(operands.extents) <= {MEAN, SAME}:
        return MEAN
    if set(operands.extents) <= {SUM, COUNT}:
        return SUM
    return ROWS if set(operands.extents) == {ROWS} and axis > 0 else OTHER


def _concat(operands: Operands) -> Extent:
    *parts, _ = operands.extents
    axes = operands.axes(-1, operands.ranks[0])
    if axes is None:
        return OTHER
    if set(parts) == {ROWS}:
        return ROWS if axes[0] > 0 else OTHER
    begins = parts[0] is SHAPE or (parts[0] is COUNT and operands.leading[0] == 1)
    if begins and operands.ranks[0] == 1 and all(part is SAME for part in parts[1:]):
        return SHAPE
    return MEAN if set(parts) <= {MEAN, SAME} else SUM if set(parts) <= {SUM, COUNT} else OTHER


def _of_shape(operands: Operands) -> Extent:
    return ROWS if operands.extents[0] is SHAPE and set(operands.extents[1:]) <= {SAME} else OTHER


def _broadcast_to(operands: Operands) -> Extent:
    value, shape = operands.extents
    if shape is not SHAPE:
        return OTHER
    rank, whole = operands.ranks[0], operands.leading[1]
    if rank is None or whole is None:
        return OTHER
    if value is ROWS:
        return ROWS if rank == whole else OTHER
    return ROWS if rank < whole or operands.leading[0] == 1 else OTHER


def _tile(operands: Operands) -> Extent:
    multiples = operands.integers(1)
    return ROWS if operands.extents[0] is ROWS and multiples is not None and multiples[:1] == [1] else OTHER


def _transpose(operands: Operands) -> Extent:
    order = operands.integers(1)
    return ROWS if operands.extents[0] is ROWS and order is not None and order[:1] == [0] else OTHER


def _pad(operands: Operands) -> Extent:
    paddings = operands.integers(1)
    return ROWS if operands.extents[0] is ROWS and paddings is not None and paddings[:2] == [0, 0] else OTHER


def _slice(operands: Operands) -> Extent:
    begin, size = operands.integers(1), operands.integers(2)
    whole = begin is not None and size is not None and begin[:1] == [0] and size[:1] == [-1]
    return ROWS if operands.extents[0] is ROWS and whole else OTHER


def _split(operands: Operands) -> Extent:
    index = 0 if operands.node.op == "Split" else 2
    value = 1 if operands.node.op == "Split" else 0
    axes = operands.axes(index, operands.ranks[value])
    return ROWS if operands.extents[value] is ROWS and axes is not None and axes[0] > 0 else OTHER


def _unpack(operands: Operands) -> Extent | tuple[Extent, ...]:
    axis, rank = operands.node.attr["axis"].i, operands.ranks[0]
    if operands.extents[0] is SHAPE:
        return (COUNT, *[SAME] * (operands.node.attr["num"].i - 1))
    if operands.extents[0] in (SUM, MEAN):
        return operands.extents[0]
    return ROWS if operands.extents[0] is ROWS and rank is not None and axis % rank > 0 else OTHER


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


def _all_have_rows(operands: Operands) -> Extent:
    return ROWS if set(operands.extents) == {ROWS} else OTHER


def _over_last_axis(operands: Operands) -> Extent:
    rank = operands.ranks[0]
    return ROWS if operands.extents[0] is ROWS and rank is not None and rank > 1 else OTHER


def _arg_reduction(operands: Operands) -> Extent:
    axes = operands.axes(1, operands.ranks[0])
    return ROWS if operands.extents[0] is ROWS and axes is not None and axes[0] > 0 else OTHER


def _one_hot(operands: Operands) -> Extent:
    return ROWS if operands.extents[0] is ROWS and operands.node.attr["axis"].i != 0 else OTHER


def _gather(operands: Operands) -> Extent:
    table, indices, _ = operands.extents
    axes = operands.axes(2, operands.ranks[0])
    if axes is None:
        return OTHER
    if table is SAME and indices is ROWS and operands.node.attr["batch_dims"].i == 0:
        return ROWS if axes[0] == 0 else OTHER
    if table is ROWS and axes[0] > 0:
        with_batch = operands.node.attr["batch_dims"].i > 0
        return ROWS if (indices is ROWS) == with_batch and indices in (ROWS, SAME) else OTHER
    return OTHER


def _gather_of_rows(operands: Operands) -> Extent:
    if operands.node.attr["batch_dims"].i if "batch_dims" in operands.node.attr else 0:
        return OTHER
    return ROWS if operands.extents[0] is SAME and operands.extents[1] is ROWS else OTHER


def _table_find(operands: Operands) -> Extent:
    return ROWS if operands.extents == (SAME, ROWS, SAME) else OTHER


def _batch_norm(operands: Operands) -> tuple[Extent, ...]:
    rows = ROWS if operands.extents[0] is ROWS and set(operands.extents[1:]) == {SAME} else OTHER
    if not operands.node.attr["is_training"].b:
        return (rows, SAME, SAME, SAME, SAME, SAME)
    return (rows, MEAN if rows is ROWS else OTHER, OTHER, OTHER, OTHER, OTHER)


# fmt: off
_ELEMENTWISE = (
    "Abs", "Acos", "Acosh", "Angle", "AsString", "Asin", "Asinh", "Atan", "Atan2", "Atanh", "BesselI0e",
    "BesselI1e", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Bucketize", "Ceil", "ClipByValue", "Complex", "Conj",
    "Cos", "Cosh", "Digamma", "Elu", "Equal", "Erf", "Erfc", "Erfinv", "Exp", "Expm1", "Floor", "FloorDiv",
    "FloorMod", "Greater", "GreaterEqual", "Igamma", "Imag", "Inv", "Invert", "IsFinite", "IsInf", "IsNan",
    "LeakyRelu", "LeftShift", "Less", "LessEqual", "Lgamma", "Log", "Log1p", "LogicalAnd", "LogicalNot",
    "LogicalOr", "Maximum", "Minimum", "Mod", "MulNoNan", "Ndtri", "NextAfter", "NotEqual", "Pow", "Real",
    "Reciprocal", "Relu", "Relu6", "RightShift", "Rint", "Round", "Rsqrt", "Select", "SelectV2", "Selu",
    "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Square", "SquaredDifference",
    "StringLength", "StringLower", "StringToHashBucketFast", "StringToNumber", "StringUpper", "Tan", "Tanh",
    "TruncateDiv", "TruncateMod", "Xdivy", "Xlog1py", "Xlogy",
)
# fmt: on

_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(("Add", "AddV2", "AddN", "Sub"), _sum_of_terms),
    **dict.fromkeys(("CheckNumerics", "EnsureShape", "Identity", "PreventGradient", "StopGradient"), _passed),
    **dict.fromkeys(("BiasAdd", "Conv2D", "Conv3D", "DepthwiseConv2dNative"), _first_has_rows),
    **dict.fromkeys(("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D", "LRN"), _first_has_rows),
    **dict.fromkeys(("ResizeBilinear", "ResizeNearestNeighbor"), _first_has_rows),
    **dict.fromkeys(("Softmax", "LogSoftmax", "TopKV2"), _over_last_axis),
    **dict.fromkeys(("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"), _all_have_rows),
    **dict.fromkeys(("ArgMax", "ArgMin", "Cumsum", "Cumprod"), _arg_reduction),
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _batch_matmul),
    **dict.fromkeys(("ZerosLike", "OnesLike"), _like),
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), _pad),
    **dict.fromkeys(("Split", "SplitV"), _split),
    **dict.fromkeys(("RandomUniform", "RandomStandardNormal", "RandomUniformInt", "TruncatedNormal"), _of_shape),
    **dict.fromkeys(("StatelessRandomUniform", "StatelessRandomNormal", "StatelessTruncatedNormal"), _of_shape),
    **dict.fromkeys(("StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2"), _of_shape),
    **dict.fromkeys(("StatelessRandomUniformInt", "StatelessRandomUniformIntV2"), _of_shape),
    **dict.fromkeys(("All", "Any", "Max", "Min", "Prod"), _reduction(OTHER, linear=False)),
    "Bitcast": _bitcast,
    "BroadcastTo": _broadcast_to,
    "Cast": _cast,
    "ConcatV2": _concat,
    "Div": _quotient,
    "DivNoNan": _quotient,
    "Einsum": _einsum,
    "ExpandDims": _expand_dims,
    "Fill": _of_shape,
    "FusedBatchNormV3": _batch_norm,
    "GatherNd": _gather_of_rows,
    "GatherV2": _gather,
    "InTopKV2": lambda operands: ROWS if operands.extents == (ROWS, ROWS, SAME) else OTHER,
    "L2Loss": lambda operands: SUM if operands.extents[0] is ROWS else OTHER,
    "LookupTableFindV2": _table_find,
    "MatMul": _matmul,
    "Mean": _reduction(MEAN, linear=True),
    "Mul": _product,
    "Neg": _unary_linear,
    "OneHot": _one_hot,
    "Pack": _pack,
    "Rank": lambda _: SAME,
    "RealDiv": _quotient,
    "Reshape": _reshape,
    "ResourceGather": _gather_of_rows,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "StridedSlice": _strided_slice,
    "Sum": _reduction(SUM, linear=True),
    "Tile": _tile,
    "Transpose": _transpose,
    "Unpack": _unpack,
}


def extent_of(operands: Operands) -> Extent | tuple[Extent, ...]:
    """The extent of an op's results, or of each of them; some input differs between replicas."""
    rule = _RULES.get(operands.node.op)
    return OTHER if rule is None else rule(operands)


def is_known(op_type: str) -> bool:
    """Whether there is a rule for ops of this type, whose results then depend on nothing but their inputs."""
    return op_type in _RULES


def constant_value(graph: GraphView, tensor: str) -> np.ndarray | None:
    """The value of a constant of `graph`; None for every other tensor."""
    node = graph.nodes[parse(tensor).op]
    while node.op == "Identity" and node.input:
        node = graph.nodes[parse(node.input[0]).op]
    return np.asarray(tf.make_ndarray(node.attr["value"].tensor)) if node.op == "Const" else None
