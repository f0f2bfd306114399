"""What back-propagation computes from shapes, and what is the same for every number of examples."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from autodist_py.capture.batch.layouts.constants import Constants
from autodist_py.capture.batch.whole_batch.known_shapes import BATCH, KnownShapes
from autodist_py.kernel.analysis.batch_layout.layouts import MIXED, REPLICATED, SHAPE, BatchLayout
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import parse
from autodist_py.kernel.ir.node import reads_of

FROM_SHAPES = frozenset({"BroadcastGradientArgs", "ConcatOffset"})
"""Op types that read shapes alone, and of which `Shapes` knows the results."""


class Layouts(Protocol):
    """What is known of tensors."""

    def layout(self, tensor: str) -> BatchLayout:
        """The layout of `tensor`."""

    def is_whole(self, tensor: str) -> bool:
        """Whether a size in `tensor` may depend on the batch, and be that of the whole one."""

    def axis(self, tensor: str) -> int | None:
        """The axis of `tensor` along which there is one entry for each of a replica's rows; None: it is not known."""


class Shapes:
    """Results that follow from shapes whose first size is the number of a replica's rows.

    Args:
        graph: the graph.
        shapes: what is known of its tensors' shapes.
        layouts: what is known of their layouts.
        constants: the values that are known; it is given what ops return whatever the number of rows.

    Attributes:
        given: sizes in shapes that the graph does not say, `BATCH` for that of the rows.
    """

    def __init__(self, graph: GraphView, shapes: KnownShapes, layouts: Layouts, constants: Constants):
        self._graph, self._shapes, self._layouts, self._constants = graph, shapes, layouts, constants
        self.given: dict[str, tuple[int, ...]] = {}

    def note(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> bool:
        """Note what `node` computes from shapes, whatever the number of rows, and whether it is known."""
        found = self._found(node, reads)
        self._constants.given |= {str(parse(f"{node.name}:{index}")): value for index, value in enumerate(found)}
        return bool(found)

    def _found(self, node: tf.compat.v1.NodeDef, reads: Sequence[str]) -> list[np.ndarray]:
        if node.op == "BroadcastGradientArgs":
            shapes = list(map(self.sizes, reads))
            known = [shape for shape in shapes if shape is not None]
            return _reduced(*known) if len(known) == len(shapes) else []
        if node.op == "Sub":
            return self._difference(reads)
        if node.op != "ConcatOffset":
            return []
        axis, shapes = self._constants.value(reads[0]), list(map(self.sizes, reads[1:]))
        known = [shape for shape in shapes if shape is not None]
        if axis is None or len(known) < len(shapes):
            return []
        place = int(axis) % len(known[0])
        sizes = [shape[place] for shape in known]
        if BATCH in sizes:
            return []
        offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        return [np.array([offset if at == place else 0 for at in range(len(known[0]))]) for offset in offsets]

    def _difference(self, reads: Sequence[str]) -> list[np.ndarray]:
        """By how much two shapes differ, as in the gradient of a slice: along the rows not at all."""
        if self._layouts.layout(reads[0]) is not SHAPE or self._layouts.layout(reads[1]) is not SHAPE:
            return []
        first, second = map(self.sizes, reads)
        if first is None or second is None or len(first) != len(second):
            return []
        pairs = list(zip(first, second, strict=True))
        if any(BATCH in pair and pair[0] != pair[1] for pair in pairs):
            return []
        return [np.array([one - other for one, other in pairs])]

    def sizes(self, tensor: str) -> list[int] | None:
        """The sizes in the shape `tensor`, or the one that it is, `BATCH` for that of the rows; None: not all known."""
        if self._layouts.layout(tensor) not in (REPLICATED, SHAPE, MIXED) or self._layouts.is_whole(tensor):
            return None
        name = parse(tensor)
        if str(name) in self.given:
            return list(self.given[str(name)])
        value = self._constants.value(tensor)
        if value is not None:
            return [int(size) for size in value.flat] if value.ndim <= 1 and not (value < 0).any() else None
        node = self._graph.nodes[name.op]
        if node.op == "StridedSlice":
            return self._sliced(node)
        if node.op == "DynamicStitch":
            return self._stitched(node)
        if node.op == "GatherV2":
            return self._gathered(node)
        if node.op == "Slice":
            return self._cut(node)
        if node.op not in ("Shape", "ShapeN"):
            return None
        shape = self._shapes.of(node.input[name.output])
        if shape.rank is None:
            return None
        sizes, axis = shape.as_list(), self._layouts.axis(node.input[name.output])
        if axis is not None and sizes[axis] is None:
            sizes[axis] = BATCH
        return None if None in sizes else sizes

    def _cut(self, node: tf.compat.v1.NodeDef) -> list[int] | None:
        whole, begin, size = self.sizes(node.input[0]), *map(self._constants.value, node.input[1:3])
        if whole is None or begin is None or size is None:
            return None
        first, count = int(begin[0]), int(size[0])
        return whole[first : None if count < 0 else first + count]

    def _gathered(self, node: tf.compat.v1.NodeDef) -> list[int] | None:
        whole, places = self.sizes(node.input[0]), self._constants.value(node.input[1])
        return None if whole is None or places is None else [whole[place] for place in places.flat]

    def _sliced(self, node: tf.compat.v1.NodeDef) -> list[int] | None:
        whole, masks = self.sizes(node.input[0]), node.attr
        begin, end, stride = (self._constants.value(name) for name in node.input[1:4])
        is_plain = not any(masks[f"{key}_mask"].i for key in ("ellipsis", "new_axis", "shrink_axis"))
        if whole is None or begin is None or end is None or stride is None or not is_plain:
            return None
        first = None if masks["begin_mask"].i else int(begin[0])
        last = None if masks["end_mask"].i else int(end[0])
        return whole[first : last : int(stride[0])]

    def _stitched(self, node: tf.compat.v1.NodeDef) -> list[int] | None:
        reads = reads_of(node)
        sizes: dict[int, int] = {}
        for at, read in zip(reads[: len(reads) // 2], reads[len(reads) // 2 :], strict=True):
            places, given = self.sizes(at), self.sizes(read)
            if places is None or given is None:
                return None
            sizes |= dict(zip(places, given, strict=True))
        return [sizes[place] for place in sorted(sizes)] if sizes.keys() == set(range(len(sizes))) else None


def _reduced(first: Sequence[int], second: Sequence[int]) -> list[np.ndarray]:
    """The axes over which the gradient of each of two that were broadcast is summed, as BroadcastGradientArgs says.

    A single row is as one of several: a sum over it changes nothing.
    """
    rank = max(len(first), len(second))
    shapes = [[1] * (rank - len(shape)) + list(shape) for shape in (first, second)]
    missing = [rank - len(shape) for shape in (first, second)]
    if any(BATCH in pair and pair[0] != pair[1] and 1 not in pair for pair in zip(*shapes, strict=True)):
        return []
    return [
        np.array([at for at in range(rank) if at < skipped or (own[at] == 1 and other[at] != 1)], np.int32)
        for own, other, skipped in zip(shapes, reversed(shapes), missing, strict=True)
    ]
