"""Serve: variables that live on servers are updated there, and what crosses travels as messages."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import networkx as nx
import tensorflow as tf

from autodist_py.kernel.fragment import Fragment, trace
from autodist_py.kernel.graph_view import VARIABLE_OP, GraphView
from autodist_py.kernel.memory import Recorder
from autodist_py.kernel.names import ASSIGNED, KERNEL_SCOPE, captured_name, on_replica, op_of, parse, replica_of
from autodist_py.kernel.passes.refresh import without_idle_copies
from autodist_py.kernel.program import Channel, Program, Promise, ServerProgram
from autodist_py.kernel.rewrite import Edits
from autodist_py.kernel.serving.common import first_writers, is_in_graph, read_of, spelt, type_of, writers_in
from autodist_py.kernel.serving.lookups import asked, lookup_channel
from autodist_py.kernel.serving.messages import Answer, channel_of, raw_gradients, sent, summed_gradients
from autodist_py.kernel.serving.server import server_programs
from autodist_py.kernel.synchronizers.parameter_server import Exchange, Service, Serving, serving
from autodist_py.kernel.weights import batch_specs
from autodist_py.proto.errors import StrategyError


@dataclass(frozen=True, slots=True)
class Serve:
    """Variables that live on servers are updated there.

    Requires: a replicated graph; the gradients of all other variables are combined.
    Ensures: the update of such a variable, with its optimizer's state, is no part of the workers' graph but of the
        server's. Workers send the raw gradients of their replicas, summed, weighted by examples, and read what the
        server answers: the variable's new value, and all else that it computes and they need. With one worker nothing
        travels: the update stands on its first replica.
    """

    name: ClassVar[str] = "serve"

    def __call__(self, program: Program) -> Program:
        if program.is_single:
            return program
        divided = serving(program)
        if divided is None:
            return program.promising(Promise.COMBINED, program.graph)
        if is_in_graph(program):
            return _in_graph(program, divided)
        return _by_messages(program, divided)


# -- One worker -------------------------------------------------------------------------------------------------------


def _in_graph(program: Program, divided: Serving) -> Program:
    edits = Edits()
    (service,) = divided.services
    answers = []
    for number, exchange in enumerate(service.exchanges):
        scope = f"{KERNEL_SCOPE}/Server/{number}"
        combined = _combined(program, exchange, scope)
        edits.add(combined.nodes)
        for gradient, tensors in zip(exchange.gradients, combined.outputs, strict=True):
            for seam, tensor in zip(gradient.tensors, tensors, strict=True):
                edits.set_input(on_replica(0, op_of(seam)), 0, tensor)
        answers.append(_first_replicas(program, exchange, scope, edits))
    graph = _without_update(edits.apply(program.graph), program, divided, service, answers, first=1)
    return _with_graph(program, graph)


def _with_graph(program: Program, graph: GraphView) -> Program:
    """`program` with `graph`, which has fewer ops."""
    if program.num_local_replicas > 1:
        graph = without_idle_copies(program, graph)
    run_ops = tuple(op for op in program.run_ops if op in graph.nodes)
    return replace(program.promising(Promise.COMBINED, graph), run_ops=run_ops)


def _combined(program: Program, exchange: Exchange, scope: str) -> Fragment:
    """The exchange's gradients, of this worker's replicas together."""
    raw = raw_gradients(program, exchange)
    return trace(
        lambda batch, gradients: summed_gradients(program, exchange.gradients, batch, gradients, ()),
        [batch_specs(program), raw],
        scope=f"{scope}/Gradients",
    )


def _first_replicas(program: Program, exchange: Exchange, scope: str, edits: Edits) -> Answer:
    """What the first replica computes, for the others."""
    device = program.place.local_replicas[0].device
    ready = tf.compat.v1.NodeDef(name=f"{scope}/updated", op="NoOp", device=device)
    ready.input.extend(f"^{writer}" for writer in first_writers(program, exchange))
    edits.add([ready])
    variables = {}
    for handle in exchange.refreshed:
        read = read_of(program, handle, f"{scope}/{handle}", device, waits=[ready.name])
        edits.add([read])
        variables[handle] = read.name
    tensors = {}
    for number, tensor in enumerate(exchange.answers):
        passed = tf.compat.v1.NodeDef(name=f"{scope}/answer_{number}", op="Identity", device=device)
        passed.input.append(on_replica(0, tensor))
        passed.attr["T"].type = type_of(program.analysis.captured, tensor).as_datatype_enum
        edits.add([passed])
        tensors[tensor] = passed.name
    return Answer(tensors, variables, ready.name)


# -- Several workers --------------------------------------------------------------------------------------------------


def _require_possible(program: Program, divided: Serving) -> None:
    """Refuse what the pace of the strategy cannot have."""
    pace, workers = program.strategy.pace, len(program.place.all_workers)
    exchanges = [[one for one in service.exchanges if not one.lookups] for service in divided.services]
    if pace.replicas_to_aggregate and any(len(own) > 1 for own in exchanges):
        raise StrategyError(
            "an update that waits for some of the workers (replicas_to_aggregate) needs all it is computed of in one "
            "message; this step asks a server again, as clipping by a global norm over several servers does, or a "
            "second network that is trained through the first. Use one server, or leave replicas_to_aggregate out"
        )
    sends_again = pace.replicas_to_aggregate > workers
    if sends_again and len(exchanges) > 1:
        raise StrategyError(
            f"an update of more gradients ({pace.replicas_to_aggregate}) than there are workers ({workers}) needs one "
            f"server, which says who sends again; the strategy has {len(exchanges)}. Use PS(), or a "
            "replicas_to_aggregate up to the number of workers"
        )
    answers = [tensor for own in exchanges for one in own for tensor in one.answers]
    if sends_again and answers:
        raise StrategyError(
            f"'{answers[0]}' is computed of an update's gradients, and of more than there are workers: there is none "
            "yet when a worker's step ends. Return it no more, or let replicas_to_aggregate be the number of workers"
        )
    if not pace.is_together and not all(replica.trains for replica in program.place.everyone):
        raise StrategyError(
            "workers that take their steps by themselves all train; with sync=False, a staleness or "
            "replicas_to_aggregate each needs a replica. Give every node one, or leave these options out"
        )


def _by_messages(program: Program, divided: Serving) -> Program:
    _require_possible(program, divided)
    graph = program.graph
    servers: list[ServerProgram] = []
    channels: list[Channel] = []
    edits = Edits()
    results: list[tf.compat.v1.NodeDef] = []
    answers: dict[int, list[Answer]] = {}
    recorder = Recorder()
    for service in divided.services:
        previous: str | None = None
        for number, exchange in enumerate(service.exchanges):
            if exchange.lookups:
                channels.append(lookup_channel(program, service, exchange, number))
                lookups = asked(program, exchange, channels[-1])
                edits.add(lookups.fragment.nodes)
                results += lookups.results
                answers.setdefault(service.worker, []).append(Answer({}, {}, lookups.dequeue))
                previous = _follow(edits, lookups.enqueue, lookups.dequeue, previous)
                continue
            channels.append(channel_of(program, service, exchange, number))
            message = sent(program, exchange, channels[-1], divided.summable, recorder)
            edits.add(message.fragment.nodes)
            for op in _waited_for(program, divided, service, exchange):
                edits.add_control(message.enqueue, op)
            answers.setdefault(service.worker, []).append(message.answer)
            previous = _follow(edits, message.enqueue, message.answer.ready, previous)
        if service.worker == program.place.worker:
            servers += server_programs(program, service, channels[-len(service.exchanges) :])
    graph = edits.apply(graph.changed(added=(), replaced=results))
    for service in divided.services:
        graph = _without_update(graph, program, divided, service, answers[service.worker], first=0)
    fetches = {
        tensor: name for several in answers.values() for answer in several for tensor, name in answer.tensors.items()
    }
    last = tuple(several[-1].ready for several in answers.values())
    rewritten = _with_graph(program, graph)
    return replace(
        rewritten,
        run_ops=(*rewritten.run_ops, *last, *recorder.writers),
        memories=(*program.memories, *recorder.memories),
        fetches=tuple(fetches.get(str(parse(captured_name(name))), name) for name in program.fetches),
        servers=tuple(servers),
        channels=tuple(channels),
        held={handle: service.worker for service in divided.services for handle in service.held},
        refreshed=frozenset(
            handle for service in divided.services for exchange in service.exchanges for handle in exchange.refreshed
        ),
    )


def _follow(edits: Edits, enqueue: str, dequeue: str, previous: str | None) -> str:
    """A server takes the messages of a step in order: each is sent after the answer to the one before it."""
    if previous is not None:
        edits.add_control(enqueue, previous)
    return dequeue


def _waited_for(program: Program, divided: Serving, service: Service, exchange: Exchange) -> Iterator[str]:
    """What the workers' ops read before the update writes it: they send nothing before."""
    captured = program.analysis.captured
    here = service.counted if service.worker == program.place.worker else frozenset()
    run_there = (divided.moved | here) & exchange.ops
    behind = set().union(*(nx.descendants(captured.digraph, op) for op in run_there))
    for op in sorted(run_there):
        for copy_ in program.copies(op):
            for name in program.graph.nodes[copy_].input:
                if name.startswith("^"):
                    original = captured_name(name[1:])
                    is_own = original in divided.stays and original not in behind
                    if is_own or original not in captured.nodes:
                        yield name[1:]


# -- Both -------------------------------------------------------------------------------------------------------------


def _without_update(
    graph: GraphView, program: Program, divided: Serving, service: Service, answers: Sequence[Answer], *, first: int
) -> GraphView:
    """The graph without what the server runs, on the local replicas from the `first` on."""
    is_server = first == 0 and service.worker == program.place.worker
    removed = divided.moved | (service.counted if is_server else frozenset())
    captured = program.analysis.captured.nodes
    tensors = {tensor: name for answer in answers for tensor, name in answer.tensors.items()}
    ready = {
        op: answer.ready
        for exchange, answer in zip(service.exchanges, answers, strict=True)
        for op in exchange.ops | exchange.seams
    }
    values = _new_values(program, service, answers)
    gone: dict[str, tf.compat.v1.NodeDef] = {}
    kept: list[tf.compat.v1.NodeDef] = []
    for node in graph.nodes.values():
        position, original = replica_of(node.name), captured_name(node.name)
        if position is None or position < first or original not in captured:
            kept.append(_reading(node, tensors) if first == 0 else node)
        elif original in ready and original in removed:
            gone[node.name] = node
        elif original in divided.stays or original in removed or node.op == VARIABLE_OP:
            kept.append(_reading(node, tensors))
    waited = {name[1:] for node in kept for name in node.input if name.startswith("^")}
    waited |= {copy_ for writers in program.analysis.writes.values() for op in writers for copy_ in program.copies(op)}
    names = {node.name for node in kept} | (gone.keys() & waited)
    for name, node in gone.items():
        if name in waited:
            controls = {other for other in node.input if other.startswith("^") and other[1:] in names}
            controls.add(f"^{ready[captured_name(name)]}")
            is_first = is_server and replica_of(name) == 0
            kept += _stand_ins(program, node, sorted(controls), () if is_first else values.get(captured_name(name), ()))
    return graph.made_of(kept, ())


def _stand_ins(
    program: Program, node: tf.compat.v1.NodeDef, controls: Sequence[str], values: Sequence[tuple[str, str]]
) -> Iterator[tf.compat.v1.NodeDef]:
    """What stands in the place of an op that the server runs: it assigns new values, or only waits.

    Args:
        program: whose op it is.
        node: the op, on a local replica.
        controls: what it waits for.
        values: handles of variables, and their new values.
    """
    assigns = []
    for number, (handle, value) in enumerate(values):
        name = node.name if len(values) == 1 else f"{node.name}{ASSIGNED}{number}"
        assign = tf.compat.v1.NodeDef(name=name, op="AssignVariableOp", device=node.device)
        assign.attr["dtype"].CopyFrom(program.analysis.captured.nodes[handle].attr["dtype"])
        assign.input.extend([on_replica(replica_of(node.name) or 0, handle), value, *controls])
        assigns.append(assign)
    yield from assigns
    if len(assigns) != 1:
        waits = [f"^{assign.name}" for assign in assigns] or controls
        yield tf.compat.v1.NodeDef(name=node.name, op="NoOp", device=node.device, input=waits)


def _new_values(program: Program, service: Service, answers: Sequence[Answer]) -> dict[str, list[tuple[str, str]]]:
    """For the last op that writes a refreshed variable in an exchange: the variable's handle, and its new value."""
    found: dict[str, list[tuple[str, str]]] = {}
    for exchange, answer in zip(service.exchanges, answers, strict=True):
        for handle, value in answer.variables.items():
            last = max(writers_in(program, exchange, handle), key=program.analysis.depth.__getitem__)
            found.setdefault(last, []).append((handle, value))
    return found


def _reading(node: tf.compat.v1.NodeDef, tensors: Mapping[str, str]) -> tf.compat.v1.NodeDef:
    """`node`, reading what the server answers."""
    answered = {
        name: tensors.get(spelt(captured_name(name)))
        for name in node.input
        if not name.startswith("^") and replica_of(op_of(name)) is not None
    }
    if not any(answered.values()):
        return node
    edited = copy.deepcopy(node)
    for index, name in enumerate(node.input):
        edited.input[index] = answered.get(name) or name
    return edited
