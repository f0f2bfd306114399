"""How the inputs and attributes of single ops are drawn: by their names, and by the op's type."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

EXAMPLES = 5

ROWS = [(EXAMPLES,), (EXAMPLES, 1), (EXAMPLES, 3), (EXAMPLES, 2, 3), (EXAMPLES, 3, 3), (EXAMPLES, EXAMPLES)]
OTHERS = [(), (1,), (3,), (1, 3), (2, 3), (3, 3), (2, 1, 3), (1, 1), (EXAMPLES,), (3, 2)]
IMAGES = [(EXAMPLES, 4, 4, 3), (1, 4, 4, 3)]

Draw = Callable[[np.random.Generator, "Drawn"], np.ndarray]


@dataclass
class Drawn:
    """What is drawn of a sample so far: its inputs by name, its attributes, and the types of its inputs."""

    inputs: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    types: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """That of the first input that has one."""
        return max((np.ndim(value) for value in self.inputs.values() if not isinstance(value, list)), default=2)


# -- Inputs, by name ---------------------------------------------------------------------------------------------------


def _axes(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
    axes = rng.permutation(max(drawn.rank, 1))[: rng.integers(1, max(drawn.rank, 1) + 1)]
    return np.array([axis - drawn.rank * int(rng.integers(2)) for axis in axes], np.int32)


def _axis(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
    return np.array(rng.integers(-drawn.rank, max(drawn.rank, 1)), np.int32)


def _order(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
    rest = 1 + rng.permutation(drawn.rank - 1)
    return np.array([0, *rest] if rng.integers(3) else rng.permutation(drawn.rank), np.int32)


def _shape(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
    given = next(iter(drawn.inputs.values()), None)
    size = np.size(given) if given is not None else EXAMPLES * 3
    if rng.integers(3) == 0:
        return np.array([-1, *[(), (3,), (1,), (2, 3), (1, 3)][rng.integers(5)]], np.int32)
    if size % EXAMPLES:
        return np.array([size], np.int32)
    rest = size // EXAMPLES
    return np.array([[EXAMPLES, rest], [EXAMPLES, 1, rest], [size], [EXAMPLES * rest, 1]][rng.integers(4)], np.int32)


def _broadcast(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
    return np.array([(EXAMPLES, 3), (EXAMPLES, 2, 3), (EXAMPLES,), (2, 3), (EXAMPLES, 3, 3)][rng.integers(5)], np.int32)


def _multiples(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
    return np.array([*[1] * int(rng.integers(2)), *rng.integers(1, 3, 4)][: drawn.rank], np.int32)


def _paddings(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
    made = rng.integers(0, 2, [drawn.rank, 2]).astype(np.int32)
    made[:1] *= rng.integers(2)
    return made


def _zeros_or_ones(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
    first = 0 if rng.integers(4) else 1
    return np.array([first, *rng.integers(0, 2, 4)][: drawn.rank], np.int32)


def _sizes(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
    first = -1 if rng.integers(3) else rng.integers(1, 3)
    return np.array([first, *[-1 if rng.integers(2) else 1 for _ in range(4)]][: drawn.rank], np.int32)


def _ends(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
    return np.array([rng.integers(1, 4) for _ in range(drawn.rank)], np.int32)


def _strides(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
    return np.array([1 if rng.integers(4) else 2 for _ in range(drawn.rank)], np.int32)


def _small(*choices: Any) -> Draw:
    return lambda rng, drawn: np.asarray(choices[rng.integers(len(choices))])


def _whole_numbers(limit: int, shapes: Sequence[tuple[int, ...]] = ((EXAMPLES,), (EXAMPLES, 2), (2,), ())) -> Draw:
    def draw(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
        return np.asarray(rng.integers(0, limit, shapes[int(rng.integers(len(shapes)))]), np.int32)

    return draw


def _values(*shapes: tuple[int, ...], low: float = -2.0, high: float = 2.0) -> Draw:
    def draw(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
        return np.asarray(rng.uniform(low, high, shapes[rng.integers(len(shapes))]))

    return draw


def _square(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
    root = rng.normal(size=[(EXAMPLES, 3, 3), (EXAMPLES, 2, 3, 3), (3, 3), (EXAMPLES, EXAMPLES)][rng.integers(4)])
    return root @ np.swapaxes(root, -1, -2) + 2.0 * np.eye(root.shape[-1])


def _texts(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
    shape = [(EXAMPLES,), (EXAMPLES, 2), (2,)][rng.integers(3)]
    return np.array([str(number / 4).encode() for number in rng.integers(0, 99, shape).flat], object).reshape(shape)


def _like(name: str) -> Draw:
    """Of the shape of another input; now and then of another one."""

    def draw(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
        return np.asarray(rng.uniform(0.1, 1.0, np.shape(drawn.inputs[name])))

    return draw


def _shape_of_rows(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
    return np.array([EXAMPLES, 4, 4, 3], np.int32)


def _kernel(rng: np.random.Generator, drawn: Drawn) -> np.ndarray:
    return rng.normal(size=(2, 2, 3, 2))


_IMAGES = _values(*IMAGES)
_VOLUMES = _values((EXAMPLES, 4, 4, 4, 3))
_PROBABILITIES = _values(*ROWS, *OTHERS, low=0.05, high=0.95)
_OF_TWO = _values((EXAMPLES, 3), (2, 3), (EXAMPLES, 2), (3, 2), (EXAMPLES, EXAMPLES), (3, EXAMPLES))
_OF_BATCHES = _values((EXAMPLES, 2, 3), (EXAMPLES, 3, 2), (EXAMPLES, 1, 3, 3), (2, 3), (3, 3), (3, 2), (1, 3, 3))
_TWO_DIMENSIONS = _values((EXAMPLES, 4), (2, 4))


def _each(op_types: Sequence[str], drawn: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The same for each of these op types."""
    return {op_type: drawn for op_type in op_types}


# fmt: off
BY_NAME: Mapping[str, Draw] = {
    "axis": _axis, "dimension": _axis, "dim": _axis, "split_dim": _axis, "concat_dim": _axis,
    "reduction_indices": _axes, "reduction_axes": _axes, "perm": _order,
    "shape": _shape, "multiples": _multiples, "paddings": _paddings, "begin": _zeros_or_ones,
    "end": _ends, "strides": _strides, "depth": _small(np.int32(4)), "k": _small(np.int32(2), np.int32(1)),
    "num_lower": _small(np.int64(1)), "num_upper": _small(np.int64(0)), "padding_value": _small(0.0, 1.5),
    "on_value": _small(1.0), "off_value": _small(0.0),
}
"""How an input is drawn, by its name."""

BY_OP: Mapping[str, Mapping[str, Draw]] = {
    **_each(("Acos", "Asin", "Atanh", "Erfinv", "Ndtri"), {"x": _PROBABILITIES}),
    "Acosh": {"x": _values(*ROWS, low=1.1, high=3.0)},
    "AdjustContrastv2": {"images": _values((EXAMPLES, 4, 4, 3), (EXAMPLES, 4, 3)), "contrast_factor": _small(1.5)},
    "AdjustHue": {"images": _values((EXAMPLES, 3), (EXAMPLES, 4, 4, 3), (4, 3), low=0, high=1), "delta": _small(0.2)},
    "AdjustSaturation": {"images": _values((EXAMPLES, 4, 4, 3), (4, 4, 3), low=0, high=1), "scale": _small(0.5)},
    "AvgPool": {"value": _IMAGES}, "AvgPool3D": {"input": _VOLUMES}, "LRN": {"input": _IMAGES},
    "MaxPool": {"input": _IMAGES}, "MaxPool3D": {"input": _VOLUMES},
    "AvgPoolGrad": {"orig_input_shape": _shape_of_rows, "grad": _values((EXAMPLES, 3, 3, 3))},
    "AvgPool3DGrad": {
        "orig_input_shape": _small(np.array([EXAMPLES, 4, 4, 4, 3], np.int32)), "grad": _values((EXAMPLES, 3, 3, 3, 3)),
    },
    **_each(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), {"x": _OF_BATCHES, "y": _OF_BATCHES}),
    "BiasAdd": {"value": _values(*ROWS, (EXAMPLES, 2, 2, 3)), "bias": _values((3,), (1,), (EXAMPLES,))},
    "BroadcastTo": {"shape": _broadcast},
    **_each(("Cholesky", "LogMatrixDeterminant", "MatrixDeterminant", "MatrixInverse"), {"input": _square}),
    **_each(("BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift"),
                    dict.fromkeys("xy", _whole_numbers(5, ROWS + OTHERS))),
    "Invert": {"x": _whole_numbers(5, ROWS)},
    "Conv2D": {"input": _IMAGES, "filter": _kernel},
    "DepthwiseConv2dNative": {"input": _IMAGES, "filter": _kernel},
    "Conv3D": {"input": _VOLUMES, "filter": _values((2, 2, 2, 3, 2))},
    "Conv2DBackpropInput": {
        "input_sizes": _shape_of_rows, "filter": _kernel, "out_backprop": _values((EXAMPLES, 3, 3, 2)),
    },
    "Conv2DBackpropFilter": {
        "input": _IMAGES, "filter_sizes": _small(np.array([2, 2, 3, 2], np.int32)),
        "out_backprop": _values((EXAMPLES, 3, 3, 2)),
    },
    "Conv3DBackpropInputV2": {
        "input_sizes": _small(np.array([EXAMPLES, 4, 4, 4, 3], np.int32)), "filter": _values((2, 2, 2, 3, 2)),
        "out_backprop": _values((EXAMPLES, 3, 3, 3, 2)),
    },
    "Conv3DBackpropFilterV2": {
        "input": _VOLUMES, "filter_sizes": _small(np.array([2, 2, 2, 3, 2], np.int32)),
        "out_backprop": _values((EXAMPLES, 3, 3, 3, 2)),
    },
    "DepthwiseConv2dNativeBackpropInput": {
        "input_sizes": _shape_of_rows, "filter": _kernel, "out_backprop": _values((EXAMPLES, 3, 3, 6)),
    },
    "DepthwiseConv2dNativeBackpropFilter": {
        "input": _IMAGES, "filter_sizes": _small(np.array([2, 2, 3, 2], np.int32)),
        "out_backprop": _values((EXAMPLES, 3, 3, 6)),
    },
    "DenseBincount": {
        "input": _whole_numbers(4, [(EXAMPLES, 3), (EXAMPLES,)]), "size": _small(np.int32(4)),
        "weights": _like("input"),
    },
    "Diag": {"diagonal": _values((3,), (EXAMPLES,))}, "DiagPart": {"input": _values((3, 3), (EXAMPLES, EXAMPLES))},
    "DynamicStitch": {
        "indices": _small(np.array([0, 1], np.int32)), "data": _small(np.array([EXAMPLES, 3], np.int32)),
    },
    "Fill": {"dims": _broadcast, "value": _small(1.5)},
    "FusedBatchNormV3": {
        "x": _values((EXAMPLES, 2, 2, 3)), "scale": _values((3,)), "offset": _values((3,)), "mean": _values((3,)),
        "variance": _values((3,), low=0.5, high=1.5),
    },
    "GatherNd": {
        "params": _values((4, 3), (EXAMPLES, 3)), "indices": _whole_numbers(3, [(EXAMPLES, 1), (EXAMPLES, 2)]),
    },
    "GatherV2": {"params": _values((4, 3), (EXAMPLES, 3), (EXAMPLES, 4, 3)), "indices": _whole_numbers(3)},
    "HSVToRGB": {"images": _values((EXAMPLES, 3), (EXAMPLES, 2, 2, 3), (4, 3), low=0, high=1)},
    "RGBToHSV": {"images": _values((EXAMPLES, 3), (EXAMPLES, 2, 2, 3), (4, 3), low=0, high=1)},
    "Igamma": dict.fromkeys("ax", _PROBABILITIES),
    **_each(("ImageProjectiveTransformV2", "ImageProjectiveTransformV3"), {
        "images": _IMAGES, "transforms": _values((EXAMPLES, 8), (1, 8), low=-0.2, high=1.0),
        "output_shape": _small(np.array([4, 4], np.int32)), "fill_value": _small(np.float32(0.5)),
    }),
    "InTopKV2": {"predictions": _TWO_DIMENSIONS, "targets": _whole_numbers(4, [(EXAMPLES,), (2,)])},
    **_each(("Log", "Log1p", "Rsqrt", "Sqrt", "Lgamma", "Digamma"), {"x": _PROBABILITIES}),
    "MatMul": {"a": _OF_TWO, "b": _OF_TWO},
    "MatrixDiagV3": {
        "diagonal": _values((3,), (2, 3), (EXAMPLES, 3)), "k": _small(np.int32(0)), "num_rows": _small(np.int32(-1)),
        "num_cols": _small(np.int32(-1)),
    },
    "LRNGrad": dict.fromkeys(("input_grads", "input_image", "output_image"), _values((EXAMPLES, 4, 4, 3))),
    "MaxPoolGrad": {
        "orig_input": _values((EXAMPLES, 4, 4, 3)), "orig_output": _values((EXAMPLES, 3, 3, 3)),
        "grad": _values((EXAMPLES, 3, 3, 3)),
    },
    "MaxPool3DGrad": {
        "orig_input": _values((EXAMPLES, 4, 4, 4, 3)), "orig_output": _values((EXAMPLES, 3, 3, 3, 3)),
        "grad": _values((EXAMPLES, 3, 3, 3, 3)),
    },
    **_each(("MatrixSolve", "MatrixTriangularSolve"), {
        "matrix": _values((3, 3), low=1, high=2), "rhs": _values((3, 2), (3, EXAMPLES)),
    }),
    **_each(("IRFFT", "RFFT"), {
        "input": _values((EXAMPLES, 4), (EXAMPLES, 2, 4), (EXAMPLES,)), "fft_length": _small(np.array([4], np.int32)),
    }),
    **_each(("IRFFT2D", "RFFT2D"), {
        "input": _values((EXAMPLES, 2, 4), (EXAMPLES, 4)), "fft_length": _small(np.array([2, 4], np.int32)),
    }),
    "ReverseV2": {"axis": _axes},
    "Pow": dict.fromkeys("xy", _PROBABILITIES),
    "OneHot": {"indices": _whole_numbers(4)},
    **_each(("ResizeArea", "ResizeBicubic", "ResizeBilinear", "ResizeNearestNeighbor"),
                    {"images": _IMAGES, "size": _small(np.array([3, 5], np.int32))}),
    "ScatterNd": {
        "indices": _whole_numbers(3, [(2, 1)]), "updates": _values((2, 3)), "shape": _small(np.array([3, 3], np.int32)),
    },
    "Slice": {"size": _sizes},
    "SplitV": {"size_splits": _small(np.array([1, 2], np.int32))},
    "SparseSoftmaxCrossEntropyWithLogits": {
        "features": _TWO_DIMENSIONS, "labels": _whole_numbers(4, [(EXAMPLES,), (2,)]),
    },
    "SoftmaxCrossEntropyWithLogits": {"features": _TWO_DIMENSIONS, "labels": _TWO_DIMENSIONS},
    **_each(("StringLength", "StringLower", "StringUpper"), {"input": _texts}),
    "StringToHashBucketFast": {"input": _texts}, "StringToNumber": {"string_tensor": _texts},
    **_each(("Where", "Unique"), {"x": _whole_numbers(3, [(EXAMPLES,)])}),
    "Roll": {"shift": _small(np.int32(1), np.int32(-2))},
    "SegmentSum": {
        "data": _values((3, 2), (3,), (EXAMPLES, 2)),
        "segment_ids": _small(np.array([0, 0, 1], np.int32), np.array([0, 0, 1, 1, 2], np.int32)),
    },
    "UnsortedSegmentSum": {
        "data": _values((3, 2), (2, 3), (EXAMPLES, 2)),
        "segment_ids": _whole_numbers(3, [(3,), (2,), (EXAMPLES,)]), "num_segments": _small(np.int32(3)),
    },
    **_each(("TensorScatterAdd", "TensorScatterSub", "TensorScatterUpdate"), {
        "tensor": _values((4, 3), (EXAMPLES, 3)), "indices": _whole_numbers(4, [(1, 1)]), "updates": _values((1, 3)),
    }),
    "StridedSliceGrad": {
        "shape": _small(np.array([EXAMPLES, 3], np.int32)), "dy": _values((EXAMPLES, 2), (EXAMPLES, 3)),
    },
}
# fmt: on
"""How inputs of one op type are drawn, by their names; what is not named is drawn by `BY_NAME`, or at random."""

# -- Attributes, by name ----------------------------------------------------------------------------------------------

# fmt: off
ATTRIBUTES: Mapping[str, Sequence[Any]] = {
    "N": [2, 3], "num": [3, 2, EXAMPLES], "num_split": [3, 2], "axis": [-1, 0, 1, 2],
    "squeeze_dims": [[1], [0], [-1]],
    "strides": [[1, 1, 1, 1]], "ksize": [[1, 2, 2, 1]], "padding": ["VALID"], "mode": ["REFLECT", "SYMMETRIC"],
    "keep_dims": [False, True], "transpose_a": [False, True], "transpose_b": [False, True], "adj_x": [False, True],
    "adj_y": [False, True], "exclusive": [False, True], "reverse": [False, True], "batch_dims": [0, 0, 1],
    "begin_mask": [0, 1, 3], "end_mask": [0, 1, 3], "ellipsis_mask": [0, 0, 1, 2], "new_axis_mask": [0, 0, 1, 2],
    "shrink_axis_mask": [0, 0, 1, 2], "boundaries": [[-0.5, 0.5]], "num_buckets": [10], "message": [""],
    "is_training": [False, True], "interpolation": ["BILINEAR"], "shape": [[None, 3], [None, None], [None]],
    "equation": [
        "bi,bj->ij", "bi,ij->bj", "bi,bi->b", "bi,ji->bj", "bi,ci->bc", "bij,bjk->bik", "bi,bi->", "ib,bj->ij",
    ],
    "binary_output": [False, True], "bad_color": [""], "align": ["LEFT_RIGHT", "RIGHT_LEFT"],
}
"""What an attribute may be, by its name; of all others the default is taken."""

ATTRIBUTES_BY_OP: Mapping[str, Mapping[str, Sequence[Any]]] = {
    **_each(("AvgPool3D", "AvgPool3DGrad", "MaxPool3D", "MaxPool3DGrad"),
                    {"ksize": [[1, 2, 2, 2, 1]], "strides": [[1, 1, 1, 1, 1]]}),
    **_each(("Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"), {"strides": [[1, 1, 1, 1, 1]]}),
    "FusedBatchNormV3": {"is_training": [False]},  # In training it is known to mix the examples.
    "Bitcast": {"type": ["int64", "float64", "int32", "uint8"]},
    "Cast": {"DstT": ["float64", "float32", "int32", "int64", "bool"]},
}
"""Likewise, of one op type."""
# fmt: on
