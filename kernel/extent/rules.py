"""The rule of each op type."""

from collections.abc import Mapping

from autodist_py.kernel.extent.arithmetic import ARITHMETIC
from autodist_py.kernel.extent.layout import LAYOUT
from autodist_py.kernel.extent.values import OTHER, Extent, Operands, Rule

_RULES: Mapping[str, Rule] = {**ARITHMETIC, **LAYOUT}


def extent_of(operands: Operands) -> Extent | tuple[Extent, ...]:
    """The extent of an op's results, or of each of them; some input differs between replicas."""
    rule = _RULES.get(operands.node.op)
    return OTHER if rule is None else rule(operands)


def is_known(op_type: str) -> bool:
    """Whether there is a rule for ops of this type, whose results then depend on nothing but their inputs."""
    return op_type in _RULES
