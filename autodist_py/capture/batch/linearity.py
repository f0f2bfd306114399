"""Which op types are linear in which of their inputs, the others being given."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from autodist_py.kernel.analysis.batch_layout.arithmetic import ADDITIVE

# fmt: off
_LINEAR: Mapping[str, tuple[tuple[int, ...], ...]] = {
    **dict.fromkeys((
        "AvgPool", "AvgPool3D", "BatchToSpaceND", "BiasAddGrad", "BroadcastTo", "Cast", "CheckNumerics", "Conj",
        "CropAndResizeGradImage", "Cumsum", "DepthToSpace", "Div", "DivNoNan", "DynamicPartition", "EluGrad",
        "EnsureShape", "ExpandDims", "FFT", "FFT2D", "FFT3D", "FakeQuantWithMinMaxArgsGradient", "FusedBatchNormGradV3",
        "GatherNd", "GatherV2", "IFFT", "IFFT2D", "IFFT3D", "IRFFT", "IRFFT2D", "Identity", "Imag", "LRNGrad",
        "LeakyReluGrad", "MatrixBandPart", "MatrixDiag", "MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3",
        "MatrixDiagV2", "MatrixDiagV3", "Mean", "MirrorPad", "MirrorPadGrad", "MulNoNan", "Neg", "Pad",
        "PreventGradient", "RFFT", "RFFT2D", "Real", "RealDiv", "Relu6Grad", "ReluGrad", "Reshape", "ResizeBicubicGrad",
        "ResizeBilinearGrad", "ResizeNearestNeighborGrad", "ReverseSequence", "ReverseV2", "Roll", "SegmentSum",
        "SeluGrad", "Slice", "SoftplusGrad", "SoftsignGrad", "SpaceToBatchND", "SpaceToDepth", "SparseSegmentMeanGrad",
        "SparseSegmentSqrtNGrad", "SparseSegmentSum", "SparseSegmentSumGrad", "SplitV", "Squeeze", "StopGradient",
        "StridedSlice", "Sum", "Tile", "Transpose", "Unpack", "UnsortedSegmentSum", "ZerosLike",
    ), ((0,),)),
    **dict.fromkeys((
        "AvgPool3DGrad", "AvgPoolGrad", "InvGrad", "MatrixSolve", "MatrixTriangularSolve", "ReciprocalGrad",
        "RsqrtGrad", "ScatterNd", "SigmoidGrad", "Split", "SqrtGrad", "TanhGrad",
    ), ((1,),)),
    **dict.fromkeys(("MaxPool3DGrad", "MaxPoolGrad"), ((2,),)),
    **dict.fromkeys((
        "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "Einsum", "MatMul", "Mul",
    ), ((0,), (1,))),
    **dict.fromkeys((
        "BiasAdd", "Complex", "MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3", "Sub",
    ), ((0, 1),)),
    **dict.fromkeys(("Select", "SelectV2"), ((1, 2),)),
    **dict.fromkeys(("PadV2", "TensorScatterAdd", "TensorScatterUpdate"), ((0, 2),)),
    **dict.fromkeys((
        "Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter",
    ), ((0,), (2,))),
    **dict.fromkeys((
        "Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput",
    ), ((1,), (2,))),
    "SparseTensorDenseMatMul": ((1,), (3,)),
    "StridedSliceGrad": ((4,),),
}
"""Op types that are linear in some inputs, all together, the others being given: the alternatives."""
# fmt: on
_JOINS = ("ConcatV2", "Pack")
OF_WEIGHTS = frozenset(
    {"BiasAddGrad", "Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter"}
)
"""Op types that compute the gradient of a layer's weights: a sum over examples, one for each row of what they read."""


def linear_groups(node: tf.compat.v1.NodeDef) -> Sequence[tuple[int, ...]]:
    """The inputs that `node` is linear in, all together: the alternatives; none: it is not known to be."""
    if node.op == "Cast" and not all(tf.as_dtype(node.attr[key].type).is_floating for key in ("SrcT", "DstT")):
        return ()
    if node.op == "DynamicStitch":
        return [tuple(range(node.attr["N"].i, 2 * node.attr["N"].i))]
    if node.op in _JOINS or node.op in ADDITIVE:
        return [tuple(range(node.attr["N"].i if "N" in node.attr else 2))]
    return _LINEAR.get(node.op, ())
