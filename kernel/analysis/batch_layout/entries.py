"""Rules for ops on some entries of rows, as sparse tensors have: a value for each, and the place where it stands.

A rule that returns None leaves the op to the other tables.
"""

from collections.abc import Callable, Mapping

from autodist_py.kernel.analysis.batch_layout.layouts import (
    CHOSEN_KEYS,
    CHOSEN_SHAPE,
    EACH,
    KEYS,
    MIXED,
    PARTIAL_SUM,
    REPLICATED,
    SELECTED,
    SELECTED_INDICES,
    SHAPE,
    SHARDED,
    TAILED,
    UNIQUE,
    BatchLayout,
    Operands,
)

_Found = BatchLayout | tuple[BatchLayout, ...] | None


def _where(operands: Operands) -> _Found:
    return SELECTED_INDICES if operands.layouts in ((SHARDED,), (SELECTED,)) else MIXED


def _unique(operands: Operands) -> _Found:
    distinct = UNIQUE if operands.layouts[0] in (SHARDED, SELECTED, UNIQUE) else MIXED
    keys = {SHARDED: KEYS, SELECTED: CHOSEN_KEYS}.get(operands.layouts[0], MIXED)
    return (distinct, keys, *[MIXED] * (operands.node.op == "UniqueWithCounts"))


_GATHERED = {
    (SHARDED, SELECTED_INDICES): SELECTED,
    (SELECTED, SELECTED_INDICES): SELECTED,
    (SELECTED_INDICES, SELECTED_INDICES): SELECTED_INDICES,
    (CHOSEN_KEYS, SELECTED_INDICES): CHOSEN_KEYS,
    (REPLICATED, UNIQUE): EACH,
    (REPLICATED, EACH): EACH,
    (REPLICATED, TAILED): TAILED,
    (EACH, KEYS): SHARDED,
    (EACH, CHOSEN_KEYS): SELECTED,
}
"""What is taken along axis 0, by what it is taken from and by which indices."""


def _gather(operands: Operands) -> _Found:
    found = _GATHERED.get((operands.layouts[0], operands.layouts[1]))
    attr = operands.node.attr
    along_rows = operands.node.op != "GatherV2" or operands.axes(2, operands.ranks[0]) == [0]
    if found is None or not along_rows or ("batch_dims" in attr and attr["batch_dims"].i):
        return None
    return found if operands.ranks[1] == 1 else MIXED


def _gather_nd(operands: Operands) -> _Found:
    return SELECTED if operands.layouts in ((SHARDED, SELECTED_INDICES), (SELECTED, SELECTED_INDICES)) else None


def _shape(operands: Operands) -> _Found:
    return CHOSEN_SHAPE if operands.layouts == (SELECTED,) else None


def _concat(operands: Operands) -> _Found:
    """Of rows and what is the same everywhere; of a size and more sizes."""
    first, *rest = operands.layouts
    if first is SHARDED and set(rest) == {REPLICATED} and operands.axes(-1, operands.ranks[0]) == [0]:
        return TAILED if operands.blocks[0] is not None else MIXED
    return CHOSEN_SHAPE if first is CHOSEN_SHAPE and operands.ranks[0] == 1 and set(rest) <= {REPLICATED} else None


def _reshape(operands: Operands) -> _Found:
    """To as many rows as there are."""
    return SELECTED if operands.layouts == (SELECTED, CHOSEN_SHAPE) else None


def _strided_slice(operands: Operands) -> _Found:
    if operands.layouts[0] is SELECTED_INDICES:
        return _coordinates(operands)
    return _size(operands) if operands.layouts[0] is CHOSEN_SHAPE else None


def _slice(operands: Operands) -> _Found:
    """As many rows as there are examples, times a factor; or what comes after these."""
    layout, begin, size = operands.layouts
    if layout is not TAILED:
        return None
    first, count = operands.integers(1), operands.integers(2)
    if size is SHAPE and first is not None and first[0] == 0:
        return SHARDED if operands.blocks[0] == operands.blocks[2] is not None else MIXED
    if begin is SHAPE and count is not None and count[0] == -1:
        return REPLICATED if operands.blocks[0] == operands.blocks[1] is not None else MIXED
    return MIXED


def _size(operands: Operands) -> _Found:
    begin, stride = operands.integers(1), operands.integers(3)
    if begin is None or stride != [1] or operands.node.attr["shrink_axis_mask"].i != 1 or begin[0] < 0:
        return MIXED
    return REPLICATED if begin[0] > 0 else PARTIAL_SUM


def _coordinates(operands: Operands) -> _Found:
    """Some coordinates of each place: the first one is that of the row, the others are the same for all replicas."""
    attr = operands.node.attr
    begin, stride = operands.integers(1), operands.integers(3)
    is_plain = not any(attr[f"{key}_mask"].i for key in ("ellipsis", "new_axis")) and not attr["shrink_axis_mask"].i & 1
    all_places = bool(attr["begin_mask"].i & attr["end_mask"].i & 1)
    if operands.ranks[0] != 2 or not is_plain or not all_places or begin is None or stride != [1, 1]:
        return MIXED
    first = 0 if attr["begin_mask"].i & 2 else begin[1]
    return MIXED if first < 0 else SELECTED_INDICES if first == 0 else SELECTED


def _sparse_reshape(operands: Operands) -> _Found:
    """Of places in rows of which the shape has as many: coordinates go on from one replica to the next."""
    is_whole = operands.blocks[0] is not None and operands.blocks[0] == operands.blocks[1]
    known = operands.layouts == (SELECTED_INDICES, SHAPE, SHAPE) and is_whole and operands.blocks[2] is not None
    return (SELECTED_INDICES, SHAPE) if known else (MIXED, MIXED)


def _fill_empty_rows(operands: Operands) -> _Found:
    """An entry for each row that has none; they are put in the order of the rows."""
    known = operands.layouts == (SELECTED_INDICES, SELECTED, SHAPE, REPLICATED) and _of_all_rows(operands, 0, 2)
    return (SELECTED_INDICES, SELECTED, SHARDED, MIXED) if known else (MIXED, MIXED, MIXED, MIXED)


def _sparse_segments(operands: Operands) -> _Found:
    return (
        SHARDED
        if operands.layouts in ((EACH, CHOSEN_KEYS, SELECTED_INDICES), (REPLICATED, SELECTED, SELECTED_INDICES))
        else MIXED
    )


def _segments(operands: Operands) -> _Found:
    return SHARDED if operands.layouts == (SELECTED, SELECTED_INDICES) else None


def _product(operands: Operands) -> _Found:
    attr = operands.node.attr
    known = operands.layouts == (SELECTED_INDICES, SELECTED, SHAPE, REPLICATED) and _of_all_rows(operands, 0, 2)
    return SHARDED if known and not attr["adjoint_a"].b and not attr["adjoint_b"].b else MIXED


def _to_dense(operands: Operands) -> _Found:
    places, shape, values, default = operands.layouts
    known = (places, shape, default) == (SELECTED_INDICES, SHAPE, REPLICATED) and values in (SELECTED, REPLICATED)
    return SHARDED if known and _of_all_rows(operands, 0, 1) else MIXED


def _of_all_rows(operands: Operands, places: int, shape: int) -> bool:
    """Whether the shape at that input begins with the number of the rows in which the places are."""
    return operands.blocks[places] is not None and operands.blocks[places] == operands.blocks[shape]


SEGMENTS = frozenset({"SegmentMean", "SegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN", "SparseSegmentSum"})
"""Op types that return a row for each row up to the last one that has an entry."""

ENTRIES: Mapping[str, Callable[[Operands], _Found]] = {
    **dict.fromkeys(("GatherV2", "ResourceGather"), _gather),
    **dict.fromkeys(("SegmentMean", "SegmentSum"), _segments),
    **dict.fromkeys(("SparseSegmentMean", "SparseSegmentSqrtN", "SparseSegmentSum"), _sparse_segments),
    **dict.fromkeys(("Unique", "UniqueWithCounts"), _unique),
    "ConcatV2": _concat,
    "GatherNd": _gather_nd,
    "Reshape": _reshape,
    "Shape": _shape,
    "Slice": _slice,
    "SparseFillEmptyRows": _fill_empty_rows,
    "SparseReshape": _sparse_reshape,
    "SparseTensorDenseMatMul": _product,
    "SparseToDense": _to_dense,
    "StridedSlice": _strided_slice,
    "Where": _where,
}
"""The rules, by op type."""
