"""Sparse gradients that travel as dense ones: where they may, where that is fewer bytes, and what is made of rows.

Of n workers each sends 2 (n - 1) / n of a table's bytes by a ring, and (n - 1) times its own rows, with their indices,
where rows are gathered. Which rows a batch will use is not known when a program is compiled, only how many indices it
has: they are taken to be spread as Zipf's law has it. What is decided is made of the captured graph, the strategy, the
topology and the size of the chief's first batch alone, so it is the same on every worker.
"""

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from autodist_py.kernel.analysis.first_batch import most_replicas, replica_shapes
from autodist_py.kernel.analysis.row_access import adds_rows_up
from autodist_py.kernel.ir.names import op_of
from autodist_py.kernel.program import Program
from autodist_py.proto.compressors import Compressor
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Gradient
from autodist_py.proto.synchronizers import AllReduceSynchronizer


def require_rows_added_up(program: Program, gradient: Gradient) -> None:
    """Refuse a sparse gradient that is to travel as a dense one, where that makes a difference to its update.

    Raises:
        StrategyError: the update does something else with rows than to scale them and add them to the table's.
    """
    if adds_rows_up(program, gradient):
        return
    raise StrategyError(
        f"variable '{gradient.variable}': sparse_as_dense=True sends the rows of its gradient as a dense one, each row "
        "once. That is for updates that scale rows and add them to the table, as plain SGD's does. This one does more "
        "with them (momentum, Adam, a clip), or something else uses them. Leave sparse_as_dense out for it, with "
        "PerVariable where other tables need it"
    )


def is_worth_it(program: Program, synchronizer: AllReduceSynchronizer, gradient: Gradient, *, members: int) -> bool:
    """Whether a sparse gradient may travel as a dense one, to `members` of a ring, and that is fewer bytes.

    Where a compressor keeps what it has rounded off, rows stay rows: what is kept would depend on the first batch.
    """
    workers = len(program.topology.workers)
    compressor = synchronizer.compressor
    if workers == 1 or compressor.keeps_state or not adds_rows_up(program, gradient):
        return False
    ids = _ids_of_a_worker(program, gradient)
    if ids is None:
        return False
    variable = program.item.variable(gradient.variable)
    marker = program.analysis.captured.nodes[op_of(gradient.tensors[0])]
    return is_fewer_bytes(
        variable.shape,
        ids,
        item=tf.as_dtype(variable.dtype).size,
        index=tf.as_dtype(marker.attr["T"].type).size,
        compressor=compressor,
        workers=workers,
        members=members,
    )


def is_fewer_bytes(
    shape: tuple[int, ...], ids: int, *, item: int, index: int, compressor: Compressor, workers: int, members: int
) -> bool:
    """Whether a worker sends fewer bytes of a whole table than of the rows that so many ids of its own are expected of.

    Args:
        shape: the table's.
        ids: how many indices the worker that has most of them has.
        item: the bytes of a number.
        index: the bytes of an index.
        compressor: how both are coded.
        workers: how many gather rows.
        members: of the ring that would sum the table.
    """
    whole = 2 * (members - 1) / members * compressor.wire_bytes(shape, item)
    row = (workers - 1) * (compressor.wire_bytes((1, *shape[1:]), item) + index)
    if not whole or whole >= row * min(ids, shape[0]):
        return False  # However they are spread; or there is nothing to send.
    return whole < row * expected_rows(shape[0], ids)


def expected_rows(rows: int, ids: int) -> float:
    """How many of so many rows are among `ids` indices, if these are drawn by Zipf's law: the r-th as often as 1 / r.

    Drawn evenly more of them are distinct: where a whole table is fewer bytes by Zipf's law, it is so then, too. Laws
    that are more skewed may have fewer.
    """
    share = 1.0 / np.arange(1, rows + 1)
    share /= share.sum()
    return float(np.sum(1.0 - (1.0 - share) ** ids))


def _ids_of_a_worker(program: Program, gradient: Gradient) -> int | None:
    """How many indices the gradient has on the worker with most replicas in the first step; None: not known."""
    indices = gradient.tensors[0]
    size = replica_shapes(program, [indices])[indices][0]
    return None if size is None else int(size) * most_replicas(program)


def as_dense(
    program: Program, gradient: Gradient, copies: Sequence[Sequence[tf.Tensor]], devices: Sequence[str]
) -> list[tf.Tensor]:
    """The rows of a sparse gradient, of which each replica has indices and values, added up in the table's shape."""
    shape = program.item.variable(gradient.variable).shape
    if not math.prod(shape):
        return [tf.zeros(shape, values.dtype) for _, values, _ in copies]  # TensorFlow's scatter refuses it.
    dense = []
    for (indices, values, _), device in zip(copies, devices, strict=True):
        with tf.device(device):
            dense.append(tf.scatter_nd(tf.expand_dims(indices, 1), values, tf.constant(shape, indices.dtype)))
    return dense


def as_rows(
    program: Program,
    gradient: Gradient,
    copies: Sequence[Sequence[tf.Tensor]],
    combined: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
) -> list[list[tf.Tensor]]:
    """Indices, values and shape on each replica: the rows of the total that are not 0.

    Rows of 0 change nothing where they are scaled by finite numbers; others would make them NaN.

    Args:
        program: whose gradient it is.
        gradient: the gradient.
        copies: what was made dense.
        combined: the total on each replica.
        devices: the replicas'.
    """
    shape = program.item.variable(gradient.variable).shape
    found = []
    for (indices, _, dense_shape), (total,), device in zip(copies, combined, devices, strict=True):
        with tf.device(device):
            numbers = tf.reshape(total, [shape[0], math.prod(shape[1:])])
            places = tf.squeeze(tf.where(tf.reduce_any(tf.not_equal(numbers, 0), axis=1)), 1)
            rows = [tf.cast(places, indices.dtype), tf.gather(total, places)]
            found.append([*rows, tf.constant(shape, dense_shape.dtype)])
    return found
