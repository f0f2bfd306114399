"""The shapes of tensors, also where rules, and not the graph, tell them."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from autodist_py.capture.batch.layouts.constants import Constants
from autodist_py.kernel.analysis.batch_layout.layouts import Block
from autodist_py.kernel.ir.graph import GraphView, has_function_attribute
from autodist_py.kernel.ir.names import parse
from autodist_py.kernel.ir.node import reads_of

BATCH = -1
"""Stands for the number of a replica's rows in a shape."""


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
        self._graph, self._tensor_of, self._constants = graph, tensor_of, constants
        self._given = {tensor: tensor_of(tensor).shape.merge_with(shape) for tensor, shape in given.items()}
        self._noted = dict(self._given)

    def forget(self) -> None:
        """Know again only what the graph says, and what was given."""
        self._noted = dict(self._given)

    def of(self, tensor: str) -> tf.TensorShape:
        """The shape of `tensor`, as far as it is known."""
        return self._noted.get(str(parse(tensor)), self._tensor_of(tensor).shape)

    def infer(self, node: tf.compat.v1.NodeDef, sizes: Callable[[str], Sequence[int] | None]) -> None:
        """Note the shapes of what `node` computes from what has a shape that the graph does not say.

        Args:
            node: an op of the graph.
            sizes: those in a shape that the op is given, `BATCH` for that of the rows, as far as they are known.
        """
        reads = reads_of(node)
        if not reads or has_function_attribute(node) or not self._graph.dataflow_consumers([node.name]):
            return
        if any(map(_is_open, self._tensor_of(f"{node.name}:0").op.outputs)):
            self._note_inferred(node, sizes)

    def is_fixed(self, node: tf.compat.v1.NodeDef, sizes: Callable[[str], Sequence[int] | None]) -> bool:
        """Whether what `node` returns has one shape, whatever the number of rows; `sizes` as in `infer`."""
        if not self.of(f"{node.name}:0").is_fully_defined() and not has_function_attribute(node):
            self._note_inferred(node, sizes)
        return self.of(f"{node.name}:0").is_fully_defined()

    def _note_inferred(self, node: tf.compat.v1.NodeDef, sizes: Callable[[str], Sequence[int] | None]) -> None:
        reads = reads_of(node)
        given = [_Input(self.of(read), self._tensor_of(read).dtype, self._content(read, sizes)) for read in reads]
        if any(str(parse(read)) in self._noted for read in reads) or any(one.content is not None for one in given):
            for index, shape in enumerate(_inferred(node, given)):
                name = str(parse(f"{node.name}:{index}"))
                self._noted[name] = self.of(name).merge_with(shape)

    def _content(self, tensor: str, sizes: Callable[[str], Sequence[int] | None]) -> np.ndarray | Sequence[int] | None:
        value = self._constants.value(tensor)
        is_list = self._tensor_of(tensor).shape.rank == 1 and self._tensor_of(tensor).dtype.is_integer
        return sizes(tensor) if value is None and is_list else value

    def note_sum(self, node: tf.compat.v1.NodeDef, axes: Sequence[int] | None) -> None:
        """Note the shape of a sum over `axes`, which a value tells that the graph does not; None: it is not known."""
        whole = self.of(node.input[0])
        if axes is None or whole.rank is None or self._tensor_of(f"{node.name}:0").shape.is_fully_defined():
            return
        kept = node.attr["keep_dims"].b
        sizes = [1 if at in axes else size for at, size in enumerate(whole.as_list()) if kept or at not in axes]
        self._noted[str(parse(f"{node.name}:0"))] = tf.TensorShape(sizes)

    def note_rows(self, node: tf.compat.v1.NodeDef, given: Block | None, made: Block | None) -> None:
        """Note how long the rows are that `node` reshapes others to, of which each example has as many as these."""
        row, shape = self.of(node.input[0])[1:].num_elements(), self.of(f"{node.name}:0")
        if row is None or shape.rank is None or given is None or made is None or given.batch != made.batch:
            return
        sizes = shape.as_list()
        missing = [at for at, size in enumerate(sizes) if at and size is None]
        others = int(np.prod([size for size in sizes[1:] if size is not None]))
        if len(missing) == 1 and others:
            sizes[missing[0]] = row * given.rows // made.rows // others
            self._noted[str(parse(f"{node.name}:0"))] = tf.TensorShape(sizes)


def _is_open(symbol: tf.Tensor) -> bool:
    """Whether the graph does not say the shape of a row of `symbol`, or how many sizes it is."""
    is_list = symbol.shape.rank == 1 and symbol.dtype.is_integer
    return not (symbol.shape if is_list else symbol.shape[1:]).is_fully_defined()


class _Input(NamedTuple):
    """What is known of an input."""

    shape: tf.TensorShape
    dtype: tf.DType
    content: np.ndarray | Sequence[int] | None
    """Its numbers, `BATCH` for that of the rows; None: they are not known."""

    def tensor(self) -> tf.Tensor:
        """One of which TensorFlow infers the same."""
        if self.content is None:
            return tf.compat.v1.placeholder(self.dtype, self.shape)
        if isinstance(self.content, np.ndarray) or BATCH not in self.content:
            return tf.constant(self.content, self.dtype)
        rows = tf.compat.v1.placeholder(self.dtype, [])
        return tf.stack([rows if size == BATCH else tf.constant(size, self.dtype) for size in self.content])


def _inferred(node: tf.compat.v1.NodeDef, given: Sequence[_Input]) -> list[tf.TensorShape]:
    """The shapes that TensorFlow infers of what `node` returns, given these inputs."""
    with tf.Graph().as_default() as scratch:
        inputs = {f"input_{index}": one.tensor() for index, one in enumerate(given)}
        alone = tf.compat.v1.GraphDef(node=[node], versions=scratch.as_graph_def().versions)
        alone.node[0].device = ""
        alone.node[0].attr.pop("_class", None)
        alone.node[0].input[:] = inputs
        tf.graph_util.import_graph_def(alone, input_map=inputs, name="")
        return [output.shape for output in scratch.get_operation_by_name(node.name).outputs]
