"""The shapes of tensors, also where rules, and not the graph, tell them."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from autodist_py.capture.batch.layouts.constants import Constants
from autodist_py.kernel.ir.graph import GraphView, has_function_attribute
from autodist_py.kernel.ir.names import parse
from autodist_py.kernel.ir.node import reads_of


class KnownShapes:
    """What is known of the shapes in a graph.

    Args:
        graph: the graph.
        tensor_of: a tensor of it by its name.
        constants: the values that are known.
        given: shapes of tensors that are known though the graph does not say them.
    """

    def __init__(
        self,
        graph: GraphView,
        tensor_of: Callable[[str], tf.Tensor],
        constants: Constants,
        given: Mapping[str, tf.TensorShape],
    ):
        self._graph, self._tensor_of, self._constants, self._given = graph, tensor_of, constants, given
        self._noted = dict(given)

    def forget(self) -> None:
        """Know again only what the graph says, and what was given."""
        self._noted = dict(self._given)

    def of(self, tensor: str) -> tf.TensorShape:
        """The shape of `tensor`, as far as it is known."""
        return self._noted.get(str(parse(tensor)), self._tensor_of(tensor).shape)

    def infer(self, node: tf.compat.v1.NodeDef) -> None:
        """Note the shapes of what `node` computes from what has a shape that the graph does not say."""
        reads = reads_of(node)
        is_told_more = any(str(parse(read)) in self._noted for read in reads)
        if not is_told_more or has_function_attribute(node) or not self._graph.dataflow_consumers([node.name]):
            return
        symbols = self._tensor_of(f"{node.name}:0").op.outputs
        if not all(symbol.shape[1:].is_fully_defined() for symbol in symbols):
            types = [self._tensor_of(read).dtype for read in reads]
            shapes = _inferred(node, list(map(self.of, reads)), list(map(self._constants.value, reads)), types)
            self._noted |= {str(parse(f"{node.name}:{index}")): shape for index, shape in enumerate(shapes)}

    def note_sum(self, node: tf.compat.v1.NodeDef, axes: Sequence[int] | None) -> None:
        """Note the shape of a sum over `axes`, which a value tells that the graph does not; None: it is not known."""
        whole = self.of(node.input[0])
        if axes is None or whole.rank is None or self._tensor_of(f"{node.name}:0").shape.is_fully_defined():
            return
        kept = node.attr["keep_dims"].b
        sizes = [1 if at in axes else size for at, size in enumerate(whole.as_list()) if kept or at not in axes]
        self._noted[str(parse(f"{node.name}:0"))] = tf.TensorShape(sizes)

    def note_rows(self, node: tf.compat.v1.NodeDef, given: int | None, made: int | None) -> None:
        """Note how long the rows are that `node` reshapes others to, of which each example has as many as these."""
        row, shape = self.of(node.input[0])[1:].num_elements(), self.of(f"{node.name}:0")
        if row is None or shape.rank is None or not given or not made:
            return
        sizes = shape.as_list()
        missing = [at for at, size in enumerate(sizes) if at and size is None]
        others = int(np.prod([size for size in sizes[1:] if size is not None]))
        if len(missing) == 1 and others:
            sizes[missing[0]] = row * given // made // others
            self._noted[str(parse(f"{node.name}:0"))] = tf.TensorShape(sizes)


def _inferred(
    node: tf.compat.v1.NodeDef,
    given: Sequence[tf.TensorShape],
    constants: Sequence[np.ndarray | None],
    dtypes: Sequence[tf.DType],
) -> list[tf.TensorShape]:
    """The shapes that TensorFlow infers of what `node` returns, where its inputs have these shapes and values."""
    with tf.Graph().as_default() as scratch:
        inputs = {
            f"input_{index}": tf.compat.v1.placeholder(dtype, shape) if value is None else tf.constant(value, dtype)
            for index, (shape, value, dtype) in enumerate(zip(given, constants, dtypes, strict=True))
        }
        alone = tf.compat.v1.GraphDef(node=[node], versions=scratch.as_graph_def().versions)
        alone.node[0].device = ""
        alone.node[0].attr.pop("_class", None)
        alone.node[0].input[:] = inputs
        tf.graph_util.import_graph_def(alone, input_map=inputs, name="")
        return [output.shape for output in scratch.get_operation_by_name(node.name).outputs]
