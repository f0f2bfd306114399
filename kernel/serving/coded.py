"""Gradients that are compressed on their way to a server, each by itself; what the server answers is as it is."""

import tensorflow as tf

from autodist_py.kernel.compressors.codec import Wire
from autodist_py.kernel.compressors.registry import codec_of
from autodist_py.kernel.compressors.rounding import rounded, travelling
from autodist_py.kernel.fragment import TensorSpec
from autodist_py.kernel.memory import Recorder
from autodist_py.kernel.program import Program
from autodist_py.kernel.serving.common import is_varying
from autodist_py.kernel.synchronizers.coding import Coding, described
from autodist_py.proto.compressors import Compressor, HorovodCompressor, NoneCompressor, compressor_of
from autodist_py.proto.graph_item import Gradient


def compressor_for(program: Program, gradient: Gradient) -> Compressor | None:
    """What codes the gradient; None: it is sent as it is."""
    compressor = compressor_of(program.strategy.node(gradient.variable).synchronizers[0].compressor, "compressor")
    is_empty = not described(program, gradient, tf.float32).elements
    return (
        None if isinstance(compressor, NoneCompressor) or is_empty or not is_varying(program, gradient) else compressor
    )


def wire_to(program: Program) -> Wire:
    """Between the workers and a server, which takes their messages one by one: nobody knows a sum before."""

    def total(value: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError("a compressor with sums_first = False has asked for a sum")

    workers = program.place.all_workers
    return Wire(workers.index(program.place.worker), len(workers), total)


def sent_spec(program: Program, gradient: Gradient, compressor: Compressor, spec: TensorSpec) -> TensorSpec:
    """What is sent in the place of a dense gradient, one row, or of the rows of a sparse one."""
    if gradient.is_sparse:
        return TensorSpec(spec.name, _rows_type(compressor, spec.dtype), spec.shape)
    codec, dense = codec_of(compressor), described(program, gradient, spec.dtype)
    with tf.Graph().as_default():
        (slots,) = codec.init([dense])
        state = {name: tf.compat.v1.placeholder(slot.dtype, slot.shape) for name, slot in slots.items()}
        sent, _ = codec.compress([tf.compat.v1.placeholder(dense.dtype, dense.shape)], [state], wire_to(program))
        return TensorSpec(spec.name, sent.dtype, (None, *sent.shape))


def _rows_type(compressor: Compressor, dtype: tf.DType) -> tf.DType:
    return travelling(compressor, dtype) if isinstance(compressor, HorovodCompressor) else dtype


def coded_rows(compressor: Compressor, values: tf.Tensor) -> tf.Tensor:
    """The rows of a sparse gradient, as they are sent."""
    return rounded(values, _rows_type(compressor, values.dtype), 1)


def coded(
    program: Program, gradient: Gradient, compressor: Compressor, value: tf.Tensor, recorder: Recorder
) -> tuple[tf.Tensor, Coding, list[dict[str, tf.Tensor]]]:
    """A dense gradient as it is sent: one row; and the states to keep once it has arrived."""
    coding = Coding(program, compressor, [gradient], value.dtype, recorder)
    sent, states = coding.compress([value], wire_to(program))
    return tf.expand_dims(sent, 0), coding, [dict(state) for state in states]


def decoded(
    program: Program, gradient: Gradient, compressor: Compressor, rows: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """The sum of the dense gradients that the messages of several workers have brought."""
    if not compressor.gathers:  # It is summed by the server, in the gradient's own precision.
        rows = tf.reduce_sum(tf.cast(rows, dtype), axis=0)
    (total,), _ = codec_of(compressor).decompress(rows, [described(program, gradient, dtype)], [{}], wire_to(program))
    return total
