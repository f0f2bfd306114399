"""Lookups: a worker asks for the rows of its batch, each once, and the server answers with them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from autodist_py.kernel.analysis.row_access import by_table, is_written_by_rows
from autodist_py.kernel.events import Exchange, ServerPlan
from autodist_py.kernel.exchange.common import read_of, type_of, with_variables
from autodist_py.kernel.exchange.worker_side import Traded, trade
from autodist_py.kernel.ir.fragment import Fragment, TensorSpec, trace
from autodist_py.kernel.ir.message_layout import MessageLayout
from autodist_py.kernel.ir.names import KERNEL_SCOPE, on_replica
from autodist_py.kernel.ir.node import controls_of, node
from autodist_py.kernel.program import Channel, Program, ServerFunction, ServerProgram


@dataclass(frozen=True, slots=True)
class Asked:
    """The ops by which a worker asks for rows, and those that pass them on under the names of the lookups."""

    fragment: Fragment
    enqueue: str
    dequeue: str
    results: tuple[tf.compat.v1.NodeDef, ...]


def lookup_channel(program: Program, plan: ServerPlan, exchange: Exchange, number: int) -> Channel:
    """The channel of an exchange of lookups: indices of rows for each table, and the rows."""
    tables = [handle for handle, _ in by_table(exchange.lookups)]
    return Channel(
        server=plan.worker,
        service=f"{program.options.channel}/{plan.worker}",
        number=number,
        sent=MessageLayout(tuple(TensorSpec(handle, tf.int64, (None,)) for handle in tables), ("rows",) * len(tables)),
        answered=MessageLayout(tuple(_rows(program, handle) for handle in tables), ("rows",) * len(tables)),
    )


def asked(program: Program, exchange: Exchange, channel: Channel) -> Asked:
    """What a worker does: all its replicas' lookups together."""
    replicas = range(program.num_local_replicas)
    places = [
        [on_replica(replica, lookup.op) for lookup in lookups for replica in replicas]
        for _, lookups in by_table(exchange.lookups)
    ]
    nodes = program.graph.nodes
    ids = [[TensorSpec(nodes[op].input[1], type_of(program.graph, nodes[op].input[1])) for op in ops] for ops in places]

    made: list[Traded] = []

    def look_up(ids: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        with tf.device(program.topology.host):
            flat = [[tf.reshape(tf.cast(one, tf.int64), [-1]) for one in table] for table in ids]
            distinct = [tf.unique(tf.concat(parts, axis=0)) for parts in flat]
            made.append(trade(program, channel, [one.y for one in distinct]))
            return [
                [
                    tf.gather(brought, tf.reshape(positions, tf.shape(one)))
                    for one, positions in zip(
                        table, tf.split(where.idx, [tf.size(part) for part in parts], num=len(parts)), strict=True
                    )
                ]
                for table, parts, where, brought in zip(ids, flat, distinct, made[0].answered, strict=True)
            ]

    fragment = trace(look_up, [ids], scope=f"{KERNEL_SCOPE}/{channel.name}")
    results = [
        _passing_on(program, op, tensor)
        for ops, tensors in zip(places, fragment.outputs, strict=True)
        for op, tensor in zip(ops, tensors, strict=True)
    ]
    return Asked(fragment, made[0].enqueue, made[0].dequeue, tuple(results))


def lookup_program(program: Program, exchange: Exchange, channel: Channel) -> ServerProgram:
    """What the server does: it reads the rows."""
    scope = f"{KERNEL_SCOPE}/{channel.name}/server"
    tables = [handle for handle, _ in by_table(exchange.lookups)]
    message = tuple(
        TensorSpec(f"{scope}/message_{position}", dtype) for position, dtype in enumerate(channel.sent.types)
    )
    kept = tuple(TensorSpec(f"{scope}/ids_{position}", tf.int64, (None,)) for position in range(len(tables)))
    by_rows = [is_written_by_rows(program, handle) for handle in tables]
    reads = [
        _rows_of(program, handle, f"{scope}/{handle}", ids.name)
        if is_rows
        else read_of(program, handle, f"{scope}/{handle}", waits=[])
        for handle, ids, is_rows in zip(tables, kept, by_rows, strict=True)
    ]
    sources = [replace(_rows(program, handle), name=read.name) for read, handle in zip(reads, tables, strict=True)]

    def answered(sources: Sequence[tf.Tensor], ids: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        each = zip(sources, ids, by_rows, strict=True)
        return channel.answered.pack([source if is_rows else tf.gather(source, of) for source, of, is_rows in each])

    with tf.device(program.topology.host):
        received = trace(channel.sent.unpack, [list(message)], scope=f"{scope}/received")
        answer = trace(answered, [sources, list(kept)], scope=f"{scope}/answer")
    return ServerProgram(
        channel=channel,
        update=ServerFunction(with_variables(program, received.nodes), takes=message, gives=tuple(received.outputs)),
        num_messages=1,
        each=True,
        taken=(),
        kept=tuple(spec.name for spec in kept),
        answer=ServerFunction(
            with_variables(program, [*reads, *answer.nodes]), takes=kept, gives=tuple(answer.outputs)
        ),
    )


def _rows_of(program: Program, handle: str, name: str, ids: str) -> tf.compat.v1.NodeDef:
    """An op that looks up rows in the first replica's variable, of which a read would be a copy of all."""
    own = on_replica(0, handle)
    return node("ResourceGather", name, [own, ids], like=program.graph.nodes[own], Tindices=tf.int64)


def _rows(program: Program, handle: str) -> TensorSpec:
    variable = program.item.variable(handle)
    return TensorSpec(handle, tf.as_dtype(variable.dtype), (None, *variable.shape[1:]))


def _passing_on(program: Program, op: str, tensor: str) -> tf.compat.v1.NodeDef:
    """An op in the place of the lookup `op`."""
    lookup = program.graph.nodes[op]
    dtype = lookup.attr["dtype" if lookup.op == "ResourceGather" else "Tparams"]
    return node("Identity", op, [tensor], controls=controls_of(lookup), like=lookup, T=dtype)
