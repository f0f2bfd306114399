"""Lists of tensors go along examples as their elements would, stacked."""

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.kernel.analysis.batch_layout.along import EVERYWHERE, ROW_BY_ROW, Along
from autodist_py.kernel.analysis.batch_layout.following import SAME, UNKNOWN, Known, followed, known_by, of_shape
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout, Operands
from autodist_py.kernel.analysis.batch_layout.lists import UNSET, along_lists

MIXED, SHARDED, REPLICATED = BatchLayout.MIXED, BatchLayout.SHARDED, BatchLayout.REPLICATED
COUNT, SHAPE = BatchLayout.COUNT, BatchLayout.SHAPE
TIMED = Along(frozenset({1}))
"""Rows along axis 1: time-major, or a list of rows."""
OF_EXAMPLES = Along(frozenset({0}))
MEANS = Along(pools=True)
REVERSED = Along(frozenset({1}), order="ReverseV2")


def operands(op: str, layouts: tuple[BatchLayout, ...]) -> Operands:
    ranks: tuple[int | None, ...] = (2,) * len(layouts)
    nothing = (None,) * len(layouts)
    return Operands(tf.compat.v1.NodeDef(op=op), layouts, ranks, nothing, None, nothing)


CASES = {
    "a batch, unstacked": ("TensorListFromTensor", (SHARDED, REPLICATED), (ROW_BY_ROW, EVERYWHERE), OF_EXAMPLES),
    "time-major, unstacked": ("TensorListFromTensor", (MIXED, REPLICATED), (TIMED, EVERYWHERE), TIMED),
    "sizes, unstacked": ("TensorListFromTensor", (SHAPE, REPLICATED), (EVERYWHERE, EVERYWHERE), None),
    "stacked": ("TensorListStack", (MIXED, SHAPE), (TIMED, EVERYWHERE), TIMED),
    "a new one": ("TensorListReserve", (SHAPE, REPLICATED), (EVERYWHERE, EVERYWHERE), UNSET),
    "one for examples": (
        "TensorListReserve",
        (REPLICATED, COUNT),
        (EVERYWHERE, Along(counts=True)),
        Along(frozenset({0}), unset=True),
    ),
    "one of unknown length": ("TensorListReserve", (REPLICATED, MIXED), (EVERYWHERE, MEANS), None),
    "an element": ("TensorListGetItem", (MIXED, REPLICATED, SHAPE), (TIMED, EVERYWHERE, EVERYWHERE), ROW_BY_ROW),
    "an-example": ("TensorListGetItem", (MIXED, REPLICATED, SHAPE), (OF_EXAMPLES, EVERYWHERE, EVERYWHERE), None),
    "by each one's place": ("TensorListGetItem", (MIXED, COUNT, SHAPE), (TIMED, Along(counts=True), EVERYWHERE), None),
    "one that is unset": ("TensorListGetItem", (REPLICATED, REPLICATED, SHAPE), (UNSET, EVERYWHERE, EVERYWHERE), None),
    "the first that is set": (
        "TensorListSetItem",
        (REPLICATED, REPLICATED, SHARDED),
        (UNSET, EVERYWHERE, ROW_BY_ROW),
        TIMED,
    ),
    "another": ("TensorListSetItem", (MIXED, REPLICATED, SHARDED), (TIMED, EVERYWHERE, ROW_BY_ROW), TIMED),
    "one in another order": (
        "TensorListSetItem",
        (MIXED, REPLICATED, SHARDED),
        (REVERSED, EVERYWHERE, ROW_BY_ROW),
        None,
    ),
    "rows among others": (
        "TensorListSetItem",
        (REPLICATED, REPLICATED, SHARDED),
        (EVERYWHERE, EVERYWHERE, ROW_BY_ROW),
        None,
    ),
    "at each one's place": (
        "TensorListSetItem",
        (MIXED, COUNT, SHARDED),
        (TIMED, Along(counts=True), ROW_BY_ROW),
        None,
    ),
    "a number of examples": (
        "TensorListSetItem",
        (REPLICATED, REPLICATED, COUNT),
        (UNSET, EVERYWHERE, Along(counts=True)),
        None,
    ),
    "means": ("TensorListPushBack", (MIXED, BatchLayout.PARTIAL_MEAN), (MEANS, MEANS), MEANS),
    "a sum among means": (
        "TensorListPushBack",
        (MIXED, BatchLayout.PARTIAL_SUM),
        (MEANS, Along(pools=True, adds=True)),
        None,
    ),
    "some": ("TensorListGather", (MIXED, REPLICATED, SHAPE), (TIMED, EVERYWHERE, EVERYWHERE), TIMED),
    "some examples": ("TensorListGather", (MIXED, REPLICATED, SHAPE), (OF_EXAMPLES, EVERYWHERE, EVERYWHERE), None),
    "put": ("TensorListScatterV2", (MIXED, REPLICATED, SHAPE, REPLICATED), (TIMED, *[EVERYWHERE] * 3), TIMED),
    "examples put": (
        "TensorListScatterV2",
        (SHARDED, REPLICATED, SHAPE, REPLICATED),
        (ROW_BY_ROW, *[EVERYWHERE] * 3),
        None,
    ),
    "what is not known": ("TensorListStack", (MIXED, SHAPE), (None, EVERYWHERE), None),
}


@pytest.mark.parametrize(("op", "layouts", "reads", "found"), CASES.values(), ids=CASES.keys())
def test_a_list_goes_along_examples_as_its_elements_stacked(
    op: str, layouts: tuple[BatchLayout, ...], reads: tuple[Along | None, ...], found: Along | None
) -> None:
    assert along_lists(operands(op, layouts), reads) == found


def test_of_a_list_of_rows_each_element_is_sharded_and_the_stack_is_time_major() -> None:
    list_of_rows, same = Known(MIXED, TIMED), SAME
    with tf.Graph().as_default():
        row = tf.compat.v1.placeholder(tf.float32, [None, 3])
    layouts = (MIXED, REPLICATED, SHAPE)
    found = followed(operands("TensorListGetItem", layouts), [list_of_rows, same, known_by(SHAPE)], row)
    assert found == known_by(SHARDED)
    stacked = followed(operands("TensorListStack", (MIXED, SHAPE)), [list_of_rows, known_by(SHAPE)], row)
    assert stacked == list_of_rows


@pytest.mark.parametrize(("axis", "layout"), [(0, REPLICATED), (1, COUNT), (-1, REPLICATED), (-2, COUNT)])
def test_sizes_of_what_is_time_major_are_told_apart(axis: int, layout: BatchLayout) -> None:
    node = tf.compat.v1.NodeDef(op="StridedSlice")
    node.attr["shrink_axis_mask"].i = 1
    constants = (None, np.array([axis]), np.array([axis + 1]), np.array([1]))
    sliced = Operands(node, (MIXED, *[REPLICATED] * 3), (1, 1, 1, 1), (3, 1, 1, 1), (), constants)
    assert of_shape(sliced, Known(MIXED, TIMED)).layout is layout
    assert of_shape(sliced, Known(MIXED, Along(frozenset({1}), pools=True))) == UNKNOWN
