"""The rule of each op type."""

from collections.abc import Mapping
from dataclasses import replace

from autodist_py.kernel.extent.arithmetic import ARITHMETIC
from autodist_py.kernel.extent.layout import LAYOUT
from autodist_py.kernel.extent.values import CHOSEN, COUNT, DISTINCT, OTHER, ROWS, SAME, SUM, Extent, Operands, Rule

_RULES: Mapping[str, Rule] = {**ARITHMETIC, **LAYOUT}

_OF_CHOSEN = {ROWS: CHOSEN, SUM: SUM, COUNT: SUM, SAME: SAME, DISTINCT: DISTINCT}


def extent_of(operands: Operands) -> Extent | tuple[Extent, ...]:
    """The extent of an op's results, or of each of them; some input differs between replicas.

    What a rule says of rows holds of chosen ones, too, but that there are as many as examples, times a factor.
    """
    rule = _RULES.get(operands.node.op)
    if rule is None:
        return OTHER
    if CHOSEN not in operands.extents:
        return rule(operands)
    if ROWS in operands.extents:
        return OTHER
    as_rows = tuple(ROWS if one is CHOSEN else one for one in operands.extents)
    found = rule(replace(operands, extents=as_rows, block=None))
    return tuple(map(_of_chosen, found)) if isinstance(found, tuple) else _of_chosen(found)


def _of_chosen(found: Extent) -> Extent:
    """What is of chosen rows what would be `found` of rows."""
    return _OF_CHOSEN.get(found, OTHER)


def is_known(op_type: str) -> bool:
    """Whether there is a rule for ops of this type, whose results then depend on nothing but their inputs."""
    return op_type in _RULES
