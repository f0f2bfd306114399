"""How a tensor depends on a replica's examples, and what a rule is told about an op."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import tensorflow as tf


class BatchLayout(Enum):
    """What the value for the whole batch is, from the values on the replicas."""

    REPLICATED = "same"
    """Equal on all replicas, and to that of one device."""
    SHARDED = "rows"
    """The replicas' values one after the other along axis 0."""
    PARTIAL_SUM = "sum"
    """Their sum; the shape is fixed."""
    PARTIAL_MEAN = "mean"
    """Their mean, weighted by examples; the shape is fixed."""
    COUNT = "count"
    """Their sum; on each replica the number of its examples, times a factor that is the same everywhere."""
    SHAPE = "shape"
    """A vector that begins with a COUNT; the rest is the same everywhere."""
    PARTIAL_SUM_PLUS = "plus"
    """Their sum, but what does not depend on examples, a term of each, is counted once; the shape is fixed."""
    SELECTED = "chosen"
    """As rows, but which of the batch's rows they are, and so how many, depends on what is in them."""
    SELECTED_INDICES = "places"
    """Where chosen rows stand: among the rows of the replica's part of the batch, or among those chosen before."""
    UNIQUE = "distinct"
    """The distinct elements of the replicas' values one after the other, in the order in which they first occur."""
    EACH = "each"
    """A row for each of the distinct elements, which depends on that element alone."""
    KEYS = "keys"
    """For each row, where its element stands among the distinct ones."""
    CHOSEN_KEYS = "chosen keys"
    """Likewise for each chosen row."""
    CHOSEN_SHAPE = "chosen shape"
    """A vector that begins with the number of chosen rows; the rest is the same everywhere."""
    TAILED = "tailed"
    """As rows, and after them some that are the same everywhere."""
    MIXED = "other"
    """Not known."""


(
    REPLICATED,
    SHARDED,
    PARTIAL_SUM,
    PARTIAL_MEAN,
    COUNT,
    SHAPE,
    PARTIAL_SUM_PLUS,
    SELECTED,
    SELECTED_INDICES,
    UNIQUE,
    EACH,
    KEYS,
    CHOSEN_KEYS,
    *_REST,
) = BatchLayout
CHOSEN_SHAPE, TAILED, MIXED = _REST
FIXED = frozenset({PARTIAL_SUM, PARTIAL_MEAN, COUNT})
"""Layouts of values that can be combined by one reduction."""

_DRAWN = ("RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal")
_STATELESS = ("Normal", "NormalV2", "Uniform", "UniformInt", "UniformIntV2", "UniformV2")
TAKES_SHAPE: Mapping[str, int] = {
    **dict.fromkeys(("AvgPool3DGrad", "AvgPoolGrad", "Fill", "StridedSliceGrad", *_DRAWN), 0),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"), 0),
    **{f"StatelessRandom{kind}": 0 for kind in _STATELESS},
    **dict.fromkeys(("StatelessTruncatedNormal", "StatelessTruncatedNormalV2"), 0),
    **dict.fromkeys(("BroadcastTo", "Reshape", "SparseReshape", "SparseToDense", "Tile"), 1),
    **dict.fromkeys(("Slice", "SparseFillEmptyRows", "SparseTensorDenseMatMul"), 2),
}
"""Op types that return rows, as many as a shape says that they are given; and which of their inputs it is.

To all others the sizes in a shape are numbers to compute with: those of the whole batch.
"""

Rule = Callable[["Operands"], BatchLayout | tuple[BatchLayout, ...]]


class Block(NamedTuple):
    """How many rows each example has, and of which batch it is: batches may have several numbers of examples."""

    rows: int
    batch: int = 0

    def __str__(self) -> str:
        return f"{self.rows}@{self.batch}" if self.batch else str(self.rows)


@dataclass(frozen=True)
class Operands:
    """One op, and what is known of its data inputs."""

    node: tf.compat.v1.NodeDef
    layouts: tuple[BatchLayout, ...]
    ranks: tuple[int | None, ...]
    leading: tuple[int | None, ...]
    """The static size of each input's first dimension; None where it is unknown."""
    row: tuple[int | None, ...] | None
    """The static shape of one row of the first input, as far as it is known."""
    constants: tuple[np.ndarray | None, ...]
    blocks: tuple[Block | None, ...] = ()
    """How many rows of each input, or of what it has the shape of, or places in, each example has; None: not known."""
    shapes: tuple[tf.TensorShape, ...] = ()
    """The static shape of each input."""

    @classmethod
    def of(
        cls,
        node: tf.compat.v1.NodeDef,
        symbols: Sequence[tf.Tensor],
        layouts: Sequence[BatchLayout],
        constants: Sequence[np.ndarray | None],
        blocks: Sequence[Block | None] = (),
    ) -> "Operands":
        """What a rule is told about `node`, whose data inputs are `symbols`: of these only shapes are asked."""
        shapes = [symbol.shape for symbol in symbols]
        row = shapes[0][1:] if shapes and shapes[0].rank else tf.TensorShape(None)
        return cls(
            node=node,
            layouts=tuple(layouts),
            ranks=tuple(shape.rank for shape in shapes),
            leading=tuple(shape[0] if shape.rank else None for shape in shapes),
            row=tuple(row.as_list()) if row.rank is not None else None,
            constants=tuple(constants),
            blocks=tuple(blocks),
            shapes=tuple(shapes),
        )

    @property
    def block(self) -> int | None:
        """How many rows of the first input each example has; None where it is not known."""
        return self.blocks[0].rows if self.blocks and self.blocks[0] and self.layouts[0] is SHARDED else None

    def has_one_row(self, index: int) -> bool:
        """Whether each example has one row of that input, or of what it tells the size of."""
        block = self.blocks[index]
        return block is not None and block.rows == 1

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
            own == max(ranks) if layout in (SHARDED, SELECTED) else own < max(ranks) or size == 1
            for layout, own, size in zip(self.layouts, ranks, self.leading, strict=True)
        )
