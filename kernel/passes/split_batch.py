"""SplitBatch: every replica reads its own part of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import tensorflow as tf

from autodist_py.kernel.analysis.replica_weights import are_all_there, some_rows
from autodist_py.kernel.collectives.collectives import Collectives
from autodist_py.kernel.events import CountExamples
from autodist_py.kernel.ir.batched import batched_tensors, require_batch
from autodist_py.kernel.ir.edits import Edits
from autodist_py.kernel.ir.fragment import TensorSpec, trace
from autodist_py.kernel.ir.names import KERNEL_SCOPE, op_of, parse, replica_of
from autodist_py.kernel.passes.read_data import require_on_all
from autodist_py.kernel.program import Batch, Invariant, Program
from autodist_py.kernel.runner import Contract
from autodist_py.kernel.topology import Topology

UNEVEN_DATA = "AutoDist: data in other proportions on workers "
"""What the error begins with when a step cannot be shared out; the ranks follow."""

_Split: TypeAlias = tuple[list[list[tf.Tensor]], list[tf.Tensor], tf.Tensor, list[tf.Tensor]]


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """Every replica reads its own part of the batch.

    Ensures: each op of replica i that read a batched tensor reads its part of the rows. Parts are contiguous and in
        replica order, and the first ones are a row longer where the rows do not divide, so together they are the
        batch in its order. With `batch="global"` the parts are those of all replicas of the cluster; with "local",
        of this worker's. Where all replicas of the cluster step together, one that is left without any computes with
        rows of another's part, and counts for nothing. Several batches may have several numbers of rows: all are cut in
        the same proportions, and no replica has a single row of one of them that has more.
        `program.replication.batch` names the tensors that count the rows, of the replicas that step together.

    Example, on one worker of two replicas: `w -= mean(x)`.

        - 0/mean = Mean(x, 0/rows)
        - 1/mean = Mean(x, 1/rows)
        + Batch = ops(x)
        + 0/mean = Mean(Batch, 0/rows)
        + 1/mean = Mean(Batch, 1/rows)
    """

    name: ClassVar[str] = "split-batch"
    contract: ClassVar[Contract] = Contract(
        requires={Invariant.REPLICATED, Invariant.SCHEDULED, Invariant.READ},
        ensures={Invariant.SPLIT},
    )

    def __call__(self, program: Program) -> Program:
        sources = batched_tensors(program.item, program.analysis.captured)
        if program.is_single:
            return program
        require_batch(program.item, program.analysis.captured)
        if not sources:
            return program
        batches = [source.batch for source in sources]
        position = program.schedule.position(CountExamples)
        collectives = Collectives(program.topology, program.lowered.next_instance_key, position or 0)

        split = trace(
            lambda tensors: _counting(program.topology, *_split(program, tensors, batches, collectives)),
            [[TensorSpec(source.name, source.dtype, source.shape) for source in sources]],
            scope=f"{KERNEL_SCOPE}/Batch",
        )
        parts, rows, total, places = split.outputs
        edits = Edits()
        edits.add(split.nodes)
        users = program.graph.users({op_of(source.name) for source in sources})
        for source, source_parts in zip(sources, zip(*parts, strict=True), strict=True):
            for consumer in users[op_of(source.name)]:
                position = replica_of(consumer)
                if position is not None:
                    for spelling in {source.name, str(parse(source.name))}:
                        edits.redirect(consumer, spelling, source_parts[position])
        replication = replace(program.replication, batch=Batch(tuple(rows), total, tuple(places)))
        return collectives.noted(replace(program, graph=edits.apply(program.graph), replication=replication))


def _split(program: Program, tensors: list[tf.Tensor], batches: Sequence[int], collectives: Collectives) -> _Split:
    """For each local replica its part of each tensor; its number of rows; those of the step; `Batch.places`.

    Several `batches` are cut in the same proportions, so that a replica's share of the rows, by which its means count,
    is one number.
    """
    topology = program.topology
    is_global = program.options.batch == "global"
    is_whole = are_all_there(program)
    count = sum(replica.trains for replica in (topology.everyone if is_global else topology.local_replicas))
    with tf.device(topology.host):
        numbers = sorted(set(batches))
        lengths = [tf.shape(tensors[batches.index(number)], out_type=tf.int64)[0] for number in numbers]
        rows, whole, least = _units(lengths)
        sharing = max(count, 1) if len(lengths) == 1 else tf.clip_by_value(rows // least, 1, max(count, 1))
        each, longer = rows // sharing, rows % sharing
        parts, sizes, begins, counts = [], [], [], []
        for position, replica in enumerate(topology.local_replicas):
            index = replica.index if is_global else position
            begin = index * each + tf.minimum(tf.constant(index, tf.int64), longer)
            size = each + tf.cast(index < longer, tf.int64) if replica.trains else tf.zeros([], tf.int64)
            if len(lengths) > 1:
                begin, size = tf.minimum(begin, rows), tf.where(index < sharing, size, 0)
            first, last = some_rows(begin, size, rows, least) if is_whole else (begin, begin + size)
            pairs = zip(numbers, whole, strict=True)
            ends = {number: (first, last) if one is None else (first * one, last * one) for number, one in pairs}
            parts.append([tensor[slice(*ends[number])] for tensor, number in zip(tensors, batches, strict=True)])
            sizes.append(size if len(lengths) == 1 else size * tf.reduce_max(tf.stack(whole)))
            begins.append(first)
            counts.append(last - first)
        given = lengths[0] if len(lengths) == 1 else tf.reduce_max(tf.stack(lengths))
        placed = ("own", "cut", "count") if is_whole else ("own", "cut")
        takes_own = any(statistic.reduction in placed for statistic in program.item.statistics)
        if is_whole:
            return parts, sizes, given, [rows, *begins, *counts] if takes_own else []
        own = tf.add_n(sizes) if is_global or not count else given
        if is_global or collectives.num_workers == 1:
            before = [tf.add_n([tf.zeros([], tf.int64), *counts[:position]]) for position in range(len(counts))]
            return parts, sizes, own, [tf.add_n(counts), *before, *counts] if takes_own else []
        if len(lengths) == 1 and not takes_own:
            return parts, sizes, collectives.sum_over_workers(own), []
        everyone = _everyones_lengths(tf.stack(lengths), collectives)
        totals = tf.reduce_sum(everyone, axis=0)
        if not takes_own:
            return parts, sizes, tf.reduce_max(totals), []
        units = totals[0] if len(lengths) == 1 else _greatest_divisor(totals)
        longest = tf.argmax(totals)
        of_workers = everyone[:, longest] // tf.maximum(totals[longest] // tf.maximum(units, 1), 1)
        before_own = tf.reduce_sum(of_workers[: topology.workers.index(topology.worker)])
        return parts, sizes, tf.reduce_max(totals), [units, *(before_own + begin for begin in begins), *counts]


def _units(lengths: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor] | list[None], tf.Tensor | int]:
    """Into how many units batches of these lengths are cut; the rows of a unit; the fewest units of who has any.

    A single row of one batch would be paired with any number of another's, where on one device the lengths differ and
    the op fails. So that it fails here, too, no replica has one row alone of a batch of several.
    """
    if len(lengths) == 1:
        return lengths[0], [None], 1  # A unit is a row.
    units = _greatest_divisor(tf.stack(lengths))
    whole = [length // tf.maximum(units, 1) for length in lengths]
    are_alike = tf.reduce_all(tf.equal(tf.stack(whole), whole[0]))
    least = tf.where(are_alike | tf.greater(tf.reduce_min(tf.stack(whole)), 1), 1, 2)
    return units, whole, tf.cast(least, tf.int64)


def _counting(
    topology: Topology,
    parts: list[list[tf.Tensor]],
    rows: list[tf.Tensor],
    total: tf.Tensor,
    places: list[tf.Tensor],
) -> _Split:
    """What `_split` returns, but of a batch of no examples each replica counts for one: it has what one device has.

    A worker that takes its steps by itself changes nothing then.
    """
    if not topology.is_together:
        return parts, rows, total, places
    num_training = sum(replica.trains for replica in topology.everyone)
    with tf.device(topology.host):
        one = tf.cast(tf.equal(total, 0), tf.int64)
        own = zip(topology.local_replicas, rows, strict=True)
        return (
            parts,
            [size + one if replica.trains else size for replica, size in own],
            total + num_training * one,
            places,
        )


def _greatest_divisor(lengths: tf.Tensor) -> tf.Tensor:
    """The greatest number that divides all of `lengths` (0 has any divisor): the only one, where they are equal."""
    largest = tf.reduce_max(lengths)
    few = tf.where(tf.reduce_all(tf.equal(lengths, largest)), tf.zeros([], tf.int64), largest)
    candidates = tf.range(1, few + 1)
    divides = tf.reduce_all(tf.equal(lengths[:, tf.newaxis] % candidates, 0), axis=0)
    return tf.where(few > 0, tf.reduce_max(tf.where(divides, candidates, 0)), largest)


def _everyones_lengths(lengths: tf.Tensor, collectives: Collectives) -> tf.Tensor:
    """The `lengths` of each worker; an error on all, if the shares of one in the components are not equal."""
    everyone = collectives.gather(lengths)
    totals = tf.reduce_sum(everyone, axis=0)
    longest = tf.argmax(totals)
    reference = tf.gather(everyone, longest, axis=1)
    equal = tf.reduce_all(tf.equal(everyone * totals[longest], reference[:, tf.newaxis] * totals), axis=1)
    with tf.control_dependencies([require_on_all(equal, UNEVEN_DATA)]):
        return tf.identity(everyone)
