"""What a value is for the whole batch that is one of several, as the loops and branches of TensorFlow 1 choose it."""

from collections.abc import Collection

from autodist_py.kernel.analysis.batch_layout.layouts import (
    COUNT,
    MIXED,
    PARTIAL_MEAN,
    PARTIAL_SUM,
    REPLICATED,
    SHAPE,
    SHARDED,
    BatchLayout,
)


def joined(layouts: Collection[BatchLayout], *, with_zeros: bool = False) -> BatchLayout:
    """The layout of a value that is one of these on all replicas alike.

    Args:
        layouts: what each of them is.
        with_zeros: whether those that are the same everywhere are known to be 0, which is a sum, too.
    """
    kinds = set(layouts)
    if len(kinds) == 1 and kinds <= {REPLICATED, SHARDED, PARTIAL_SUM, PARTIAL_MEAN, COUNT, SHAPE}:
        return kinds.pop()
    if kinds == {REPLICATED, PARTIAL_MEAN}:
        return PARTIAL_MEAN
    if kinds <= {PARTIAL_SUM, COUNT} or (with_zeros and kinds <= {REPLICATED, PARTIAL_SUM, COUNT}):
        return PARTIAL_SUM
    return MIXED


def after_turn(taken: BatchLayout | None, found: BatchLayout) -> BatchLayout:
    """What is taken next for the layout of a value that goes round a loop.

    What is taken, and is found again at the end of a turn that begins with it, holds after any number of turns. After
    one turn that adds a sum to a 0, which is the same everywhere, that it is a sum is yet to be tried.

    Args:
        taken: what it was taken for at the beginning of a turn; None: for what the loop is given.
        found: what it is at the end of the turn then.
    """
    if taken is None:
        return found if joined({found}) is found else PARTIAL_SUM
    after = joined({taken, found})
    return PARTIAL_SUM if after is MIXED and taken is REPLICATED else after
