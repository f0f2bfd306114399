"""Shapes in which sizes stand before the number of examples, and what is reshaped to them, as `tf.tensordot` does.

So is what is put into them, the gradient of `tf.gather_nd`.

Before → after, of `x` with a row of 6 for each example, and `turned`, its transpose:

    tf.stack([2, tf.shape(x)[0]]) → a shape, with 2 before the number of examples
    tf.reshape(turned, tf.stack([6, tf.shape(x)[0]])) → examples along axis 1
    tf.reshape(turned, tf.stack([2, 3, tf.shape(x)[0]])) → examples along axis 2
    tf.reshape(turned, tf.stack([2, tf.shape(x)[0], 3])) → not known: it puts several examples into one row
"""

import math
from dataclasses import replace

from autodist_py.kernel.analysis.batch_layout.along import NUMBER, Along
from autodist_py.kernel.analysis.batch_layout.layouts import COUNT, REPLICATED, SHAPE, BatchLayout, Operands

SIZED = frozenset({"ConcatV2", "Pack", "Reshape", "ScatterNd"})
"""Op types that `along_sizes` knows."""


def along_sizes(operands: Operands, reads: tuple[Along | None, ...]) -> Along | None:
    """How the result of `operands`, of SIZED, goes along examples, where a shape says it; None: it does not."""
    return {"Reshape": _reshaped, "ScatterNd": _scattered}.get(operands.node.op, _shape)(operands, reads)


def _shape(operands: Operands, reads: tuple[Along | None, ...]) -> Along | None:
    """A shape that is made of sizes, of which one is the number of examples, times a constant."""
    is_list = operands.node.op == "Pack"
    num_parts = len(reads) if is_list else len(reads) - 1
    numbers = [index for index in range(num_parts) if operands.layouts[index] is not REPLICATED]
    if len(numbers) != 1 or set(operands.ranks[:num_parts]) != {0 if is_list else 1}:
        return None
    begins = _before(operands.layouts[numbers[0]], reads[numbers[0]])
    sizes = [operands.integers(index) for index in range(numbers[0])]
    if begins is None or None in sizes:
        return None
    return replace(NUMBER, before=(*(size for part in sizes if part is not None for size in part), *begins))


def _reshaped(operands: Operands, reads: tuple[Along | None, ...]) -> Along | None:
    """As many elements stand before an example's in the result as before: so its own stay together."""
    value, before = reads[0], _before(operands.layouts[1], reads[1])
    if value is None or before is None or len(value.axes) != 1 or operands.row is None:
        return None
    (axis,) = value.axes
    outer = (operands.leading[0], *operands.row)[:axis]
    is_of_each = value.keeps_apart or (value.pools and not (value.chosen or value.uneven))
    if not is_of_each or value.others or value.joined or None in outer:
        return None
    is_alike = math.prod(size for size in outer if size is not None) == math.prod(before)
    return replace(value, axes=frozenset({len(before)})) if is_alike else None


def _scattered(operands: Operands, reads: tuple[Along | None, ...]) -> Along | None:
    """Entries that are put by their places along the first axes, which are not those of the examples."""
    places, value, before = reads[0], reads[1], _before(operands.layouts[2], reads[2])
    rank, depth = operands.ranks[0], operands.shapes[0][-1] if operands.ranks[0] else None
    if places is None or value is None or before is None or rank is None or depth is None:
        return None
    is_of_each = value.keeps_apart and not value.others and not value.joined and min(value.axes) >= rank - 1
    axes = frozenset(axis - (rank - 1) + depth for axis in value.axes)
    return replace(value, axes=axes) if places.is_same and is_of_each and axes == {len(before)} else None


def _before(layout: BatchLayout, read: Along | None) -> tuple[int, ...] | None:
    """The sizes that stand before the number of examples; None: they are not known."""
    if layout in (COUNT, SHAPE):
        return ()
    return None if read is None else read.before
