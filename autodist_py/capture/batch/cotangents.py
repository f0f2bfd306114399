"""Back-propagation that is not linear in what it passes back, and what replicas make of it.

A replica passes back the gradients of its own loss. Where all of that is linear, a share of them may be taken anywhere.
A custom gradient need not be linear: it may clip what it is given, take its sign, or add to it. Four cases:

1. It reads a gradient of each example. It must be one device's: the share counts where back-propagation begins.
2. It reads a gradient that no example has a part in yet: that of a mean, say. The share must count after it.
3. It reads a sum over examples, the gradient of a weight. A replica has a part of that sum only.
4. It is not seen which of these it reads, or whether it is linear.

A linear one may still mix examples (`custom_gradients.py`): this is case 3 too.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from autodist_py.capture.batch.custom_gradients import CustomGradients
from autodist_py.capture.batch.layouts.beside import Beside
from autodist_py.capture.batch.layouts.solution import Solution
from autodist_py.capture.batch.linearity import OF_WEIGHTS, linear_groups
from autodist_py.capture.batch.mixing import ONLY_SHAPES, Mixing
from autodist_py.capture.recording.gradients import CustomGradient
from autodist_py.kernel.analysis.batch_layout.along import (
    EVERYWHERE,
    ROW_BY_ROW,
    Along,
    Mixture,
    along,
    is_followed,
    of_layout,
)
from autodist_py.kernel.analysis.batch_layout.arithmetic import ADDITIVE
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout
from autodist_py.kernel.analysis.batch_layout.rules import is_known
from autodist_py.kernel.ir.dataflow import random_ops
from autodist_py.kernel.ir.functions import reached_in
from autodist_py.kernel.ir.graph import RUNS_BRANCH, GraphView, functions_of
from autodist_py.kernel.ir.names import op_of, parse


class Reads(Enum):
    """What an op that is not linear reads of what is passed back: the cases above."""

    EACH = "gradients of each example"
    BEFORE = "gradients before there is one of each example"
    SUM = "a sum over examples"
    UNKNOWN = "not known"


class Nonlinear(NamedTuple):
    """An op of back-propagation that is not linear, or not known to be; or one that mixes what examples pass back."""

    op: str
    reads: Reads
    reason: str = ""


_ONLY_SHAPES = ONLY_SHAPES | {"BroadcastGradientArgs", "TensorListLength"}
"""Op types whose results do not depend on the numbers that they read."""
_CARRIES = {
    **dict.fromkeys(("Enter", "Exit", "NextIteration", "StackPopV2", "Switch", "TensorListConcatV2"), (0,)),
    **dict.fromkeys(("TensorListFromTensor", "TensorListGather", "TensorListGetItem", "TensorListPopBack"), (0,)),
    **dict.fromkeys(("TensorListResize", "TensorListScatterV2", "TensorListStack"), (0,)),
    **dict.fromkeys(("Merge", "StackPushV2", "TensorListPushBack"), (0, 1)),
    "TensorListSetItem": (0, 2),
}
"""Op types that carry numbers round loops, and the inputs of which they do."""
_RESHAPES = frozenset({"BroadcastTo", "Reshape", "Slice", "StridedSliceGrad", "Tile"})
"""Op types whose result has a row for each example if its first dimension is not known."""
_ADDS_UP = OF_WEIGHTS | {"UnsortedSegmentSum", "FusedBatchNormGradV3"}
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_LOOPS = frozenset({"StatelessWhile", "While"})
_SUM = Along(pools=True, adds=True)
_ADDED = "added up"
_NUMBERS = frozenset({tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.variant})
"""Types of what is passed back; lists are variants. An integer counts turns."""


@dataclass(frozen=True, slots=True)
class BackPropagation:
    """What is computed between some seeds and the markers of the gradients that come of them.

    Attributes:
        graph: of the ops that are needed.
        solution: the layouts of the forward pass.
        mixing: how that goes along the examples.
        tensor_of: a tensor by its name.
    """

    graph: GraphView
    solution: Solution
    mixing: Mixing
    tensor_of: Callable[[str], tf.Tensor]

    def nonlinear(
        self, seeds: Collection[str], markers: Collection[str], custom: Collection[CustomGradient] = ()
    ) -> list[Nonlinear]:
        """The ops that are not linear in what comes of the seeds, in order; then those that mix examples."""
        needed = self.graph.dataflow_ancestors(markers, blocked=self._truisms()) - set(markers)
        begins = set(map(op_of, seeds))
        found: dict[str, Along | None] = {op_of(seed): self._begun(seed) for seed in seeds}
        beside = Beside(self.solution)
        told: list[Nonlinear] = []
        turned = self._turned(begins)
        for name in self.graph.dataflow_order(needed):
            node = self.graph.nodes[name]
            if name in begins:
                continue
            reads = [str(parse(read)) for read in node.input if not read.startswith("^")]
            passed = [index for index, read in enumerate(reads) if op_of(read) in found or op_of(read) in turned]
            if passed and node.op not in _ONLY_SHAPES:
                found[name] = self._visited(node, reads, passed, found, beside, told)
            else:
                beside.visit(node, reads)
        return told + (list(dict.fromkeys(self._judged(custom, needed, beside, found))) if custom else [])

    def _judged(
        self,
        custom: Collection[CustomGradient],
        needed: Collection[str],
        beside: Beside,
        found: dict[str, Along | None],
    ) -> Iterator[Nonlinear]:
        """The ops by which custom gradients mix examples, or of which that is not seen."""
        drawn = {name for name in random_ops(self.graph) & set(needed) if self.solution.seen(name) is None}
        drawn = self.graph.dataflow_descendants(drawn)
        gradients = CustomGradients(
            self.graph, self.solution, self.mixing, self.tensor_of, needed, drawn, beside, found
        )
        for call in custom:
            for op, reason in gradients.judged(call):
                yield Nonlinear(op, Reads.SUM if reason else Reads.UNKNOWN, reason)

    def _truisms(self) -> set[str]:
        """Ops that compare a truth with itself, by which `tf.recompute_grad` waits for what is passed back."""
        return {
            node.name
            for node in self.graph.of_type({"Equal"})
            if node.attr["T"].type == tf.bool.as_datatype_enum and len(set(map(parse, node.input[:2]))) == 1
        }

    def _turned(self, begins: Collection[str]) -> set[str]:
        """The ops that give a loop of TensorFlow 1 what comes of the seeds, for its next turn, which is seen before."""
        turns = {node.name for node in self.graph.of_type({"NextIteration"})}
        shapes = {node.name for node in self.graph.of_type(_ONLY_SHAPES)}
        return turns & self.graph.dataflow_descendants(begins, blocked=shapes) if turns else turns

    def _begun(self, seed: str) -> Along | None:
        """How a seed goes along examples: of a loss of each example it has a row for each, as the loss has."""
        if self.tensor_of(seed).shape.is_fully_defined():
            return EVERYWHERE
        node = self.graph.nodes[op_of(seed)]
        reads = [read for read in node.input if not read.startswith("^")]
        return self.mixing.read(reads[0]) if node.op == "OnesLike" else None

    def _visited(
        self,
        node: tf.compat.v1.NodeDef,
        reads: Sequence[str],
        passed: Sequence[int],
        found: dict[str, Along | None],
        beside: Beside,
        told: list[Nonlinear],
    ) -> Along | None:
        """How the op's result goes along examples; an op that is not linear is noted."""
        own = tuple(
            found.get(op_of(read)) if index in passed else self._forward(read, beside)
            for index, read in enumerate(reads)
        )
        given = [own[index] for index in passed]
        operands = self.solution.operands(node, reads, tuple(map(beside.layout, reads)))
        result = along(operands, own)
        linear = [index for index, read in enumerate(reads) if index in passed or self._is_zero(read)]
        is_added_to = _adds_another(node, reads, linear) or (self._begins_loop(node) and len(linear) < len(reads))
        if not is_added_to and self._is_linear(node, linear if _called(node) else passed):
            return self._linear(node, given, result if isinstance(result, Along) else None, reads, beside)
        told.append(Nonlinear(node.name, *self._case(node, given, result, is_added_to=is_added_to)))
        if result is None and any(read is not None and read.is_pooled for read in given):
            return _SUM  # A comparison, say.
        return result if isinstance(result, Along) else None

    def _case(
        self,
        node: tf.compat.v1.NodeDef,
        given: Sequence[Along | None],
        result: Along | Mixture | None,
        *,
        is_added_to: bool,
    ) -> tuple[Reads, str]:
        """Which of the cases it is."""
        known = [read for read in given if read is not None]
        if len(known) < len(given) or not (is_known(node.op) or is_followed(node.op)):
            return Reads.UNKNOWN, ""
        if all(read.is_same for read in known) or (is_added_to and any(read.is_pooled for read in known)):
            return Reads.BEFORE, ""
        if isinstance(result, Mixture):
            return Reads.SUM, str(result)
        return (Reads.UNKNOWN if result is None or result.pools or result.uneven else Reads.EACH), ""

    def _forward(self, tensor: str, beside: Beside) -> Along | None:
        """How what the forward pass has computed goes along examples."""
        if self.solution.seen(tensor) is not None or self.solution.is_combined(tensor):
            return self.mixing.read(tensor)
        return of_layout(beside.layout(tensor))

    def _linear(
        self,
        node: tf.compat.v1.NodeDef,
        given: Sequence[Along | None],
        result: Along | None,
        reads: Sequence[str],
        beside: Beside,
    ) -> Along | None:
        """How what a linear op makes of `given` goes along examples."""
        known = [read for read in given if read is not None]
        if len(known) < len(given) or node.op in _CARRIES:
            return None
        if node.op in _RESHAPES or (node.op == "Sum" and result is None):
            return self._reshaped(node, known[0], reads, beside)
        if result is not None:
            return result
        if node.op in _ADDS_UP:
            return _SUM if any(read.axes or read.pools for read in known) else EVERYWHERE
        if all(read.is_same or read.is_pooled for read in known):
            return _SUM if any(read.pools for read in known) else None
        shape = self.tensor_of(f"{node.name}:0").shape
        if shape.is_fully_defined():
            return _SUM  # Nothing has a row for each example.
        is_of_rows = shape.rank is not None and shape[0] is None
        return next((read for read in known if read.axes == {0}), None) if is_of_rows else None

    def _reshaped(self, node: tf.compat.v1.NodeDef, read: Along, reads: Sequence[str], beside: Beside) -> Along | None:
        """Of an op whose result has a shape that is given, or has been added up along axes that are."""
        if node.op == "Sum":  # To the shape of what was broadcast: a reshape follows, and shows which.
            return replace(read, order=_ADDED) if read.axes else read
        shape = self.tensor_of(f"{node.name}:0").shape
        if shape.is_fully_defined():
            return _SUM if read.axes else read
        if read.is_pooled or (read.axes and read.axes != {0}):
            return None
        layout = beside.layout(reads[0 if node.op == "StridedSliceGrad" else 1])
        if read.is_same and layout is BatchLayout.REPLICATED:
            return read
        is_of_rows = layout is BatchLayout.SHAPE if shape.rank is None else shape[0] is None
        return ROW_BY_ROW if is_of_rows else None

    # -- Whether an op is linear --------------------------------------------------------------------------------------

    def _is_linear(self, node: tf.compat.v1.NodeDef, passed: Collection[int]) -> bool:
        """Whether the op is linear in its inputs `passed`, all together."""
        if node.op in _CARRIES:
            return set(passed) <= set(_CARRIES[node.op])
        if called := _called(node):
            return self._calls_linear(node, called, frozenset(passed))
        return any(set(passed) <= set(group) for group in linear_groups(node))

    def _begins_loop(self, node: tf.compat.v1.NodeDef) -> bool:
        """Whether the op gives the first turn of a loop one of its inputs, and each next turn the other."""
        return node.op == "Merge" and any(self.graph.nodes[op_of(read)].op == "NextIteration" for read in node.input)

    def _is_zero(self, tensor: str) -> bool:
        """Whether it is seen that `tensor` is 0, which is linear in everything."""
        node, value = self.graph.nodes[op_of(tensor)], self.graph.constant(tensor)
        if node.op == "Enter":
            return self._is_zero(node.input[0])
        if node.op == "ZerosLike":
            return tf.as_dtype(node.attr["T"].type) in _NUMBERS
        return value is not None and tf.as_dtype(value.dtype) in _NUMBERS and not np.any(value)

    def _calls_linear(self, node: tf.compat.v1.NodeDef, called: Sequence[str], passed: frozenset[int]) -> bool:
        """Whether a call, branch or loop is: all of the functions that it may run are."""
        if node.op in _CALLS:
            return all(self._is_linear_function(name, passed) for name in called)
        if node.op in RUNS_BRANCH:
            arguments = frozenset(index - 1 for index in passed)
            return 0 not in passed and all(self._is_linear_function(name, arguments) for name in called)
        if node.op not in _LOOPS:
            return False
        body, condition = node.attr["body"].func.name, node.attr["cond"].func.name
        turned: frozenset[int] = frozenset()
        while not passed <= turned:  # What one turn returns, the next one is given.
            turned |= passed
            passed = self._returned(body, self._reached(body, turned))
        return not self._returned(condition, self._reached(condition, turned)) and self._is_linear_function(
            body, turned
        )

    def _reached(self, function: str, arguments: Collection[int]) -> set[str]:
        """Of a library function, the arguments and ops that depend on the numbers of these arguments."""
        definition = self.graph.library[function]
        begins = [definition.signature.input_arg[index].name for index in arguments]
        return reached_in(definition, begins, but=_ONLY_SHAPES)

    def _returned(self, function: str, reached: Collection[str]) -> frozenset[int]:
        """The results of a library function that are among these."""
        definition = self.graph.library[function]
        results = (definition.ret[one.name].partition(":")[0] for one in definition.signature.output_arg)
        return frozenset(index for index, name in enumerate(results) if name in reached)

    def _is_linear_function(self, function: str, arguments: Collection[int]) -> bool:
        """Whether all that a library function computes from these arguments is linear in them."""
        reached = self._reached(function, arguments)
        for node in self.graph.library[function].node_def:
            reads = [read for read in node.input if not read.startswith("^")]
            passed = [index for index, read in enumerate(reads) if read.partition(":")[0] in reached]
            if node.name in reached and (_adds_another(node, reads, passed) or not self._is_linear(node, passed)):
                return False
        return True


def _called(node: tf.compat.v1.NodeDef) -> list[str]:
    """The library functions that the op runs."""
    return [name for _, name in functions_of(node)]


def _adds_another(node: tf.compat.v1.NodeDef, reads: Sequence[str], passed: Sequence[int]) -> bool:
    """Whether the op adds what is passed back to what is not."""
    return node.op in ADDITIVE | {"Sub"} and len(passed) < len(reads)
