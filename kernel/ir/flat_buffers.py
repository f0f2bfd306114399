"""Flat buffers: tensors of one type laid one after the other, and a buffer in pieces, without needless copies."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import tensorflow as tf

_ALIGNED_BYTES = 64
"""Pieces that begin at multiples of it share the buffer's memory: more than TensorFlow asks for anywhere."""

_Item = TypeVar("_Item")


def filled(items: Iterable[_Item], size: Callable[[_Item], int], most: int) -> Iterator[tuple[_Item, ...]]:
    """Items that follow one another together, as far as they are no more than `most`; what is larger is alone."""
    together: list[_Item] = []
    total = 0
    for item in items:
        more = size(item)
        if together and total + more > most:
            yield tuple(together)
            together, total = [], 0
        together.append(item)
        total += more
    if together:
        yield tuple(together)


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The tensors in one flat buffer; one alone as it is."""
    if len(tensors) == 1:
        return tensors[0]
    flat = tf.constant([-1])
    return tf.concat([tensor if tensor.shape.rank == 1 else tf.reshape(tensor, flat) for tensor in tensors], axis=0)


def unpack(buffer: tf.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[tf.Tensor]:
    """The tensors of these shapes that `pack` has put into `buffer`."""
    if len(shapes) == 1:
        return [buffer]
    distinct = {shape: tf.constant(shape, tf.int32) for shape in dict.fromkeys(shapes) if len(shape) != 1}
    parts = tf.split(buffer, [tf.TensorShape(shape).num_elements() for shape in shapes])
    return [
        tf.reshape(part, distinct[shape]) if shape in distinct else part
        for part, shape in zip(parts, shapes, strict=True)
    ]


def pack_each(values: Sequence[Sequence[tf.Tensor]], devices: Sequence[str]) -> list[tf.Tensor]:
    """A buffer on each device, of values that are given for each value by device."""
    buffers = []
    for device, tensors in zip(devices, zip(*values, strict=True), strict=True):
        with tf.device(device):
            buffers.append(pack(tensors))
    return buffers


def unpack_each(
    buffers: Sequence[tf.Tensor], devices: Sequence[str], shapes: Sequence[tuple[int, ...]]
) -> list[list[tf.Tensor]]:
    """The values of these shapes that `pack_each` has put into buffers: for each value by device."""
    unpacked = []
    for device, buffer in zip(devices, buffers, strict=True):
        with tf.device(device):
            unpacked.append(unpack(buffer, shapes))
    return [list(copies) for copies in zip(*unpacked, strict=True)]


def piece_sizes(buffer: tf.Tensor, most: int) -> list[int]:
    """How many elements the pieces have of a buffer of more than `most`: equal ones, as far as they divide."""
    elements = buffer.shape.num_elements()
    count, aligned = max(1, -(-elements // most)), _ALIGNED_BYTES // buffer.dtype.size
    size = -(-elements // (count * aligned)) * aligned
    return [min(size, elements - begin) for begin in range(0, elements, size)] if count > 1 else [elements]


def cut(buffer: tf.Tensor, sizes: Sequence[int]) -> list[tf.Tensor]:
    """The buffer in flat pieces of these sizes; in one piece as it is."""
    return list(tf.split(tf.reshape(buffer, [-1]), sizes)) if len(sizes) > 1 else [buffer]


def join(parts: Sequence[tf.Tensor], shape: tf.TensorShape) -> tf.Tensor:
    """The tensor of this shape that `cut` has cut into `parts`."""
    return tf.reshape(tf.concat(parts, axis=0), shape) if len(parts) > 1 else parts[0]


def cut_each(buffers: Sequence[tf.Tensor], devices: Sequence[str], sizes: Sequence[int]) -> list[tuple[tf.Tensor, ...]]:
    """A buffer of each device in pieces: for each piece by device."""
    pieces = []
    for device, buffer in zip(devices, buffers, strict=True):
        with tf.device(device):
            pieces.append(cut(buffer, sizes))
    return list(zip(*pieces, strict=True))


def join_each(pieces: Sequence[Sequence[tf.Tensor]], devices: Sequence[str], shape: tf.TensorShape) -> list[tf.Tensor]:
    """On each device the tensor of this shape that `cut_each` has cut."""
    joined = []
    for device, parts in zip(devices, zip(*pieces, strict=True), strict=True):
        with tf.device(device):
            joined.append(join(parts, shape))
    return joined
