"""Rules for ops that move elements: shapes, slices, joins, gathers."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from autodist_py.kernel.analysis.batch_layout.layouts import (
    COUNT,
    FIXED,
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


def _shape(operands: Operands) -> BatchLayout:
    return SHAPE if operands.layouts[0] is SHARDED else REPLICATED if operands.layouts[0] in FIXED else MIXED


def _size(operands: Operands) -> BatchLayout:
    return COUNT if operands.layouts[0] is SHARDED else REPLICATED if operands.layouts[0] in FIXED else MIXED


def _like(operands: Operands) -> BatchLayout:
    return SHARDED if operands.layouts[0] is SHARDED else REPLICATED if operands.layouts[0] in FIXED else MIXED


def _expand_dims(operands: Operands) -> BatchLayout:
    layout, rank = operands.layouts[0], operands.ranks[0]
    if layout in FIXED:
        return layout
    axes = operands.axes(1, None if rank is None else rank + 1)
    return SHARDED if layout is SHARDED and axes is not None and axes[0] > 0 else MIXED


def _squeeze(operands: Operands) -> BatchLayout:
    layout, rank = operands.layouts[0], operands.ranks[0]
    if layout in FIXED:
        return layout
    axes = list(operands.node.attr["squeeze_dims"].list.i)
    if layout not in (SHARDED, SELECTED_INDICES) or rank is None or not axes:
        return MIXED
    return MIXED if 0 in [axis % rank for axis in axes] else layout


def _reshape(operands: Operands) -> BatchLayout:
    layout, target = operands.layouts
    if layout in FIXED:
        return layout if target is REPLICATED else MIXED
    if layout is SHARDED and target is SHAPE:
        return SHARDED
    if (
        operands.leading[1] == 1
        and operands.integers(1) in (None, [-1])
        and (layout in (SHARDED, UNIQUE, TAILED) or (layout is SELECTED_INDICES and operands.row in ((), (1,))))
    ):
        return layout  # All elements, in their order.
    sizes = operands.integers(1)
    return (
        SHARDED
        if layout is SHARDED and sizes is not None and keeps_rows(operands.row, operands.block, sizes)
        else MIXED
    )


def keeps_rows(row: tuple[int | None, ...] | None, block: int | None, sizes: Sequence[int]) -> bool:
    """Whether a reshape to `sizes` keeps examples apart, each having `block` rows of this shape.

    No row of the result may have elements of two examples; of two rows of one example it may.
    """
    if sizes[:1] != [-1]:
        return False
    inner = math.prod(sizes[1:])
    if inner == 1 or row is None:
        return inner == 1
    ends_alike = len(row) >= len(sizes) - 1 and list(row[len(row) - len(sizes) + 1 :]) == list(sizes[1:])
    elements = None if None in row else math.prod(size for size in row if size is not None)
    return ends_alike or (inner > 0 and elements is not None and elements * (block or 1) % inner == 0)


def _strided_slice(operands: Operands) -> BatchLayout:
    layout, rank = operands.layouts[0], operands.ranks[0]
    if any(one is not REPLICATED for one in operands.layouts[1:]):
        return MIXED
    masks = {
        key: operands.node.attr[f"{key}_mask"].i for key in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    begin, end, stride = (operands.integers(index) for index in (1, 2, 3))
    if layout is SHAPE:
        if begin is None or end is None or stride != [1] or masks["ellipsis"] or masks["new_axis"]:
            return MIXED
        first = 0 if masks["begin"] & 1 else begin[0]
        if first < 0 and operands.leading[0] is not None:
            first += operands.leading[0]
        if masks["shrink_axis"] & 1:
            return COUNT if first == 0 else REPLICATED if first > 0 else MIXED
        if first != 0:
            return REPLICATED if first > 0 else MIXED
        if masks["end"] & 1 or end[0] > 0:
            return SHAPE
        rank = operands.leading[0]
        return MIXED if rank is None else REPLICATED if end[0] + rank * (end[0] < 0) <= 0 else SHAPE
    if layout is not SHARDED or stride is None:
        return layout if layout in (PARTIAL_SUM, PARTIAL_MEAN) else MIXED
    if masks["ellipsis"] & 1:
        kept = bin(masks["new_axis"]).count("1")
        return SHARDED if rank is not None and rank > len(stride) - 1 - kept else MIXED
    if masks["new_axis"] & 1 or masks["shrink_axis"] & 1:
        return MIXED
    return SHARDED if masks["begin"] & masks["end"] & 1 and stride[0] == 1 else MIXED


def _pack(operands: Operands) -> BatchLayout:
    axis = operands.node.attr["axis"].i
    first, *rest = operands.layouts
    if first is COUNT and operands.ranks[0] == 0 and all(layout is REPLICATED for layout in rest):
        return SHAPE
    if set(operands.layouts) <= {PARTIAL_MEAN, REPLICATED}:
        return PARTIAL_MEAN
    if set(operands.layouts) <= {PARTIAL_SUM, COUNT}:
        return PARTIAL_SUM
    if set(operands.layouts) <= {PARTIAL_SUM, COUNT, PARTIAL_SUM_PLUS, REPLICATED}:
        return PARTIAL_SUM_PLUS
    return SHARDED if set(operands.layouts) == {SHARDED} and axis > 0 else MIXED


def _concat(operands: Operands) -> BatchLayout:
    sizes = zip(operands.layouts[:-1], operands.leading, strict=False)
    *parts, _ = operands.layouts
    if operands.ranks[0] == 1 and 0 in operands.leading:  # As boolean_mask has, before the axes that it masks.
        parts = [part for part, size in sizes if size != 0] or [REPLICATED]
    if set(parts) == {REPLICATED}:
        return REPLICATED
    axes = operands.axes(-1, operands.ranks[0])
    if axes is None:
        return MIXED
    if set(parts) == {SHARDED}:
        return SHARDED if axes[0] > 0 else MIXED
    is_number = len(parts) < len(operands.layouts) - 1 or operands.leading[0] == 1
    begins = parts[0] is SHAPE or (parts[0] is COUNT and is_number)
    if begins and operands.ranks[0] == 1 and all(part is REPLICATED for part in parts[1:]):
        return SHAPE
    return (
        PARTIAL_MEAN
        if set(parts) <= {PARTIAL_MEAN, REPLICATED}
        else PARTIAL_SUM
        if set(parts) <= {PARTIAL_SUM, COUNT}
        else MIXED
    )


def _of_shape(operands: Operands) -> BatchLayout:
    return SHARDED if operands.layouts[0] is SHAPE and set(operands.layouts[1:]) <= {REPLICATED} else MIXED


def _broadcast_to(operands: Operands) -> BatchLayout:
    value, shape = operands.layouts
    if shape is not SHAPE:
        return value if shape is REPLICATED and value in FIXED else MIXED
    rank, whole = operands.ranks[0], operands.leading[1]
    if rank is None or whole is None:
        return MIXED
    if value is SHARDED:
        return SHARDED if rank == whole else MIXED
    return SHARDED if rank < whole or operands.leading[0] == 1 else MIXED


def _tile(operands: Operands) -> BatchLayout:
    multiples = operands.integers(1)
    return SHARDED if operands.layouts[0] is SHARDED and multiples is not None and multiples[:1] == [1] else MIXED


def _transpose(operands: Operands) -> BatchLayout:
    order = operands.integers(1)
    return SHARDED if operands.layouts[0] is SHARDED and order is not None and order[:1] == [0] else MIXED


def _pad(operands: Operands) -> BatchLayout:
    paddings = operands.integers(1)
    return SHARDED if operands.layouts[0] is SHARDED and paddings is not None and paddings[:2] == [0, 0] else MIXED


def _slice(operands: Operands) -> BatchLayout:
    begin, size = operands.integers(1), operands.integers(2)
    if operands.layouts[0] is SHAPE and begin is not None and size is not None:
        return REPLICATED if begin[0] > 0 else SHAPE if size[0] != 0 else MIXED
    whole = begin is not None and size is not None and begin[:1] == [0] and size[:1] == [-1]
    return SHARDED if operands.layouts[0] is SHARDED and whole else MIXED


def _reverse(operands: Operands) -> BatchLayout:
    axes = operands.axes(1, operands.ranks[0])
    return SHARDED if operands.layouts[0] is SHARDED and axes is not None and 0 not in axes else MIXED


def _histogram(operands: Operands) -> BatchLayout:
    """A count of values for each row, as `tf.math.bincount` with an axis makes."""
    values, size, weights = operands.layouts
    of_rows = operands.ranks[0] == 2 and values is SHARDED and size is REPLICATED
    has_none = weights is REPLICATED and operands.leading[2] == 0
    return SHARDED if of_rows and (weights is SHARDED or has_none) else MIXED


def _split(operands: Operands) -> BatchLayout:
    index = 0 if operands.node.op == "Split" else 2
    value = 1 if operands.node.op == "Split" else 0
    axes = operands.axes(index, operands.ranks[value])
    return SHARDED if operands.layouts[value] is SHARDED and axes is not None and axes[0] > 0 else MIXED


def _unpack(operands: Operands) -> BatchLayout | tuple[BatchLayout, ...]:
    axis, rank = operands.node.attr["axis"].i, operands.ranks[0]
    if operands.layouts[0] is SHAPE:
        return (COUNT, *[REPLICATED] * (operands.node.attr["num"].i - 1))
    if operands.layouts[0] in (PARTIAL_SUM, PARTIAL_MEAN):
        return operands.layouts[0]
    return SHARDED if operands.layouts[0] is SHARDED and rank is not None and axis % rank > 0 else MIXED


def _one_hot(operands: Operands) -> BatchLayout:
    return SHARDED if operands.layouts[0] is SHARDED and operands.node.attr["axis"].i != 0 else MIXED


def _sizes_at(positions: np.ndarray | None) -> BatchLayout:
    """The sizes at these positions of a SHAPE."""
    if positions is None or positions.ndim > 1:
        return MIXED
    if 0 not in positions:
        return REPLICATED
    if positions.ndim == 0:
        return COUNT
    return SHAPE if positions[0] == 0 and 0 not in positions[1:] else MIXED


def _gather(operands: Operands) -> BatchLayout:
    table, indices, _ = operands.layouts
    axes = operands.axes(2, operands.ranks[0])
    if axes is None:
        return MIXED
    if table is SHAPE:
        return _sizes_at(operands.constants[1])
    if table is REPLICATED and indices is SHARDED and operands.node.attr["batch_dims"].i == 0:
        return SHARDED if axes[0] == 0 else MIXED
    if table is SHARDED and axes[0] > 0:
        with_batch = operands.node.attr["batch_dims"].i > 0
        return SHARDED if (indices is SHARDED) == with_batch and indices in (SHARDED, REPLICATED) else MIXED
    return MIXED


def _gather_of_rows(operands: Operands) -> BatchLayout:
    if operands.node.attr["batch_dims"].i if "batch_dims" in operands.node.attr else 0:
        return MIXED
    return SHARDED if operands.layouts[0] is REPLICATED and operands.layouts[1] is SHARDED else MIXED


def _table_find(operands: Operands) -> BatchLayout:
    return SHARDED if operands.layouts == (REPLICATED, SHARDED, REPLICATED) else MIXED


LAYOUT: Mapping[str, Rule] = {
    **dict.fromkeys(("ZerosLike", "OnesLike"), _like),
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), _pad),
    **dict.fromkeys(("Split", "SplitV"), _split),
    **dict.fromkeys(("RandomUniform", "RandomStandardNormal", "RandomUniformInt", "TruncatedNormal"), _of_shape),
    **dict.fromkeys(("StatelessRandomUniform", "StatelessRandomNormal", "StatelessTruncatedNormal"), _of_shape),
    **dict.fromkeys(("StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2"), _of_shape),
    **dict.fromkeys(("StatelessRandomUniformInt", "StatelessRandomUniformIntV2"), _of_shape),
    "BroadcastTo": _broadcast_to,
    "ConcatV2": _concat,
    "DenseBincount": _histogram,
    "ExpandDims": _expand_dims,
    "Fill": _of_shape,
    "GatherNd": _gather_of_rows,
    "GatherV2": _gather,
    "LookupTableFindV2": _table_find,
    "OneHot": _one_hot,
    "Pack": _pack,
    "Reshape": _reshape,
    "ResourceGather": _gather_of_rows,
    "ResourceGatherNd": _gather_of_rows,
    "ReverseV2": _reverse,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "StridedSlice": _strided_slice,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unpack": _unpack,
}
"""The rules, by op type."""
