"""How ops go along examples for which no rule says their layout, and what loops, branches and calls return."""

from collections.abc import Sequence

import tensorflow as tf

from autodist_py.capture.batch.layouts.blocks import Blocks
from autodist_py.capture.batch.layouts.constants import Constants
from autodist_py.capture.batch.layouts.loops import Functions
from autodist_py.capture.batch.layouts.mapped import Argument
from autodist_py.capture.batch.layouts.regions import Regions, Sources
from autodist_py.capture.batch.layouts.table import LayoutTable
from autodist_py.kernel.analysis.batch_layout.along import Along
from autodist_py.kernel.analysis.batch_layout.following import (
    OF_SHAPE,
    UNKNOWN,
    Known,
    followed,
    is_exact,
    known_by,
    of_shape,
)
from autodist_py.kernel.analysis.batch_layout.layouts import FIXED, BatchLayout
from autodist_py.kernel.analysis.batch_layout.lists import LISTS, MAKES, UNSET
from autodist_py.kernel.analysis.batch_layout.rules import is_known
from autodist_py.kernel.ir.control_flow import CONTROL_FLOW
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.ir.node import reads_of

_WHILE = ("StatelessWhile", "While")


class Followed:
    """How the results of ops go along examples whose layout does not say it."""

    def __init__(self, regions: Regions, sources: Sources, table: LayoutTable, blocks: Blocks, constants: Constants):
        self._graph, self._tensor_of = regions.graph, regions.tensor_of
        self._regions, self._sources, self._table, self._blocks = regions, sources, table, blocks
        self._constants, self._functions = constants, Functions()
        self._along: dict[str, Along] = {}

    def begin(self) -> None:
        """Forget what was followed; the functions stay indexed."""
        self._along.clear()

    def layouts_of(self, node: tf.compat.v1.NodeDef) -> tuple[BatchLayout, ...]:
        """The layouts of results for which there is no rule, as far as it is followed how they go along examples.

        Entries of examples need not stand along axis 0 (time-major sequences), nor in their order (two batches, one
        behind the other): what is reduced over them is a sum, or a mean, all the same. An op that is not known, and is
        given rows, and returns as many, is taken to keep them apart, and told of.
        """
        if self._sources.of_source(node) is not None or node.op in CONTROL_FLOW:
            return (BatchLayout.MIXED,)
        reads = reads_of(node)
        in_loss = node.name in self._regions.losses  # All else is computed from what is combined, with all its rows.
        known = self._known(node, reads) if is_known(node.op) or (in_loss and node.op in LISTS) else UNKNOWN
        if known.along is None and not is_known(node.op):
            is_told = in_loss and node.name in self._table.local
            return self._taken_to_keep_apart(node, reads) if is_told else (BatchLayout.MIXED,)
        if known.along is None:
            return (BatchLayout.MIXED,)
        self._along[node.name] = known.along
        own = [self._known_of(node.name, tensor) for tensor in reads]
        if node.name in self._table.local and is_exact(known, node.op, own):
            self._table.local.remove(node.name)
        return (known.layout if in_loss or known.layout in FIXED else BatchLayout.MIXED,)

    def _known(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> Known:
        """What is known of what `node` makes of `reads`, where no rule says its layout."""
        operands = self._blocks.operands(node, reads, tuple(self._table.read(node.name, tensor) for tensor in reads))
        source = self._graph.nodes[op_of(reads[0])]
        if node.op in OF_SHAPE and source.op == "Shape":
            return of_shape(operands, self._known_of(node.name, source.input[0]))
        own = [self._known_of(node.name, tensor) for tensor in reads]
        return followed(operands, own, self._tensor_of(f"{node.name}:0"))

    def _known_of(self, reader: str, tensor: str) -> Known:
        """What is known of `tensor` as `reader` reads it."""
        layout = self._table.read(reader, tensor)
        if layout is BatchLayout.MIXED:
            return Known(layout, self.along_of(tensor))
        is_unset = layout is BatchLayout.REPLICATED and self._graph.nodes[op_of(tensor)].op in MAKES
        return Known(layout, UNSET) if is_unset else known_by(layout)

    def _argument(self, reader: str, tensor: str) -> Argument:
        """What is known of `tensor`, which `reader` gives to a function."""
        known = self._known_of(reader, tensor)
        constant = self._constants.value(tensor) if known.layout is BatchLayout.REPLICATED else None
        return Argument(known, constant, self._blocks.of(tensor))

    def along_of(self, tensor: str) -> Along | None:
        """How `tensor`, whose layout does not say it, goes along examples, as far as it was followed."""
        return self._along.get(str(parse(tensor)), self._along.get(op_of(tensor)))

    def run(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> tuple[BatchLayout, ...]:
        """The layouts of what a loop, branch or call of a loss returns, by what its functions compute; none: unknown.

        A value that nothing reads, as one that is kept for back-propagation, need not be known.
        """
        op = self._tensor_of(f"{node.name}:0").op
        found = self._functions.results(op, [self._argument(node.name, tensor) for tensor in reads])
        if any(one == UNKNOWN and self.is_read(node.name, index) for index, one in enumerate(found)):
            return ()
        along = {str(parse(f"{node.name}:{index}")): one.along for index, one in enumerate(found)}
        self._along |= {name: one for name, one in along.items() if one is not None}
        return tuple(one.layout for one in found)

    def is_read(self, op: str, index: int) -> bool:
        """Whether this result of `op` is a loss or result, or one of these or a write reads it."""
        return self._regions.is_read(f"{op}:{index}", self._regions.region)

    def _taken_to_keep_apart(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> tuple[BatchLayout, ...]:
        """The layouts of what an op of a loss returns that is not known: rows, where it is given as many."""
        layouts = [self._table.read(node.name, tensor) for tensor in reads]
        has_rows = BatchLayout.SHARDED in layouts and set(layouts) <= {BatchLayout.SHARDED, BatchLayout.REPLICATED}
        found = []
        for index, one in enumerate(self._tensor_of(f"{node.name}:0").op.outputs):
            is_given = has_rows
            if node.op in _WHILE:  # What goes round it begins as one of its inputs.
                is_given = layouts[index] is BatchLayout.SHARDED
            elif node.op == "TensorListStack":
                is_given = self._has_one_of_each(reads[0])
            is_batch = one.shape.rank and one.shape[0] is None and one.shape[1:].is_fully_defined()
            is_taken = is_given and is_batch and one.dtype.is_floating
            found.append(BatchLayout.SHARDED if is_taken else BatchLayout.MIXED)
        return tuple(found)

    def _has_one_of_each(self, tensor: str) -> bool:
        """Whether a list that a loop fills has been made for as many tensors as there are examples."""
        name = parse(tensor)
        node = self._graph.nodes[name.op]
        while node.op in ("Identity", *_WHILE):
            name = parse(node.input[name.output if node.op in _WHILE else 0])
            node = self._graph.nodes[name.op]
        return node.op == "TensorListReserve" and self._table.layout(node.input[1]) is BatchLayout.COUNT
