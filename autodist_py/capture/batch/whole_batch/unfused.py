"""Batch normalization that one op computes, taken apart into ops whose layouts are known.

`FusedBatchNormV3` reads a mean and a variance of all examples, and so would every op behind it have to be computed of
the whole batch, by every replica. Of ops that compute the same it is only the mean and the variance that are combined.
What its kernels return, and their gradient, is that of tensorflow/core/kernels/fused_batch_norm_op.cc.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import tensorflow as tf

from autodist_py.capture.batch.layouts.loops import NORMALIZES
from autodist_py.kernel.ir.fragment import TensorSpec, trace
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse, unique_names
from autodist_py.kernel.ir.node import reads_of
from autodist_py.proto.graph_item import GraphItem

_BACKWARD = frozenset({"FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"})


@dataclass(frozen=True, slots=True)
class Unfused:
    """A program without ops that normalize the batch they are given.

    Attributes:
        item: what was captured, whose results are named as in `graph`.
        graph: its graph.
        tensor_of: a tensor of it by its name; only its shape and type are used.
    """

    item: GraphItem
    graph: GraphView
    tensor_of: Callable[[str], tf.Tensor]


def unfused(item: GraphItem, graph: GraphView, tensor_of: Callable[[str], tf.Tensor]) -> Unfused:
    """`item` with each such op, and each of the back-propagation through it, taken apart."""
    parts = _Parts(graph, tensor_of)
    for node in graph.of_type(NORMALIZES | _BACKWARD):
        if node.attr["is_training"].b:
            parts.take_apart(node)
    if not parts.of:
        return Unfused(item, graph, tensor_of)
    outputs = tuple(replace(one, tensor=parts.named(one.tensor)) for one in item.outputs)
    return Unfused(replace(item, outputs=outputs), graph.made_of(parts.nodes(), ()), parts.tensor)


@dataclass
class _Parts:
    """The ops that others are taken apart into.

    Attributes:
        graph: with the ops in one piece.
        tensor_of: a tensor of it.
        of: for each op that is taken apart, what stands for its results.
    """

    graph: GraphView
    tensor_of: Callable[[str], tf.Tensor]
    of: dict[str, Sequence[str]] = field(default_factory=dict)
    _made: dict[str, tf.compat.v1.NodeDef] = field(default_factory=dict)
    _scratch: dict[str, tf.Graph] = field(default_factory=dict)

    def take_apart(self, node: tf.compat.v1.NodeDef) -> None:
        """Make the ops of which `node` stands for several."""
        reads = reads_of(node)
        symbols = list(map(self.tensor_of, reads))
        specs = [
            TensorSpec(read, one.dtype, None if one.shape.rank is None else tuple(one.shape.as_list()))
            for read, one in zip(reads, symbols, strict=True)
        ]
        is_forward = node.op in NORMALIZES
        examples = symbols[0].shape if is_forward else symbols[1].shape
        if examples.rank is None:
            return
        kind = _Kind.of(node, examples)
        scratch: list[tf.Graph] = []

        def made(*given: tf.Tensor) -> list[tf.Tensor]:
            scratch.append(tf.compat.v1.get_default_graph())
            return kind.forward(*given) if is_forward else kind.backward(*given)

        (scope,) = unique_names([f"{node.name}/apart"], self.graph.nodes)
        fragment = trace(lambda given: made(*given), [specs], scope=scope)
        for one in fragment.nodes:
            one.device = node.device
            self._made[one.name] = one
            self._scratch[one.name] = scratch[0]
        self.of[node.name] = fragment.outputs

    def nodes(self) -> Iterator[tf.compat.v1.NodeDef]:
        """All ops there are now; each reads the parts of what it read."""
        for name, node in {**self.graph.nodes, **self._made}.items():
            if name not in self.of:
                yield self._redirected(node)

    def _redirected(self, node: tf.compat.v1.NodeDef) -> tf.compat.v1.NodeDef:
        if not any(op_of(read) in self.of for read in node.input):
            return node
        result = tf.compat.v1.NodeDef()
        result.CopyFrom(node)
        result.ClearField("input")
        result.input.extend(self.named(read) for read in node.input)
        return result

    def named(self, tensor: str) -> str:
        """The name that a tensor, or the end of an op, has now; an op ends with the first of its results."""
        name = parse(tensor)
        if name.op not in self.of:
            return tensor
        results = self.of[name.op]
        return f"^{op_of(results[0])}" if name.is_control else results[name.output]

    def tensor(self, tensor: str) -> tf.Tensor:
        """A tensor by its name."""
        name = parse(tensor)
        if name.op not in self._scratch:
            return self.tensor_of(tensor)
        return self._scratch[name.op].get_tensor_by_name(f"{name.op}:{name.output}")


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one op normalizes.

    Attributes:
        axes: over which it takes means.
        shape: that of means which are paired with its examples.
        epsilon: what is added to variances.
        share: of the new mean, and variance, in the averages that it returns.
    """

    axes: tuple[int, ...]
    shape: tuple[int, ...]
    epsilon: float
    share: float

    @classmethod
    def of(cls, node: tf.compat.v1.NodeDef, examples: tf.TensorShape) -> "_Kind":
        """How `node` normalizes examples of this shape."""
        at = 1 if node.attr["data_format"].s in (b"NCHW", b"NCDHW") else examples.rank - 1
        averaged = node.attr["exponential_avg_factor"].f if "exponential_avg_factor" in node.attr else 1.0
        axes = tuple(axis for axis in range(examples.rank) if axis != at)
        return cls(
            axes, tuple(-1 if axis == at else 1 for axis in range(examples.rank)), node.attr["epsilon"].f, averaged
        )

    def forward(
        self, x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor
    ) -> list[tf.Tensor]:
        """What the op returns: its examples, averages, and what back-propagation reads: mean, variance, and a place."""
        values = tf.cast(x, scale.dtype)
        of_all = tf.reduce_mean(values, self.axes, keepdims=True)
        spread = tf.reduce_mean(tf.math.squared_difference(values, of_all), self.axes, keepdims=True)
        factor = tf.math.rsqrt(spread + self.epsilon) * self._paired(scale)
        y = tf.cast((values - of_all) * factor + self._paired(offset), x.dtype)
        own = [tf.reshape(one, tf.shape(scale)) for one in (of_all, spread)]
        one_of = tf.math.reciprocal(self._count(x, scale))
        unbiased = tf.where(one_of < 1.0, tf.math.divide_no_nan(tf.ones_like(one_of), 1.0 - one_of), 1.0)
        averages = [own[0], own[1] * unbiased]
        if self.share != 1.0:
            averages = [
                before * (1.0 - self.share) + now * self.share
                for before, now in zip((mean, variance), averages, strict=True)
            ]
        return [y, *averages, *own, tf.zeros([], scale.dtype)]

    def backward(
        self, dy: tf.Tensor, x: tf.Tensor, scale: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor, *_: tf.Tensor
    ) -> list[tf.Tensor]:
        """The gradients for the examples, the scale and the offset; and two places."""
        arriving, values = tf.cast(dy, scale.dtype), tf.cast(x, scale.dtype)
        inverse = tf.math.rsqrt(self._paired(variance) + self.epsilon)
        normalized = (values - self._paired(mean)) * inverse
        sums = [tf.reduce_sum(one, self.axes, keepdims=True) for one in (arriving, arriving * normalized)]
        count = self._count(x, scale)
        leaving = arriving - sums[0] / count - normalized * (sums[1] / count)
        of_offset, of_scale = (tf.reshape(one, tf.shape(scale)) for one in sums)
        dx = tf.cast(leaving * (inverse * self._paired(scale)), x.dtype)
        return [dx, of_scale, of_offset, tf.zeros([], scale.dtype), tf.zeros([], scale.dtype)]

    def _paired(self, one: tf.Tensor) -> tf.Tensor:
        return tf.reshape(one, self.shape)

    def _count(self, x: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        """Of how many numbers a mean is."""
        return tf.cast(tf.size(x, out_type=tf.int64), scale.dtype) / tf.cast(tf.size(scale), scale.dtype)
