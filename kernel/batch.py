"""Which tensors of a captured program carry the batch: those whose rows are examples, shared out among replicas."""

from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from autodist_py.kernel.graph_view import ITERATOR_NEXT
from autodist_py.proto.graph_item import GraphItem


class BatchedTensor(NamedTuple):
    """A tensor of the captured graph, with its type and shape; the first dimension is the batch."""

    name: str
    dtype: tf.DType
    shape: tuple[int | None, ...]


def batched_tensors(item: GraphItem) -> tuple[BatchedTensor, ...]:
    """The batched inputs of `item`, then the outputs of its iterators whose first dimension is unknown."""
    inputs = (
        BatchedTensor(f"{source.name}:0", tf.as_dtype(source.dtype), tuple(source.shape))
        for source in item.inputs
        if source.batched and source.shape is not None
    )
    return (*inputs, *_iterator_outputs(tf.compat.v1.GraphDef.FromString(item.graph_def)))


def _iterator_outputs(graph: tf.compat.v1.GraphDef) -> Iterator[BatchedTensor]:
    for node in graph.node:
        if node.op not in ITERATOR_NEXT:
            continue
        shapes, types = node.attr["output_shapes"].list.shape, node.attr["output_types"].list.type
        for index, (shape, dtype) in enumerate(zip(shapes, types, strict=True)):
            sizes = None if shape.unknown_rank else [size.size for size in shape.dim]
            if sizes and sizes[0] < 0:
                yield BatchedTensor(
                    f"{node.name}:{index}", tf.as_dtype(dtype), tuple(size if size >= 0 else None for size in sizes)
                )
