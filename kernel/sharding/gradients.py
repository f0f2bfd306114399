"""Gradients in shards: each shard is given its part of the raw gradient, and others read the parts joined again."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import tensorflow as tf

from autodist_py.kernel.analysis.shard_plan import marker_kinds
from autodist_py.kernel.analysis.shard_rules import Kind
from autodist_py.kernel.ir.editor import Editor
from autodist_py.kernel.ir.fragment import TensorSpec
from autodist_py.kernel.ir.names import op_of
from autodist_py.kernel.ir.node import identity
from autodist_py.proto.graph_item import Gradient, Variable
from autodist_py.proto.strategy import VariableStrategy, shard_name


def cut_gradient(editor: Editor, gradient: Gradient, variable: Variable, node: VariableStrategy) -> list[Gradient]:
    """The gradients of the shards, with markers of their own; the gradient's markers pass on what those do, joined."""
    axis, sizes = node.axis, node.sizes(variable.shape[node.axis])
    raw = [editor.spec(editor.view.nodes[op_of(tensor)].input[0]) for tensor in gradient.tensors]
    if gradient.is_sparse:
        shapes = node.shapes(variable.shape)
        parts = editor.trace(lambda *raw: _sparse_parts(*raw, axis=axis, sizes=sizes, shapes=shapes), *raw)
    else:
        whole = TensorSpec(raw[0].name, raw[0].dtype, variable.shape)
        parts = [[part] for part in editor.trace(lambda tensor: tf.split(tensor, list(sizes), axis=axis), whole)]
    shards = []
    for index, tensors in enumerate(parts):
        markers = [shard_name(op_of(tensor), index) for tensor in gradient.tensors]
        for marker, tensor, spec in zip(markers, tensors, raw, strict=True):
            editor.add(identity(marker, tensor, spec.dtype))
        own = tuple(f"{marker}:0" for marker in markers)
        rows = gradient.rows if axis else None  # Which of the rows are in the shard is known in a step only.
        name = shard_name(variable.name, index)
        shards.append(replace(gradient, variable=name, tensors=own, rows=rows))
    for position, kind in enumerate(marker_kinds(gradient, axis)):
        cut = [TensorSpec(shard.tensors[position], raw[position].dtype) for shard in shards]
        joined = editor.trace(lambda *parts, kind=kind: _joined(kind, parts, variable, axis, sizes), *cut)
        editor.put_identity(op_of(gradient.tensors[position]), joined)
    return shards


def owners(indices: tf.Tensor, sizes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """For the index of each row the shard that has it, and the first row of that shard."""
    begins = np.cumsum([0, *sizes[:-1]])
    shards = tf.searchsorted(tf.constant(begins, tf.int64), tf.cast(indices, tf.int64), side="right") - 1
    return shards, tf.gather(tf.constant(begins, indices.dtype), tf.maximum(shards, 0))


def _sparse_parts(
    indices: tf.Tensor,
    values: tf.Tensor,
    dense_shape: tf.Tensor,
    *,
    axis: int,
    sizes: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
) -> list[list[tf.Tensor]]:
    own_shapes = [tf.constant(shape, dense_shape.dtype) for shape in shapes]
    if axis:
        columns = tf.split(values, list(sizes), axis=axis)
        return [[tf.identity(indices), part, shape] for part, shape in zip(columns, own_shapes, strict=True)]
    shards, begins = owners(indices, sizes)
    local = tf.dynamic_partition(indices - begins, shards, len(sizes))
    rows = tf.dynamic_partition(values, shards, len(sizes))
    return [list(part) for part in zip(local, rows, own_shapes, strict=True)]


def _joined(kind: Kind, parts: Sequence[tf.Tensor], variable: Variable, axis: int, sizes: Sequence[int]) -> tf.Tensor:
    """The whole gradient's tensor, of those of the shards; rows stand shard by shard."""
    if kind is Kind.SIZES:
        return tf.constant(variable.shape, parts[0].dtype)
    if kind is Kind.INDICES:
        if axis:
            return tf.identity(parts[0])
        begins = [0, *accumulate(sizes[:-1])]
        parts = [part + tf.constant(begin, part.dtype) for part, begin in zip(parts, begins, strict=True)]
    return tf.concat(parts, axis=axis if kind is Kind.DENSE else 0)
