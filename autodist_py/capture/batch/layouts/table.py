"""The layouts that are found so far, and what the readers of each tensor are given of it.

Whether a value may be combined depends on the layouts, and the layouts on what is combined: one table has both.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf

from autodist_py.capture.batch.layouts.regions import Layers, Regions, Sources
from autodist_py.capture.recording.layers import LayerCall
from autodist_py.kernel.analysis.batch_layout.layouts import FIXED, BatchLayout
from autodist_py.kernel.analysis.batch_layout.rules import is_known
from autodist_py.kernel.collectives.collectives import CARRIED
from autodist_py.kernel.collectives.reductions import SUMMED
from autodist_py.kernel.collectives.rows import TRAVELS
from autodist_py.kernel.ir.names import op_of, parse

AGAIN = "again"
"""Not combined by one reduction, but computed again, from what is combined."""

OF_SHARES = frozenset({"share", "part"})
"""How what a loss reads is combined, and then taken times the replica's share of the examples."""

OF_ROWS = frozenset({BatchLayout.SHARDED, BatchLayout.SELECTED})
SUMS = frozenset({BatchLayout.PARTIAL_SUM, BatchLayout.COUNT, BatchLayout.PARTIAL_SUM_PLUS})
REDUCTIONS = {
    BatchLayout.PARTIAL_SUM: "sum",
    BatchLayout.COUNT: "sum",
    BatchLayout.PARTIAL_MEAN: "mean",
    BatchLayout.SHARDED: "rows",
    BatchLayout.SELECTED: "rows",
    BatchLayout.PARTIAL_SUM_PLUS: AGAIN,
    BatchLayout.MIXED: AGAIN,
}

Edge = tuple[str, int]
"""An op and the position of one of its inputs."""


class Read(NamedTuple):
    """One data input of an op."""

    position: int
    tensor: str
    layout: BatchLayout


def wanted_of(reads: Sequence[str], layouts: Sequence[BatchLayout]) -> list[Read]:
    """The data inputs that differ between replicas."""
    return [
        Read(index, tensor, layout)
        for index, (tensor, layout) in enumerate(zip(reads, layouts, strict=True))
        if layout is not BatchLayout.REPLICATED
    ]


class LayoutTable:
    """What is known so far, and what is combined.

    Attributes:
        found: the layouts of what each op returns.
        terms: terms of losses that are not known, and what they are taken for where anything but a loss reads them.
        for_losses: tensors that the losses, and back-propagation, read combined, and how.
        shared: of these, the ones that only losses which cannot be followed read.
        edges: inputs of other ops that are combined, and how.
        local: ops that mix a replica's own examples where one device mixes all.
    """

    def __init__(self, regions: Regions, sources: Sources, layers: Layers):
        self._graph, self._tensor_of = regions.graph, regions.tensor_of
        self._regions, self._sources, self._layers = regions, sources, layers
        self.found: dict[str, tuple[BatchLayout, ...]] = {}
        self.terms: dict[str, BatchLayout] = {}
        self.for_losses: dict[str, str] = {}
        self.shared: set[str] = set()
        self.edges: dict[Edge, str] = {}
        self.local: list[str] = []

    def begin(self) -> None:
        """Forget what the ops were found to be, but not what the losses are given."""
        self.found.clear()
        self.edges.clear()
        self.local.clear()

    def read(self, reader: str, tensor: str) -> BatchLayout:
        """The layout of `tensor` as `reader` reads it."""
        combined = self.for_losses.get(str(parse(tensor))) if reader in self._regions.trains else None
        if combined is not None:
            return BatchLayout.COUNT if combined in OF_SHARES else BatchLayout.REPLICATED
        return self.layout(tensor) if reader in self._regions.losses else self.taken_for(tensor)

    def taken_for(self, tensor: str) -> BatchLayout:
        """The layout of `tensor` for all but losses: a term of one that is not known is taken for what that is."""
        layout = self.layout(tensor)
        return self.terms.get(str(parse(tensor)), layout) if layout is BatchLayout.MIXED else layout

    def layout(self, tensor: str) -> BatchLayout:
        """The layout of `tensor`: of a loss that cannot be followed, what it is taken for."""
        layout, name = self.known_layout(tensor), str(parse(tensor))
        if layout is not BatchLayout.MIXED:
            return layout
        is_fixed = name in self._regions.assumed and self._tensor_of(name).shape.is_fully_defined()
        if is_fixed and not self.can_compute_again(op_of(name)):
            return self._regions.assumed[name]  # As the user is told: see `inexact.inexact`.
        return BatchLayout.SHARDED if self._is_of_row_wise_layer(name) else layout

    def _keeps_apart(self, call: LayerCall | None) -> bool:
        """Whether a layer keeps examples apart, as it does if what it is given does."""
        return (
            call is not None
            and all(self.layout(read) in (BatchLayout.SHARDED, BatchLayout.REPLICATED) for read in call.reads)
            and all(self.layout(read) is BatchLayout.REPLICATED for read in call.shared)
        )

    def layout_as_followed(self, tensor: str) -> BatchLayout:
        """The layout of `tensor`, but that a loss that cannot be followed is not taken for anything."""
        layout = self.known_layout(tensor)
        is_apart = layout is BatchLayout.MIXED and self._is_of_row_wise_layer(str(parse(tensor)))
        return BatchLayout.SHARDED if is_apart else layout

    def is_in_row_wise_layer(self, op: str) -> bool:
        """Whether `op` is a part of a layer that keeps examples apart."""
        return self._keeps_apart(self._layers.inside.get(op))

    def _is_of_row_wise_layer(self, tensor: str) -> bool:
        return self._keeps_apart(self._layers.results.get(tensor))

    def known_layout(self, tensor: str) -> BatchLayout:
        """The layout of `tensor`, as far as its graph shows."""
        name = parse(tensor)
        layouts = self.found.get(name.op, (BatchLayout.REPLICATED,))
        return layouts[name.output if len(layouts) > 1 else 0]

    def combine(self, reader: str, wanted: Iterable[Read]) -> None:
        """Let `reader` be given combined what is wanted."""
        for position, tensor, layout in wanted:
            if reader in self._regions.losses:
                self.for_losses[str(parse(tensor))] = REDUCTIONS[layout]
            else:
                self.edges[reader, position] = REDUCTIONS[layout]

    def can_combine_all(self, reader: str, wanted: Iterable[Read]) -> bool:
        """Whether `reader` gives one device's result when all that is wanted is combined."""
        return reader not in self._sources.random and all(
            self.can_combine(reader, one.tensor, one.layout) for one in wanted
        )

    def can_combine(self, reader: str, tensor: str, layout: BatchLayout) -> bool:
        """Whether `reader` may be given the combined `tensor`, which is of this layout on each replica.

        Replicas would wait for one another for what is combined in loops and branches of TensorFlow 1.
        """
        if not self._graph.control_flow.runs_once(op_of(tensor)):
            return False
        if reader in self._regions.losses and (layout in OF_ROWS or op_of(tensor) in self._regions.trained):
            return False
        name = str(parse(tensor))
        if reader in self._regions.losses and (name in self.shared or self.for_losses.get(name) == "part"):
            return False
        shape, dtype = self._tensor_of(tensor).shape, self._tensor_of(tensor).dtype
        if layout in (BatchLayout.PARTIAL_SUM_PLUS, BatchLayout.MIXED):
            return reader not in self._regions.losses and self.can_compute_again(op_of(tensor))
        if dtype not in (TRAVELS if layout is BatchLayout.SHARDED else SUMMED) or shape.rank is None:
            return False
        if reader in self._regions.losses and not dtype.is_floating and not self.is_uncarried_cast(reader):
            return False  # A size or an index: it is of the replica's own rows.
        if layout in OF_ROWS:
            return bool(shape[1:].is_fully_defined())
        return layout in FIXED and bool(shape.is_fully_defined())

    def can_compute_again(self, op: str) -> bool:
        """Whether what a loss is computed by can be computed of all examples too, beside the replica's own value."""
        node = self._graph.nodes[op]
        if op not in self._regions.losses or op in self._sources.random or not is_known(node.op):
            return False
        if not self._graph.control_flow.runs_once(op):
            return False
        reads = [(tensor, self.taken_for(tensor)) for tensor in node.input if not tensor.startswith("^")]
        return all(
            layout is BatchLayout.REPLICATED or (layout not in OF_ROWS and self.can_combine("", tensor, layout))
            for tensor, layout in reads
        )

    def is_uncarried_cast(self, op: str) -> bool:
        """Whether `op` is a cast to a type that collectives do not carry, as of how many numbers are drawn."""
        node = self._graph.nodes.get(op)
        return node is not None and node.op == "Cast" and tf.as_dtype(node.attr["DstT"].type) not in CARRIED
