"""Layouts of what is computed for back-propagation alone, beside what losses, writes and results are made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from autodist_py.capture.batch.layouts.solution import Solution
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout
from autodist_py.kernel.analysis.batch_layout.rules import layout_of
from autodist_py.kernel.ir.names import op_of


@dataclass(slots=True)
class Beside:
    """What back-propagation reads that is not made of what is passed back.

    Attributes:
        solution: the layouts of the forward pass.
        found: those of ops that are none of it.
    """

    solution: Solution
    found: dict[str, BatchLayout] = field(default_factory=dict)

    def visit(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> None:
        """Find the layout of what `node` makes of `reads`, which have been visited."""
        if self.solution.seen(node.name) is not None:
            return
        own = tuple(map(self.layout, reads))
        result = BatchLayout.REPLICATED
        if any(layout is not BatchLayout.REPLICATED for layout in own):
            made = layout_of(self.solution.operands(node, reads, own))
            result = BatchLayout.MIXED if isinstance(made, tuple) else made
        self.found[node.name] = result

    def layout(self, tensor: str) -> BatchLayout:
        """The layout of `tensor`, as back-propagation reads it."""
        if self.solution.is_combined(tensor):
            return BatchLayout.REPLICATED
        seen = self.solution.seen(tensor)
        return self.found.get(op_of(tensor), BatchLayout.REPLICATED) if seen is None else seen
