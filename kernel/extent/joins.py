"""What a value is for the whole batch that is one of several, as the loops and branches of TensorFlow 1 choose it."""

from collections.abc import Collection

from autodist_py.kernel.extent.values import COUNT, MEAN, OTHER, ROWS, SAME, SHAPE, SUM, Extent


def joined(extents: Collection[Extent], *, with_zeros: bool = False) -> Extent:
    """The extent of a value that is one of these on all replicas alike.

    Args:
        extents: what each of them is.
        with_zeros: whether those that are the same everywhere are known to be 0, which is a sum, too.
    """
    kinds = set(extents)
    if len(kinds) == 1 and kinds <= {SAME, ROWS, SUM, MEAN, COUNT, SHAPE}:
        return kinds.pop()
    if kinds == {SAME, MEAN}:
        return MEAN
    if kinds <= {SUM, COUNT} or (with_zeros and kinds <= {SAME, SUM, COUNT}):
        return SUM
    return OTHER


def after_turn(taken: Extent | None, found: Extent) -> Extent:
    """What is taken next for the extent of a value that goes round a loop.

    What is taken, and is found again at the end of a turn that begins with it, holds after any number of turns. After
    one turn that adds a sum to a 0, which is the same everywhere, that it is a sum is yet to be tried.

    Args:
        taken: what it was taken for at the beginning of a turn; None: for what the loop is given.
        found: what it is at the end of the turn then.
    """
    if taken is None:
        return found if joined({found}) is found else SUM
    after = joined({taken, found})
    return SUM if after is OTHER and taken is SAME else after
