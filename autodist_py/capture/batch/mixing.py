"""Losses that mix examples: what one device computes with the whole batch, and a replica with its own part only.

Two kinds of values are known not to be those of one device: an example's value that depends on others of the batch
(in-batch negatives, ranks, statistics of activations), and what is computed from a sum or mean over the examples (its
logarithm). A loss that reads one is neither the sum nor the mean of the replicas' losses. Batch normalization is such,
too, and is told apart: it is the one mixture that everybody's replicas have.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import tensorflow as tf

from autodist_py.capture.batch.layouts.solution import Solution
from autodist_py.capture.recording.user_code import line_of, normalizes_batch
from autodist_py.kernel.analysis.batch_layout.along import (
    EVERYWHERE,
    Along,
    Found,
    Mixture,
    along,
    of_layout,
)
from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.proto.graph_item import Gradient
from autodist_py.proto.text import some

_SIZES = frozenset({BatchLayout.REPLICATED, BatchLayout.COUNT, BatchLayout.SHAPE})
ONLY_SHAPES = frozenset({"OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"})
"""Op types whose results do not depend on the numbers that they read."""
_TOLD = 3


def described(op: tf.Operation, mixture: str) -> str:
    """What `op` does, with its name and the user's line."""
    line = line_of(op)
    return f"'{op.name}'{f' ({line})' if line else ''} {mixture}"


@dataclass
class Mixing:
    """What of the losses mixes examples.

    Attributes:
        normalizing: ops of batch normalization that losses depend on.
        statistics: ops that mix examples for them alone.
        mixed: ops that may mix examples, of losses that do and of nothing else, or computed from what does.
    """

    graph: GraphView
    solution: Solution
    tensor_of: Callable[[str], tf.Tensor]
    normalizing: list[str] = field(default_factory=list, init=False)
    statistics: list[str] = field(default_factory=list, init=False)
    mixed: list[str] = field(default_factory=list, init=False)
    _found: dict[str, Found] = field(default_factory=dict, init=False)
    _of_normalization: dict[str, bool] = field(default_factory=dict, init=False)

    def told(self, gradients: Sequence[Gradient], losses: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
        """The losses that mix examples: by which ops, where they stand, and what trains by it."""
        region = list(self.graph.dataflow_order(self.solution.loss_region))
        mixtures = {name: found for name in region if isinstance(found := self._visit(name), Mixture)}
        trained: dict[tuple[str, ...], list[str]] = {}
        for gradient, targets in zip(gradients, losses, strict=True):
            trained.setdefault(targets, []).append(gradient.variable)
        live = {targets: self._live(targets) for targets in trained}
        in_any = set[str]().union(*live.values())
        self.normalizing += [name for name in region if name in in_any and self._is_normalizing(name)]
        if self.normalizing:
            self.statistics += [name for name in self.solution.local if name in self.solution.loss_region - in_any]
        mixing: dict[tuple[str, ...], list[str]] = {}
        for targets in trained:
            own = [self._described(name, mixtures[name]) for name in mixtures if name in live[targets]]
            if reasons := own or self._unlike(targets):
                mixing[targets] = reasons
        markers = {op_of(tensor) for gradient in gradients for tensor in gradient.tensors}
        only = set[str]().union(*(live[targets] for targets in mixing))
        only -= set[str]().union(*(live[targets] for targets in trained.keys() - mixing.keys()))
        only |= self.graph.dataflow_descendants(only & mixtures.keys(), blocked=markers)
        self.mixed += [name for name in self.solution.local if name in only]
        return {
            targets: (
                f"the loss {some(targets)}, which trains {some(trained[targets])}, mixes the examples of a batch: "
                + "; ".join(reasons[:_TOLD])
            )
            for targets, reasons in mixing.items()
        }

    def _unlike(self, targets: Sequence[str]) -> list[str]:
        """Of losses whose gradients are added up, those that are means where others are sums."""
        known = {target: self.read(str(parse(target))) for target in targets}
        varying = {target: found for target, found in known.items() if found is not None and not found.is_same}
        means = [target for target, found in varying.items() if found.is_pooled and not found.adds]
        sums = [target for target, found in varying.items() if found.adds or not found.pools]
        if not means or not sums:
            return []
        reason = (
            f"is a sum over examples, or of each example, and its gradient is added to that of {some(means)}, a mean"
        )
        return [self._described(op_of(target), reason) for target in sums]

    def _is_normalizing(self, name: str) -> bool:
        """Whether the op is a batch normalization's, and mixes a replica's own examples."""
        return name in self._local and self._normalizes(name)

    def _normalizes(self, name: str) -> bool:
        if name not in self._of_normalization:
            self._of_normalization[name] = normalizes_batch(self.tensor_of(f"{name}:0").op)
        return self._of_normalization[name]

    def _described(self, name: str, mixture: str) -> str:
        return described(self.tensor_of(f"{name}:0").op, mixture)

    @cached_property
    def _local(self) -> frozenset[str]:
        return frozenset(self.solution.local)

    def _reads(self, name: str) -> list[str]:
        return [str(parse(read)) for read in self.graph.nodes[name].input if not read.startswith("^")]

    def _visit(self, name: str) -> Found:
        self._found[name] = found = self._judged(name)
        return found

    def _judged(self, name: str) -> Found:
        """How the results of the op go along examples, where its layouts do not say it; or what it mixes."""
        node = self.graph.nodes[name]
        layouts = self.solution.layouts_of(name)
        reads = self._reads(name)
        if len(layouts) > 1 or layouts[0] in _SIZES or self.solution.of_source(node) is not None or not reads:
            return None
        is_known = name not in self._local and layouts[0] is not BatchLayout.MIXED
        if is_known and not any(isinstance(self._found.get(op_of(tensor)), Along) for tensor in reads):
            return None  # `read` asks for the layout.
        found = tuple(self.read(tensor) for tensor in reads)
        operands = self.solution.operands(node, reads, tuple(map(self.solution.layout, reads)))
        result = along(operands, found)
        if (result is None or isinstance(result, Mixture)) and self._normalizes(name):
            axes = [read.axes for read in found if read is not None and read.axes]
            return Along(axes[0]) if axes else None
        return result

    def read(self, tensor: str) -> Along | None:
        """How what a loss reads goes along examples; what is combined is the same everywhere."""
        if self.solution.is_combined(tensor):
            return EVERYWHERE
        found = self._found.get(op_of(tensor))
        if isinstance(found, Along):
            return found
        layout = self.solution.layout(tensor)
        if isinstance(found, Mixture):
            return None
        return self.solution.along_of(tensor) if layout is BatchLayout.MIXED else of_layout(layout)

    def _live(self, targets: Iterable[str]) -> set[str]:
        """The ops whose values the loss depends on; the statistics that a batch normalization reads are not asked for.

        Neither is what only gives a shape, or a number that is one device's whatever it is made of.
        """
        live, pending = set[str](), [op_of(tensor) for tensor in targets]
        while pending:
            name = pending.pop()
            if name in live or name not in self.solution.loss_region:
                continue
            live.add(name)
            if self.graph.nodes[name].op in ONLY_SHAPES or self.solution.of_source(self.graph.nodes[name]):
                continue
            if self.solution.layouts_of(name) == (BatchLayout.REPLICATED,):
                continue
            normalizes = self._is_normalizing(name)
            pending += [op_of(read) for read in self._reads(name) if not (normalizes and self._is_of_all(read, name))]
        return live

    def _is_of_all(self, tensor: str, reader: str) -> bool:
        """Whether this has no entry for each of the examples that `reader` has: it is broadcast to them."""
        own, whole = (self.tensor_of(name).shape for name in (tensor, f"{reader}:0"))
        return own.rank is not None and whole.rank is not None and (own.rank < whole.rank or own[:1] == [1])
