"""What is known of a tensor whose layout no rule says: how it goes along examples, and the layout that follows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import tensorflow as tf

from autodist_py.kernel.analysis.batch_layout.alignment import is_aligned
from autodist_py.kernel.analysis.batch_layout.along import EVERYWHERE, NUMBER, ROW_BY_ROW, Along, along, of_layout
from autodist_py.kernel.analysis.batch_layout.layouts import (
    COUNT,
    MIXED,
    PARTIAL_MEAN,
    PARTIAL_SUM,
    PARTIAL_SUM_PLUS,
    REPLICATED,
    SHAPE,
    SHARDED,
    TAKES_SHAPE,
    BatchLayout,
    Operands,
)
from autodist_py.kernel.analysis.batch_layout.lists import LISTS, along_lists
from autodist_py.kernel.analysis.batch_layout.parts import PARTS, part_of
from autodist_py.kernel.analysis.batch_layout.sizes import SIZED, along_sizes

_REDUCES = frozenset({"Mean", "StridedSlice", "Sum"})
"""Op types that make a sum, or mean, over examples of several such."""


class Known(NamedTuple):
    """What is known of a tensor.

    Attributes:
        layout: what it is for the whole batch.
        along: how it goes along examples; None: it is not known.
    """

    layout: BatchLayout
    along: Along | None


SAME = Known(REPLICATED, EVERYWHERE)
UNKNOWN = Known(MIXED, None)


def known_by(layout: BatchLayout) -> Known:
    """What is known of what is of this layout. Of terms that count once nothing else says that they do."""
    return Known(layout, None if layout is PARTIAL_SUM_PLUS else of_layout(layout))


def followed(operands: Operands, reads: Sequence[Known], symbol: tf.Tensor) -> Known:
    """What is known of `symbol`, which an op makes of `reads`, where no rule says its layout."""
    own = tuple(read.along for read in reads)
    if operands.node.op in LISTS:
        listed = along_lists(operands, own)
        return UNKNOWN if listed is None else Known(_layout(listed, symbol), listed)
    if operands.node.op == "Shape":
        is_of_examples = own[0] is not None and own[0].axes and symbol.shape.rank == 1
        return Known(MIXED, NUMBER) if is_of_examples else UNKNOWN
    whole = own[operands.node.op == "Split"]
    if operands.node.op in PARTS and whole is not None and (part := part_of(operands, whole)) is not None:
        return Known(_layout(part, symbol), part)
    if operands.node.op in SIZED and (sized := along_sizes(operands, own)) is not None:
        return Known(_layout(sized, symbol), sized)
    takes = TAKES_SHAPE.get(operands.node.op)
    if any(layout is SHAPE and index != takes for index, layout in enumerate(operands.layouts)):
        return UNKNOWN  # Its sizes are numbers to compute with, of which one is the replica's own.
    found = along(operands, own) if is_aligned(operands, own) else None
    if not isinstance(found, Along):
        return UNKNOWN
    if any(read is None or read.pools for read in own) and operands.node.op not in _REDUCES:
        return Known(MIXED, found)
    return Known(_layout(found, symbol), found)


def of_shape(operands: Operands, source: Known) -> Known:
    """What is made of the shape of `source`, whose examples stand elsewhere than along axis 0: a size, or a filled one.

    Before → after, of a time-major tensor of which the examples stand along axis 1:

        shape[0] → REPLICATED
        shape[1] → COUNT
        tf.fill(shape, 0.0) → examples along axis 1
    """
    read = source.along
    if read is None or not read.keeps_apart:
        return UNKNOWN
    if operands.node.op == "Fill":
        is_fixed = operands.layouts[1] is REPLICATED
        return Known(MIXED, replace(EVERYWHERE, axes=read.axes, joined=read.joined)) if is_fixed else UNKNOWN
    axis = _one_size(operands)
    if axis is None:
        return UNKNOWN
    if axis not in read.axes:
        return SAME
    return UNKNOWN if read.others else known_by(COUNT)  # Of several batches it is so many times their size.


def is_exact(known: Known, op_type: str, reads: Sequence[Known]) -> bool:
    """Whether replicas' values, as they are known to be, make up one device's, as far as those that are read do."""
    if known.along is None or known.along.uneven:
        return False
    if op_type in LISTS or known.along.counts or known.layout in (REPLICATED, COUNT) or known.along.keeps_apart:
        return True
    of_pooled = any(read.along is None or read.along.pools for read in reads) and op_type not in _REDUCES
    return known.along.is_pooled and not of_pooled


OF_SHAPE = frozenset({"Fill", "StridedSlice"})
"""Op types that `of_shape` knows."""


def _one_size(operands: Operands) -> int | None:
    """The axis of which a slice of a shape is the size; None: it is not known, or of several."""
    begin, stride, attr = operands.integers(1), operands.integers(3), operands.node.attr
    is_one = attr["shrink_axis_mask"].i == 1 and stride == [1] and not attr["begin_mask"].i
    if not is_one or begin is None or len(begin) != 1 or operands.leading[0] is None:
        return None
    return begin[0] % operands.leading[0]


def _layout(found: Along, symbol: tf.Tensor) -> BatchLayout:
    """The layout of `symbol`, which goes along examples as `found`, where that says it."""
    if symbol.dtype == tf.variant:
        return MIXED
    if found == ROW_BY_ROW:
        return SHARDED
    is_number = found.is_pooled and not found.both and symbol.dtype.is_floating and symbol.shape.is_fully_defined()
    if not is_number:
        return MIXED
    return PARTIAL_SUM if found.adds else PARTIAL_MEAN
