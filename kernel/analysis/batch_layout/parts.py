"""Batches that were joined, one behind the other, and are taken apart again: each part is a batch as it was.

Before → after, of two batches with one row for each example:

    tf.split(tf.concat([a, b], 0), 2) → SHARDED, SHARDED
    tf.concat([a, b], 0)[: tf.shape(a)[0]] → SHARDED
    tf.concat([a, b], 0)[tf.shape(a)[0] :] → SHARDED
    tf.split(tf.concat([a, b], 0), 4) → not known: halves of a replica's examples
"""

import re
from dataclasses import replace

from autodist_py.kernel.analysis.batch_layout.along import Along
from autodist_py.kernel.analysis.batch_layout.layouts import REPLICATED, SHAPE, Operands

PARTS = frozenset({"Split", "StridedSlice"})
"""Op types that may take joined batches apart."""


def part_of(operands: Operands, joined: Along) -> Along | None:
    """How the result of `operands`, of PARTS, goes along examples, where it is one of the batches that were joined."""
    parts = _parts(joined.joined)
    is_in_order = joined.keeps_apart and not joined.order  # Shuffled rows may have come from the other part.
    if joined.axes != {0} or not is_in_order or len(parts) < 2:
        return None
    if operands.node.op == "Split":
        is_apart = operands.axes(0, operands.ranks[1]) == [0] and operands.node.attr["num_split"].i == len(parts)
        return _part(joined, parts[0]) if is_apart and len(set(parts)) == 1 else None
    return _cut(operands, joined, parts)


def _cut(operands: Operands, joined: Along, parts: list[str]) -> Along | None:
    """The rows up to, or from, the number of rows of the first part on."""
    attr = operands.node.attr
    is_plain = operands.integers(3) == [1] and not any(
        attr[f"{key}_mask"].i for key in ("ellipsis", "new_axis", "shrink_axis")
    )
    if not is_plain:
        return None
    begin, end = (
        "all" if attr[f"{key}_mask"].i else _number(operands, index) for index, key in enumerate(("begin", "end"), 1)
    )
    if begin in ("all", "0") and end == parts[0]:
        return _part(joined, parts[0])
    rest = parts[1] if len(parts) == 2 else ""
    return _part(joined, rest) if rest and begin == parts[0] and end == "all" else None


def _number(operands: Operands, index: int) -> str:
    """A place: 0, or behind how many rows of each example; "": another one."""
    if operands.layouts[index] is REPLICATED:
        return "0" if operands.integers(index) == [0] else ""
    is_number = operands.layouts[index] is SHAPE and operands.leading[index] == 1
    return str(operands.blocks[index] or "") if is_number and operands.blocks else ""


def _part(joined: Along, part: str) -> Along:
    return replace(joined, joined="" if re.fullmatch(r"\d+(@\d+)?", part) else part)


def _parts(joined: str) -> list[str]:
    """What was joined, in order: "(1 (1 1@1))" has the parts "1" and "(1 1@1)"."""
    found, depth = [""], 0
    for letter in joined[1:-1]:
        depth += (letter == "(") - (letter == ")")
        if letter == " " and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found if joined.startswith("(") else []
