"""Rules for ops that move elements: shapes, slices, joins, gathers."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from autodist_py.kernel.extent.values import (
    CHOSEN,
    COUNT,
    DISTINCT,
    FIXED,
    MEAN,
    OTHER,
    PLACES,
    PLUS,
    ROWS,
    SAME,
    SHAPE,
    SUM,
    Extent,
    Operands,
    Rule,
)


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
    if extent not in (ROWS, PLACES) or rank is None or not axes:
        return OTHER
    return OTHER if 0 in [axis % rank for axis in axes] else extent


def _reshape(operands: Operands) -> Extent:
    extent, target = operands.extents
    if extent in FIXED:
        return extent if target is SAME else OTHER
    if extent is ROWS and target is SHAPE:
        return ROWS
    if extent in (ROWS, DISTINCT) and operands.leading[1] == 1:
        return extent  # All elements, in their order.
    sizes = operands.integers(1)
    return ROWS if extent is ROWS and sizes is not None and _keeps_rows(operands.row, operands.block, sizes) else OTHER


def _keeps_rows(row: tuple[int | None, ...] | None, block: int | None, sizes: Sequence[int]) -> bool:
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
    if set(operands.extents) <= {SUM, COUNT, PLUS, SAME}:
        return PLUS
    return ROWS if set(operands.extents) == {ROWS} and axis > 0 else OTHER


def _concat(operands: Operands) -> Extent:
    sizes = zip(operands.extents[:-1], operands.leading, strict=False)
    *parts, _ = operands.extents
    if operands.ranks[0] == 1 and 0 in operands.leading:  # As boolean_mask has, before the axes that it masks.
        parts = [part for part, size in sizes if size != 0] or [SAME]
    axes = operands.axes(-1, operands.ranks[0])
    if axes is None:
        return OTHER
    if set(parts) == {ROWS}:
        return ROWS if axes[0] > 0 else OTHER
    is_number = len(parts) < len(operands.extents) - 1 or operands.leading[0] == 1
    begins = parts[0] is SHAPE or (parts[0] is COUNT and is_number)
    if begins and operands.ranks[0] == 1 and all(part is SAME for part in parts[1:]):
        return SHAPE
    return MEAN if set(parts) <= {MEAN, SAME} else SUM if set(parts) <= {SUM, COUNT} else OTHER


def _of_shape(operands: Operands) -> Extent:
    return ROWS if operands.extents[0] is SHAPE and set(operands.extents[1:]) <= {SAME} else OTHER


def _broadcast_to(operands: Operands) -> Extent:
    value, shape = operands.extents
    if shape is not SHAPE:
        return value if shape is SAME and value in FIXED else OTHER
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
    if operands.extents[0] is SHAPE and begin is not None and size is not None:
        return SAME if begin[0] > 0 else SHAPE if size[0] != 0 else OTHER
    whole = begin is not None and size is not None and begin[:1] == [0] and size[:1] == [-1]
    return ROWS if operands.extents[0] is ROWS and whole else OTHER


def _reverse(operands: Operands) -> Extent:
    axes = operands.axes(1, operands.ranks[0])
    return ROWS if operands.extents[0] is ROWS and axes is not None and 0 not in axes else OTHER


def _histogram(operands: Operands) -> Extent:
    """A count of values for each row, as `tf.math.bincount` with an axis makes."""
    values, size, weights = operands.extents
    of_rows = operands.ranks[0] == 2 and values is ROWS and size is SAME
    return ROWS if of_rows and weights in (ROWS, SAME) else OTHER


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


def _one_hot(operands: Operands) -> Extent:
    return ROWS if operands.extents[0] is ROWS and operands.node.attr["axis"].i != 0 else OTHER


def _sizes_at(positions: np.ndarray | None) -> Extent:
    """The sizes at these positions of a SHAPE."""
    if positions is None or positions.ndim > 1:
        return OTHER
    if 0 not in positions:
        return SAME
    if positions.ndim == 0:
        return COUNT
    return SHAPE if positions[0] == 0 and 0 not in positions[1:] else OTHER


def _gather(operands: Operands) -> Extent:
    table, indices, _ = operands.extents
    axes = operands.axes(2, operands.ranks[0])
    if axes is None:
        return OTHER
    if table is SHAPE:
        return _sizes_at(operands.constants[1])
    if (table, indices) == (ROWS, PLACES) and operands.node.attr["batch_dims"].i == 0:
        return CHOSEN if axes[0] == 0 else OTHER
    if table is SAME and indices is ROWS and operands.node.attr["batch_dims"].i == 0:
        return ROWS if axes[0] == 0 else OTHER
    if table is ROWS and axes[0] > 0:
        with_batch = operands.node.attr["batch_dims"].i > 0
        return ROWS if (indices is ROWS) == with_batch and indices in (ROWS, SAME) else OTHER
    return OTHER


def _gather_of_rows(operands: Operands) -> Extent:
    if operands.node.attr["batch_dims"].i if "batch_dims" in operands.node.attr else 0:
        return OTHER
    if operands.node.op == "GatherNd" and operands.extents == (ROWS, PLACES):
        return CHOSEN
    return ROWS if operands.extents[0] is SAME and operands.extents[1] is ROWS else OTHER


def _where(operands: Operands) -> Extent:
    return PLACES if operands.extents == (ROWS,) else OTHER


def _unique(operands: Operands) -> tuple[Extent, ...]:
    distinct = DISTINCT if operands.extents[0] in (ROWS, DISTINCT) else OTHER
    return (distinct, OTHER, *[OTHER] * (operands.node.op == "UniqueWithCounts"))


def _table_find(operands: Operands) -> Extent:
    return ROWS if operands.extents == (SAME, ROWS, SAME) else OTHER


LAYOUT: Mapping[str, Rule] = {
    **dict.fromkeys(("ZerosLike", "OnesLike"), _like),
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), _pad),
    **dict.fromkeys(("Split", "SplitV"), _split),
    **dict.fromkeys(("Unique", "UniqueWithCounts"), _unique),
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
    "ReverseV2": _reverse,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "StridedSlice": _strided_slice,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unpack": _unpack,
    "Where": _where,
}
"""The rules, by op type."""
