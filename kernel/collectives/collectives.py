"""Reductions over the replicas of a cluster, written as TensorFlow functions: called while a fragment is traced.

A value per local replica goes in, and a value per local replica comes out. Between workers, TensorFlow's collective ops
move the data: one member per worker where local replicas are reduced first (the sum over all replicas then crosses
the network once), one per replica where the whole ring is asked for.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import tensorflow as tf

from autodist_py.kernel.collectives import horovod_adapter
from autodist_py.kernel.events import Collective
from autodist_py.kernel.ir import flat_buffers
from autodist_py.kernel.ir.bitcast import from_int32, to_int32
from autodist_py.kernel.ir.tf_adapter import Group, all_gather, all_reduce, broadcast_receive, broadcast_send
from autodist_py.kernel.program import Program
from autodist_py.kernel.topology import Topology, is_gpu

RING, NCCL = "ring", "nccl"
"""The engines of TensorFlow's collectives, as it names them; NCCL's reduces on GPUs, and does nothing else here."""
HOROVOD = "horovod"
"""The engine that sums over workers by Horovod's ops, and does nothing else."""

REDUCIBLE = frozenset({tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64})
"""What the ring carries."""
CARRIED = {
    **{kind: kind for kind in REDUCIBLE},
    **dict.fromkeys((tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32),
    tf.uint32: tf.int64,
}
"""The type as which values of each type travel without loss."""
CARRIED_BY_HOROVOD = REDUCIBLE - {tf.bfloat16}

ENGINES = {"RING": RING, "NCCL": NCCL, "HOROVOD": HOROVOD}
"""The engines, by what an event calls them."""


_SMALL_BYTES, _SMALL_BYTES_OF_TWO = 1 << 13, 1 << 16
"""Of sums that are gathered: n workers then move n / 2 times the bytes of a ring. Two workers gather 4 KB in 0.73 of
its time, 64 KB in 0.76; over shaped links 460 KB take 1.1 of it."""


def _lengths(in_octave: int) -> tuple[int, ...]:
    """Numbers of rows that gathers have on the wire: all that are few, then so many per doubling (a power of 2).

    No rows are padded to one: what has no elements cannot be gathered.
    """
    sizes = list(range(in_octave))
    while sizes[-1] < 2**31:
        octave = 2 ** (len(sizes) // in_octave - 1) * in_octave
        sizes += [octave + step * (octave // in_octave) for step in range(in_octave)]
    return (1, *sizes[1:])


_ROW_COUNTS = _lengths(16)
"""Of tensors with as many rows; at most 6.25% is padding."""
_WORD_COUNTS = _lengths(64)
"""Of 32-bit words, in `gather_each`; at most 1.6% is padding."""


class Made(NamedTuple):
    """The ops that make one collective of an event, by its position, on this worker: see Collective."""

    event: int
    ops: tuple[str, ...]
    nbytes: int | None
    by_name: bool


class Collectives:
    """The collectives that a pass makes on one worker, while it traces fragments.

    It hands out their instance keys, and notes which ops make each of them. A key stands for one shape: TensorFlow
    keeps what it found out about a collective, and refuses another shape under the same key. What has no elements does
    not travel: TensorFlow's gathers of nothing crash the process, and so do sums and broadcasts (tried on 2.21).
    """

    def __init__(self, topology: Topology, next_key: int, event: int = 0):
        """Collectives of the workers of `topology`, from the key `next_key` on."""
        self.topology = topology
        self.event = event
        """Of which event of the schedule, by its position, the next collectives are."""
        self.num_workers = len(topology.workers)
        """How many workers take part."""
        self.next_key = next_key
        self.made: list[Made] = []
        self.pieces: dict[str, tuple[str, ...]] = {}
        """As `Lowered.pieces`."""

    def _take_keys(self, count: int = 1) -> int:
        key = self.next_key
        self.next_key += count
        return key

    def _note(self, given: tf.Tensor, *results: tf.Tensor, by_name: bool = False) -> None:
        """Note a collective of which each member gives a tensor like `given`."""
        elements = given.shape.num_elements()
        nbytes = None if elements is None else elements * given.dtype.size
        self.made.append(Made(self.event, tuple(result.op.name for result in results), nbytes, by_name))

    def noted(self, program: Program) -> Program:
        """`program`, to whose graph a pass adds the ops that were made."""
        events = program.schedule.events
        added = (Collective(one.ops, one.event, events[one.event].what, one.nbytes, one.by_name) for one in self.made)
        lowered = program.lowered
        lowered = replace(
            lowered,
            collectives=(*lowered.collectives, *added),
            pieces={**lowered.pieces, **self.pieces},
            next_instance_key=self.next_key,
        )
        return replace(program, lowered=lowered)

    def sum_over_workers(self, value: tf.Tensor, *, hint: str = RING) -> tf.Tensor:
        """The sum of one value of a static shape per worker, by the engine `hint`; `value` itself on one worker.

        Small values are gathered, and added up by each worker: a ring takes two messages after one another for each.

        Raises:
            StrategyError: the engine is HOROVOD, which is not there.
        """
        if self.num_workers == 1 or value.shape.num_elements() == 0:
            return value
        if hint == HOROVOD:
            with tf.device(self.topology.host):
                total = horovod_adapter.all_reduce(value, f"horovod_{self._take_keys()}")
            self._note(value, total, by_name=True)
            return total
        if hint == RING and value.dtype != tf.bfloat16 and self._is_small(value):  # Gathers do not carry bfloat16.
            everyone = self._gather(tf.expand_dims(value, 0), self._take_keys())
            return tf.add_n(tf.unstack(everyone, num=self.num_workers))
        device, members = self._members(value)
        with tf.device(device):
            total = all_reduce(value, Group(self.num_workers, group_key(members), self._take_keys(), hint))
        self._note(value, total)
        return total

    def _is_small(self, value: tf.Tensor) -> bool:
        most = _SMALL_BYTES_OF_TWO if self.num_workers == 2 else _SMALL_BYTES
        return value.shape.num_elements() * value.dtype.size <= most

    def sum_of_members(
        self, members: Sequence[tf.Tensor], devices: Sequence[str], *, hint: str, is_each: bool, most: int
    ) -> list[tf.Tensor]:
        """The sum over the members of all workers, on each of this worker's.

        Args:
            members: this worker's, of one static shape.
            devices: where they are.
            hint: the engine.
            is_each: whether every replica is a member; else each worker.
            most: of how many elements a collective is; more go in pieces. By Horovod all are one: what is cut would be
                copied: into its own buffer, out of it, and to be joined.
        """
        sizes = flat_buffers.piece_sizes(members[0], most)
        if len(sizes) > 1 and hint != HOROVOD:
            pieces = flat_buffers.cut_each(members, devices, sizes)
            sums = [self.sum_of_members(one, devices, hint=hint, is_each=is_each, most=most) for one in pieces]
            return flat_buffers.join_each(sums, devices, members[0].shape)
        if is_each:
            return self.ring_over_replicas(members, hint=hint)
        with tf.device(devices[0]):
            return [self.sum_over_workers(members[0], hint=hint)]

    def ring_over_replicas(self, values: Sequence[tf.Tensor], *, hint: str = RING) -> list[tf.Tensor]:
        """The sum over all replicas, each of which is a member of one ring, or of what the engine `hint` makes."""
        if values[0].shape.num_elements() == 0:
            return list(values)
        members = [(replica.worker, replica.device) for replica in self.topology.replicas]
        group = Group(self.topology.num_replicas, group_key(members), self._take_keys(), hint)
        sums = []
        for replica, value in zip(self.topology.local_replicas, values, strict=True):
            with tf.device(replica.device):
                sums.append(all_reduce(value, group))
        self._note(values[0], *sums)
        return sums

    def gather_rows(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Each worker's rows one after the other in rank order; workers may have different numbers of rows, or none.

        Args:
            parts: tensors of numbers, of any type, with the same number of rows (axis 0), say indices and values.

        Returns:
            For each of them the rows of all workers. Sizes are exchanged first, and shorter parts padded on the wire,
            where all parts travel as one.
        """
        if self.num_workers == 1:
            return list(parts)
        rows = tf.shape(parts[0], out_type=tf.int64)[0]
        sizes = self._gather(tf.reshape(rows, [1]), self._take_keys())
        kind, length = _padded(tf.reduce_max(sizes, keepdims=True), _ROW_COUNTS)
        kept = tf.reshape(tf.where(tf.reshape(tf.sequence_mask(sizes, length), [-1])), [-1])
        words = [to_int32(_as_matrix(part)) for part in parts]
        widths = [one.shape[1] for one in words]
        sent = tf.concat([tf.reshape(_pad_rows(one, length), [-1]) for one in words], axis=0)
        everyone = self._gather(tf.expand_dims(sent, 0), self._take_keys(len(_ROW_COUNTS)) + kind)
        pieces = tf.split(everyone, [length * width for width in widths], axis=1, num=len(widths))
        return [
            _as_rows(tf.gather(tf.reshape(piece, [-1, width]), kept), part)
            for piece, width, part in zip(pieces, widths, parts, strict=True)
        ]

    def gather_each(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """As `gather_rows`, of parts that have different numbers of rows; two collectives for all of them, too."""
        if self.num_workers == 1:
            return list(parts)
        words = [to_int32(_as_matrix(part)) for part in parts]
        rows = tf.stack([tf.shape(part, out_type=tf.int64)[0] for part in parts])
        sizes = self._gather(tf.expand_dims(rows, 0), self._take_keys()) * [one.shape[1] for one in words]
        totals = tf.reduce_sum(sizes, axis=1)
        kind, length = _padded(tf.reduce_max(totals, keepdims=True), _WORD_COUNTS)
        sent = _pad_rows(tf.concat([tf.reshape(one, [-1]) for one in words], axis=0), length)
        everyone = self._gather(tf.expand_dims(sent, 0), self._take_keys(len(_WORD_COUNTS)) + kind)
        pieces = [
            tf.split(everyone[worker, : totals[worker]], sizes[worker], num=len(parts))
            for worker in range(self.num_workers)
        ]
        return [
            _as_rows(tf.reshape(tf.concat(of_part, axis=0), [-1, one.shape[1]]), part)
            for of_part, one, part in zip(zip(*pieces, strict=True), words, parts, strict=True)
        ]

    def sum_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """The sum of as many rows on each worker, where their number is known in a step only."""
        if self.num_workers == 1:
            return rows
        if rows.shape.is_fully_defined():
            return self.sum_over_workers(rows)
        size = tf.shape(rows, out_type=tf.int64)[:1]
        sizes = self._gather(size, self._take_keys())
        differ = "workers look up different numbers of rows, of what is the same for all of the batch:"
        checked = tf.raw_ops.Assert(condition=tf.reduce_all(tf.equal(sizes, size)), data=[differ, sizes])
        with tf.control_dependencies([checked]):
            kind, length = _padded(size, _ROW_COUNTS)
        sent = _pad_rows(_as_matrix(rows), length)
        if not sent.shape[1]:
            return rows
        device, members = self._members(sent)
        with tf.device(device):
            key = self._take_keys(len(_ROW_COUNTS)) + kind
            total = all_reduce(sent, Group(self.num_workers, group_key(members), key, RING))
        self._note(sent, total)
        return tf.reshape(total[: size[0]], tf.shape(rows))

    def gather(self, value: tf.Tensor) -> tf.Tensor:
        """Each worker's value, of one static shape, stacked in rank order."""
        if value.dtype == tf.bfloat16:  # Reductions carry it, gathers do not.
            everyone = self.gather(to_int32(tf.reshape(value, [-1])))
            numbers = from_int32(everyone, value.dtype, value.shape.num_elements())
            return tf.reshape(numbers, [self.num_workers, *value.shape])
        value = tf.expand_dims(value, 0)
        everyone = value if self.num_workers == 1 else self._gather(value, self._take_keys())
        everyone.set_shape([self.num_workers, *value.shape[1:]])
        return everyone

    def broadcast(self, value: tf.Tensor) -> tf.Tensor:
        """The first worker's value, bit by bit, of one static shape and a type of `CARRIED`; `value` on one worker."""
        if self.num_workers == 1 or value.shape.num_elements() == 0:
            return value
        if value.dtype == tf.bfloat16:  # Reductions carry it, broadcasts do not.
            return tf.bitcast(self.broadcast(tf.bitcast(value, tf.float16)), tf.bfloat16)
        device, members = self._members(value)
        own, group = (
            tf.cast(value, CARRIED[value.dtype]),
            Group(self.num_workers, group_key(members), self._take_keys(), RING),
        )
        is_first = self.topology.worker == self.topology.workers[0]
        with tf.device(device):
            received = broadcast_send(own, group) if is_first else broadcast_receive(own.shape, own.dtype, group)
        self._note(own, received)
        return tf.cast(tf.ensure_shape(received, value.shape), value.dtype)

    def _gather(self, value: tf.Tensor, key: int | tf.Tensor) -> tf.Tensor:
        if value.shape[1:].num_elements() == 0:
            rows = tf.shape(value)[:1] * self.num_workers
            return tf.zeros(tf.concat([rows, value.shape[1:]], axis=0), value.dtype)
        device, members = self._members(value)
        with tf.device(device):
            everyone = all_gather(value, Group(self.num_workers, group_key(members), key, RING))
        self._note(value, everyone)
        return everyone

    def _members(self, value: tf.Tensor) -> tuple[str, list[tuple[int, str]]]:
        """Where this worker takes part with the value, and each worker's member: its first GPU or, else, its host."""
        replicas, host = self.topology.replicas, self.topology.host
        if is_gpu(value.device):
            return value.device, sorted({replica.worker: replica.device for replica in reversed(replicas)}.items())
        return host, sorted({replica.worker: host for replica in replicas}.items())


def group_key(members: Sequence[tuple[int, str]]) -> int:
    """Names a group by its members, given by worker and device, on all of them alike.

    TensorFlow keeps the members of a key for the life of the process, and refuses others under the same key.
    """
    return zlib.crc32(repr(list(members)).encode()) & 0x7FFFFFFF


def _padded(size: tf.Tensor, lengths: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Which of the lengths, and how long, the first one is that a size, a vector of one, is not over."""
    table = tf.constant(lengths, tf.int64)
    kind = tf.searchsorted(table, size)[0]
    return kind, tf.gather(table, kind)


def _pad_rows(value: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    missing = tf.reshape(rows - tf.shape(value, out_type=tf.int64)[0], [1, 1])
    below = tf.concat([tf.zeros([1, 1], tf.int64), missing], axis=1)
    padded = tf.pad(value, tf.pad(below, [[0, value.shape.rank - 1], [0, 0]]))
    return tf.ensure_shape(padded, [None, *value.shape[1:]])


def _as_matrix(rows: tf.Tensor) -> tf.Tensor:
    """Rows of any shape as rows of numbers."""
    return tf.reshape(rows, [tf.shape(rows)[0], math.prod(rows.shape[1:])])


def _as_rows(words: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Rows of the shape and type of `like`, given by their words."""
    numbers = from_int32(words, like.dtype, math.prod(like.shape[1:]))
    return tf.reshape(numbers, [tf.shape(words)[0], *like.shape[1:]])
