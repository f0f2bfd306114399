"""Custom gradients of the user's: whether a replica's, computed of its own examples, are parts of one device's.

What TensorFlow derives is the transpose of what was computed, so that it keeps examples apart wherever that does. A
custom gradient is what the user wrote. It must give each example a gradient that is made of this example's alone, and
a weight the sum over examples. It is followed op by op, as losses are (`mixing.py`), from the gradients of the
function's results, which go along examples as the results do, to those of its arguments.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from autodist_py.capture.batch.layouts.beside import Beside
from autodist_py.capture.batch.layouts.solution import Solution
from autodist_py.capture.batch.linearity import OF_WEIGHTS, linear_groups
from autodist_py.capture.batch.mixing import ONLY_SHAPES, Mixing
from autodist_py.capture.recording.gradients import CustomGradient
from autodist_py.kernel.analysis.batch_layout.along import (
    BY_POOLED,
    EVERYWHERE,
    ROW_BY_ROW,
    Along,
    Found,
    Mixture,
    along,
    of_layout,
)
from autodist_py.kernel.analysis.batch_layout.arithmetic import ADDITIVE, ELEMENTWISE
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout, Operands
from autodist_py.kernel.analysis.batch_layout.rules import layout_of
from autodist_py.kernel.ir.graph import GraphView, functions_of
from autodist_py.kernel.ir.names import op_of, parse

_BY_ELEMENT = frozenset(
    {
        *(*ELEMENTWISE, "Add", "AddN", "AddV2", "Cast", "CheckNumerics", "Const", "Div", "DivNoNan", "EnsureShape"),
        *("Identity", "Maximum", "Minimum", "Mul", "Neg", "OnesLike", "PreventGradient", "RealDiv", "StopGradient"),
        *("Sub", "ZerosLike"),
    }
)
"""Op types that compute each element of what they are given by itself, whatever that is."""
_OF_OTHERS = Mixture("gives an example a gradient that is made of other examples'")
_OF_MEAN = Mixture("gives a weight the mean over examples where it must be their sum, or the other way round")
_OF_NUMBER = Mixture("gives an example a gradient that is divided by the number of examples, or not, as it must be")
_REPEATS = frozenset({"BroadcastTo", "Tile"})
_PRODUCTS = frozenset({"BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul", "Mul", "MulNoNan"})
_QUOTIENTS = frozenset({"Div", "DivNoNan", "RealDiv"})


class Judged(NamedTuple):
    """An op of a custom gradient that mixes examples; or, without a reason, one that is not followed."""

    op: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CustomGradients:
    """What custom gradients make of what examples pass back.

    Attributes:
        graph: of the ops that are needed.
        solution: the layouts of the forward pass.
        mixing: how that goes along the examples.
        tensor_of: a tensor by its name.
        needed: the ops that the gradients are made of.
        drawn: those whose results each replica draws anew, for back-propagation alone, and what is made of them.
        beside: the layouts of what is computed for back-propagation, and not from gradients.
        passed_back: how gradients go along examples by the name of their op, as far as back-propagation shows it.
    """

    graph: GraphView
    solution: Solution
    mixing: Mixing
    tensor_of: Callable[[str], tf.Tensor]
    needed: Collection[str]
    drawn: Collection[str]
    beside: Beside
    passed_back: Mapping[str, Along | None]

    def judged(self, custom: CustomGradient) -> Iterator[Judged]:
        """The ops by which it is no part of one device's, or of which that is not seen."""
        if custom.in_body:
            if custom.reads_others or not custom.ops <= _BY_ELEMENT:
                types = custom.ops - {"Placeholder"}
                yield from (Judged(name) for name in self.passed_back if types <= self._types_in(name))
            return
        needed = [name for name in custom.returned if op_of(name) in self.needed]
        if not needed:
            return
        results = [self.mixing.read(name) if name else None for name in custom.results]
        given = {name: self._begun(name, result) for name, result in zip(custom.given, results, strict=True) if name}
        walk = _Walk(self, given)
        walk.visit(needed)
        if walk.mixtures:
            yield from walk.mixtures
            return
        yield from walk.unseen
        for argument, returned in zip(custom.arguments, custom.returned, strict=False):
            if returned in needed and not walk.is_zero(returned):
                own = self.mixing.read(argument) if argument else EVERYWHERE
                yield from walk.compared(ROW_BY_ROW if returned in custom.sparse else own, returned, results)

    def _types_in(self, name: str) -> set[str]:
        """The types of the ops that a loop, branch or call runs, however deep in it."""
        types, reached = set[str](), set[str]()
        pending = [function for _, function in functions_of(self.graph.nodes[name])]
        while pending:
            function = pending.pop()
            if function not in reached and function in self.graph.library:
                reached.add(function)
                nodes = self.graph.library[function].node_def
                types |= {node.op for node in nodes}
                pending += [inner for node in nodes for _, inner in functions_of(node)]
        return types

    def _begun(self, name: str, result: Along | None) -> Along | None:
        """How the gradient of a result goes along examples."""
        if result is None or (result.pools and result.axes):
            return None
        return self.passed_back.get(op_of(name)) if result.is_same else EVERYWHERE if result.is_pooled else result


class _Walk:
    """How the ops between the gradients that are given and those that are returned go along examples."""

    def __init__(self, of: CustomGradients, given: Mapping[str, Along | None]):
        self._of = of
        self._given = {str(parse(name)): begun for name, begun in given.items()}
        self._found: dict[str, Along | None] = {}
        self._layouts: dict[str, BatchLayout] = {}
        self._region: set[str] = set()
        self._of_shapes: set[str] = set()
        self._made_of_given: set[str] = set()
        self._powers: dict[str, int | None] = {}
        self.mixtures: list[Judged] = []
        self.unseen: list[Judged] = []

    def visit(self, returned: Collection[str]) -> None:
        """Follow all ops that the `returned` tensors are made of."""
        graph = self._of.graph
        begins = {op_of(name) for name in self._given} & graph.nodes.keys()
        ends = {op_of(name) for name in returned} - begins
        needed = graph.dataflow_ancestors(ends)
        of_given = graph.dataflow_descendants(begins) & needed
        alone = {name for name, layout in self._of.beside.found.items() if layout is not BatchLayout.REPLICATED}
        self._region = (of_given | (alone & needed)) - begins
        for name in graph.dataflow_order(self._region):
            self._follow(name)

    def _follow(self, name: str) -> None:
        """Follow one op; what it reads of the region has been followed."""
        node = self._of.graph.nodes[name]
        reads = [str(parse(read)) for read in node.input if not read.startswith("^")]
        found = tuple(map(self.read, reads))
        layouts = tuple(map(self._layout, reads))
        made = [self._is_made_of_given(tensor) for tensor in reads]
        if any(made) and node.op in _PRODUCTS | _QUOTIENTS:  # What numbers of examples do is in the powers.
            found = tuple(EVERYWHERE if one is not None and one.counts else one for one in found)
            layouts = tuple(BatchLayout.REPLICATED if one is BatchLayout.COUNT else one for one in layouts)
        operands = self._of.solution.operands(node, reads, layouts)
        if node.op in ONLY_SHAPES or self._is_of_shapes(reads):
            self._of_shapes.add(name)
            layout = layout_of(operands)
            self._layouts[name] = BatchLayout.MIXED if isinstance(layout, tuple) else layout
            self._found[name] = of_layout(self._layouts[name])
            self._powers[name] = int(self._layouts[name] is BatchLayout.COUNT)
            return
        if any(made):
            self._made_of_given.add(name)
        if node.op in ADDITIVE | {"Sub"} and any(made):
            others = [one for one, is_made in zip(found, made, strict=True) if not is_made]
            if any(one is None or one.pools for one in others):
                self.unseen.append(Judged(name))
        if node.op in _REPEATS and found[0] == EVERYWHERE and layouts[1] is not BatchLayout.REPLICATED:
            result: Found = ROW_BY_ROW if layouts[1] is BatchLayout.SHAPE else None
        else:
            result = along(operands, found)
        if isinstance(result, Mixture):
            self.mixtures.append(Judged(name, str(result)))
        self._found[name] = result if isinstance(result, Along) else self._by_layout(operands)
        self._layouts[name] = _layout_along(self._found[name])
        self._powers[name] = self._power(node, reads, found[0] if found else None)

    def compared(self, own: Along | None, returned: str, results: Sequence[Along | None]) -> Iterator[Judged]:
        """Whether the gradient of an argument goes along examples as the argument does, `own`."""
        op, found, power = op_of(returned), self.read(returned), self._power_of(returned)
        kinds = {None if one is None else one.is_pooled and not one.adds for one in results}
        wanted = None if len(kinds) > 1 or None in kinds else -1 if True in kinds else 0
        if own is None or found is None or found.counts or not self._is_made_of_given(returned):
            yield Judged(op)
        elif own.is_pooled:  # Of a mean, say, as its own result is.
            yield from () if found.is_same and power == 0 else (Judged(op),)
        elif own.axes and found.pools:
            yield Judged(op, BY_POOLED if found.axes else _OF_OTHERS)
        elif own.axes and not found.is_same and (found.axes != own.axes or found.order != own.order):
            yield Judged(op, _OF_OTHERS)
        elif power is None or wanted is None or found.both or (found != own if own.axes else found.axes):
            yield Judged(op)
        elif power != wanted:
            yield Judged(op, _OF_MEAN if own.is_same else _OF_NUMBER)

    def is_zero(self, tensor: str) -> bool:
        """Whether it is seen that `tensor` is 0."""
        node, value = self._of.graph.nodes[op_of(tensor)], self._of.graph.constant(tensor)
        if node.op in ("BroadcastTo", "Fill"):
            value = self._of.graph.constant(node.input[0 if node.op == "BroadcastTo" else 1])
        return node.op == "ZerosLike" or (value is not None and not np.any(value))

    def _is_made_of_given(self, tensor: str) -> bool:
        """Whether its numbers depend on what was given."""
        return str(parse(tensor)) in self._given or op_of(tensor) in self._made_of_given

    def _power_of(self, tensor: str) -> int | None:
        """By which power of a replica's number of examples it is multiplied; None: that is not seen."""
        if op_of(tensor) in self._region and str(parse(tensor)) not in self._given:
            return self._powers.get(op_of(tensor))
        if self._layout(tensor) is not BatchLayout.COUNT:
            return 0
        return None if self._of.solution.is_combined(tensor) else 1

    def _power(self, node: tf.compat.v1.NodeDef, reads: Sequence[str], first: Along | None) -> int | None:
        """Likewise of what an op makes of these."""
        powers = [self._power_of(tensor) for tensor in reads]
        known = [power for power in powers if power is not None]
        if len(known) < len(powers):
            return None
        if node.op in _PRODUCTS:
            return sum(known)
        if node.op in _QUOTIENTS:
            return known[0] - known[1]
        if not any(known):
            made = self._found[node.name]
            over_examples = first is not None and made is not None and len(made.axes) < len(first.axes)
            return -1 if node.op == "Mean" and over_examples else 0
        for group in linear_groups(node) if node.op != "Mean" else ():
            inside = {known[index] for index in group}
            if len(inside) == 1 and not any(power for index, power in enumerate(known) if index not in group):
                return inside.pop()
        return None

    def _by_layout(self, operands: Operands) -> Along | None:
        """How the result goes along examples as far as its layout says it."""
        if BatchLayout.MIXED in operands.layouts:
            return None
        if operands.node.op in OF_WEIGHTS and set(operands.layouts) <= {BatchLayout.SHARDED, BatchLayout.REPLICATED}:
            return Along(pools=True, adds=True)
        layout = layout_of(operands)
        return None if isinstance(layout, tuple) else of_layout(layout)

    def _is_of_shapes(self, reads: Sequence[str]) -> bool:
        """Whether what is read of the region are shapes and sizes alone."""
        own = {op_of(tensor) for tensor in reads if tensor in self._given or op_of(tensor) in self._region}
        return bool(own) and own <= self._of_shapes

    def read(self, tensor: str) -> Along | None:
        """How a tensor goes along examples."""
        if str(parse(tensor)) in self._given:
            return self._given[str(parse(tensor))]
        if op_of(tensor) in self._region:
            return self._found.get(op_of(tensor))  # None: it comes round a loop of TensorFlow 1.
        of = self._of
        if op_of(tensor) in of.passed_back or self._is_drawn(tensor):
            return None  # It comes of what is passed back to somewhere else.
        if of.solution.seen(tensor) is not None or of.solution.is_combined(tensor):
            return of.mixing.read(tensor)
        return of_layout(self._layout(tensor))

    def _is_drawn(self, tensor: str) -> bool:
        """Whether each replica draws it anew, and not for each example."""
        of = self._of
        is_fixed = op_of(tensor) in of.drawn and of.solution.seen(tensor) is None
        return is_fixed and of.tensor_of(f"{op_of(tensor)}:0").shape.is_fully_defined()

    def _layout(self, tensor: str) -> BatchLayout:
        if tensor in self._given:
            return _layout_along(self._given[tensor])
        if op_of(tensor) in self._region:
            return self._layouts.get(op_of(tensor), BatchLayout.MIXED)
        if op_of(tensor) in self._of.passed_back or self._is_drawn(tensor):
            return BatchLayout.MIXED
        return self._of.beside.layout(tensor)


def _layout_along(found: Along | None) -> BatchLayout:
    """The layout of what goes along examples so."""
    if found is None or found.counts:
        return BatchLayout.MIXED
    if found.is_same:
        return BatchLayout.REPLICATED
    if found.is_pooled and not found.both:
        return BatchLayout.PARTIAL_SUM if found.adds else BatchLayout.PARTIAL_MEAN
    return BatchLayout.SHARDED if found == ROW_BY_ROW else BatchLayout.MIXED
