"""What has a replica's own examples, but not along axis 0: in lists, along other axes, through loops and branches.

Such a value is followed from the op that begins it to where its examples stand along axis 0 again, or are added up. No
message carries one. Where an op is not known to keep its examples apart, all ops that began it are computed of the
whole batch instead.

Before → after, of a recurrent layer:

    sequence = Transpose(x)        → a time-major one, with the examples along axis 1
    states = While(sequence, w)    → followed through a turn: a list of rows
    dw = While_grad(states, dy)    → a part of a sum
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import tensorflow as tf

from autodist_py.capture.batch.layouts.blocks import Blocks
from autodist_py.capture.batch.layouts.constants import Constants
from autodist_py.capture.batch.layouts.loops import PASSES, REORDERS, RUNS
from autodist_py.capture.batch.whole_batch.bodies import Bodies
from autodist_py.capture.batch.whole_batch.held import EMPTY, MAKES, NOTHING, SAME, Held, on_lists, placed
from autodist_py.capture.batch.whole_batch.known_shapes import BATCH
from autodist_py.capture.batch.whole_batch.shapes import FROM_SHAPES, Shapes
from autodist_py.kernel.analysis.batch_layout.along import EVERYWHERE, NUMBER, ROW_BY_ROW
from autodist_py.kernel.analysis.batch_layout.following import (
    OF_SHAPE,
    UNKNOWN,
    Known,
    followed,
    is_exact,
    known_by,
    of_shape,
)
from autodist_py.kernel.analysis.batch_layout.layouts import (
    COUNT,
    MIXED,
    PARTIAL_SUM_PLUS,
    REPLICATED,
    SHAPE,
    SHARDED,
    BatchLayout,
    Operands,
)
from autodist_py.kernel.analysis.batch_layout.rules import is_known
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.ir.node import reads_of

_SLICE_GRADIENT = "StridedSliceGrad"
_OF_OTHER_ROWS = frozenset({"ConcatV2", "Reshape", "Shape", "Tile"})
"""Op types that may return another number of rows for each example than they are given."""

_OF_SIZES = frozenset({"DynamicStitch", "GatherV2", "Shape", "Slice", "StridedSlice"})
"""Op types whose results may be sizes in a shape."""
_SAME_NUMBERS = frozenset({"BroadcastTo", "Identity", "Reshape", "Tile", "ZerosLike"})
"""Op types whose results are 0 if their first input is."""


class Elsewhere:
    """What is known of the tensors whose layout is MIXED.

    Args:
        graph: the program's, or a function's.
        tensor_of: a tensor of it by its name.
        blocks: how many rows each example has.
        shapes: what is known of sizes in shapes.
        constants: the values that are known.
        bodies: what ops that run functions return.
        is_function: whether the graph is a function's, which a loop may run again and again.

    Attributes:
        kept_whole: the ops that began what was not followed to its end.
    """

    def __init__(
        self,
        graph: GraphView,
        tensor_of: Callable[[str], tf.Tensor],
        blocks: Blocks,
        shapes: Shapes,
        constants: Constants,
        bodies: Bodies,
        *,
        is_function: bool,
    ):
        self._graph, self._tensor_of, self._blocks = graph, tensor_of, blocks
        self._shapes, self._constants, self._bodies = shapes, constants, bodies
        self._is_function = is_function
        self._held: dict[str, Held] = {}
        self._begun: dict[str, frozenset[str]] = {}
        self.kept_whole: set[str] = set()

    def begin(self) -> None:
        """Forget what was followed, but for what was so in vain."""
        self._held.clear()
        self._begun.clear()
        self._shapes.given.clear()
        self._blocks.forget_given()

    def note(self, op: str, results: Sequence[Held]) -> None:
        """Take what `op` returns for these."""
        for index, held in enumerate(results):
            tensor = str(parse(f"{op}:{index}"))
            self._held[tensor] = held
            if held.sizes is not None:
                self._shapes.given[tensor] = held.sizes
        blocks = {held.block for held in results if held.layout is not REPLICATED and held.element is None}
        self._blocks.give(op, blocks.pop() if len(blocks) == 1 else None)

    def of(self, tensor: str, layout: BatchLayout) -> Held:
        """What is known of `tensor`, which is read with this layout."""
        if layout is MIXED:
            return self._held.get(str(parse(tensor)), Held(MIXED))
        symbol, source = self._tensor_of(tensor), self._graph.nodes[op_of(tensor)]
        while source.op in PASSES:
            source = self._graph.nodes[op_of(source.input[0])]
        if symbol.dtype == tf.variant:
            return EMPTY if source.op in MAKES else Held(MIXED, element=SAME)
        if source.op == "FakeParam":
            return NOTHING
        is_list = symbol.shape.rank == 1 and symbol.dtype.is_integer
        sizes = self._shapes.sizes(tensor) if is_list else None
        known = tuple(sizes) if sizes else None
        if layout is REPLICATED:
            return Held(layout, sizes=known, is_zero=self._is_zero(tensor))
        return Held(layout, sizes=known, block=self._blocks.of(tensor))

    def give_up(self, reads: Iterable[str]) -> None:
        """Let what began these be computed of the whole batch."""
        for read in reads:
            self.kept_whole |= self._begun.get(op_of(read), frozenset())

    def follow(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], operands: Operands
    ) -> tuple[BatchLayout, ...] | None:
        """The layouts of what `node` returns, if its examples are followed through it; None: they are not."""
        given = [self.of(read, layout) for read, layout in zip(reads, operands.layouts, strict=True)]
        if not all(one.is_known for one in given):
            return None
        if node.op in RUNS:
            found = self._bodies.run(self._tensor_of(f"{node.name}:0").op, given)
        else:
            found = self._computed(node, reads, given, operands)
        if found is None or not all(one.is_known for one in found):
            return None
        if node.op in RUNS and any(one.layout is PARTIAL_SUM_PLUS for one in found):
            return None  # Of its terms outside, some would be counted once, and some for each replica.
        begun = {op for read in reads for op in self._begun.get(op_of(read), ())}
        self._begun[node.name] = frozenset(begun | {node.name})
        self.note(node.name, found)
        return tuple(one.layout for one in found)

    def _computed(
        self, node: tf.compat.v1.NodeDef, reads: Sequence[str], given: Sequence[Held], operands: Operands
    ) -> list[Held] | None:
        symbols = list(self._tensor_of(f"{node.name}:0").op.outputs)
        if node.op in PASSES:
            return [given[0]]
        if self._is_function and node.op in REORDERS:
            return None  # Another turn's order is another one, under the same name.
        if any(one.element is not None for one in given) or symbols[0].dtype == tf.variant:
            return on_lists(node.op, given, symbols)
        if node.op in FROM_SHAPES:
            return [SAME] * len(symbols) if self._shapes.note(node, reads) else None
        if node.op in _OF_SIZES and (sizes := self._shapes.sizes(f"{node.name}:0")) is not None:
            return [self._sized(sizes, symbols[0])] if sizes.count(BATCH) <= 1 else None
        if node.op == "BroadcastTo":
            return self._broadcast(given, operands, symbols[0])
        if not is_known(node.op) and node.op != _SLICE_GRADIENT:
            return None
        own = [Known(MIXED, one.along) if one.layout is MIXED else known_by(one.layout) for one in given]
        source = self._graph.nodes[op_of(reads[0])]
        if node.op == _SLICE_GRADIENT and source.op == "Shape":
            found = self._sliced_from(node, source.input[0], operands, own)
        elif node.op in OF_SHAPE and source.op == "Shape":
            found = of_shape(operands, self._known(source.input[0]))
        else:
            found = followed(operands, own, symbols[0])
        if found.along is None or not is_exact(found, node.op, own):
            return None
        blocks = {one.block for one in given if one.layout is SHARDED or one.along is not None}
        block = blocks.pop() if len(blocks) == 1 and node.op not in _OF_OTHER_ROWS else None
        return [placed(found.layout, found.along, symbol, block) for symbol in symbols]

    def _sized(self, sizes: Sequence[int], symbol: tf.Tensor) -> Held:
        """What a tensor of these sizes is: a number, a shape, or sizes that stand before the number of rows."""
        if symbol.shape.rank != 1:
            return Held(COUNT if BATCH in sizes else REPLICATED)
        if BATCH not in sizes[1:]:
            return Held(SHAPE if BATCH in sizes else REPLICATED, sizes=tuple(sizes))
        before = tuple(sizes[: sizes.index(BATCH)])
        return Held(MIXED, replace(NUMBER, before=before), sizes=tuple(sizes))

    def _broadcast(self, given: Sequence[Held], operands: Operands, symbol: tf.Tensor) -> list[Held] | None:
        """What is broadcast to a shape in which the size of the rows is not the first."""
        value, shape = given
        if shape.sizes is None or shape.sizes.count(BATCH) != 1 or operands.ranks[0] is None:
            return None
        place = shape.sizes.index(BATCH)
        along = replace(EVERYWHERE, axes=frozenset({place}))
        further = len(shape.sizes) - operands.ranks[0]
        own = ROW_BY_ROW if value.layout is SHARDED else value.along
        if value.layout is REPLICATED:
            size = 1 if place < further else (operands.leading[0], *(operands.row or ()))[place - further]
            return [placed(MIXED, along, symbol)] if size == 1 else None
        is_alike = own is not None and own.keeps_apart and own.axes == {place - further}
        return [placed(MIXED, replace(own, axes=along.axes), symbol, value.block)] if own and is_alike else None

    def _sliced_from(self, node: tf.compat.v1.NodeDef, whole: str, operands: Operands, reads: Sequence[Known]) -> Known:
        """The gradient of what was sliced: it is as that, if the slice is as the slice's gradient."""
        forward, known = copy.deepcopy(node), self._known(whole)
        forward.op = "StridedSlice"
        symbols = [self._tensor_of(tensor) for tensor in (whole, *reads_of(node)[1:-1])]
        layouts = [known.layout, *operands.layouts[1:-1]]
        of_forward = Operands.of(forward, symbols, layouts, [None, *operands.constants[1:-1]])
        sliced = followed(of_forward, [known, *reads[1:-1]], self._tensor_of(reads_of(node)[-1]))
        return known if sliced == reads[-1] else UNKNOWN

    def _known(self, tensor: str) -> Known:
        held = self._held.get(str(parse(tensor)))
        return Known(MIXED, None if held is None else held.along)

    def _is_zero(self, tensor: str) -> bool:
        """Whether `tensor` is surely 0."""
        node = self._graph.nodes[op_of(tensor)]
        while node.op in _SAME_NUMBERS:
            if node.op == "ZerosLike":
                return True
            tensor = node.input[0]
            node = self._graph.nodes[op_of(tensor)]
        noted = self._held.get(str(parse(tensor)))
        if noted is not None and noted.is_zero:
            return True
        value = self._constants.value(reads_of(node)[1] if node.op == "Fill" else f"{node.name}:0")
        return value is not None and value.dtype.kind in "fiu" and not value.any()
