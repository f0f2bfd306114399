"""Batches of values in packs: values of one type and static shapes that are reduced as one flat buffer."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from autodist_py.kernel.collectives.base import Value
from autodist_py.kernel.collectives.values import is_sparse
from autodist_py.kernel.ir import flat_buffers
from autodist_py.proto.errors import StrategyError

Packing: TypeAlias = Callable[[Mapping[int, tf.Tensor]], Iterator[tuple[int, ...]]]
"""From values, by their positions in the batch, to the positions of those that share a buffer."""
Reduce: TypeAlias = Callable[[Sequence[Value]], list[Value]]
"""From a value per device to a value per destination."""


def one_by_one(values: Mapping[int, tf.Tensor]) -> Iterator[tuple[int, ...]]:
    """Each value by itself."""
    for position in values:
        yield (position,)


def by_type(values: Mapping[int, tf.Tensor]) -> Iterator[tuple[int, ...]]:
    """All values of one type together."""
    for dtype in dict.fromkeys(value.dtype for value in values.values()):
        yield tuple(position for position, value in values.items() if value.dtype == dtype)


def by_size(most: Callable[[tf.DType], int]) -> Packing:
    """Values of one type that follow one another together, as far as they have no more elements than `most` says."""

    def packs(values: Mapping[int, tf.Tensor]) -> Iterator[tuple[int, ...]]:
        def elements_of(position: int) -> int:
            return int(values[position].shape.num_elements())

        for alike in by_type(values):
            yield from flat_buffers.filled(alike, elements_of, most(values[alike[0]].dtype))

    return packs


def reduce_in_packs(
    batch: Sequence[Sequence[Value]],
    devices: Sequence[str],
    destinations: Sequence[str],
    packs: Packing,
    reduce: Reduce,
) -> list[list[Value]]:
    """For each value of the batch what `reduce` makes of its pack; what is sparse, or of no static shape, is alone."""
    dense = {
        position: values[0]
        for position, values in enumerate(batch)
        if not is_sparse(values) and all(value.shape.is_fully_defined() for value in values)
    }
    results: dict[int, list[Value]] = {}
    for pack in packs(dense):
        reduced = reduce_pack([batch[position] for position in pack], devices, destinations, reduce)
        results |= zip(pack, reduced, strict=True)
    for position in range(len(batch)):
        if position not in results:
            results[position] = reduce(batch[position])
    return [results[position] for position in range(len(batch))]


def reduce_pack(
    values: Sequence[Sequence[tf.Tensor]], devices: Sequence[str], destinations: Sequence[str], reduce: Reduce
) -> list[list[tf.Tensor]]:
    """What `reduce` makes of values of one type and static shapes, laid into one buffer on each device.

    Args:
        values: for each value the replicas' values.
        devices: where these are.
        destinations: where `reduce` delivers.
        reduce: from a buffer per device to a buffer per destination.

    Returns:
        For each value one per destination.
    """
    reduced = reduce(flat_buffers.pack_each(values, devices))
    return flat_buffers.unpack_each(reduced, destinations, [tuple(copies[0].shape) for copies in values])


def reduce_in_pieces(
    buffers: Sequence[tf.Tensor],
    devices: Sequence[str],
    destinations: Sequence[str],
    most: int,
    reduce: Callable[[Sequence[tf.Tensor], int], list[tf.Tensor]],
) -> list[tf.Tensor]:
    """What `reduce`, which is told their numbers, makes of the pieces of buffers: of at most `most` elements.

    The buffers are of one static shape; where they are no larger they are reduced as they are.
    """
    sizes = flat_buffers.piece_sizes(buffers[0], most)
    pieces = flat_buffers.cut_each(buffers, devices, sizes)
    reduced = [reduce(piece, number) for number, piece in enumerate(pieces)]
    return flat_buffers.join_each(reduced, destinations, buffers[0].shape)


def reduce_in_num_packs(
    batch: Sequence[Sequence[Value]],
    devices: Sequence[str],
    destinations: Sequence[str],
    num_packs: int,
    reduce: Callable[[Sequence[Value], int], list[Value]],
) -> list[list[Value]]:
    """As `reduce_in_packs`; all values of one type are laid into one buffer, and that is cut into the packs.

    Args:
        batch: for each value the replicas' values.
        devices: where these are.
        destinations: where `reduce` delivers.
        num_packs: into how many packs a buffer is cut at most; 0: each value is reduced as it is.
        reduce: from a value per device, and the number of the pack, to a value per destination.
    """

    def in_pieces(values: Sequence[Value]) -> list[Value]:
        if is_sparse(values) or not values[0].shape.is_fully_defined():
            return reduce(values, 0)
        most = math.ceil(values[0].shape.num_elements() / max(1, num_packs))
        return reduce_in_pieces(values, devices, destinations, max(1, most), reduce)

    return reduce_in_packs(batch, devices, destinations, by_type if num_packs else one_by_one, in_pieces)


def require_packs(num_packs: int, what: str) -> None:
    """Check how many packs a batch is to be reduced in.

    Raises:
        StrategyError: it is less than none.
    """
    if num_packs < 0:
        raise StrategyError(f"num_packs of {what} is 0 (values are not packed) or more; got {num_packs}; use 1")
