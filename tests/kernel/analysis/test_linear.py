"""What ops make of sums and means over examples, of fixed shape, is what the rule says: against its definition."""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.kernel.analysis.batch_layout.layouts import BatchLayout, Operands
from autodist_py.kernel.analysis.batch_layout.linear import LINEAR, linear_layout

REPLICATED, MEAN = BatchLayout.REPLICATED, BatchLayout.PARTIAL_MEAN
SUM, PLUS, MIXED = BatchLayout.PARTIAL_SUM, BatchLayout.PARTIAL_SUM_PLUS, BatchLayout.MIXED
SHARES = (0.25, 0.75)
"""Of two replicas, of the examples."""

Make = Callable[..., tf.Tensor]

MATRIX = (4, 4)
OF_EQUATIONS = np.tril(np.random.default_rng(1).normal(size=MATRIX)) + 3.0 * np.eye(4)


def of_complex(transform: Make, value: tf.Tensor) -> tf.Tensor:
    return tf.math.real(transform(tf.cast(value, tf.complex128)) * (1.0 - 2.0j))


OPS: dict[str, tuple[Make, Sequence[tuple[int, ...]]]] = {
    "BatchMatMulV2": (lambda a, b: tf.matmul(a, b), [(2, 3, 4), (2, 4, 5)]),
    "BiasAdd": (lambda a, b: tf.nn.bias_add(a, b), [(3, 4), (4,)]),
    "BroadcastTo": (lambda a: tf.broadcast_to(a, [2, *MATRIX]), [MATRIX]),
    "ConcatV2": (lambda a, b: tf.concat([a, b], 1), [MATRIX, MATRIX]),
    "Cumsum": (lambda a: tf.cumsum(a, reverse=True), [MATRIX]),
    "Diag": (lambda a: tf.raw_ops.Diag(diagonal=a), [(4,)]),
    "DiagPart": (lambda a: tf.raw_ops.DiagPart(input=a), [MATRIX]),
    "DynamicStitch": (lambda a, b: tf.dynamic_stitch([[0, 2], [1, 3]], [a, b]), [(2, 3), (2, 3)]),
    "Einsum": (lambda a, b: tf.einsum("ij,jk->ki", a, b), [MATRIX, (4, 3)]),
    "ExpandDims": (lambda a: tf.expand_dims(a, 1), [MATRIX]),
    "GatherNd": (lambda a: tf.gather_nd(a, [[0, 1], [3, 3]]), [MATRIX]),
    "GatherV2": (lambda a: tf.gather(a, [3, 0, 0], axis=1), [MATRIX]),
    "FFT": (lambda a: of_complex(tf.signal.fft, a), [MATRIX]),
    "FFT2D": (lambda a: of_complex(tf.signal.fft2d, a), [MATRIX]),
    "IFFT": (lambda a: of_complex(tf.signal.ifft, a), [MATRIX]),
    "IFFT2D": (lambda a: of_complex(tf.signal.ifft2d, a), [MATRIX]),
    "IRFFT": (lambda a: tf.signal.irfft(tf.cast(a, tf.complex128), [6]), [MATRIX]),
    "IRFFT2D": (lambda a: tf.signal.irfft2d(tf.cast(a, tf.complex128), [4, 6]), [MATRIX]),
    "MatMul": (lambda a, b: tf.matmul(a, b, transpose_a=True), [MATRIX, MATRIX]),
    "MatrixSolve": (lambda a: tf.linalg.solve(OF_EQUATIONS, a), [MATRIX]),
    "MatrixTriangularSolve": (lambda a: tf.linalg.triangular_solve(OF_EQUATIONS, a), [MATRIX]),
    "MatrixBandPart": (lambda a: tf.linalg.band_part(a, 1, 0), [MATRIX]),
    "MatrixDiag": (lambda a: tf.raw_ops.MatrixDiag(diagonal=a), [MATRIX]),
    "MatrixDiagPart": (lambda a: tf.raw_ops.MatrixDiagPart(input=a), [MATRIX]),
    "MatrixDiagPartV3": (lambda a, b: tf.linalg.diag_part(a, k=(0, 1), padding_value=b), [MATRIX, ()]),
    "MatrixDiagV3": (lambda a, b: tf.linalg.diag(a, k=1, padding_value=b), [MATRIX, ()]),
    "MirrorPad": (lambda a: tf.pad(a, [[1, 0], [0, 2]], "REFLECT"), [MATRIX]),
    "Pack": (lambda a, b: tf.stack([a, b], 1), [MATRIX, MATRIX]),
    "Pad": (lambda a: tf.pad(a, [[1, 0], [0, 2]]), [MATRIX]),
    "PadV2": (lambda a, b: tf.raw_ops.PadV2(input=a, paddings=[[1, 0], [0, 2]], constant_values=b), [MATRIX, ()]),
    "Reshape": (lambda a: tf.reshape(a, [2, -1]), [MATRIX]),
    "RFFT": (lambda a: tf.math.real(tf.signal.rfft(a) * (1.0 - 2.0j)), [MATRIX]),
    "RFFT2D": (lambda a: tf.math.real(tf.signal.rfft2d(a) * (1.0 - 2.0j)), [MATRIX]),
    "ReverseV2": (lambda a: tf.reverse(a, [0]), [MATRIX]),
    "Roll": (lambda a: tf.roll(a, 1, 0), [MATRIX]),
    "ScatterNd": (lambda a: tf.scatter_nd([[0], [2], [2], [1]], a, [5, 4]), [MATRIX]),
    "SegmentSum": (lambda a: tf.math.segment_sum(a, [0, 0, 1, 2]), [MATRIX]),
    "Select": (lambda a, b: tf.raw_ops.Select(condition=[True, False, True, True], x=a, y=b), [MATRIX, MATRIX]),
    "SelectV2": (lambda a, b: tf.where([True, False, True, True], a, b), [MATRIX, MATRIX]),
    "Slice": (lambda a: tf.slice(a, [1, 0], [2, -1]), [MATRIX]),
    "Split": (lambda a: tf.split(a, 2)[1], [MATRIX]),
    "SplitV": (lambda a: tf.split(a, [1, 3])[1], [MATRIX]),
    "Squeeze": (lambda a: tf.squeeze(a), [(1, *MATRIX)]),
    "StridedSlice": (lambda a: a[::2, -1], [MATRIX]),
    "StridedSliceGrad": (
        lambda a: tf.raw_ops.StridedSliceGrad(
            shape=[5, 4], begin=[0, 0], end=[4, 4], strides=[1, 1], dy=a, shrink_axis_mask=0
        ),
        [MATRIX],
    ),
    "TensorScatterAdd": (lambda a, b: tf.tensor_scatter_nd_add(a, [[1], [1]], b), [MATRIX, (2, 4)]),
    "TensorScatterSub": (lambda a, b: tf.tensor_scatter_nd_sub(a, [[1], [1]], b), [MATRIX, (2, 4)]),
    "TensorScatterUpdate": (lambda a, b: tf.tensor_scatter_nd_update(a, [[1], [2]], b), [MATRIX, (2, 4)]),
    "Tile": (lambda a: tf.tile(a, [2, 1]), [MATRIX]),
    "Transpose": (lambda a: tf.transpose(a), [MATRIX]),
    "Unpack": (lambda a: tf.unstack(a, axis=1)[2], [MATRIX]),
    "UnsortedSegmentSum": (lambda a: tf.math.unsorted_segment_sum(a, [2, 0, 0, 1], 3), [MATRIX]),
}
SAME_ON_ALL = {"BatchMatMulV3": "TensorFlow makes it where types differ, as BatchMatMulV2"}


def test_each_op_is_tried() -> None:
    assert OPS.keys() | SAME_ON_ALL.keys() == LINEAR


def of_layout(layout: BatchLayout, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[list[np.ndarray], ...]:
    """What two replicas have of a value of that layout, what one device has, and its term of no example."""
    own, term = [rng.normal(size=shape) for _ in SHARES], rng.normal(size=shape)
    if layout is REPLICATED:
        return [term, term], [term], [term]
    if layout is MEAN:
        return own, [np.average(own, axis=0, weights=SHARES)], [np.zeros(shape)]
    if layout is SUM:
        return own, [np.sum(own, axis=0)], [np.zeros(shape)]
    return [one + term for one in own], [np.sum(own, axis=0) + term], [term]


@pytest.mark.parametrize("op", OPS)
def test_what_a_rule_says_is_what_one_device_has(op: str) -> None:
    make, shapes = OPS[op]
    tried = 0
    for layouts in product((REPLICATED, MEAN, SUM, PLUS), repeat=len(shapes)):
        found = _found(op, make, shapes, layouts)
        if set(layouts) == {REPLICATED} or found is MIXED:
            continue
        tried += 1
        rng = np.random.default_rng(tried)
        parts, whole, terms = zip(
            *(of_layout(one, shape, rng) for one, shape in zip(layouts, shapes, strict=True)), strict=True
        )
        results = [make(*map(tf.constant, own)).numpy() for own in zip(*parts, strict=True)]
        (expected,) = [make(*map(tf.constant, own)).numpy() for own in zip(*whole, strict=True)]
        (term,) = [make(*map(tf.constant, own)).numpy() for own in zip(*terms, strict=True)]
        combined = {
            MEAN: np.average(results, axis=0, weights=SHARES),
            SUM: np.sum(results, axis=0),
            PLUS: np.sum(results, axis=0) - (len(SHARES) - 1) * term,
        }
        np.testing.assert_allclose(combined[found], expected, atol=1e-12, err_msg=f"{layouts}")
    assert tried >= 3


def _found(op: str, make: Make, shapes: Sequence[tuple[int, ...]], layouts: Sequence[BatchLayout]) -> BatchLayout:
    with tf.Graph().as_default() as graph:
        values = [tf.compat.v1.placeholder(tf.float64, shape) for shape in shapes]
        make(*values)
        (made,) = [each for each in graph.get_operations() if each.type == op]
    given = {value.op.name: layout for value, layout in zip(values, layouts, strict=True)}
    symbols = list(made.inputs)
    own = [_origin(symbol, given) for symbol in symbols]
    return linear_layout(Operands.of(made.node_def, symbols, own, [None] * len(symbols)))


def _origin(symbol: tf.Tensor, given: dict[str, BatchLayout]) -> BatchLayout:
    """The layout of what is given, which may have been reshaped on the way."""
    if symbol.op.name in given:
        return given[symbol.op.name]
    found = {_origin(read, given) for read in symbol.op.inputs} - {REPLICATED}
    return found.pop() if found else REPLICATED
