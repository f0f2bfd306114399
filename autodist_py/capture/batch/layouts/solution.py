"""What is known once all layouts are found: how gradients, results and writes combine examples, and what differs."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import tensorflow as tf

from autodist_py.capture.batch.layouts.blocks import Blocks
from autodist_py.capture.batch.layouts.choices import CHOICES, Choices
from autodist_py.capture.batch.layouts.constants import Constants
from autodist_py.capture.batch.layouts.followed import Followed
from autodist_py.capture.batch.layouts.regions import Regions, Sources
from autodist_py.capture.batch.layouts.shown import known_values
from autodist_py.capture.batch.layouts.table import OF_ROWS, OF_SHARES, REDUCTIONS, SUMS, Edge, LayoutTable
from autodist_py.kernel.analysis.batch_layout.along import Along
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout, Operands
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import Output


@dataclass(frozen=True)
class Solution:
    """The layouts of all that losses, writes and results are computed from.

    Attributes:
        regions: the ops by what they are for.
        sources: what a replica is given.
        table: the layouts, and what is combined.
        blocks: how many rows each example has.
        choices: which rows, elements and places belong together.
        followed: how results go along examples whose layout does not say it.
        constants: values that are known.
        edges: inputs of ops that replicas combine, and how: those of the table, in the order of their names.
        deltas: ops whose change of a variable replicas add up.
    """

    regions: Regions
    sources: Sources
    table: LayoutTable
    blocks: Blocks
    choices: Choices
    followed: Followed
    constants: Constants
    edges: Mapping[Edge, str]
    deltas: Sequence[str]

    @property
    def varies(self) -> bool:
        """Whether anything differs between replicas."""
        return any(layout is not BatchLayout.REPLICATED for layouts in self.table.found.values() for layout in layouts)

    def gradient_reduction(self, losses: Sequence[str]) -> str:
        """How a gradient of all `losses` together combines examples: "mean", "sum" or, where it is not known, "".

        Back-propagation adds up what has rows.
        """
        kinds = {self.table.known_layout(tensor) for tensor in losses}
        return _reduction({BatchLayout.PARTIAL_SUM if kind in OF_ROWS else kind for kind in kinds})

    def result_reduction(self, tensor: str) -> str:
        """What the result `tensor` does with examples."""
        layout = self.table.layout(tensor)
        if layout is BatchLayout.REPLICATED or self.is_again(tensor):
            return "same"
        if layout is BatchLayout.PARTIAL_SUM_PLUS:
            return ""
        if layout in CHOICES - OF_ROWS:
            raise CaptureError(
                f"result '{tensor}' is made of each replica's own rows: their places in its part of the batch, or "
                "their distinct elements. A loss reads it, too, so it is not computed again for all rows. "
                "Return the mask, or the elements, and compute it outside of the step"
            )
        known = self.table.known_layout(tensor)
        if known is BatchLayout.MIXED and op_of(tensor) not in self.sources.of_examples:
            return "same"  # It is drawn: the first replica's is one device's.
        return "rows" if known is BatchLayout.SHARDED else _reduction({known})

    def is_of_several_batches(self, tensor: str) -> bool:
        """Whether `tensor` has rows of several inputs, one behind the other: not those of replicas in their order."""
        found = self.followed.along_of(op_of(tensor))
        return (
            found is not None and bool(found.axes and found.joined) and self.table.layout(tensor) is BatchLayout.MIXED
        )

    @cached_property
    def _differing(self) -> set[str]:
        return differing(self.regions, self.sources, self.edges)

    def reads_differing(self, op: str, index: int) -> bool:
        """Whether the `index`-th input of `op` differs between replicas as it is read."""
        read = self.regions.graph.nodes[op].input[index]
        return op_of(read) in self._differing and self.edges.get((op, index), "share") in OF_SHARES

    @property
    def loss_region(self) -> Set[str]:
        """The ops that losses are computed by."""
        return self.regions.losses

    @property
    def local(self) -> Sequence[str]:
        """Ops that mix a replica's own examples where one device mixes all."""
        return self.table.local

    def is_combined(self, tensor: str) -> bool:
        """Whether losses read `tensor` combined over replicas."""
        return str(parse(tensor)) in self.table.for_losses

    def layouts_of(self, op: str) -> tuple[BatchLayout, ...]:
        """The layouts of what the op returns."""
        return self.table.found.get(op, (BatchLayout.REPLICATED,))

    def operands(self, node: tf.compat.v1.NodeDef, reads: Sequence[str], layouts: tuple[BatchLayout, ...]) -> Operands:
        """What a rule is told about `node`, whose data inputs `reads` are of these layouts."""
        return self.blocks.operands(node, reads, layouts)

    def along_of(self, tensor: str) -> Along | None:
        """How `tensor`, whose layout does not say it, goes along examples, as far as it was followed."""
        return self.followed.along_of(tensor)

    def layout(self, tensor: str) -> BatchLayout:
        """The layout of `tensor`, but that a loss that cannot be followed is not taken for anything."""
        return self.table.layout_as_followed(tensor)

    def has_rows(self, tensor: str) -> bool:
        """Whether `tensor`, of the loss or what it is computed from, has a row for each of the replica's examples."""
        return self.table.layout(tensor) is BatchLayout.SHARDED

    def seen(self, tensor: str) -> BatchLayout | None:
        """The layout of `tensor`, of the loss, a write or a result, or what they are made of; None: it is not."""
        return self.table.layout(tensor) if op_of(tensor) in self.table.found else None

    def is_read_whole(self, op: str) -> bool:
        """Whether `op` passes a gradient on, or is of a loss, a write or a result, or what they are made of."""
        return op in self.table.found or op in self.regions.markers

    def of_source(self, node: tf.compat.v1.NodeDef) -> tuple[BatchLayout, ...] | None:
        """The layouts of what a replica is given, as its part of the batch; None: `node` computes what it returns."""
        return self.sources.of_source(node)

    def is_everyones(self, tensor: str) -> bool:
        """Whether what is the same on all replicas of a worker is so on all workers: their own batches may differ."""
        return not self.sources.is_local or self.constants.value(tensor) is not None

    def is_random(self, op: str) -> bool:
        """Whether `op` gives another result on each replica though what it reads is equal."""
        return op in self.sources.random

    def known_values(self, graph: GraphView) -> Iterator[Output]:
        """The tensors of `graph` of which it is known what they are for the whole batch, each after what it is of."""
        known = self.table.found.keys() | self.regions.markers
        return known_values(graph, known, self.table.layout, self.regions.tensor_of)

    def is_again(self, tensor: str) -> bool:
        """Whether the result `tensor` must be computed again for all examples."""
        layout = self.table.layout(tensor)
        return layout in (BatchLayout.PARTIAL_SUM_PLUS, BatchLayout.MIXED) and self.table.can_combine(
            "", tensor, layout
        )

    def reduction_again(self, tensor: str) -> str:
        """How `tensor` is combined before something is computed again from it; "": it is the same everywhere."""
        layout = self.table.taken_for(tensor)
        return "" if layout is BatchLayout.REPLICATED else REDUCTIONS[layout]


def _reduction(kinds: Set[BatchLayout]) -> str:
    """How the sum of what is of these kinds combines examples: "mean", "sum" or, where it is not known, ""."""
    if kinds and kinds <= {BatchLayout.PARTIAL_MEAN, BatchLayout.REPLICATED}:
        return "mean"  # So is that of what depends on no example.
    return "sum" if kinds & SUMS and kinds <= SUMS | {BatchLayout.REPLICATED} else ""


def differing(regions: Regions, sources: Sources, edges: Mapping[Edge, str]) -> set[str]:
    """Ops that are computed from what differs between replicas, when what `edges` say is combined."""
    graph = regions.graph

    def differs(op: str, found: Set[str]) -> bool:
        """Whether `op` is a source, or reads, or depends on, one of those `found`."""
        return (
            op in sources.ops
            or not found.isdisjoint(graph.control_flow.unread.get(op, ()))
            or any(
                op_of(read) in found and edges.get((op, index), "share") in OF_SHARES
                for index, read in enumerate(graph.nodes[op].input)
                if not read.startswith("^")
            )
        )

    found: set[str] = set()
    while True:  # What differs in one turn of a loop of TensorFlow 1 does so in the next.
        num_before = len(found)
        for name in graph.dataflow_order(graph.nodes):
            if name not in found and name not in regions.markers and differs(name, found):
                found.add(name)
        if len(found) == num_before or not graph.control_flow.frames:
            return found
