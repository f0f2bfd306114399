"""What workers send to servers, and take from them: the messages of an exchange, and the ops that send them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from autodist_py.kernel.analysis.replica_weights import (
    batch_specs,
    gradient_shapes,
    joined_rows,
    raw_gradient,
    replica_weights,
    summed_as,
    weighted,
    weighted_rows,
)
from autodist_py.kernel.compressors.coding import Coding, compressor_for
from autodist_py.kernel.events import Exchange, ServerPlan
from autodist_py.kernel.exchange.common import type_of
from autodist_py.kernel.exchange.compressed import coded, coded_rows, sent_spec
from autodist_py.kernel.exchange.queues import RUNG, named_queue
from autodist_py.kernel.ir.fragment import Fragment, TensorSpec, trace
from autodist_py.kernel.ir.message_layout import MessageLayout
from autodist_py.kernel.ir.names import KERNEL_SCOPE
from autodist_py.kernel.ir.state import Recorder
from autodist_py.kernel.program import Channel, Program
from autodist_py.proto.graph_item import Gradient


@dataclass(frozen=True, slots=True)
class Answer:
    """What stands in the place of what a server computes in one exchange, on the workers.

    Attributes:
        tensors: for each tensor of the captured graph that workers read, the one that brings its value.
        variables: for each refreshed variable, the tensor that brings its new value.
        ready: the op to wait for.
    """

    tensors: Mapping[str, str]
    variables: Mapping[str, str]
    ready: str


@dataclass(frozen=True, slots=True)
class Traded:
    """A message that is sent, and the answer to it.

    Attributes:
        enqueue: the op that sends it.
        dequeue: the op that takes the answer.
        answered: what the answer brings.
    """

    enqueue: str
    dequeue: str
    answered: list[tf.Tensor]


def trade(program: Program, channel: Channel, tensors: Sequence[tf.Tensor]) -> Traded:
    """Send `tensors`, and take the answer; to be traced."""
    worker = program.topology.worker
    queue = named_queue(channel.push(worker), channel.sent.types)
    enqueue = tf.raw_ops.QueueEnqueueV2(handle=queue, components=channel.sent.pack(tensors))
    last = enqueue
    if channel.server == worker:  # Nobody carries it there.
        rung = tf.constant([worker, channel.number], tf.int64)
        with tf.control_dependencies([enqueue]):
            last = tf.raw_ops.QueueEnqueueV2(handle=named_queue(channel.bell, RUNG), components=[rung])
    queue = named_queue(channel.answer(worker), channel.answered.types)
    with tf.control_dependencies([last]):
        dequeued = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=channel.answered.types)
    return Traded(enqueue.name, dequeued[0].op.name, channel.answered.unpack(dequeued))


def channel_of(program: Program, plan: ServerPlan, exchange: Exchange, number: int) -> Channel:
    """The channel of an exchange that is no lookup."""
    view = program.analysis.captured
    specs: list[TensorSpec] = []
    joins: list[str] = []
    counts = program.strategy.consistency.replicas_to_aggregate > 0
    for gradient, (tensors, *_) in zip(exchange.gradients, raw_gradients(program, exchange), strict=True):
        differs = program.analysis.is_varying(gradient)
        own = [replace(spec, name=marker) for spec, marker in zip(tensors, gradient.tensors, strict=True)]
        own_joins = _joins(program, gradient) if differs else ["same"] * len(own)
        values = values_of(gradient)
        own[values] = replace(own[values], dtype=summed_as(own[values].dtype))
        if "rows" in own_joins:  # Their number is a worker's own.
            own[:2] = [replace(spec, shape=(None, *spec.shape[1:])) for spec in own[:2] if spec.shape is not None]
        compressor = compressor_for(program, gradient)
        if compressor is not None:
            own[values] = sent_spec(program, gradient, compressor, own[values])
            own_joins[values] = own_joins[values] if gradient.is_sparse else "rows"
        specs += own
        joins += own_joins
    specs += [TensorSpec(value, type_of(view, value)) for value in exchange.values]
    joins += ["same"] * len(exchange.values)
    if counts:
        specs.append(TensorSpec("", tf.float64, ()))
        joins.append("sum")
    if not specs:  # It says that the worker has read what it reads before the next write.
        specs.append(TensorSpec("", tf.int32, ()))
        joins.append("same")
    answered = [TensorSpec(tensor, type_of(view, tensor)) for tensor in exchange.answers]
    for handle in exchange.refreshed:
        variable = program.item.variable(handle)
        answered.append(TensorSpec(handle, tf.as_dtype(variable.dtype), variable.shape))
    if not answered:  # It says that the update is done.
        answered.append(TensorSpec("", tf.int32, ()))
    return Channel(
        server=plan.worker,
        service=f"{program.options.channel}/{plan.worker}",
        number=number,
        sent=MessageLayout(tuple(specs), tuple(joins)),
        answered=MessageLayout(tuple(answered), ("same",) * len(answered)),
        counts=counts,
    )


def _joins(program: Program, gradient: Gradient) -> list[str]:
    """How what workers send of a gradient becomes one, as a MessageLayout says.

    Workers that take their steps by themselves need not look up the same rows, even of what is no row of the batch.
    """
    if not gradient.is_sparse:
        return ["sum"]
    are_same = gradient.indices == "same" and program.strategy.consistency.is_bsp
    return ["same", "sum", "same"] if are_same else ["rows", "rows", "same"]


@dataclass(frozen=True, slots=True)
class Sent:
    """The ops by which a worker sends a message and takes the answer."""

    fragment: Fragment
    enqueue: str
    answer: Answer


def values_of(gradient: Gradient) -> int:
    """Which of the gradient's tensors has its values."""
    return 1 if gradient.is_sparse else 0


def sent(program: Program, exchange: Exchange, channel: Channel, summable: Collection[str], recorder: Recorder) -> Sent:
    """What a worker does in an exchange; what compressors keep is `recorder`'s."""
    made: list[Traded] = []
    values = [
        TensorSpec(next(program.copies(value)), type_of(program.analysis.captured, value)) for value in exchange.values
    ]

    def send(batch: Sequence[tf.Tensor], gradients: Any, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        summed = summed_gradients(program, exchange.gradients, batch, gradients, summable)
        with tf.device(program.topology.host):
            if channel.counts:
                once = not batch or any(one.reduction == "average" for one in exchange.gradients)
                values = [*values, tf.ones([], tf.float64) if once else tf.cast(batch[0], tf.float64)]
            kept: list[tuple[Coding, list[dict[str, tf.Tensor]]]] = []
            for gradient, parts in zip(exchange.gradients, summed, strict=True):
                compressor = compressor_for(program, gradient)
                if compressor is None:
                    continue
                if gradient.is_sparse:
                    parts[values_of(gradient)] = coded_rows(compressor, parts[values_of(gradient)])
                else:
                    parts[0], coding, states = coded(program, gradient, compressor, parts[0], recorder)
                    kept.append((coding, states))
            tensors = [*(part for parts in summed for part in parts), *values]
            made.append(trade(program, channel, tensors or [tf.constant(0)]))
            for coding, states in kept:
                coding.keep(states, after=made[0].answered[:1])
            return made[0].answered

    fragment = trace(
        send, [batch_specs(program), raw_gradients(program, exchange), values], scope=f"{KERNEL_SCOPE}/{channel.name}"
    )
    brought = dict(zip([*exchange.answers, *exchange.refreshed], fragment.outputs, strict=False))
    answer = Answer(
        {tensor: brought[tensor] for tensor in exchange.answers},
        {handle: brought[handle] for handle in exchange.refreshed},
        made[0].dequeue,
    )
    return Sent(fragment, made[0].enqueue, answer)


def raw_gradients(program: Program, exchange: Exchange) -> list[list[list[TensorSpec]]]:
    """For each gradient and local replica the raw tensors."""
    return [
        [
            raw_gradient(gradient, gradient_shapes(program, gradient), program.graph, replica)
            for replica in range(program.num_local_replicas)
        ]
        for gradient in exchange.gradients
    ]


def summed_gradients(
    program: Program,
    gradients: Sequence[Gradient],
    batch: Sequence[tf.Tensor],
    copies: Sequence[Sequence[Sequence[tf.Tensor]]],
    summable: Collection[str],
) -> list[list[tf.Tensor]]:
    """Each gradient of this worker's replicas together, on its host: what it adds to the sum over workers.

    Values are of the type of sums. Rows of one index are added up where that is asked for, and for the `summable`
    variables.
    """
    with tf.device(program.topology.host):
        summed = []
        for gradient, replicas in zip(gradients, copies, strict=True):
            if program.analysis.is_varying(gradient):
                weights = replica_weights(program, batch, program.item.weighting_of(gradient))
            else:  # It is computed from replicated values alone: equal on all replicas.
                replicas, weights = replicas[:1], [tf.ones([], tf.float64)]
            scale = _scale(program, gradient, batch)
            weights = weights if scale is None else [weight * scale for weight in weights]
            if gradient.is_sparse:
                parts = [
                    weighted_rows(gradient, indices, values, weight)
                    for (indices, values, _), weight in zip(replicas, weights, strict=True)
                ]
                sums = program.options.sum_duplicates or gradient.variable in summable
                indices, rows = joined_rows(gradient, parts, sums=sums)
                if gradient.indices == "same":  # They are the first replica's, as the shape is: an op stands for all.
                    indices = tf.identity(indices)
                summed.append([indices, rows, tf.identity(replicas[0][2])])
            else:
                own = [weighted(value, weight) for (value,), weight in zip(replicas, weights, strict=True)]
                summed.append([tf.add_n(own)])
        return summed


def _scale(program: Program, gradient: Gradient, batch: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """By how much more a gradient of a mean counts than what this worker's replicas make of it by themselves."""
    consistency = program.strategy.consistency
    if program.item.reduction_of(gradient) == "mean" and not program.serves_itself:
        if consistency.staleness:
            return tf.constant(1.0 / len(program.topology.all_workers), tf.float64)
        if consistency.replicas_to_aggregate and batch and program.analysis.is_varying(gradient):
            return tf.cast(batch[0], tf.float64)  # The server divides by the examples of all whom it hears.
    return None
