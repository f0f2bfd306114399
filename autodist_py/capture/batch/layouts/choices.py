"""Which rows were chosen, which elements are distinct, and what places are places in: what belongs together."""

from collections.abc import Sequence

import tensorflow as tf

from autodist_py.capture.batch.layouts.blocks import Blocks
from autodist_py.capture.batch.layouts.regions import Regions
from autodist_py.capture.batch.layouts.table import LayoutTable
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout
from autodist_py.kernel.ir.names import op_of
from autodist_py.kernel.ir.node import reads_of

_OF_SETS = frozenset({BatchLayout.UNIQUE, BatchLayout.EACH, BatchLayout.KEYS, BatchLayout.CHOSEN_KEYS})
"""Layouts of what belongs to the distinct elements that one op has found."""
_OF_CHOICES = frozenset(
    {BatchLayout.SELECTED, BatchLayout.SELECTED_INDICES, BatchLayout.CHOSEN_KEYS, BatchLayout.CHOSEN_SHAPE}
)
"""Layouts of what has a row for each of those that one op has chosen."""
CHOICES = _OF_SETS | _OF_CHOICES
"""Layouts of what depends on which rows were chosen, or on which elements there are."""
_FILLS = "SparseFillEmptyRows"
_CHOOSES = frozenset({"Where", _FILLS})
_FINDS = frozenset({"Unique", "UniqueWithCounts"})
_TAKES = frozenset({"GatherNd", "GatherV2", "ResourceGather"})
_ON_PLACES = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "StridedSlice"})


class Choices:
    """The choices of rows, sets of elements, and places, that each op returns something of.

    Attributes:
        sets: the op whose distinct elements these ops return, or what belongs to them.
        places: what the places that these ops return are places in: rows, or a shape that begins with their number.
        ending: ops of losses that return rows up to the last one with an entry, and what has all rows.
    """

    def __init__(self, regions: Regions, table: LayoutTable, blocks: Blocks):
        self._graph, self._table, self._blocks = regions.graph, table, blocks
        self._choices: dict[str, str] = {}
        """The op that has chosen the rows that these ops return, or their places."""
        self.sets: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self.ending: dict[str, str] = {}

    def begin(self) -> None:
        """Forget which ops of losses were found to end early."""
        self.ending.clear()

    def note(self, node: tf.compat.v1.NodeDef) -> None:
        """Note which rows, distinct elements or places `node` returns something of."""
        reads = reads_of(node)
        chosen = {node.name} if node.op in _CHOOSES else self._chosen_by(node)
        found = {node.name} if node.op in _FINDS else {self.sets.get(op_of(name), "") for name in self._of_sets(reads)}
        places = {op_of(name) for name in reads if self._table.layout(name) is BatchLayout.SELECTED_INDICES}
        if node.op == "Where":
            self.places[node.name] = reads[0]
        elif node.op == "SparseReshape":
            self.places[node.name] = f"{node.name}:1"
        elif places:
            first = op_of(reads[0])
            self.places[node.name] = self.places.get(first if first in places else places.pop(), node.name)
        if len(chosen) == 1:
            self._choices[node.name] = chosen.pop()
        if len(found) == 1:
            self.sets[node.name] = found.pop()

    def _of_sets(self, reads: Sequence[str]) -> list[str]:
        return [name for name in reads if self._table.layout(name) in _OF_SETS]

    def _chosen_by(self, node: tf.compat.v1.NodeDef) -> set[str]:
        """The ops that have chosen the rows, or places of rows, that `node` returns; itself for what is not known."""
        reads = reads_of(node)
        if self._takes(node) and self._table.layout(reads[0]) in _OF_CHOICES:
            reads = reads[1:]  # Chosen once more.
        return {self._choices.get(op_of(name), node.name) for name in reads if self._table.layout(name) in _OF_CHOICES}

    def _takes(self, node: tf.compat.v1.NodeDef) -> bool:
        """Whether `node` takes rows by their places."""
        return node.op in _TAKES and self._table.layout(node.input[1]) is BatchLayout.SELECTED_INDICES

    def belong_together(self, node: tf.compat.v1.NodeDef, reads: Sequence[str], layouts: Sequence[BatchLayout]) -> bool:
        """Whether what `node` reads of chosen rows, of distinct elements or of places is of the same ones."""
        if len(self._chosen_by(node)) > 1 or len({self.sets.get(op_of(name)) for name in self._of_sets(reads)}) > 1:
            return False
        of_places = [name for name, one in zip(reads, layouts, strict=True) if one is BatchLayout.SELECTED_INDICES]
        of_rows = [name for name, one in zip(reads, layouts, strict=True) if one is BatchLayout.SHARDED]
        if self._takes(node) and layouts[0] in _OF_CHOICES:
            return self._chosen_in(op_of(reads[1])) == self._choices.get(op_of(reads[0]), node.name)
        if any(self._chosen_in(op_of(name)) for name in of_places) and node.op not in _ON_PLACES:
            return False
        blocks = {self._blocks.of(tensor) for tensor in (*of_places, *of_rows)}
        return not (of_places and of_rows) or (len(blocks) == 1 and None not in blocks)

    def _chosen_in(self, op: str) -> str:
        """The op that has chosen the rows in which the places that `op` returns are; "": they are in all rows."""
        source = self.places.get(op)
        is_chosen = source is not None and self._table.layout(source) is BatchLayout.SELECTED
        return self._choices.get(op_of(source), op) if source is not None and is_chosen else ""

    def note_ending(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> None:
        """Note that `node` may return fewer rows than there are, as not each is known to have an entry."""
        places = op_of(reads[-1])
        chosen = self._graph.nodes[self._choices[places]]
        if chosen.op != _FILLS:
            self.ending[node.name] = self.places[places]
