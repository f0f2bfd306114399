"""LowerExchanges: variables that live on servers are updated there, and what crosses travels as messages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist_py.kernel.analysis.event_graph import awaited
from autodist_py.kernel.analysis.replica_weights import batch_specs
from autodist_py.kernel.events import Exchange, ServerPlan, ServerPlans
from autodist_py.kernel.exchange.common import first_writers, read_of, type_of, writers_in
from autodist_py.kernel.exchange.rows import asked, lookup_channel
from autodist_py.kernel.exchange.server_side import server_programs
from autodist_py.kernel.exchange.stand_ins import without_updates
from autodist_py.kernel.exchange.worker_side import Answer, channel_of, raw_gradients, sent, summed_gradients
from autodist_py.kernel.ir.edits import Edits
from autodist_py.kernel.ir.fragment import Fragment, trace
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import KERNEL_SCOPE, captured_name, on_replica, op_of, parse
from autodist_py.kernel.ir.node import identity, node
from autodist_py.kernel.ir.state import Recorder
from autodist_py.kernel.passes.refresh import without_idle_copies
from autodist_py.kernel.program import Channel, Invariant, Program, ServerProgram
from autodist_py.kernel.runner import Contract
from autodist_py.proto.errors import StrategyError


@dataclass(frozen=True, slots=True)
class LowerExchanges:
    """Variables that live on servers are updated there.

    Ensures: the update of such a variable, with its optimizer's state, is no part of the workers' graph but of the
        server's. Workers send the raw gradients of their replicas, summed, weighted by examples, and read what the
        server answers: the variable's new value, and all else that it computes and they need. With one worker nothing
        travels: the update stands on its first replica.

    Example, on worker 1 of two: `w -= mean(x)`, where `w` lives on worker 0.

        - 0/gradient/w = Identity(0/mean)
        - 0/update = AssignSubVariableOp(0/w, 0/gradient/w)
        + channel = ops(Batch, 0/mean)
        + 0/update = AssignVariableOp(0/w, channel, ^channel)
    """

    name: ClassVar[str] = "lower-exchanges"
    contract: ClassVar[Contract] = Contract(
        requires={Invariant.REFRESHED, Invariant.REDUCED},
        ensures={Invariant.COMBINED, Invariant.WRITTEN},
        ends={Invariant.REFRESHED},  # Of a variable that lives elsewhere nothing may be left to read.
    )

    def __call__(self, program: Program) -> Program:
        if program.is_single:
            return program
        divided = program.schedule.servers
        if divided is None:
            return program
        if program.serves_itself:
            return _in_graph(program, divided)
        return _by_messages(program, divided)


# -- One worker -------------------------------------------------------------------------------------------------------


def _in_graph(program: Program, divided: ServerPlans) -> Program:
    edits = Edits()
    (plan,) = divided.plans
    answers: list[Answer] = []
    for number, exchange in enumerate(plan.exchanges):
        for handle, value in (pair for answer in answers for pair in answer.variables.items()):
            for writer in writers_in(program, exchange, handle):  # Further replicas are given what was before.
                edits.add_control(on_replica(0, writer), value)
        scope = f"{KERNEL_SCOPE}/Server/{number}"
        combined = _combined(program, exchange, scope)
        edits.add(combined.nodes)
        for gradient, tensors in zip(exchange.gradients, combined.outputs, strict=True):
            for marker, tensor in zip(gradient.tensors, tensors, strict=True):
                edits.set_input(on_replica(0, op_of(marker)), 0, tensor)
        answers.append(_first_replicas(program, exchange, scope, edits))
    graph = without_updates(edits.apply(program.graph), program, divided, {plan.worker: answers}, first=1)
    return _with_graph(program, divided, graph)


def _with_graph(program: Program, divided: ServerPlans, graph: GraphView) -> Program:
    """`program` with `graph`, which has fewer ops."""
    if program.num_local_replicas > 1:
        graph = without_idle_copies(program, graph)
    # In the place of what a server computes, its answer is fetched, which need not wait for all that the op waits for.
    answered = (op for op in map(op_of, program.fetches) if captured_name(op) in divided.server_ops)
    run_ops = dict.fromkeys(op for op in (*program.run_ops, *answered) if op in graph.nodes)
    return replace(program, graph=graph, run_ops=tuple(run_ops))


def _combined(program: Program, exchange: Exchange, scope: str) -> Fragment:
    """The exchange's gradients, of this worker's replicas together."""
    raw = raw_gradients(program, exchange)

    def total(batch: Sequence[tf.Tensor], gradients: Sequence[Sequence[Sequence[tf.Tensor]]]) -> list[list[tf.Tensor]]:
        summed = summed_gradients(program, exchange.gradients, batch, gradients, ())
        each = zip(summed, gradients, strict=True)
        return [[tf.cast(one, own.dtype) for one, own in zip(parts, first, strict=True)] for parts, (first, *_) in each]

    return trace(
        total,
        [batch_specs(program), raw],
        scope=f"{scope}/Gradients",
    )


def _first_replicas(program: Program, exchange: Exchange, scope: str, edits: Edits) -> Answer:
    """What the first replica computes, for the others."""
    ready = node("NoOp", f"{scope}/updated", controls=first_writers(program, exchange))
    ready.device = program.topology.local_replicas[0].device
    edits.add([ready])
    variables = {}
    for handle in exchange.refreshed:
        read = read_of(program, handle, f"{scope}/{handle}", waits=[ready.name])
        edits.add([read])
        variables[handle] = read.name
    tensors = {}
    for number, tensor in enumerate(exchange.answers):
        dtype = type_of(program.analysis.captured, tensor)
        passed = identity(f"{scope}/answer_{number}", on_replica(0, tensor), dtype, like=ready)
        edits.add([passed])
        tensors[tensor] = passed.name
    return Answer(tensors, variables, ready.name)


# -- Several workers --------------------------------------------------------------------------------------------------


def _require_possible(program: Program, divided: ServerPlans) -> None:
    """Refuse what the consistency of the strategy cannot have."""
    consistency, workers = program.strategy.consistency, len(program.topology.all_workers)
    exchanges = [[one for one in plan.exchanges if not one.lookups] for plan in divided.plans]
    if consistency.replicas_to_aggregate and any(len(own) > 1 for own in exchanges):
        raise StrategyError(
            "an update that waits for some of the workers (replicas_to_aggregate) needs all it is computed of in one "
            "message. This step asks a server again, as clipping by a global norm over several servers does, or a "
            "second network that is trained through the first. Use one server, or leave replicas_to_aggregate out"
        )
    takes_tokens = consistency.first_tokens is not None
    sends_again = consistency.replicas_to_aggregate > workers and not takes_tokens
    if sends_again and len(exchanges) > 1:
        raise StrategyError(
            f"an update of more gradients ({consistency.replicas_to_aggregate}) than there are workers ({workers}) "
            f"needs one server, which says who sends again; the strategy has {len(exchanges)}. Use PS(), or a "
            "replicas_to_aggregate up to the number of workers"
        )
    answers = [tensor for own in exchanges for one in own for tensor in one.answers]
    if sends_again and answers:
        raise StrategyError(
            f"'{answers[0]}' is computed of an update's gradients, and of more than there are workers: there is none "
            "yet when a worker's step ends. Return it no more, or let replicas_to_aggregate be the number of workers"
        )
    if takes_tokens and len(exchanges) > 1:
        raise StrategyError(
            f"workers take the tokens of SyncReplicasOptimizer at one server; the strategy has {len(exchanges)}. Use "
            "PS()"
        )
    if takes_tokens and answers:
        raise StrategyError(
            f"'{answers[0]}' is computed of an update's averaged gradients, and a worker that has a token goes on "
            "before the update is made. Compute it of the worker's own gradients, or return it no more"
        )
    if not consistency.is_bsp and not all(replica.trains for replica in program.topology.everyone):
        raise StrategyError(
            "workers that take their steps by themselves all train; with sync=False, a staleness or "
            "replicas_to_aggregate each needs a replica. Give every node one, or leave these options out"
        )


def _by_messages(program: Program, divided: ServerPlans) -> Program:
    _require_possible(program, divided)
    servers: list[ServerProgram] = []
    channels: list[Channel] = []
    edits = Edits()
    answers: dict[int, list[Answer]] = {}
    recorder = Recorder()
    for plan in divided.plans:
        previous: str | None = None
        for number, exchange in enumerate(plan.exchanges):
            if exchange.lookups:
                channels.append(lookup_channel(program, plan, exchange, number))
                lookups = asked(program, exchange, channels[-1])
                edits.add(lookups.fragment.nodes)
                for result in lookups.results:
                    edits.put(result)
                answers.setdefault(plan.worker, []).append(Answer({}, {}, lookups.dequeue))
                previous = _follow(edits, lookups.enqueue, lookups.dequeue, previous)
                continue
            channels.append(channel_of(program, plan, exchange, number))
            message = sent(program, exchange, channels[-1], divided.summable, recorder)
            edits.add(message.fragment.nodes)
            for op in _waited_for(program, divided, plan, exchange):
                edits.add_control(message.enqueue, op)
            answers.setdefault(plan.worker, []).append(message.answer)
            previous = _follow(edits, message.enqueue, message.answer.ready, previous)
        if plan.worker == program.topology.worker:
            servers += server_programs(program, plan, channels[-len(plan.exchanges) :])
    graph = without_updates(edits.apply(program.graph), program, divided, answers, first=0)
    fetches = {
        tensor: name for several in answers.values() for answer in several for tensor, name in answer.tensors.items()
    }
    last = tuple(several[-1].ready for several in answers.values())
    rewritten = _with_graph(program, divided, graph)
    return replace(
        rewritten,
        run_ops=(*rewritten.run_ops, *last, *recorder.writers),
        fetches=tuple(fetches.get(str(parse(captured_name(name))), name) for name in program.fetches),
        lowered=replace(
            program.lowered,
            compressor_states=(*program.lowered.compressor_states, *recorder.compressor_states),
            servers=tuple(servers),
            channels=tuple(channels),
        ),
    )


def _follow(edits: Edits, enqueue: str, dequeue: str, previous: str | None) -> str:
    """A server takes the messages of a step in order: each is sent after the answer to the one before it."""
    if previous is not None:
        edits.add_control(enqueue, previous)
    return dequeue


def _waited_for(program: Program, divided: ServerPlans, plan: ServerPlan, exchange: Exchange) -> Iterator[str]:
    """The ops that the message waits for: those of the captured graph, and the kernel's own ones before the update."""
    captured, worker = program.analysis.captured, program.topology.worker
    for op in sorted(awaited(captured, exchange, divided, worker)):
        yield from program.copies(op)
    mirrored_ops = plan.mirrored_ops if plan.worker == worker else frozenset()
    for op in sorted((divided.server_ops | mirrored_ops) & exchange.ops):
        for copy_ in program.copies(op):
            for name in program.graph.nodes[copy_].input:
                if name.startswith("^") and captured_name(name[1:]) not in captured.nodes:
                    yield name[1:]
