"""What a server runs: the captured update, between the messages that it is sent and the answers that it gives."""

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import tensorflow as tf

from autodist_py.kernel.analysis.replica_weights import sum_duplicates, summed_as
from autodist_py.kernel.analysis.server_closure import waited_for
from autodist_py.kernel.compressors.coding import compressor_for
from autodist_py.kernel.events import Exchange, ServerPlan
from autodist_py.kernel.exchange.common import first_writers, read_of, spelt, type_of, with_variables
from autodist_py.kernel.exchange.compressed import decoded
from autodist_py.kernel.exchange.rows import lookup_program
from autodist_py.kernel.exchange.worker_side import values_of
from autodist_py.kernel.ir.fragment import TensorSpec, trace
from autodist_py.kernel.ir.graph import VARIABLE_OP
from autodist_py.kernel.ir.names import KERNEL_SCOPE, on_replica, op_of
from autodist_py.kernel.program import Channel, Program, ServerFunction, ServerProgram
from autodist_py.proto.compressors import Compressor
from autodist_py.proto.graph_item import Gradient


def server_programs(program: Program, plan: ServerPlan, channels: Sequence[Channel]) -> Iterator[ServerProgram]:
    """What the server runs, for each exchange in order."""
    parts = [
        None if exchange.lookups else _ServerPart(program, exchange, channel)
        for exchange, channel in zip(plan.exchanges, channels, strict=True)
    ]
    for position, part in enumerate(parts):
        if part is None:
            yield lookup_program(program, plan.exchanges[position], channels[position])
            continue
        later = {name for other in parts[position + 1 :] if other is not None for name in other.missing}
        yield part.program(set(filter(part.makes, later)))


class _ServerPart:
    """The graphs that a server runs in one exchange.

    Attributes:
        missing: tensors that it reads, which an earlier exchange has made.
    """

    def __init__(self, program: Program, exchange: Exchange, channel: Channel):
        self._program, self._exchange, self._channel = program, exchange, channel
        self._scope = f"{KERNEL_SCOPE}/{channel.name}/server"
        self._ops = {on_replica(0, op) for op in exchange.ops}
        self._messages = self._message_specs()
        with tf.device(program.topology.host):
            self._received = trace(self._joined, [self._messages], scope=f"{self._scope}/received")
        names = [next(program.copies(spec.name)) for spec in channel.sent.tensors if spec.name]
        self._given = dict(zip(map(spelt, names), self._received.outputs, strict=False))
        nodes = program.graph.nodes
        read = {
            spelt(name)
            for op in self._ops
            for name in nodes[op].input
            if not name.startswith("^") and nodes[op_of(name)].op != VARIABLE_OP
        }
        self.missing = {name for name in read - self._given.keys() if op_of(name) not in self._ops}

    def makes(self, tensor: str) -> bool:
        """Whether `tensor` is computed here, or received."""
        return tensor in self._given or op_of(tensor) in self._ops

    def program(self, passed_on: Collection[str]) -> ServerProgram:
        """What the server runs; `passed_on` are the tensors that later exchanges read."""
        answers = [spelt(on_replica(0, name)) for name in self._exchange.answers]
        kept = tuple(sorted({*passed_on, *answers}))
        taken = tuple(sorted(self.missing))
        update = ServerFunction(
            with_variables(self._program, [*self._received.nodes, *self._updates()]),
            takes=(*(spec for message in self._messages for spec in message), *map(self._spec, taken)),
            gives=tuple(self._given.get(name, name) for name in kept),
            run_ops=tuple(first_writers(self._program, self._exchange)),
        )
        return ServerProgram(
            channel=self._channel,
            update=update,
            num_messages=len(self._messages),
            each=False,
            taken=taken,
            kept=kept,
            answer=self._answer(answers),
        )

    def _answer(self, answers: Sequence[str]) -> ServerFunction:
        """What packs an answer: what the update gave, and the variables as they are then."""
        reads = [
            read_of(self._program, handle, f"{self._scope}/{handle}", waits=[]) for handle in self._exchange.refreshed
        ]
        names = [*answers, *(read.name for read in reads)]
        specs = [replace(spec, name=name) for spec, name in zip(self._channel.answered.tensors, names, strict=False)]
        with tf.device(self._program.topology.host):
            packed = trace(
                lambda tensors: self._channel.answered.pack(tensors or [tf.constant(0)]),
                [specs],
                scope=f"{self._scope}/answer",
            )
        return ServerFunction(
            with_variables(self._program, [*reads, *packed.nodes]),
            takes=tuple(map(self._spec, answers)),
            gives=tuple(packed.outputs),
        )

    def _spec(self, tensor: str) -> TensorSpec:
        return TensorSpec(tensor, type_of(self._program.graph, tensor))

    def _message_specs(self) -> list[list[TensorSpec]]:
        """The components of each of the messages that become one update."""
        consistency = self._program.strategy.consistency
        count = (
            len(self._program.topology.all_workers) if consistency.is_bsp else consistency.replicas_to_aggregate or 1
        )
        return [
            [
                TensorSpec(f"{self._scope}/message_{number}_{position}", dtype)
                for position, dtype in enumerate(self._channel.sent.types)
            ]
            for number in range(count)
        ]

    def _joined(self, messages: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """What several messages bring together."""
        sent = self._channel.sent
        tensors = sent.unpack(sent.join(messages))
        position = 0
        for gradient in self._exchange.gradients:
            values = position + values_of(gradient)
            reduction = self._program.item.reduction_of(gradient)
            is_mean = reduction in ("mean", "average") and sent.joins[values] != "same"
            compressor = compressor_for(self._program, gradient)
            if compressor is not None:
                tensors[values] = self._decoded(gradient, compressor, tensors[values])
            if self._channel.counts and is_mean:
                count = tf.cast(tensors[-1], tensors[values].dtype)
                tensors[values] = tf.math.divide_no_nan(tensors[values], count)
            dtype = type_of(self._program.analysis.captured, gradient.tensors[values - position])
            tensors[values] = tf.cast(tensors[values], dtype)
            if gradient.is_sparse and sent.joins[values] == "rows" and self._sums_rows(gradient):
                tensors[position : position + 2] = sum_duplicates(*tensors[position : position + 2])
            position += len(gradient.tensors)
        return tensors

    def _sums_rows(self, gradient: Gradient) -> bool:
        """Whether rows of one index, which several workers have sent, are added up."""
        return self._program.options.sum_duplicates or gradient.indices != ""

    def _decoded(self, gradient: Gradient, compressor: Compressor, tensor: tf.Tensor) -> tf.Tensor:
        """What a gradient, or its rows, are of which the messages have brought `tensor`."""
        dtype = type_of(self._program.analysis.captured, gradient.tensors[values_of(gradient)])
        if gradient.is_sparse:
            return tf.cast(tensor, summed_as(dtype))
        return decoded(self._program, gradient, compressor, tensor, summed_as(dtype))

    def _updates(self) -> Iterator[tf.compat.v1.NodeDef]:
        """The captured ops, which read what was received, and wait for one another as they do in the captured graph."""
        waits = waited_for(self._program.analysis.captured, self._exchange.ops)
        for op in sorted(self._exchange.ops):
            node = copy.deepcopy(self._program.graph.nodes[on_replica(0, op)])
            data = [name for name in node.input if not name.startswith("^")]
            del node.input[:]
            node.input.extend(self._given.get(spelt(name), name) for name in data)
            node.input.extend(f"^{on_replica(0, other)}" for other in sorted(waits[op]))
            yield node
