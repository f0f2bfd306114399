"""How a tensor depends on a replica's examples, and what a rule is told about an op."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import tensorflow as tf


class Extent(Enum):
    """What the value for the whole batch is, from the values on the replicas."""

    SAME = "same"
    """Equal on all replicas, and to that of one device."""
    ROWS = "rows"
    """The replicas' values one after the other along axis 0."""
    SUM = "sum"
    """Their sum; the shape is fixed."""
    MEAN = "mean"
    """Their mean, weighted by examples; the shape is fixed."""
    COUNT = "count"
    """Their sum; on each replica the number of its examples, times a factor that is the same everywhere."""
    SHAPE = "shape"
    """A vector that begins with a COUNT; the rest is the same everywhere."""
    PLUS = "plus"
    """Their sum, but what does not depend on examples, a term of each, is counted once; the shape is fixed."""
    CHOSEN = "chosen"
    """As rows, but which of the batch's rows they are, and so how many, depends on what is in them."""
    PLACES = "places"
    """Where chosen rows stand among the rows of the replica's part of the batch."""
    DISTINCT = "distinct"
    """The distinct elements of the replicas' values one after the other, in the order in which they first occur."""
    OTHER = "other"
    """Not known."""


SAME, ROWS, SUM, MEAN, COUNT, SHAPE, PLUS, CHOSEN, PLACES, DISTINCT, OTHER = Extent
FIXED = frozenset({SUM, MEAN, COUNT})
"""Extents of values that can be combined by one reduction."""

Rule = Callable[["Operands"], Extent | tuple[Extent, ...]]


@dataclass(frozen=True)
class Operands:
    """One op, and what is known of its data inputs."""

    node: tf.compat.v1.NodeDef
    extents: tuple[Extent, ...]
    ranks: tuple[int | None, ...]
    leading: tuple[int | None, ...]
    """The static size of each input's first dimension; None where it is unknown."""
    row: tuple[int | None, ...] | None
    """The static shape of one row of the first input, as far as it is known."""
    constants: tuple[np.ndarray | None, ...]
    block: int | None = None
    """How many rows of the first input each example has; None where it is not known."""

    def integers(self, index: int) -> list[int] | None:
        """The constant input `index` as integers; None where it is no constant."""
        value = self.constants[index] if -len(self.constants) <= index < len(self.constants) else None
        return None if value is None else [int(one) for one in np.reshape(value, [-1])]

    def axes(self, index: int, rank: int | None) -> list[int] | None:
        """The constant input `index` as axes of a tensor of `rank`, counted from 0; None where they are not known."""
        values = self.integers(index)
        if values is None or (rank is None and any(value < 0 for value in values)):
            return None
        return [value + (rank or 0) if value < 0 else value for value in values]

    @property
    def aligned(self) -> bool:
        """Whether broadcasting keeps the rows of all inputs that have rows along axis 0, and nothing else there."""
        ranks = [rank for rank in self.ranks if rank is not None]
        if len(ranks) < len(self.ranks):
            return False
        return max(ranks) > 0 and all(
            own == max(ranks) if extent in (ROWS, CHOSEN) else own < max(ranks) or size == 1
            for extent, own, size in zip(self.extents, ranks, self.leading, strict=True)
        )
