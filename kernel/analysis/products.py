"""Gradients that are products of two matrices whose rows are of examples: `products_of`.

The gradient of `x @ w` is `xᵀ · dy`, and that of a bias that is added to it the sum of dy's rows. The sum of such a
gradient over replicas is the product of all their rows, whatever is in them: sufficient factors (Xie et al., "Lighter-
Communication Distributed Machine Learning via Sufficient Factor Broadcasting", UAI 2016).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile

import tensorflow as tf

from autodist_py.kernel.analysis.first_batch import replica_shapes
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.ir.product import Factor, Product
from autodist_py.kernel.program import Program
from autodist_py.proto.graph_item import Gradient

_PASSES_ON = frozenset({"Identity", "Reshape"})
"""Op types whose results have the numbers of their first input, in its order."""


def products_of(program: Program, gradients: Iterable[Gradient]) -> tuple[dict[str, Product], dict[str, str]]:
    """Which of the dense gradients are products; and why others are none. Both are by their markers' tensors."""
    view, asked = _View.of(program), list(gradients)
    makers = {gradient.tensors[0]: view.maker(gradient.tensors[0]) for gradient in asked}
    reasons = {marker: f"'{node.name}' ({node.op}) makes it" for marker, node in makers.items()}
    for gradient in asked:
        marker = gradient.tensors[0]
        if op := view.awaited(marker):
            reasons[marker] = f"it waits for '{op}'"
        elif view.is_rounded(marker, tf.as_dtype(program.item.variable(gradient.variable).dtype)):
            reasons[marker] = "it is cast to a third type on the way"
        else:
            continue
        del makers[marker]
    multiplied = {marker: of for marker, node in makers.items() if (of := _product_of_rows(view, node)) is not None}
    shapes = replica_shapes(program, {read for node in multiplied.values() for read in node.input[:2]})
    found: dict[str, Product] = {}
    for gradient in asked:
        marker, shape = gradient.tensors[0], program.item.variable(gradient.variable).shape
        if marker not in multiplied:
            continue
        whole = shape if view.is_passed_on(marker) and len(shape) == 2 else (None, None)
        product = _product(view, multiplied[marker], shapes, whole)
        if product is not None and math.prod(one.width for one in product.factors) == math.prod(shape) > 0:
            found[marker] = product
        else:
            reasons[marker] = "its factors have not the same rows, or sizes that are not known"
    sums = [gradient for gradient in asked if gradient.tensors[0] in makers]
    found |= dict(_sums(program, view, sums, makers, list(found.values())))
    return found, {marker: why for marker, why in reasons.items() if marker not in found}


@dataclass(frozen=True, slots=True)
class _View:
    """The captured graph, and what stands behind tensors of it.

    Attributes:
        graph: the graph.
        markers: the ops that pass on gradients and statistics, in whose results' place combined ones are read.
    """

    graph: GraphView
    markers: frozenset[str]

    @classmethod
    def of(cls, program: Program) -> "_View":
        gradients = (tensor for gradient in program.item.gradients for tensor in gradient.tensors)
        statistics = (statistic.tensor for statistic in program.item.statistics)
        return cls(program.analysis.captured, frozenset(map(op_of, (*gradients, *statistics))))

    def source(self, tensor: str) -> str:
        """The tensor that has the numbers of `tensor`, in their order, and passes on none."""
        while (node := self.graph.nodes[op_of(tensor)]).op in _PASSES_ON or _keeps_axes(self.graph, node):
            if node.name in self.markers:
                break
            tensor = node.input[0]
        return str(parse(tensor))

    def maker(self, marker: str) -> tf.compat.v1.NodeDef:
        """The op that makes the numbers of the raw gradient, but for their type."""
        *_, maker = self._behind(marker)
        return maker

    def awaited(self, marker: str) -> str:
        """An op that the raw gradient waits for, whatever it is computed from; "": none."""
        nodes = list(self._behind(marker))
        if nodes[-1].op == "Sum":
            nodes += [one for one in [self.graph.nodes[op_of(nodes[-1].input[0])]] if one.op == "BatchMatMulV2"]
        waits = (name for node in nodes for name in node.input if name.startswith("^"))
        return next((op_of(name) for name in waits), "")

    def is_rounded(self, marker: str, dtype: tf.DType) -> bool:
        """Whether the raw gradient, of that type, is cast to a third type on the way from what makes it."""
        *passed, _ = self._behind(marker)
        casts = [node for node in passed if node.op == "Cast"]
        types = [tf.as_dtype(node.attr["SrcT"].type) for node in casts]  # The last one is that of what makes it.
        return any(one not in (dtype, types[-1]) for one in types)

    def is_passed_on(self, marker: str) -> bool:
        """Whether the raw gradient has the shape of what makes its numbers."""
        return all(node.op in ("Cast", "Identity") for node in list(self._behind(marker))[:-1])

    def _behind(self, marker: str) -> Iterator[tf.compat.v1.NodeDef]:
        """What passes on the raw gradient, from the last to the first; then what makes it."""
        node = self.graph.nodes[op_of(self.graph.nodes[op_of(marker)].input[0])]
        while node.op in _PASSES_ON or _keeps_axes(self.graph, node) or _is_of_floats(node):
            if node.name in self.markers:
                break
            yield node
            node = self.graph.nodes[op_of(node.input[0])]
        yield node


def _is_of_floats(node: tf.compat.v1.NodeDef) -> bool:
    """Whether the op makes floats of floats: a product of rows then is one of each replica's rows, but for rounding."""
    return node.op == "Cast" and all(tf.as_dtype(node.attr[key].type).is_floating for key in ("SrcT", "DstT"))


def _keeps_axes(view: GraphView, node: tf.compat.v1.NodeDef) -> bool:
    """Whether the op is a transposition that leaves the axes as they are, as those of `tf.tensordot` may be."""
    if node.op != "Transpose":
        return False
    axes = view.nodes[op_of(node.input[1])]
    parts = axes.input[:-1] if axes.op == "ConcatV2" else [node.input[1]]
    given = [view.constant(part) for part in parts]
    order = [axis for part in given if part is not None for axis in part.tolist()]
    return not any(part is None for part in given) and order == list(range(len(order)))


def _product_of_rows(view: _View, node: tf.compat.v1.NodeDef) -> tf.compat.v1.NodeDef | None:
    """The op that multiplies matrices along their rows, and adds up, with `node`, along all axes before; None: none."""
    if node.op == "Sum" and _sums_before_matrices(view.graph, node):
        node = view.graph.nodes[op_of(node.input[0])]
        is_product = node.op == "BatchMatMulV2" and node.attr["adj_x"].b and not node.attr["adj_y"].b
    else:
        is_product = node.op == "MatMul" and node.attr["transpose_a"].b and not node.attr["transpose_b"].b
    return node if is_product and tf.as_dtype(node.attr["T"].type).is_floating else None


def _sums_before_matrices(view: GraphView, node: tf.compat.v1.NodeDef) -> bool:
    """Whether the op adds up axes before the last two alone, as those along which an operand was broadcast."""
    name = parse(node.input[1])
    broadcast = view.nodes[name.op]
    if broadcast.op != "BroadcastGradientArgs":
        axes = view.constant(node.input[1])
        return axes is not None and axes.tolist() == list(range(axes.size))
    part = view.nodes[op_of(broadcast.input[name.output])]
    end = view.constant(part.input[2]) if part.op == "StridedSlice" and not part.attr["end_mask"].i else None
    return end is not None and end.tolist() == [-2]


def _product(
    view: _View,
    node: tf.compat.v1.NodeDef,
    shapes: Mapping[str, tf.TensorShape],
    made: tuple[int | None, int | None],
) -> Product | None:
    """What the op multiplies, whose result is of the shape `made`, if that is known; None: the rows' sizes are not."""
    if any(shapes[one].rank is None for one in node.input[:2]):
        return None
    (*leading, height), (*others, width) = (shapes[one].as_list() for one in node.input[:2])
    height, width = height or made[0], width or made[1]
    if not height or not width or _may_differ(leading[:-1], others[:-1]):
        return None
    left, right = (
        Factor(view.source(tensor), size, tf.as_dtype(node.attr["T"].type), position == 1, tensor, node.name, position)
        for position, (tensor, size) in enumerate(zip(node.input[:2], (height, width), strict=True))
    )
    return Product(left, right, None if None in leading else math.prod(leading))


def _may_differ(leading: Sequence[int | None], others: Sequence[int | None]) -> bool:
    """Whether axes of these sizes, before two matrices' own, may be broadcast: one factor then has more rows."""
    pairs = zip(leading, others, strict=False)
    return len(leading) != len(others) or any(one != other and 1 in (one, other) for one, other in pairs)


def _sums(
    program: Program,
    view: _View,
    gradients: Iterable[Gradient],
    makers: Mapping[str, tf.compat.v1.NodeDef],
    products: Iterable[Product],
) -> Iterator[tuple[str, Product]]:
    """Of biases: sums of the rows of what a product's right factor is."""
    rights = {(product.right.source, product.right.width): product for product in products}
    for gradient in gradients:
        node, shape = makers[gradient.tensors[0]], program.item.variable(gradient.variable).shape
        if not _sums_rows(view.graph, node, shape):
            continue
        product = rights.get((view.source(node.input[0]), math.prod(shape)))
        if product is not None:
            yield gradient.tensors[0], replace(product, left=None)


def _sums_rows(view: GraphView, node: tf.compat.v1.NodeDef, shape: tuple[int, ...]) -> bool:
    """Whether the op adds up leading axes; what it makes has as many numbers as `shape`."""
    if node.op == "BiasAddGrad":
        return node.attr["data_format"].s != b"NCHW"
    if node.op != "Sum":
        return False
    axes = view.constant(node.input[1])
    if axes is not None:
        return axes.tolist() == list(range(axes.size))
    name = parse(node.input[1])
    maker = view.nodes[name.op]
    broadcast = view.constant(maker.input[name.output]) if maker.op == "BroadcastGradientArgs" else None
    # An axis of size 1 behind others is added up along, too.
    own = list(dropwhile(lambda size: size == 1, shape))
    return broadcast is not None and tuple(broadcast) == shape and 1 not in own
