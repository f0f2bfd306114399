"""Gradients that are products of two matrices whose rows are of examples: `products_of`.

The gradient of `x @ w` is `xᵀ · dy`, and that of a bias that is added to it the sum of dy's rows. The sum of such a
gradient over replicas is the product of all their rows, whatever is in them: sufficient factors (Xie et al., "Lighter-
Communication Distributed Machine Learning via Sufficient Factor Broadcasting", UAI 2016).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import tensorflow as tf

from autodist_py.kernel.analysis.first_batch import replica_shapes
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse
from autodist_py.kernel.ir.product import Factor, Product
from autodist_py.kernel.program import Program
from autodist_py.proto.graph_item import Gradient

_PASSES_ON = frozenset({"Identity", "Reshape"})
"""Op types whose results have the numbers of their first input, in its order."""
_PASSED = frozenset({"Cast", "Identity"})
"""Op types whose results are, element by element, what is behind a gradient."""


def products_of(program: Program, gradients: Iterable[Gradient]) -> tuple[dict[str, Product], dict[str, str]]:
    """Which of the dense gradients are products; and why others are none. Both are by their markers' tensors."""
    view, asked = program.analysis.captured, list(gradients)
    makers = {gradient.tensors[0]: _maker(view, gradient.tensors[0]) for gradient in asked}
    multiplied = {marker: of for marker, node in makers.items() if (of := _product_of_rows(view, node)) is not None}
    shapes = replica_shapes(program, {read for node in multiplied.values() for read in node.input[:2]})
    found: dict[str, Product] = {}
    for gradient in asked:
        marker, shape = gradient.tensors[0], program.item.variable(gradient.variable).shape
        whole = shape if _is_passed_on(view, marker) and len(shape) == 2 else (None, None)
        product = _product(view, multiplied[marker], shapes, whole) if marker in multiplied else None
        if product is not None and math.prod(one.width for one in product.factors) == math.prod(shape) > 0:
            found[marker] = product
    found |= dict(_sums(program, asked, makers, list(found.values())))
    reasons = {
        marker: "the sizes of its factors are not known"
        if marker in multiplied
        else f"'{node.name}' ({node.op}) makes it"
        for marker, node in makers.items()
        if marker not in found
    }
    return found, reasons


def _maker(view: GraphView, marker: str) -> tf.compat.v1.NodeDef:
    """The op that makes the numbers of the raw gradient."""
    return view.nodes[op_of(_source(view, view.nodes[op_of(marker)].input[0], _PASSED | {"Reshape"}))]


def _is_passed_on(view: GraphView, marker: str) -> bool:
    """Whether the raw gradient has the shape of what makes its numbers."""
    raw = view.nodes[op_of(marker)].input[0]
    return _source(view, raw, _PASSED) == _source(view, raw, _PASSED | {"Reshape"})


def _source(view: GraphView, tensor: str, passed: frozenset[str] = _PASSES_ON) -> str:
    """The tensor that `tensor` is made of by ops that are passed by alone, or transpose nothing."""
    while (node := view.nodes[op_of(tensor)]).op in passed or _keeps_axes(view, node):
        tensor = node.input[0]
    return str(parse(tensor))


def _keeps_axes(view: GraphView, node: tf.compat.v1.NodeDef) -> bool:
    """Whether the op is a transposition that leaves the axes as they are, as those of `tf.tensordot` may be."""
    if node.op != "Transpose":
        return False
    axes = view.nodes[op_of(node.input[1])]
    parts = axes.input[:-1] if axes.op == "ConcatV2" else [node.input[1]]
    given = [view.constant(part) for part in parts]
    order = [axis for part in given if part is not None for axis in part.tolist()]
    return not any(part is None for part in given) and order == list(range(len(order)))


def _product_of_rows(view: GraphView, node: tf.compat.v1.NodeDef) -> tf.compat.v1.NodeDef | None:
    """The op that multiplies matrices along their rows, and adds up, with `node`, along all axes before; None: none."""
    if node.op == "Sum" and _sums_before_matrices(view, node):
        node = view.nodes[op_of(node.input[0])]
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
    view: GraphView,
    node: tf.compat.v1.NodeDef,
    shapes: Mapping[str, tf.TensorShape],
    made: tuple[int | None, int | None],
) -> Product | None:
    """What the op multiplies, whose result is of the shape `made`, if that is known; None: the rows' sizes are not."""
    if any(shapes[one].rank is None for one in node.input[:2]):
        return None
    (*leading, height), (*_, width) = (shapes[one].as_list() for one in node.input[:2])
    height, width = height or made[0], width or made[1]
    if not height or not width:
        return None
    left, right = (
        Factor(
            _source(view, tensor), size, tf.as_dtype(node.attr["T"].type), position == 1, tensor, node.name, position
        )
        for position, (tensor, size) in enumerate(zip(node.input[:2], (height, width), strict=True))
    )
    return Product(left, right, None if None in leading else math.prod(leading))


def _sums(
    program: Program,
    gradients: Iterable[Gradient],
    makers: Mapping[str, tf.compat.v1.NodeDef],
    products: Iterable[Product],
) -> Iterator[tuple[str, Product]]:
    """Of biases: sums of the rows of what a product's right factor is."""
    view = program.analysis.captured
    rights = {product.right.source: product for product in products}
    for gradient in gradients:
        node, shape = makers[gradient.tensors[0]], program.item.variable(gradient.variable).shape
        product = rights.get(_source(view, node.input[0])) if _sums_rows(view, node, shape) else None
        if product is not None and math.prod(shape) == product.right.width:
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
    return broadcast is not None and tuple(broadcast) == shape
