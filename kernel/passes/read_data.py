"""ReadData: workers go on to the next element of their iterators together, or end together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist_py.kernel.collectives.collectives import Collectives
from autodist_py.kernel.events import CheckData
from autodist_py.kernel.ir.edits import Edits
from autodist_py.kernel.ir.fragment import TensorSpec, trace
from autodist_py.kernel.ir.graph import ITERATOR_NEXT
from autodist_py.kernel.ir.names import KERNEL_SCOPE
from autodist_py.kernel.ir.node import controls_of, node
from autodist_py.kernel.program import Invariant, Program
from autodist_py.kernel.runner import Contract

END_OF_DATA = "AutoDist: no data left on workers "
OTHER_DATA = "AutoDist: data that the chief does not have on workers "
"""What the error begins with when a step cannot be run; the ranks follow."""

_HASHED_ROWS = 16


@dataclass(frozen=True, slots=True)
class ReadData:
    """A step in which a worker's iterator has ended fails on all workers, before anything is computed.

    Ensures: the ops that read iterators pass on elements only when all workers have one, else they fail with
        `END_OF_DATA`. With `batch="global"` they fail with `OTHER_DATA` where the first rows of the workers' elements
        are not equal. One collective says both.

    Example, on worker 0 of two: `w -= mean(next(iterator))`.

        - next = IteratorGetNext(iterator)
        + Data = ops(iterator)
        + next = IdentityN(Data)
    """

    name: ClassVar[str] = "read-data"
    contract: ClassVar[Contract] = Contract(
        requires={Invariant.REPLICATED, Invariant.SCHEDULED}, ensures={Invariant.READ}
    )

    def __call__(self, program: Program) -> Program:
        position = program.schedule.position(CheckData)
        if position is None:
            return program
        reads = list(program.graph.of_type(ITERATOR_NEXT))
        collectives = Collectives(program.topology, program.lowered.next_instance_key, position)
        fragment = trace(
            lambda iterators: _read(program, reads, iterators, collectives),
            [[TensorSpec(read.input[0], tf.resource, ()) for read in reads]],
            scope=f"{KERNEL_SCOPE}/Data",
        )
        edits = Edits()
        edits.add(fragment.nodes)
        graph = edits.apply(program.graph)
        passed_on = [_identity(read, values) for read, values in zip(reads, fragment.outputs, strict=True)]
        return replace(collectives.noted(program), graph=graph.changed(added=(), replaced=passed_on))


def _identity(read: tf.compat.v1.NodeDef, values: Sequence[str]) -> tf.compat.v1.NodeDef:
    """What stands in the place of `read`: it passes on `values`."""
    types = read.attr["output_types"]
    return node("IdentityN", read.name, values, controls=controls_of(read), like=read, T=types)


def _read(
    program: Program,
    reads: Sequence[tf.compat.v1.NodeDef],
    iterators: Sequence[tf.Tensor],
    collectives: Collectives,
) -> list[list[tf.Tensor]]:
    """The components of each iterator's next element."""
    with tf.device(program.topology.host):
        elements, has_data = zip(*map(_next_or_empty, reads, iterators), strict=True)
        own = [tf.cast(tf.reduce_all(tf.stack(has_data)), tf.int64)]
        if program.options.batch == "global":
            hashable = (value for element in elements for value in element if value.dtype != tf.variant)
            own += [_fingerprint(value) for value in hashable]
        everyone = collectives.gather(tf.stack(own))
        have_data = everyone[:, 0] > 0
        are_equal = tf.reduce_all(tf.equal(everyone[:, 1:], everyone[:1, 1:]), axis=1)
        checks = [
            require_on_all(have_data, END_OF_DATA),
            require_on_all(are_equal | ~tf.reduce_all(have_data), OTHER_DATA),
        ]
        with tf.control_dependencies(checks):
            return [[tf.identity(value) for value in element] for element in elements]


def _next_or_empty(read: tf.compat.v1.NodeDef, iterator: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
    """The iterator's next element, or one of no rows where there is none; and whether there is one."""
    types = [tf.as_dtype(kind) for kind in read.attr["output_types"].list.type]
    shapes = [tf.TensorShape(shape) for shape in read.attr["output_shapes"].list.shape]
    following = tf.raw_ops.IteratorGetNextAsOptional(iterator=iterator, output_types=types, output_shapes=shapes)
    has_data = tf.raw_ops.OptionalHasValue(optional=following)
    empty = [_empty(kind, shape) for kind, shape in zip(types, shapes, strict=True)]
    either = tf.raw_ops.SelectV2(condition=has_data, t=following, e=tf.raw_ops.OptionalFromValue(components=empty))
    return tf.raw_ops.OptionalGetValue(optional=either, output_types=types, output_shapes=shapes), has_data


def _empty(kind: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
    """A tensor that stands for one of this type and static shape; its unknown dimensions are 0."""
    sizes = [size or 0 for size in shape.as_list()] if shape.rank else []
    if kind != tf.variant:
        return tf.zeros(sizes, kind)
    count = math.prod(sizes)  # Parts of sparse and ragged tensors.
    return tf.reshape(tf.stack([tf.raw_ops.OptionalNone()] * max(count, 1))[:count], sizes)


def _fingerprint(value: tf.Tensor) -> tf.Tensor:
    """An int64 of a tensor's number of rows and its first rows."""
    rows = tf.expand_dims(value, 0) if value.shape.rank == 0 else value
    hashes = tf.bitcast(tf.raw_ops.Fingerprint(data=rows[:_HASHED_ROWS], method="farmhash64"), tf.int64)
    parts = tf.concat([hashes, tf.shape(rows, out_type=tf.int64)[:1]], axis=0)
    return tf.bitcast(tf.raw_ops.Fingerprint(data=tf.expand_dims(parts, 0), method="farmhash64"), tf.int64)[0]


def require_on_all(holds: tf.Tensor, message: str) -> tf.Operation:
    """An op that fails with `message` and the workers for which `holds`, which has a bool for each, is false."""
    return tf.raw_ops.Assert(condition=tf.reduce_all(holds), data=[message, tf.where(~holds)[:, 0]], summarize=99)
