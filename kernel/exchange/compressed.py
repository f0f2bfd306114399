"""Gradients that are compressed on their way to a server, each by itself; what the server answers is as it is."""

import tensorflow as tf

from autodist_py.kernel.compressors.codec import Wire
from autodist_py.kernel.compressors.coding import Coding, codec_for, described
from autodist_py.kernel.compressors.registry import codec_of
from autodist_py.kernel.compressors.rounding import rounded, travelling
from autodist_py.kernel.ir.fragment import TensorSpec
from autodist_py.kernel.ir.state import Recorder
from autodist_py.kernel.program import Program
from autodist_py.proto.compressors import Compressor
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient


def _wire(program: Program, gradient: Gradient, compressor: Compressor) -> Wire:
    """Between the workers and a server, which takes their messages one by one: nobody knows a sum before."""

    def total(value: tf.Tensor) -> tf.Tensor:
        name = type(compressor).__name__
        raise StrategyError(
            f"a server is sent each worker's gradient by itself, so nobody knows a sum over workers before; {name} has "
            f"asked for one, of {value.dtype.name} {tuple(value.shape)}, for variable '{gradient.variable}'. Use "
            f"AllReduce for it, or another compressor; sums_first = True says what {name} needs, before anything runs"
        )

    workers = program.topology.all_workers
    return Wire(workers.index(program.topology.worker), len(workers), total)


def sent_spec(program: Program, gradient: Gradient, compressor: Compressor, spec: TensorSpec) -> TensorSpec:
    """What is sent in the place of a dense gradient, one row, or of the rows of a sparse one."""
    if gradient.is_sparse:
        return TensorSpec(spec.name, travelling(compressor, spec.dtype), spec.shape)
    dense = described(program, gradient, spec.dtype)
    codec, (slots,) = codec_for(compressor, [dense])
    with tf.Graph().as_default():
        state = {name: tf.compat.v1.placeholder(slot.dtype, slot.shape) for name, slot in slots.items()}
        given = [tf.compat.v1.placeholder(dense.dtype, dense.shape)]
        sent, _ = codec.compress(given, [state], _wire(program, gradient, compressor))
        return TensorSpec(spec.name, sent.dtype, (None, *sent.shape))


def coded_rows(compressor: Compressor, values: tf.Tensor) -> tf.Tensor:
    """The rows of a sparse gradient, as they are sent."""
    return rounded(values, travelling(compressor, values.dtype), 1)


def coded(
    program: Program, gradient: Gradient, compressor: Compressor, value: tf.Tensor, recorder: Recorder
) -> tuple[tf.Tensor, Coding, list[dict[str, tf.Tensor]]]:
    """A dense gradient as it is sent: one row; and the states to keep once it has arrived."""
    coding = Coding(program, compressor, [gradient], value.dtype, recorder)
    sent, states = coding.compress([value], _wire(program, gradient, compressor))
    return tf.expand_dims(sent, 0), coding, [dict(state) for state in states]


def decoded(
    program: Program, gradient: Gradient, compressor: Compressor, rows: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """The sum of the dense gradients that the messages of several workers have brought."""
    if not compressor.gathers:  # It is summed by the server, in the gradient's own precision.
        rows = tf.reduce_sum(tf.cast(rows, dtype), axis=0)
    dense, wire = described(program, gradient, dtype), _wire(program, gradient, compressor)
    (total,), _ = codec_of(compressor).decompress(rows, [dense], [{}], wire)
    return total
