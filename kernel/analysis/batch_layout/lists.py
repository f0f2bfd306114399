"""Rules for lists of tensors, as loops over time fill and read them (`tf.TensorArray`): how they go along examples.

A list goes along examples as its elements would, stacked: entries along axis 0 are the list's elements, along axis 1
those along axis 0 of each element. So a list of rows of the batch, an element for each time, goes along axis 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from autodist_py.kernel.analysis.batch_layout.along import Along
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout, Operands

UNSET = Along(unset=True)
"""A list of which no element has been set; what is read of it is 0."""

UNSET_FOR_EXAMPLES = Along(frozenset({0}), unset=True)
"""Such a list with an element for each example."""

_Reads = tuple[Along, ...]


def along_lists(operands: Operands, reads: tuple[Along | None, ...]) -> Along | None:
    """What an op that makes, fills or reads a list makes of what goes along the examples like `reads`."""
    rule = _RULES.get(operands.node.op)
    known = tuple(read for read in reads if read is not None)
    value = _VALUES.get(operands.node.op)
    if rule is None or len(known) < len(reads):
        return None
    if value is not None and (operands.layouts[value] is BatchLayout.SHAPE or known[value].counts):
        return None  # Of numbers of examples.
    return rule(operands, known)


def _made(operands: Operands, reads: _Reads) -> Along | None:
    """A new list, of as many elements as the last input says; none of them is there yet."""
    if operands.layouts[-1] is BatchLayout.COUNT:
        return UNSET_FOR_EXAMPLES
    return UNSET if operands.layouts[-1] is BatchLayout.REPLICATED else None


def _passed(operands: Operands, reads: _Reads) -> Along | None:
    return None if reads[0].unset else reads[0]


def _read(operands: Operands, reads: _Reads) -> Along | None:
    """One element, the same one on all replicas."""
    whole = reads[0]
    if whole.unset or 0 in whole.axes or not _is_same(operands, 1):
        return None
    return replace(whole, axes=frozenset(axis - 1 for axis in whole.axes))


def _set(operands: Operands, reads: _Reads) -> Along | None:
    return _filled(reads[0], reads[2]) if _is_same(operands, 1) else None


def _pushed(operands: Operands, reads: _Reads) -> Along | None:
    return _filled(reads[0], reads[1])


def _filled(whole: Along, element: Along) -> Along | None:
    """A list with one more element, which is as the others, or the first."""
    stacked = replace(element, axes=frozenset(axis + 1 for axis in element.axes))
    return stacked if whole == UNSET else whole if whole == stacked else None


def _taken(operands: Operands, reads: _Reads) -> Along | None:
    """Some elements, stacked."""
    is_fixed = _is_same(operands, 1) and 0 not in reads[0].axes
    return _passed(operands, reads) if is_fixed else None


def _put(operands: Operands, reads: _Reads) -> Along | None:
    """A list of which some elements are those of a tensor, in another order."""
    is_fixed = 0 not in reads[0].axes and all(_is_same(operands, index) for index in (1, len(reads) - 1))
    return reads[0] if is_fixed else None


def _is_same(operands: Operands, index: int) -> bool:
    return operands.layouts[index] is BatchLayout.REPLICATED


MAKES = frozenset({"EmptyTensorList", "TensorListReserve"})
"""Op types that make a list without elements, or with some that are to be set."""

_VALUES = {"TensorListFromTensor": 0, "TensorListPushBack": 1, "TensorListScatterV2": 0, "TensorListSetItem": 2}
"""Op types that put elements into a list, and the input that they put."""

_RULES: Mapping[str, Callable[[Operands, _Reads], Along | None]] = {
    **dict.fromkeys(("TensorListFromTensor", "TensorListStack"), _passed),
    "EmptyTensorList": lambda operands, reads: UNSET,
    "TensorListGather": _taken,
    "TensorListGetItem": _read,
    "TensorListPushBack": _pushed,
    "TensorListReserve": _made,
    "TensorListScatterV2": _put,
    "TensorListSetItem": _set,
}

LISTS = frozenset(_RULES)
"""Op types that make, fill or read a list."""
