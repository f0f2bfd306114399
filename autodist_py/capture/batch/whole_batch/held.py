"""What a tensor of a program of the whole batch is, where its layout alone does not say it, and what lists hold.

A list, as a loop over time fills and reads one (`tf.TensorArray`), holds elements that are all alike. Stacked, they are
one tensor with its examples one axis further on. An optional value, as a branch returns it, is a list of one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import tensorflow as tf

from autodist_py.kernel.analysis.batch_layout.along import ROW_BY_ROW, Along
from autodist_py.kernel.analysis.batch_layout.joins import joined
from autodist_py.kernel.analysis.batch_layout.layouts import (
    COUNT,
    MIXED,
    PARTIAL_MEAN,
    PARTIAL_SUM,
    PARTIAL_SUM_PLUS,
    REPLICATED,
    SHAPE,
    SHARDED,
    BatchLayout,
    Block,
)
from autodist_py.kernel.analysis.batch_layout.lists import MAKES as MAKES_LIST
from autodist_py.kernel.analysis.batch_layout.lists import UNSET


class Held(NamedTuple):
    """What a tensor is for the whole batch.

    Attributes:
        layout: as the rules say it; MIXED: the next attributes do.
        along: where its examples stand, if not along axis 0; None: it has none, or it is a list.
        element: what each element of a list is; None: it is no list.
        sizes: of a shape, `BATCH` for that of the rows; None: they are not all known.
        block: how many of its rows each example has; None: it is not known.
        is_zero: whether it is surely 0.
    """

    layout: BatchLayout
    along: Along | None = None
    element: "Held | None" = None
    sizes: tuple[int, ...] | None = None
    block: Block | None = None
    is_zero: bool = False

    @property
    def is_known(self) -> bool:
        """Whether what reads it can be followed."""
        return self.layout is not MIXED or self.along is not None or self.element is not None


SAME = Held(REPLICATED)
NOTHING = Held(MIXED, UNSET)
"""An element that is not there yet, and that nothing reads: any other may take its place."""
EMPTY = Held(MIXED, element=NOTHING)
"""A list without elements."""
UNKNOWN = Held(MIXED)


def either(one: Held, other: Held) -> Held:
    """What is one of these, on all replicas alike: as `joins.joined` of layouts, and of lists and places, too."""
    if one == other or other == NOTHING:
        return one
    if one == NOTHING:
        return other
    if one.element is not None and other.element is not None:
        element = either(one.element, other.element)
        return Held(MIXED, element=element) if element.is_known else UNKNOWN
    if one.along != other.along or one.element is not None or other.element is not None:
        return UNKNOWN
    zeros = any(held.is_zero for held in (one, other) if held.layout is REPLICATED)
    layout = one.layout if one.layout is other.layout else joined([one.layout, other.layout], with_zeros=zeros)
    block = one.block if one.block == other.block else None
    sizes = one.sizes if one.sizes == other.sizes else None
    return Held(layout, one.along, sizes=sizes, block=block)


def after_turn(taken: Held, found: Held) -> Held:
    """What is taken next for what goes round a loop, and is `found` after a turn that begins with `taken`.

    After one turn that adds a sum to a 0, that it is a sum is yet to be tried.
    """
    is_begun = taken.is_zero and found.layout is PARTIAL_SUM_PLUS
    return Held(PARTIAL_SUM) if is_begun else either(taken, found)


def placed(layout: BatchLayout, along: Along | None, symbol: tf.Tensor, block: Block | None = None) -> Held:
    """What `symbol` is, of which the rules say that it is of this layout, and goes along examples so."""
    if layout in (REPLICATED, SHARDED, SHAPE, COUNT):
        return Held(layout, block=block if layout is SHARDED else None)
    if layout in (PARTIAL_SUM, PARTIAL_MEAN):
        return Held(layout) if symbol.shape.is_fully_defined() else UNKNOWN
    if along is None or symbol.dtype == tf.variant:
        return UNKNOWN
    return Held(MIXED, along, block=block) if along.keeps_apart or along.counts else UNKNOWN


_Rule = Callable[[Sequence[Held], Sequence[tf.Tensor]], list[Held] | None]
"""Of what is read, and the symbols of the results: what these are."""


def on_lists(op_type: str, reads: Sequence[Held], symbols: Sequence[tf.Tensor]) -> list[Held] | None:
    """What an op that makes, fills or reads a list returns, given `reads`; None: it is no such op, or not known."""
    rule = _RULES.get(op_type)
    found = None if rule is None else rule(reads, symbols)
    return found if found is not None and all(one.is_known for one in found) else None


def _made(reads: Sequence[Held], symbols: Sequence[tf.Tensor]) -> list[Held] | None:
    """A list of as many elements as its last input says, of which none is there; they are of a given shape."""
    shape, size = reads
    is_shape = shape.layout in (REPLICATED, SHAPE) or (shape.along is not None and shape.along.counts)
    return [EMPTY] if is_shape and size.layout is REPLICATED else None


def _shape_of_each(reads: Sequence[Held], symbols: Sequence[tf.Tensor]) -> list[Held] | None:
    """A shape in which the number of rows may stand."""
    element = reads[0].element
    is_of_rows = element is not None and element.layout is SHARDED
    return [Held(SHAPE, block=element.block)] if element is not None and is_of_rows else None


def _filled(whole: Held, element: Held) -> list[Held] | None:
    if whole.element is None:
        return None
    is_carried = element.layout in (SHARDED, REPLICATED, PARTIAL_SUM, PARTIAL_MEAN, SHAPE)
    if not (is_carried or element.along is not None or element.element is not None):
        return None
    joint = either(whole.element, element)
    return [Held(MIXED, element=joint)] if joint.is_known else None


def _set(reads: Sequence[Held], symbols: Sequence[tf.Tensor]) -> list[Held] | None:
    return _filled(reads[0], reads[2]) if reads[1].layout is REPLICATED else None


def _taken(whole: Held) -> Held | None:
    return None if whole.element in (None, NOTHING) else whole.element


def _read(reads: Sequence[Held], symbols: Sequence[tf.Tensor]) -> list[Held] | None:
    """The element at a place, which is the second input; of an optional value there is one alone."""
    element = _taken(reads[0])
    return [element] if element is not None and all(read.layout is REPLICATED for read in reads[1:2]) else None


def _popped(reads: Sequence[Held], symbols: Sequence[tf.Tensor]) -> list[Held] | None:
    element = _taken(reads[0])
    return None if element is None else [reads[0], element]


def _stacked(reads: Sequence[Held], symbols: Sequence[tf.Tensor]) -> list[Held] | None:
    element = _taken(reads[0])
    if element is None or element.element is not None:
        return None
    along = ROW_BY_ROW if element.layout is SHARDED else element.along
    if along is not None and element.layout in (SHARDED, MIXED):
        further = replace(along, axes=frozenset(axis + 1 for axis in along.axes))
        return [placed(MIXED, further, symbols[0], element.block)]
    return [placed(element.layout, None, symbols[0])] if element.layout is not SHAPE else None


def _unstacked(reads: Sequence[Held], symbols: Sequence[tf.Tensor]) -> list[Held] | None:
    whole = reads[0]
    if whole.layout in (REPLICATED, PARTIAL_SUM, PARTIAL_MEAN):
        return [Held(MIXED, element=Held(whole.layout))]
    if whole.along is None or not whole.along.keeps_apart or 0 in whole.along.axes:
        return None
    along = replace(whole.along, axes=frozenset(axis - 1 for axis in whole.along.axes))
    layout, elsewhere = (SHARDED, None) if along == ROW_BY_ROW else (MIXED, along)
    return [Held(MIXED, element=Held(layout, elsewhere, block=whole.block))]


def _added(reads: Sequence[Held], symbols: Sequence[tf.Tensor]) -> list[Held] | None:
    """Lists, element by element: of sums and means these are such, and of rows rows."""
    first, *others = reads
    is_list = first.element is not None and first.element != NOTHING
    return [first] if is_list and all(other == first for other in others) else None


def _sized(reads: Sequence[Held], symbols: Sequence[tf.Tensor]) -> list[Held] | None:
    return None if reads[0].element is None else [SAME]


_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("AddN", "ZerosLike"), _added),
    **dict.fromkeys(sorted(MAKES_LIST), _made),
    **dict.fromkeys(("OptionalGetValue", "TensorListGetItem"), _read),
    **dict.fromkeys(("OptionalHasValue", "TensorListLength"), _sized),
    "OptionalFromValue": lambda reads, symbols: _filled(EMPTY, reads[0]) if len(reads) == 1 else None,
    "TensorListElementShape": _shape_of_each,
    "TensorListFromTensor": _unstacked,
    "TensorListPopBack": _popped,
    "TensorListPushBack": lambda reads, symbols: _filled(reads[0], reads[1]),
    "TensorListSetItem": _set,
    "TensorListStack": _stacked,
}
MAKES = MAKES_LIST | {"OptionalNone"}
"""Op types that make an empty list; `FakeParam` makes what nothing reads."""
