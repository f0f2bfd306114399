"""Which sums and means over examples are combined where they are made, not what is computed from them.

A mean may be read by a square, by a difference and by a moving average: once combined it serves all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autodist_py.capture.batch.whole_batch.known_shapes import KnownShapes
from autodist_py.kernel.analysis.batch_layout.layouts import FIXED, PARTIAL_MEAN, PARTIAL_SUM, BatchLayout
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.ir.node import reads_of


@dataclass(frozen=True, slots=True)
class Early:
    """The sums and means that are read combined, as layouts that were found say it.

    Attributes:
        graph: the program's.
        found: the layouts of what each op returns.
        layout: that of a tensor.
        edges: the inputs that are read combined, and how.
        shapes: what is known of shapes.
    """

    graph: GraphView
    found: Mapping[str, tuple[BatchLayout, ...]]
    layout: Callable[[str], BatchLayout]
    edges: Mapping[tuple[str, int], str]
    shapes: KnownShapes

    def made_by(self) -> set[str]:
        """The ops that make what is smaller than all that is computed from it, and combined."""
        derived: dict[str, set[str]] = {}
        for (op, index), reduction in self.edges.items():
            tensor = str(parse(self.graph.nodes[op].input[index]))
            if reduction in ("sum", "mean") and (origin := self._origin(tensor)):
                derived.setdefault(origin, set()).add(tensor)
        return {
            origin
            for origin, tensors in derived.items()
            if self.shapes.of(f"{origin}:0").is_fully_defined()
            and self._size(f"{origin}:0") <= sum(map(self._size, tensors))
        }

    def _size(self, tensor: str) -> int:
        return self.shapes.of(tensor).num_elements() or 0

    def _origin(self, tensor: str) -> str:
        """The op that makes the one sum, or mean, over examples that `tensor` is computed of; "": there are several."""
        op = op_of(tensor)
        while True:
            reads = reads_of(self.graph.nodes[op])
            if self.layout(f"{op}:0") not in (PARTIAL_SUM, PARTIAL_MEAN) or len(self.found[op]) > 1:
                return ""
            parts = {op_of(name) for at, name in enumerate(reads) if self._is_part(op, at, name)}
            if not parts:
                return op
            if len(parts) > 1:
                return ""
            (op,) = parts

    def _is_part(self, op: str, index: int, tensor: str) -> bool:
        """Whether `op` reads a part of a sum, or mean, as such."""
        return self.layout(tensor) in FIXED and (op, index) not in self.edges
