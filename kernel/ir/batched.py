"""Which tensors of a captured program carry the batch: those whose rows are examples, shared out among replicas."""

from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from autodist_py.kernel.ir.graph import ITERATOR_NEXT, GraphView
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import GraphItem


class BatchedTensor(NamedTuple):
    """A tensor of the captured graph, with its type and shape; the first dimension is the batch.

    Tensors of one `batch` (a number) have as many rows each; others may have as many.
    """

    name: str
    dtype: tf.DType
    shape: tuple[int | None, ...]
    batch: int


def batched_tensors(item: GraphItem, graph: GraphView) -> tuple[BatchedTensor, ...]:
    """The batched inputs of `item`, then the outputs of its iterators whose first dimension is unknown.

    Each output of an iterator is a batch of its own, as it may have other numbers of rows.
    """
    inputs = tuple(
        BatchedTensor(f"{source.name}:0", tf.as_dtype(source.dtype), tuple(source.shape), source.batch)
        for source in item.inputs
        if source.batched and source.shape is not None
    )
    first = max((one.batch for one in inputs), default=-1) + 1
    outputs = (one._replace(batch=first + index) for index, one in enumerate(_iterator_outputs(graph)))
    return (*inputs, *outputs)


def require_batch(item: GraphItem, graph: GraphView) -> None:
    """Refuse a program that reads an iterator and has no batch: every replica would train on all that it reads.

    Raises:
        CaptureError: an iterator's elements have a static first dimension, and nothing else is batched.
    """
    if batched_tensors(item, graph):
        return
    for node in graph.of_type(ITERATOR_NEXT):
        shapes = [tf.TensorShape(shape) for shape in node.attr["output_shapes"].list.shape]
        if any(shape.rank is None or shape.rank > 0 for shape in shapes):
            raise CaptureError(
                "a step is shared out by the first dimension of what it reads, which must be unknown (None) for the "
                f"batch; the iterator gives the static shapes {', '.join(map(str, shapes))}. Batch the dataset "
                "without drop_remainder=True, or pass the batches to the step as arguments"
            )


def _iterator_outputs(graph: GraphView) -> Iterator[BatchedTensor]:
    for node in graph.of_type(ITERATOR_NEXT):
        shapes, types = node.attr["output_shapes"].list.shape, node.attr["output_types"].list.type
        for index, (shape, dtype) in enumerate(zip(shapes, types, strict=True)):
            sizes = None if shape.unknown_rank else [size.size for size in shape.dim]
            if sizes and sizes[0] < 0:
                known = tuple(size if size >= 0 else None for size in sizes)
                yield BatchedTensor(f"{node.name}:{index}", tf.as_dtype(dtype), known, 0)
