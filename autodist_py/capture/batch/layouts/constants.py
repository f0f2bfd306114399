"""Values that are known while a graph is captured: constants, static sizes, and arithmetic on them."""

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of, parse

_ARITHMETIC: Mapping[str, Callable[..., np.ndarray]] = {
    "Add": np.add,
    "AddV2": np.add,
    "FloorMod": np.mod,
    "InvertPermutation": np.argsort,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Range": np.arange,
    "Sub": np.subtract,
}


class Constants:
    """Values of tensors that follow from constants and static shapes.

    Attributes:
        given: values of tensors that are known otherwise.
    """

    def __init__(self, graph: GraphView, tensor_of: Callable[[str], tf.Tensor]):
        self._graph, self._tensor_of = graph, tensor_of
        self._known: dict[str, np.ndarray | None] = {}
        self.given: dict[str, np.ndarray] = {}

    def forget_given(self) -> None:
        """Know again only what the graph says."""
        self.given.clear()
        self._known.clear()

    def value(self, tensor: str) -> np.ndarray | None:
        """The value of `tensor`; None where it is not known."""
        name = str(parse(tensor))
        if name in self.given:
            return self.given[name]
        if name not in self._known:
            self._known[name] = self._found(name)
        return self._known[name]

    def _found(self, tensor: str) -> np.ndarray | None:
        node = self._graph.nodes[op_of(tensor)]
        if node.op in ("Const", "Identity"):
            return self._graph.constant(tensor)
        if node.op == "StridedSlice":
            return self._size(node)
        if node.op == "Slice":
            return self._sliced(node)
        if node.op == "Reshape":
            given, sizes = self.value(node.input[0]), self.value(node.input[1])
            return None if given is None or sizes is None else given.reshape(sizes)
        if node.op == "GatherV2":
            return self._gathered(node)
        if node.op == "Shape" and self._tensor_of(node.input[0]).shape.rank == 0:
            return np.zeros([0], np.int32)
        if node.op == "Fill":
            sizes, number = self.value(node.input[0]), self.value(node.input[1])
            is_number = sizes is not None and number is not None and not sizes.size
            return number if is_number else None
        if node.op == "Prod":
            return self._product(node)
        if node.op == "Rank":
            rank = self._tensor_of(node.input[0]).shape.rank
            return None if rank is None else np.array(rank, np.int32)
        if node.op not in _ARITHMETIC and node.op not in ("ConcatV2", "Pack"):
            return None
        if tf.as_dtype(node.attr["Tidx" if node.op == "Range" else "T"].type) not in (tf.int32, tf.int64):
            return None
        values = [self.value(name) for name in node.input if not name.startswith("^")]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        if node.op == "Pack":
            return np.stack(known, axis=node.attr["axis"].i)
        if node.op == "ConcatV2":
            return np.concatenate(known[:-1], axis=int(known[-1]))
        return np.asarray(_ARITHMETIC[node.op](*known))

    def _size(self, node: tf.compat.v1.NodeDef) -> np.ndarray | None:
        """One static dimension, taken from a shape: `tf.shape(x)[i]`."""
        source = self._graph.nodes[op_of(node.input[0])]
        begin, stride = self.value(node.input[1]), self.value(node.input[3])
        is_one = node.attr["shrink_axis_mask"].i == 1 and stride is not None and stride.tolist() == [1]
        if source.op != "Shape" or not is_one or begin is None or begin.shape != (1,):
            return None
        shape = self._tensor_of(source.input[0]).shape
        index = int(begin[0])
        if shape.rank is None or not -shape.rank <= index < shape.rank or shape[index] is None:
            return None
        return np.array(shape[index], tf.as_dtype(source.attr["out_type"].type).as_numpy_dtype)

    def sizes(self, tensor: str) -> list[int | None] | None:
        """What is known of the sizes in a shape, or taken from one: `tf.gather(tf.shape(x), [i, j])`; None: nothing."""
        node = self._graph.nodes[op_of(tensor)]
        if node.op == "Shape":
            shape = self._tensor_of(node.input[0]).shape
            return None if shape.rank is None else shape.as_list()
        places = self.value(node.input[1]) if node.op == "GatherV2" else None
        sizes = None if places is None else self.sizes(node.input[0])
        if sizes is None or places is None or not all(0 <= place < len(sizes) for place in places.flat):
            return None
        return [sizes[place] for place in places.flat]

    def _gathered(self, node: tf.compat.v1.NodeDef) -> np.ndarray | None:
        """Static dimensions, taken from a shape."""
        known, places = self.sizes(f"{node.name}:0"), self.value(node.input[1])
        if known is None or places is None or None in known:
            return None
        return np.array(known, tf.as_dtype(node.attr["Tparams"].type).as_numpy_dtype).reshape(places.shape)

    def _product(self, node: tf.compat.v1.NodeDef) -> np.ndarray | None:
        """The product of sizes."""
        sizes = self.value(node.input[0])
        is_vector = sizes is not None and sizes.ndim == 1 and not node.attr["keep_dims"].b
        return np.asarray(np.prod(sizes, dtype=sizes.dtype)) if sizes is not None and is_vector else None

    def _sliced(self, node: tf.compat.v1.NodeDef) -> np.ndarray | None:
        """A part of what is known; or static dimensions, taken from a shape: `tf.slice(tf.shape(x), [i], [n])`."""
        source, given = self._graph.nodes[op_of(node.input[0])], self.value(node.input[0])
        begin, size = self.value(node.input[1]), self.value(node.input[2])
        if begin is None or size is None:
            return None
        if given is not None:
            ends = zip(begin, size, strict=True)
            return given[tuple(slice(first, None if count < 0 else first + count) for first, count in ends)]
        if source.op != "Shape":
            return None
        shape = self._tensor_of(source.input[0]).shape
        if shape.rank is None:
            return None
        first, count = int(begin[0]), int(size[0])
        known = shape.as_list()[first : None if count < 0 else first + count]
        return None if None in known else np.array(known, tf.as_dtype(source.attr["out_type"].type).as_numpy_dtype)
