"""Gradients as products of two matrices, whose rows are those of the batch: `Product`, and its factors."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import tensorflow as tf


@dataclass(frozen=True, slots=True)
class Factor:
    """A matrix that a gradient is a product of: each replica has rows of its own, most often those of its examples.

    Those that have the same source, width and type have the same rows.

    Attributes:
        source: the tensor whose numbers it has, in whatever shape.
        width: the size of a row.
        dtype: of its numbers.
        is_weighted: whether its rows are weighted, as the replica counts.
        tensor: the matrix itself.
        op: an op that reads it.
        position: as which of its inputs.
    """

    source: str
    width: int
    dtype: tf.DType
    is_weighted: bool
    tensor: str = field(compare=False)
    op: str = field(compare=False)
    position: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class Product:
    """What a gradient is made of: `leftᵀ · right`; without a left factor the sum of the rows of `right`.

    `rows` is how many rows they have on a replica for the first batch; None: not known.
    """

    left: Factor | None
    right: Factor
    rows: int | None

    @property
    def factors(self) -> tuple[Factor, ...]:
        """Those that there are."""
        return (self.right,) if self.left is None else (self.left, self.right)


def factor_bytes(products: Iterable[Product]) -> int:
    """The bytes of the distinct factors that a replica has for the first batch, as far as that is known."""
    rows = {factor: product.rows or 0 for product in products for factor in product.factors}
    return sum(count * factor.width * factor.dtype.size for factor, count in rows.items())
