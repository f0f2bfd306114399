"""Sparse gradients whose rows are gathered from all workers: those of an event together, in two collectives.

What is gathered are the rows of all replicas, in replica order, with each replica's values weighted. Of one lookup
these are the rows of one device, in its order; of several lookups in one table, the same rows grouped by replica. A
worker adds up its rows of one index before it sends them where that makes no difference to the update. Rows that all
replicas have are added up, as dense gradients are, and of indices that are distinct in the whole batch each comes once.
"""

from collections.abc import Sequence

import tensorflow as tf

from autodist_py.kernel.analysis.replica_weights import joined_rows, sum_duplicates, weighted_rows
from autodist_py.kernel.analysis.row_access import adds_rows_up
from autodist_py.kernel.collectives.collectives import Collectives
from autodist_py.kernel.compressors.rounding import rounded, travelling
from autodist_py.kernel.events import ReduceGradients
from autodist_py.kernel.program import Program
from autodist_py.proto.graph_item import Gradient


def gathered(
    program: Program,
    event: ReduceGradients,
    values: Sequence[Sequence[Sequence[tf.Tensor]]],
    weights: Sequence[tf.Tensor],
    devices: Sequence[str],
    collectives: Collectives,
) -> list[list[list[tf.Tensor]]]:
    """Of each gradient of a `GatherRows` the indices, values and dense shape of all replicas' rows, on each device."""
    with tf.device(devices[0]):
        rows = [
            _own_rows(program, gradient, copies, weights, devices)
            for gradient, copies in zip(event.gradients, values, strict=True)
        ]
        if collectives.num_workers > 1:
            rows = _of_all_workers(program, event, rows, collectives)
    combined: list[list[list[tf.Tensor]]] = []
    for gradient, copies, (indices, of_all) in zip(event.gradients, values, rows, strict=True):
        shape = program.item.variable(gradient.variable).shape  # A branch that was not taken has no other.
        combined.append([])
        for device, (_, _, dense_shape) in zip(devices, copies, strict=True):
            with tf.device(device):
                copy = [tf.identity(indices), tf.identity(of_all), tf.constant(shape, dense_shape.dtype)]
                combined[-1].append(copy)
    return combined


def _own_rows(
    program: Program,
    gradient: Gradient,
    copies: Sequence[Sequence[tf.Tensor]],
    weights: Sequence[tf.Tensor],
    devices: Sequence[str],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Indices and values of this worker's replicas; added up before they are sent, if the update adds them up, too."""
    parts = []
    for device, (indices, values, _), weight in zip(devices, copies, weights, strict=True):
        with tf.device(device):
            parts.append(weighted_rows(gradient, indices, values, weight))
    is_sent = len(program.topology.workers) > 1
    sums_before = is_sent and gradient.indices != "same" and adds_rows_up(program, gradient)
    sums = program.options.sum_duplicates or sums_before
    return joined_rows(gradient, parts, sums=sums)


def _of_all_workers(
    program: Program,
    event: ReduceGradients,
    rows: Sequence[tuple[tf.Tensor, tf.Tensor]],
    collectives: Collectives,
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Indices and values of all workers, in the order of ranks; each index once where that is needed."""
    half = travelling(event.compressor, event.dtype)
    if event.gradients[0].indices == "same":
        ((indices, values),) = rows
        sent = values if half == event.dtype else rounded(values, half, collectives.num_workers)
        return [(indices, tf.cast(collectives.sum_rows(sent), values.dtype))]
    parts = [part for indices, values in rows for part in (indices, rounded(values, half, 1))]
    everyone = collectives.gather_rows(parts) if len(rows) == 1 else collectives.gather_each(parts)
    found = []
    for gradient, (_, own), indices, values in zip(event.gradients, rows, everyone[::2], everyone[1::2], strict=True):
        of_all = indices, tf.cast(values, own.dtype)
        is_distinct = program.options.sum_duplicates or gradient.indices == "distinct"
        found.append(sum_duplicates(*of_all) if is_distinct else of_all)
    return found
