"""SplitBatch: every replica reads its own part of the batch."""

from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist_py.kernel.batch import batched_tensors, require_batch
from autodist_py.kernel.cross_device_ops.collective import Collectives
from autodist_py.kernel.fragment import TensorSpec, trace
from autodist_py.kernel.names import KERNEL_SCOPE, op_of, parse, replica_of
from autodist_py.kernel.passes.launches import with_launches
from autodist_py.kernel.program import Batch, Program
from autodist_py.kernel.rewrite import Edits


@dataclass(frozen=True, slots=True)
class SplitBatch:
    """Every replica reads its own part of the batch.

    Requires: a replicated graph whose batched inputs stand once per worker.
    Ensures: each op of replica i that read a batched tensor reads its part of the rows. Parts are contiguous and in
        replica order, and the first ones are a row longer where the rows do not divide, so together they are the
        batch in its order. With `batch="global"` the parts are those of all replicas of the cluster; with "local",
        of this worker's. `program.batch` names the tensors that count the rows, of the replicas that step together.
    """

    name: ClassVar[str] = "split-batch"

    def __call__(self, program: Program) -> Program:
        sources = batched_tensors(program.item, program.analysis.captured)
        if program.is_single:
            return program
        require_batch(program.item, program.analysis.captured)
        if not sources:
            return program
        collectives = Collectives(program.place, program.next_instance_key)
        split = trace(
            lambda tensors: _split(program, tensors, collectives),
            [[TensorSpec(source.name, source.dtype, source.shape) for source in sources]],
            scope=f"{KERNEL_SCOPE}/Batch",
        )
        parts, rows, total = split.outputs
        edits = Edits()
        edits.add(split.nodes)
        users = program.graph.users({op_of(source.name) for source in sources})
        for source, source_parts in zip(sources, zip(*parts, strict=True), strict=True):
            for consumer in users[op_of(source.name)]:
                position = replica_of(consumer)
                if position is not None:
                    for spelling in {source.name, str(parse(source.name))}:
                        edits.redirect(consumer, spelling, source_parts[position])
        result = with_launches(program, collectives, rank=(0, 0), what="number of examples")
        return replace(result, graph=edits.apply(program.graph), batch=Batch(tuple(rows), total))


def _split(
    program: Program, tensors: list[tf.Tensor], collectives: Collectives
) -> tuple[list[list[tf.Tensor]], list[tf.Tensor], tf.Tensor]:
    """For each local replica its part of each tensor; its number of rows; the number of rows of the step."""
    place = program.place
    is_global = program.options.batch == "global"
    count = sum(replica.trains for replica in (place.everyone if is_global else place.local_replicas))
    with tf.device(place.host):
        rows = tf.shape(tensors[0], out_type=tf.int64)[0]
        each, longer = rows // max(count, 1), rows % max(count, 1)
        parts, sizes = [], []
        for position, replica in enumerate(place.local_replicas):
            index = replica.index if is_global else position
            begin = index * each + tf.minimum(tf.constant(index, tf.int64), longer)
            size = each + tf.cast(index < longer, tf.int64) if replica.trains else tf.zeros([], tf.int64)
            parts.append([tensor[begin : begin + size] for tensor in tensors])
            sizes.append(size)
        if is_global and place.replicas == place.everyone:
            total = rows
        else:
            own = tf.add_n(sizes) if is_global or not count else rows
            total = own if is_global else collectives.sum_over_workers(own)
    return parts, sizes, total
