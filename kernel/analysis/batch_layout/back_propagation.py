"""Rules for ops that only back-propagation has, of a gradient with a row for each example."""

from collections.abc import Mapping, Sequence

from autodist_py.kernel.analysis.batch_layout.layouts import (
    MIXED,
    PARTIAL_SUM,
    REPLICATED,
    SHAPE,
    SHARDED,
    BatchLayout,
    Operands,
    Rule,
)


def _elementwise(operands: Operands) -> BatchLayout:
    return SHARDED if set(operands.layouts) == {SHARDED} else MIXED


def _of_filter(operands: Operands) -> BatchLayout:
    """The gradient of a convolution's filter, of (input, sizes of the filter, gradient)."""
    return PARTIAL_SUM if operands.layouts == (SHARDED, REPLICATED, SHARDED) else MIXED


def _of_bias(operands: Operands) -> BatchLayout:
    return PARTIAL_SUM if operands.layouts[0] is SHARDED and (operands.ranks[0] or 0) > 1 else MIXED


def _of_pool(operands: Operands) -> BatchLayout:
    """The gradient of a mean over windows, of (shape of the input, gradient)."""
    return SHARDED if operands.layouts == (SHAPE, SHARDED) else MIXED


def _of_slice(operands: Operands) -> BatchLayout:
    """The gradient of a strided slice of all rows, of (shape, begin, end, strides, gradient)."""
    attr, strides = operands.node.attr, operands.integers(3)
    if operands.layouts != (SHAPE, REPLICATED, REPLICATED, REPLICATED, SHARDED) or not strides or strides[0] != 1:
        return MIXED
    if any(attr[f"{key}_mask"].i & 1 for key in ("ellipsis", "new_axis", "shrink_axis")):
        return MIXED
    return SHARDED if attr["begin_mask"].i & attr["end_mask"].i & 1 else MIXED


def _of_shape_pieces(operands: Operands) -> BatchLayout:
    """Sizes put together from a shape, and from what takes the place of some of them: as a sum's gradient does."""
    half = len(operands.layouts) // 2
    places = [own for index in range(half) if (own := operands.integers(index)) is not None]
    if len(places) < half or operands.ranks[:half] != operands.ranks[half:] or not set(operands.ranks) <= {0, 1}:
        return MIXED  # A place that is one number has one size.
    first: BatchLayout = MIXED
    for own, layout in zip(places, operands.layouts[half:], strict=True):
        if layout is SHAPE and own[:1] == [0] and 0 not in own[1:]:
            first = SHAPE
        elif layout is REPLICATED:
            first = REPLICATED if 0 in own else first
        else:
            return MIXED
    return first


def _tile(operands: Operands) -> BatchLayout:
    """One row, as many times as there are."""
    return SHARDED if operands.layouts == (REPLICATED, SHAPE) and operands.leading[0] == 1 else MIXED


def _slice(operands: Operands) -> BatchLayout:
    """A slice of all rows, of a given shape: as a concatenation's gradient takes."""
    begin = operands.integers(1)
    is_whole = operands.layouts == (SHARDED, REPLICATED, SHAPE) and begin is not None and begin[:1] == [0]
    alike = bool(operands.blocks) and operands.blocks[0] is not None and operands.blocks[0] == operands.blocks[2]
    return SHARDED if is_whole and alike else MIXED


def _shapes(operands: Operands) -> Sequence[BatchLayout]:
    kinds = {SHARDED: SHAPE, REPLICATED: REPLICATED, PARTIAL_SUM: REPLICATED}
    return tuple(kinds.get(layout, MIXED) for layout in operands.layouts)


# fmt: off
BACK_PROPAGATION: Mapping[str, Rule] = {
    **dict.fromkeys((
        "EluGrad", "InvGrad", "LeakyReluGrad", "LRNGrad", "MaxPool3DGrad", "MaxPoolGrad", "ReciprocalGrad", "Relu6Grad",
        "ReluGrad", "RsqrtGrad", "SeluGrad", "SigmoidGrad", "SoftplusGrad", "SoftsignGrad", "SqrtGrad", "TanhGrad",
    ), _elementwise),
    **dict.fromkeys((
        "Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter",
    ), _of_filter),
    **dict.fromkeys(("AvgPoolGrad", "AvgPool3DGrad"), _of_pool),
    "BiasAddGrad": _of_bias,
    "DynamicStitch": _of_shape_pieces,
    "ShapeN": lambda operands: tuple(_shapes(operands)),
    "Slice": _slice,
    "StridedSliceGrad": _of_slice,
    "Tile": _tile,
}
# fmt: on
"""The rules, by op type: what they do not know is MIXED."""
