"""How many rows each example has in what an op returns, and what the rules of layouts are told."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import tensorflow as tf

from autodist_py.capture.batch.layouts.constants import Constants
from autodist_py.capture.batch.layouts.loops import RUNS
from autodist_py.capture.batch.layouts.regions import Sources
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout, Block, Operands
from autodist_py.kernel.ir.names import parse
from autodist_py.kernel.ir.node import reads_of

_WITH_BLOCKS = frozenset(
    {
        BatchLayout.SHARDED,
        BatchLayout.TAILED,
        BatchLayout.SELECTED_INDICES,
        BatchLayout.KEYS,
        BatchLayout.SHAPE,
        BatchLayout.COUNT,
    }
)
"""Layouts of what has a number of rows for each example, or tells it."""
_FROM_SHAPE = frozenset(
    {
        *("Cast", "ConcatV2", "DynamicStitch", "GatherV2", "Identity", "Pack", "Prod", "Shape", "ShapeN", "Slice"),
        *("SparseReshape", "StridedSlice"),
    }
)
"""Op types that pass on with how many rows of each example a shape begins, where what they return has one."""


class Layouts(Protocol):
    """What is known of the layouts of tensors, and of what each op returns."""

    @property
    def found(self) -> Mapping[str, tuple[BatchLayout, ...]]:
        """The layouts of what each op returns."""

    def layout(self, tensor: str) -> BatchLayout:
        """The layout of `tensor`."""


class Blocks:
    """The rows of each example: a sequence that is flattened has as many as it is long."""

    def __init__(self, tensor_of: Callable[[str], tf.Tensor], sources: Sources, table: Layouts, constants: Constants):
        self._tensor_of, self._sources, self._table, self._constants = tensor_of, sources, table, constants
        self._found: dict[str, Block | None] = {}
        self._given: dict[str, Block | None] = {}

    def of(self, tensor: str) -> Block | None:
        """How many rows each example has in `tensor`, or in what that is the shape of; None: not known."""
        name = parse(tensor)
        if str(name) in self._sources.rows:
            return Block(1, self._sources.rows[str(name)])
        op = self._tensor_of(tensor).op if name.output else None
        if op is not None and op.type == "ShapeN":
            return self.of(op.inputs[name.output].name)
        return self._found.get(name.op)

    def give(self, op: str, block: Block | None) -> None:
        """Take it for what is told, whatever `op` reads."""
        self._given[op] = block

    def forget_given(self) -> None:
        """Find them again by what ops read."""
        self._given.clear()

    def note(self, node: tf.compat.v1.NodeDef) -> None:
        """Find them for `node`, whose layouts are known."""
        self._found[node.name] = self._given[node.name] if node.name in self._given else self._block(node)

    def _block(self, node: tf.compat.v1.NodeDef) -> Block | None:
        """How many rows each example has in what `node` computes, or in what that is the shape of; None: not known."""
        if node.name in self._sources.ops:
            return self._sources.block_of(node.name, map(self.of, reads_of(node)))
        layout = self._table.found[node.name][0]
        if layout in (BatchLayout.SHAPE, BatchLayout.COUNT) and node.op not in _FROM_SHAPE:
            return None
        reads = [name for name in node.input if not name.startswith("^") and self._table.layout(name) in _WITH_BLOCKS]
        if node.op in ("Reshape", "SparseReshape") and reads and self._table.layout(reads[-1]) is BatchLayout.SHAPE:
            return self.of(reads[-1])
        known = (block for name in reads if (block := self.of(name)) is not None)
        if node.op == "Merge" or node.op in RUNS:
            blocks = set(map(self.of, reads))
            return blocks.pop() if len(blocks) == 1 else None
        block = next(known, None)
        if node.op == "Prod" and block is not None and self._tensor_of(node.input[0]).shape != [1]:
            first, *others = self._constants.sizes(node.input[0]) or (0,)
            fixed = [size for size in others if size is not None]
            is_known = first is None and fixed == others
            return block._replace(rows=block.rows * math.prod(fixed)) if is_known else None
        if node.op != "Reshape" or block is None:
            return block
        sizes = [self._tensor_of(name).shape[1:].num_elements() for name in (node.input[0], f"{node.name}:0")]
        whole = [size for size in sizes if size]
        is_known = len(whole) == 2 and not block.rows * whole[0] % whole[1]
        return block._replace(rows=block.rows * whole[0] // whole[1]) if is_known else None

    def operands(self, node: tf.compat.v1.NodeDef, reads: Sequence[str], layouts: tuple[BatchLayout, ...]) -> Operands:
        """What a rule is told about `node`, whose data inputs `reads` are of these layouts."""
        return Operands.of(
            node,
            [self._tensor_of(tensor) for tensor in reads],
            layouts,
            [
                self._constants.value(tensor) if layout is BatchLayout.REPLICATED else None
                for tensor, layout in zip(reads, layouts, strict=True)
            ],
            [
                self.of(tensor) if layout in _WITH_BLOCKS else None
                for tensor, layout in zip(reads, layouts, strict=True)
            ],
        )
