"""What loops, branches and calls make of what they are given: the layouts of what their functions compute.

A loop over time keeps examples apart if each of its turns does. What goes round is taken for what the loop is given;
where a turn returns something else, for what is both; until a turn returns what it was taken for. All replicas must go
round equally often, so what ends the loop must be the same on all. What is not known here is left to be told of.

Four cases of what goes round:

1. It stays what it was: rows of the batch, a counter, a weight.
2. A list that is filled, one element a turn: as its elements are.
3. A sum over examples that is added to 0, or a mean that is added to what is the same everywhere.
4. Anything else: not known, and so is what is computed from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import tensorflow as tf

from autodist_py.capture import tf_adapter
from autodist_py.capture.batch.layouts.constants import Constants
from autodist_py.capture.batch.layouts.mapped import Argument, Body, mapped
from autodist_py.kernel.analysis.batch_layout.following import (
    OF_SHAPE,
    SAME,
    UNKNOWN,
    Known,
    followed,
    known_by,
    of_shape,
)
from autodist_py.kernel.analysis.batch_layout.joins import joined
from autodist_py.kernel.analysis.batch_layout.layouts import FIXED, BatchLayout, Operands
from autodist_py.kernel.analysis.batch_layout.lists import MAKES, UNSET
from autodist_py.kernel.analysis.batch_layout.rules import layout_of
from autodist_py.kernel.ir.dataflow import random_ops
from autodist_py.kernel.ir.graph import READS_VARIABLE, RUNS_BRANCH, SEEDED_RANDOM, GraphView
from autodist_py.kernel.ir.names import parse

LOOPS = frozenset({"StatelessWhile", "While"})
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
RUNS = LOOPS | RUNS_BRANCH | _CALLS
"""Op types that run library functions, which are followed into."""

_FOLLOWED = frozenset(
    {
        BatchLayout.REPLICATED,
        BatchLayout.SHARDED,
        BatchLayout.COUNT,
        BatchLayout.SHAPE,
        BatchLayout.PARTIAL_MEAN,
        BatchLayout.PARTIAL_SUM,
        BatchLayout.PARTIAL_SUM_PLUS,
    }
)
"""Layouts that are followed into functions: chosen rows and distinct elements are not."""
_APART = frozenset({BatchLayout.REPLICATED, BatchLayout.SHARDED, BatchLayout.SHAPE})
"""Layouts of inputs that, where the result has rows, say nothing of other replicas' examples."""
PASSES = frozenset({"Identity", "StopGradient"})
"""Op types that return what they are given."""
REORDERS = frozenset({"RandomShuffle", "Roll"})
"""Op types that put examples into an order that has their name, and another one in each turn of a loop."""
NORMALIZES = frozenset({"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"})
"""Op types that, in training, normalize the examples that they are given by one another."""
_READS = READS_VARIABLE | {"Identity", "LookupTableFindV2"}
"""Op types that are given a resource, and change nothing."""


@dataclass
class Function:
    """A library function, as it is followed.

    Attributes:
        graph: what it computes, with its `inputs` and `outputs`.
    """

    graph: tf.Graph

    @cached_property
    def view(self) -> GraphView:
        """Its graph, indexed."""
        return GraphView(self.graph.as_graph_def())

    def tensor(self, name: str) -> tf.Tensor:
        """A tensor of it by its name, as a NodeDef spells it."""
        tensor = parse(name)
        return self.graph.get_tensor_by_name(f"{tensor.op}:{tensor.output}")

    @cached_property
    def ops(self) -> list[tf.Operation]:
        """In the order in which they can be computed."""
        return [self.graph.get_operation_by_name(name) for name in self.view.dataflow_order(self.view.nodes)]

    @cached_property
    def live(self) -> set[str]:
        """The names of the ops that its results come of, or that do something beside."""
        ends = {symbol.op.name for symbol in self.graph.outputs}
        ends |= {op.name for op in self.graph.get_operations() if op.op_def.is_stateful or not op.outputs}
        return self.view.dataflow_ancestors(ends)

    @cached_property
    def constants(self) -> Constants:
        """The values in it that are known."""
        return Constants(self.view, self.tensor)

    @cached_property
    def random(self) -> set[str]:
        """The names of its ops that draw."""
        return random_ops(self.view)

    @cached_property
    def on_resources(self) -> list[tf.Operation]:
        """The ops that are given a variable, or another resource, and may write it."""
        ops = [op for op in self.graph.get_operations() if op.type not in _READS]
        return [op for op in ops if any(one.dtype == tf.resource for one in op.inputs)]


@dataclass
class Functions:
    """The layouts of what library functions compute.

    Each function is indexed once, however often it is followed.
    """

    _indexed: dict[int, Function] = field(default_factory=dict, init=False)

    def results(self, op: tf.Operation, arguments: Sequence[Argument]) -> list[Known]:
        """What is known of what `op` returns, given what is known of what it reads."""
        if op.type in LOOPS:
            return self._turned(op, arguments)
        reads = [argument.known for argument in arguments]
        names = list(called(op))
        if op.type in RUNS_BRANCH and reads[0].layout is not BatchLayout.REPLICATED:
            return [UNKNOWN] * len(op.outputs)
        passed = reads[1:] if op.type in RUNS_BRANCH else reads
        ways = [self._computed(op, name, passed) for name in names]
        return [_one_of(results) for results in zip(*ways, strict=True)]

    def _turned(self, op: tf.Operation, arguments: Sequence[Argument]) -> list[Known]:
        """What goes round a loop, when it has ended."""
        body, condition = (op.get_attr(key).name for key in ("body", "cond"))
        taken, before = [argument.known for argument in arguments], list[Known]()
        while taken != before:
            before = taken
            found = self._computed(op, body, taken)
            turned = zip(taken, found, arguments, strict=True)
            taken = [after_turn(one, other, argument.is_zero) for one, other, argument in turned]
        ends, *_ = self._computed(op, condition, taken)  # A function whose graph is gone returns nothing known.
        return taken if ends.layout is BatchLayout.REPLICATED else self._mapped(op, body, condition, arguments)

    def _mapped(self, op: tf.Operation, body: str, condition: str, arguments: Sequence[Argument]) -> list[Known]:
        """What a loop over the examples has made of each."""
        turn, ends = (self.function(op, name) for name in (body, condition))
        if turn is None or ends is None or self.changes(turn):
            return [UNKNOWN] * len(arguments)
        parts = Body(turn.graph, ends.graph, turn.ops, turn.random, self._draws_anew, self._is_pure)
        return mapped(parts, arguments)

    def _draws_anew(self, op: tf.Operation) -> bool:
        """Whether the op draws other numbers each time that it runs, and changes nothing else."""
        if op.type not in RUNS:
            return op.type in SEEDED_RANDOM
        functions = [self.function(op, name) for name in called(op)]
        return all(
            one is not None
            and not self.changes(one)
            and all(self._draws_anew(inner) for inner in one.ops if inner.name in one.random)
            for one in functions
        )

    def _is_pure(self, op: tf.Operation) -> bool:
        """Whether the op computes the same of the same, and changes nothing."""
        if op.type not in RUNS:
            return not op.op_def.is_stateful
        functions = [self.function(op, name) for name in called(op)]
        return all(one is not None and not one.random and not self.changes(one) for one in functions)

    def changes(self, function: Function) -> bool:
        """Whether `function` may write a variable, or another resource."""
        for op in function.on_resources:
            functions = [self.function(op, name) for name in called(op)] if op.type in RUNS else []
            if not functions or any(one is None or self.changes(one) for one in functions):
                return True
        return False

    def function(self, op: tf.Operation, name: str) -> Function | None:
        """The library function `name`, which `op` runs; None: its graph is not known."""
        graph = tf_adapter.function_graph(op, name)
        return None if graph is None else self._indexed.setdefault(id(graph), Function(graph))

    def _computed(self, op: tf.Operation, name: str, arguments: Sequence[Known]) -> list[Known]:
        """What the library function `name`, which `op` runs, returns for these arguments."""
        function = self.function(op, name)
        if function is None or self.changes(function):
            return [UNKNOWN] * (len(op.outputs) if function is None else len(function.graph.outputs))
        graph = function.graph
        arguments = [known if known.layout in _FOLLOWED or known.along else UNKNOWN for known in arguments]
        found = {symbol.name: known for symbol, known in zip(graph.inputs, arguments, strict=True)}
        for inner in function.ops:
            if inner.outputs and inner.outputs[0].name not in found:
                results = self._visit(function, inner, found)
                found |= {symbol.name: one for symbol, one in zip(inner.outputs, results, strict=True)}
        return [found[symbol.name] for symbol in graph.outputs]

    def _visit(self, function: Function, op: tf.Operation, found: Mapping[str, Known]) -> list[Known]:
        """What is known of the results of an op of a library function."""
        reads = [found[symbol.name] for symbol in op.inputs]
        if op.type in PASSES:
            return reads
        if all(read.layout is BatchLayout.REPLICATED for read in reads):
            is_random = op.name in function.random
            return [UNKNOWN if is_random else Known(SAME.layout, UNSET) if op.type in MAKES else SAME] * len(op.outputs)
        if op.type in RUNS:
            given = zip(op.inputs, reads, strict=True)
            return self.results(
                op, [Argument(read, _constant(function.constants, one, read), None) for one, read in given]
            )
        node = function.view.nodes[op.name]
        if op.type in NORMALIZES and node.attr["is_training"].b:
            return [UNKNOWN] * len(op.outputs)  # In the program itself the user is told of it: see `Mixing`.
        constant_of = function.constants.value
        constants = [
            constant_of(symbol.name) if read.layout is BatchLayout.REPLICATED else None
            for symbol, read in zip(op.inputs, reads, strict=True)
        ]
        operands = Operands.of(node, op.inputs, [read.layout for read in reads], constants, [None] * len(reads))
        layout = layout_of(operands)
        if layout is not BatchLayout.MIXED:
            layouts = layout if isinstance(layout, tuple) else [layout] * len(op.outputs)
            return [_told(one, symbol, operands) for one, symbol in zip(layouts, op.outputs, strict=True)]
        if op.type in REORDERS:
            return [UNKNOWN] * len(op.outputs)  # Another turn's order is another one, under the same name.
        shape = op.inputs[0].op
        if op.type in OF_SHAPE and shape.type == "Shape":
            return [of_shape(operands, found[shape.inputs[0].name])]
        return [followed(operands, reads, op.outputs[0])] * len(op.outputs)


def called(op: tf.Operation) -> Iterator[str]:
    """The functions of which `op` runs one."""
    if op.type in _CALLS:
        yield op.get_attr("f").name
    elif "branches" in op.node_def.attr:
        yield from (one.name for one in op.get_attr("branches"))
    else:
        keys = ("body", "cond") if op.type in LOOPS else ("then_branch", "else_branch")
        yield from (op.get_attr(key).name for key in keys)


def _told(layout: BatchLayout, symbol: tf.Tensor, operands: Operands) -> Known:
    """What is known of `symbol`, of which a rule says that it is of this layout."""
    if layout not in _FOLLOWED or (layout in FIXED and not symbol.shape.is_fully_defined()):
        return UNKNOWN
    mixes = layout is BatchLayout.SHARDED and not set(operands.layouts) <= _APART
    return UNKNOWN if mixes else known_by(layout)


def _constant(constants: Constants, symbol: tf.Tensor, read: Known) -> np.ndarray | None:
    """The value of a tensor that is the same everywhere, where it is known."""
    return constants.value(symbol.name) if read.layout is BatchLayout.REPLICATED else None


def _one_of(ways: Sequence[Known]) -> Known:
    """What is known of what is one of these, on all replicas alike."""
    layout = joined([one.layout for one in ways])
    if layout is not BatchLayout.MIXED:
        return known_by(layout)
    first, *rest = ways
    return first if all(one == first for one in rest) else UNKNOWN


def after_turn(taken: Known, found: Known, is_zero: bool) -> Known:
    """What is taken next for what goes round a loop, and is `found` after a turn that begins with `taken`."""
    if taken == found:
        return taken
    if taken.along == UNSET and taken.layout in (BatchLayout.REPLICATED, BatchLayout.MIXED):
        return found
    is_begun = taken.layout is BatchLayout.REPLICATED and found.layout is BatchLayout.PARTIAL_SUM_PLUS
    if is_zero and is_begun:
        return known_by(BatchLayout.PARTIAL_SUM)  # That it is one is yet to be tried.
    layout = joined([taken.layout, found.layout], with_zeros=is_zero and taken.layout is BatchLayout.REPLICATED)
    return UNKNOWN if layout is BatchLayout.MIXED else known_by(layout)
