"""What a worker's graph has in the place of the ops that servers run: `without_updates`.

A stand-in waits for the server's answer, and for all that the captured op waits for, also through ops that the worker
does not run. So whoever waits for it, or runs it, runs what one device would have run before.
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import tensorflow as tf

from autodist_py.kernel.events import ServerPlan, ServerPlans
from autodist_py.kernel.exchange.common import spelt, writers_in
from autodist_py.kernel.exchange.worker_side import Answer
from autodist_py.kernel.ir.graph import VARIABLE_OP, GraphView
from autodist_py.kernel.ir.names import ASSIGNED, captured_name, on_replica, op_of, replica_of
from autodist_py.kernel.ir.node import controls_of, node
from autodist_py.kernel.program import Program


@dataclass(frozen=True, slots=True)
class _Removed:
    """An op that a server runs: the op that takes the server's answer, and whether the server is this worker."""

    ready: str
    is_here: bool


def without_updates(
    graph: GraphView, program: Program, divided: ServerPlans, answers: Mapping[int, Sequence[Answer]], *, first: int
) -> GraphView:
    """The graph without what servers run, on the local replicas from the `first` on.

    Args:
        graph: `program`'s, with the ops that send messages and take answers.
        program: before its updates are removed.
        divided: what servers run.
        answers: of each server, for each of its exchanges.
        first: 1, where the first replica runs the update.
    """
    captured = program.analysis.captured
    removed = _removed(program, divided, answers, first=first)
    mirrored = frozenset().union(*(plan.mirrored_ops for plan in divided.plans))
    tensors = {tensor: name for several in answers.values() for one in several for tensor, name in one.tensors.items()}
    gone: dict[str, tf.compat.v1.NodeDef] = {}
    kept: list[tf.compat.v1.NodeDef] = []
    for name, one in graph.nodes.items():
        position, original = replica_of(name), captured_name(name)
        if position is None or position < first or original not in captured.nodes:
            kept.append(_reading(one, tensors, first))
        elif original in removed and (position == 0 or original not in mirrored):  # A server has the first replica's.
            gone[name] = one
        elif original in divided.worker_ops or one.op == VARIABLE_OP:
            kept.append(_reading(one, tensors, first))
    by_others = {name[1:] for one in kept for name in controls_of(one)}
    writers = {copy_ for own in program.analysis.writes.values() for op in own for copy_ in program.copies(op)}
    waited = by_others | writers | set(map(op_of, (*program.fetches, *program.run_ops)))
    standing = {one.name for one in kept} | (gone.keys() & waited)
    waits = _waits(graph, program, divided, removed, standing, first=first)
    values = _new_values(program, divided.plans, answers)
    assigned = {
        name: values[captured_name(name)]
        for name in gone.keys() & waited
        if captured_name(name) in values
        and not (first == 0 and replica_of(name) == 0 and removed[captured_name(name)].is_here)
    }
    left_out: set[str] = set()
    for name, taken in gone.items():
        if name not in waited:
            continue
        controls = waits[name] | {removed[captured_name(name)].ready}
        if name in assigned or name in by_others:
            own = captured.control_flow.predicates.get(captured_name(name), frozenset())
            own = frozenset() if name in assigned else own
            run = _run_in(captured, name, controls, own, standing=standing, always=assigned)
            left_out |= controls - run
            controls = run
        kept += _stand_ins(program, taken, sorted(controls), assigned.get(name, ()))
    for name in program.run_ops:  # A read that nobody reads is no use, but for what it waits for.
        if name not in standing and waits[name]:
            kept.append(node("NoOp", name, controls=sorted(waits[name]), like=graph.nodes[name]))
    if left_out:
        kept = list(_running(kept, left_out, set(program.run_ops) - by_others))
    return graph.made_of(kept, ())


def _removed(
    program: Program, divided: ServerPlans, answers: Mapping[int, Sequence[Answer]], *, first: int
) -> dict[str, _Removed]:
    """The ops of the captured graph that this worker leaves to servers."""
    found: dict[str, _Removed] = {}
    for plan in divided.plans:
        is_here = plan.worker == program.topology.worker
        ours = divided.server_ops | (plan.mirrored_ops if first == 0 and is_here else frozenset())
        for exchange, answer in zip(plan.exchanges, answers[plan.worker], strict=True):
            found |= dict.fromkeys((exchange.ops | exchange.markers) & ours, _Removed(answer.ready, is_here))
    return found


def _waits(
    graph: GraphView,
    program: Program,
    divided: ServerPlans,
    removed: Mapping[str, _Removed],
    standing: Collection[str],
    *,
    first: int,
) -> dict[str, set[str]]:
    """For each op that is removed or left out, those `standing` that it waits for, directly or through such ops.

    What a message brings to the server, the server's answer waits for already.
    """
    given = {op_of(value) for plan in divided.plans for one in plan.exchanges for value in one.values}
    given |= {marker for plan in divided.plans for one in plan.exchanges for marker in one.markers}
    found: dict[str, set[str]] = {}
    for op in program.analysis.captured.order():
        for position in range(first, program.num_local_replicas):
            name = on_replica(position, op)
            if name not in graph.nodes or (name in standing and op not in removed):
                continue
            own = found[name] = set()
            if op in removed and name not in standing:
                own.add(removed[op].ready)
            if op in given and op in removed:
                continue  # A gradient, which was sent.
            for read in graph.nodes[name].input:
                producer = op_of(read)
                if not read.startswith("^") and captured_name(producer) in given:
                    continue
                if producer in standing:
                    own |= {one for one in _asked(graph, producer) if graph.producers[one]}
                else:
                    own |= found.get(producer, set())
    return found


def _asked(graph: GraphView, op: str) -> list[str]:
    """The op; of a `Switch`, what it passes on and asks: who waits for one that nobody reads never runs."""
    return list(graph.producers[op]) if graph.nodes[op].op == "Switch" else [op]


def _run_in(
    captured: GraphView,
    name: str,
    waits: set[str],
    predicates: frozenset[str],
    *,
    standing: Collection[str],
    always: Collection[str],
) -> set[str]:
    """What a stand-in waits for that runs as the `predicates` of branches of TensorFlow 1 decide.

    What runs in another branch only would keep the stand-in from running: in its place stand what ends that branch, and
    what decides it.

    Args:
        captured: the captured graph.
        name: the stand-in, on a replica.
        waits: all that it is to wait for.
        predicates: those that decide whether the stand-in runs.
        standing: what there is to wait for.
        always: stand-ins that run in each step, wherever they stand.
    """
    flow = captured.control_flow
    deciding = {one: flow.predicates.get(captured_name(one), frozenset()) - predicates for one in waits - set(always)}
    others = {one for one, own in deciding.items() if own}
    if not others:
        return waits
    behind: set[str] = nx.descendants(captured.digraph, captured_name(name)) | {captured_name(name)}
    found = waits - others
    for one in others:
        ends = captured.ends_of_branch(captured_name(one)) - behind
        asked = {op for op in deciding[one] if flow.predicates.get(op, frozenset()) <= predicates}
        found |= {on_replica(replica_of(one) or 0, op) for op in ends | asked} & set(standing)
    return found


def _running(
    nodes: Sequence[tf.compat.v1.NodeDef], ops: Collection[str], run_ops: Collection[str]
) -> Iterator[tf.compat.v1.NodeDef]:
    """The nodes, of which one that is run, and for which nobody waits, waits for `ops` too; in each step or not."""
    names = [one.name for one in nodes if one.op == "NoOp" and one.name in run_ops]
    for one in nodes:
        if one.name in names[:1]:
            edited = copy.deepcopy(one)
            own = (op for op in sorted(ops) if replica_of(op) in (None, replica_of(one.name)))
            edited.input.extend(f"^{op}" for op in own if f"^{op}" not in one.input)
            yield edited
        else:
            yield one


def _stand_ins(
    program: Program, removed: tf.compat.v1.NodeDef, controls: Sequence[str], values: Sequence[tuple[str, str]]
) -> Iterator[tf.compat.v1.NodeDef]:
    """What stands in the place of an op that the server runs: it assigns new values, or only waits.

    Args:
        program: whose op it is.
        removed: the op, on a local replica.
        controls: what it waits for.
        values: handles of variables, and their new values.
    """
    assigns = []
    for number, (handle, value) in enumerate(values):
        name = removed.name if len(values) == 1 else f"{removed.name}{ASSIGNED}{number}"
        own = on_replica(replica_of(removed.name) or 0, handle)
        dtype = program.analysis.captured.nodes[handle].attr["dtype"]
        assigns.append(node("AssignVariableOp", name, [own, value], controls=controls, like=removed, dtype=dtype))
    yield from assigns
    if len(assigns) != 1:
        yield node("NoOp", removed.name, controls=[assign.name for assign in assigns] or controls, like=removed)


def _new_values(
    program: Program, plans: Sequence[ServerPlan], answers: Mapping[int, Sequence[Answer]]
) -> dict[str, list[tuple[str, str]]]:
    """For the last op that writes a refreshed variable in an exchange: the variable's handle, and its new value."""
    found: dict[str, list[tuple[str, str]]] = {}
    for plan in plans:
        for exchange, answer in zip(plan.exchanges, answers[plan.worker], strict=True):
            for handle, value in answer.variables.items():
                last = max(writers_in(program, exchange, handle), key=program.analysis.depth.__getitem__)
                found.setdefault(last, []).append((handle, value))
    return found


def _reading(original: tf.compat.v1.NodeDef, tensors: Mapping[str, str], first: int) -> tf.compat.v1.NodeDef:
    """`original`, reading what servers answer in the place of what replicas from the `first` on leave to them."""
    answered: dict[str, str] = {}
    for name in original.input:
        position = None if name.startswith("^") else replica_of(op_of(name))
        if position is not None and position >= first and spelt(captured_name(name)) in tensors:
            answered[name] = tensors[spelt(captured_name(name))]
    if not answered:
        return original
    edited = copy.deepcopy(original)
    for index, name in enumerate(original.input):
        edited.input[index] = answered.get(name, name)
    return edited
