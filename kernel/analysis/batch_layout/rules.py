"""The rule of each op type."""

from collections.abc import Mapping
from dataclasses import replace

from autodist_py.kernel.analysis.batch_layout.arithmetic import ARITHMETIC
from autodist_py.kernel.analysis.batch_layout.entries import ENTRIES
from autodist_py.kernel.analysis.batch_layout.layouts import (
    CHOSEN_KEYS,
    CHOSEN_SHAPE,
    COUNT,
    EACH,
    KEYS,
    MIXED,
    PARTIAL_SUM,
    REPLICATED,
    SELECTED,
    SELECTED_INDICES,
    SHARDED,
    TAILED,
    UNIQUE,
    BatchLayout,
    Operands,
    Rule,
)
from autodist_py.kernel.analysis.batch_layout.linear import LINEAR, linear_layout
from autodist_py.kernel.analysis.batch_layout.movement import LAYOUT

_RULES: Mapping[str, Rule] = {**ARITHMETIC, **LAYOUT}

_OF_CHOSEN = {SHARDED: SELECTED, PARTIAL_SUM: PARTIAL_SUM, COUNT: PARTIAL_SUM, REPLICATED: REPLICATED}
_INDICES = frozenset({SELECTED_INDICES, KEYS, CHOSEN_KEYS, UNIQUE, CHOSEN_SHAPE, TAILED})
_ON_INDICES = frozenset({"Cast", "EnsureShape", "Identity", "Reshape", "Squeeze", "StopGradient"})
"""Op types whose rules tell indices from rows; whatever else reads indices is not known."""


def layout_of(operands: Operands) -> BatchLayout | tuple[BatchLayout, ...]:
    """The layout of an op's results, or of each of them; some input differs between replicas.

    What a rule says of rows holds of chosen ones, too, but that there are as many as examples, times a factor.
    """
    if operands.node.op in ENTRIES and (found := ENTRIES[operands.node.op](operands)) is not None:
        return found
    found = _by_rule(operands)
    return linear_layout(operands) if found is MIXED else found


def _by_rule(operands: Operands) -> BatchLayout | tuple[BatchLayout, ...]:
    rule, kinds = _RULES.get(operands.node.op), set(operands.layouts)
    if rule is None:
        return MIXED
    if kinds & _INDICES and operands.node.op not in _ON_INDICES:
        return MIXED
    if EACH in kinds:
        return _of_each(operands)
    if SELECTED not in kinds:
        return rule(operands)
    if SHARDED in kinds:
        return MIXED
    as_rows = tuple(SHARDED if one is SELECTED else one for one in operands.layouts)
    found = rule(replace(operands, layouts=as_rows, blocks=(None,) * len(as_rows)))
    return tuple(map(_of_chosen, found)) if isinstance(found, tuple) else _of_chosen(found)


def _of_each(operands: Operands) -> BatchLayout:
    """What is computed row by row of what distinct elements are given, and leaves a row for each."""
    if operands.node.op not in ARITHMETIC or not set(operands.layouts) <= {EACH, REPLICATED}:
        return MIXED
    as_rows = tuple(SHARDED if one is EACH else one for one in operands.layouts)
    found = ARITHMETIC[operands.node.op](replace(operands, layouts=as_rows, blocks=(None,) * len(as_rows)))
    return EACH if found is SHARDED else MIXED


def _of_chosen(found: BatchLayout) -> BatchLayout:
    """What is of chosen rows what would be `found` of rows."""
    return _OF_CHOSEN.get(found, MIXED)


def is_known(op_type: str) -> bool:
    """Whether there is a rule for ops of this type, whose results then depend on nothing but their inputs."""
    return op_type in _RULES or op_type in ENTRIES or op_type in LINEAR
