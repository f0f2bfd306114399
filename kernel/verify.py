"""The invariants of a program's graph, checked after every pass.

1. Names of ops are unique.
2. Every input is an op of the graph; control inputs come last.
3. Every function that is called is in the library.
4. Data and control edges have no cycle (loops of TensorFlow 1 aside).
5. Fetches and ops to run are in the graph.
6. An op of one replica reads no op of another replica: what crosses goes through the kernel's own ops.
7. A variable has no writer but those of the captured graph, and assignments of the kernel that all else which uses the
   variable waits for; a compressor's state has one.

Once the pass that brings it about has run, what `Invariant` lists: on the way there, as `verify_passes.py` says; and

8. A gradient or statistic that differs between replicas is read as the kernel's own ops combine it.
9. Each write that the captured step does is done once: by the server of the variable, or on each worker; and an op to
   fetch or to run waits for it, or for the assignment of the new value that a server answers. Of further replicas
   that is not asked: each step begins with the first one's values.
10. Every op has a device, and one that writes a variable that of the variable.
11. The graph holds the schedule's events, as `verify_schedule.py` says, and issues collectives as it lists them: each
    waits for those before it but one; one found by its name is run.
12. A write of a variable and each other use of it run in the captured order.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import networkx as nx
import tensorflow as tf

from autodist_py.kernel.analysis.variable_uses import misordered
from autodist_py.kernel.ir.control_flow import BACK_EDGE
from autodist_py.kernel.ir.graph import (
    PASSES_HANDLE,
    READS_VARIABLE,
    VARIABLE_OP,
    GraphView,
    functions_of,
    has_function_attribute,
)
from autodist_py.kernel.ir.names import (
    ASSIGNED,
    KERNEL_SCOPE,
    REPLICA_SCOPE,
    captured_name,
    on_replica,
    op_of,
    replica_of,
)
from autodist_py.kernel.printer import format_node
from autodist_py.kernel.program import Invariant, Program
from autodist_py.kernel.verify_passes import ON_THE_WAY
from autodist_py.kernel.verify_schedule import require_scheduled
from autodist_py.proto.errors import InvalidGraphError
from autodist_py.proto.graph_item import GraphItem


def verify(program: Program, before: Program | None = None) -> None:
    """Check the invariants above.

    Args:
        program: what to check.
        before: a program for which they hold; what it shares with `program` is not looked at again.

    Raises:
        InvalidGraphError: the first one that does not hold, with the op and what stands around it.
    """
    graph = program.graph
    held = frozenset() if before is None else before.holds
    if before is not None and not _is_comparable(before, program):
        before = None
    nodes = {} if before is None else before.graph.nodes
    changed = [node for name, node in graph.nodes.items() if nodes.get(name) is not node]
    _check_inputs(graph, changed)
    _check_replicas(graph, changed)
    _check_calls(graph, changed)
    if before is None or any(_has_other_edges(graph, before.graph, node.name) for node in changed):
        _check_acyclic(graph)
    for name in (*program.fetches, *program.run_ops):
        if op_of(name) not in graph.nodes:
            raise InvalidGraphError(f"'{name}' is to be fetched or run, but no op of the graph makes it")
    _check_writers(program, before, changed)
    for invariant in Invariant:
        if invariant in program.holds and invariant not in _OF_CAPTURED:
            if before is None or invariant not in before.holds:
                _CHECKS[invariant](program, list(graph.nodes.values()))
            elif invariant is not Invariant.WRITTEN or not _runs_no_less(program, before, changed):
                _CHECKS[invariant](program, changed)
    for invariant in _OF_CAPTURED & program.holds:
        if invariant not in held:
            _CHECKS[invariant](program, changed)


def _is_comparable(before: Program, program: Program) -> bool:
    """Whether ops that stand in both programs are told apart from each other by what stands around them alone."""
    return (
        before.analysis is program.analysis
        and before.topology == program.topology
        and before.replication.shared == program.replication.shared
        and before.graph.is_within(program.graph)
    )


def _has_other_edges(graph: GraphView, before: GraphView, name: str) -> bool:
    """Whether the op waits for others than before, or its readers do not wait for it any more, or now do."""
    if name not in before.nodes or graph.producers[name] != before.producers[name]:
        return True
    return (graph.nodes[name].op in BACK_EDGE) != (before.nodes[name].op in BACK_EDGE)


def _check_inputs(graph: GraphView, changed: Iterable[tf.compat.v1.NodeDef]) -> None:
    for node in changed:
        controls_began = False
        for name in node.input:
            if name[0] == "^":
                controls_began = True
            elif controls_began:
                raise InvalidGraphError(f"data input '{name}' comes after a control input: {format_node(node)}")
        for producer in graph.producers[node.name]:
            if producer not in graph.nodes:
                raise InvalidGraphError(f"input '{producer}' is no op of the graph: {format_node(node)}")


def _check_replicas(graph: GraphView, changed: Iterable[tf.compat.v1.NodeDef]) -> None:
    for node in changed:
        name = node.name
        if not name.startswith(REPLICA_SCOPE):
            continue
        scope = name[: name.index("/") + 1]
        for producer in graph.producers[name]:
            if not producer.startswith(scope) and producer.startswith(REPLICA_SCOPE):
                raise InvalidGraphError(
                    f"an op of replica {replica_of(name)} reads replica {replica_of(producer)}:\n"
                    + neighbourhood(graph, node)
                )


def _check_calls(graph: GraphView, changed: Iterable[tf.compat.v1.NodeDef]) -> None:
    calls: dict[str, bool] = {}  # by op type, whose nodes have the same attributes
    for node in changed:
        if node.op not in calls:
            calls[node.op] = has_function_attribute(node)
        if not calls[node.op]:
            continue
        for attribute, function in functions_of(node):
            if function not in graph.library:
                raise InvalidGraphError(
                    f"{attribute} names '{function}', which is not in the library: {format_node(node)}"
                )


def _check_acyclic(graph: GraphView) -> None:
    """Walk from each op to all that it waits for; an op met again on its own way waits for itself."""
    back_edges = {node.name for node in graph.of_type(BACK_EDGE)}
    done: set[str] = set()
    for end in graph.nodes:
        pending = [end]
        way: set[str] = set()
        while pending:
            name = pending[-1]
            ahead = [producer for producer in graph.producers[name] if producer not in done]
            if back_edges:
                ahead = [producer for producer in ahead if producer not in back_edges]
            if name in done or name in way or not ahead:
                way.discard(name)
                done.add(name)
                pending.pop()
            elif name not in ahead and way.isdisjoint(ahead):
                way.add(name)
                pending += ahead
            else:
                raise InvalidGraphError(_cycle(graph))


def _cycle(graph: GraphView) -> str:
    cycle = [edge[0] for edge in nx.find_cycle(graph.digraph)]
    listed = "\n".join(format_node(graph.nodes[name]) for name in cycle)
    return f"the graph has a cycle of {len(cycle)} ops:\n{listed}"


def _check_writers(program: Program, before: Program | None, changed: Sequence[tf.compat.v1.NodeDef]) -> None:
    """Of each variable that a changed op uses, or used, look at all users: one of them may be a writer already."""
    repeated = [
        name for name, count in Counter(state.name for state in program.lowered.compressor_states).items() if count > 1
    ]
    if repeated:
        raise InvalidGraphError(f"compressor state '{repeated[0]}' has several ops that read and write it")
    graph = program.graph
    compressor_states = {state.op for state in program.lowered.compressor_states}
    touched = {node.name for node in changed}.union(*(graph.producers[node.name] for node in changed))
    if before is not None:
        touched.update(*(before.graph.producers.get(node.name, ()) for node in changed))
        touched |= compressor_states ^ {state.op for state in before.lowered.compressor_states}
    handles = [name for name in touched if name in graph.nodes and graph.nodes[name].op == VARIABLE_OP]
    for handle, users in graph.users(handles).items() if handles else ():
        _check_users(program, handle, users, is_state=handle in compressor_states)


def _check_users(program: Program, handle: str, users: Sequence[str], *, is_state: bool) -> None:
    graph, captured = program.graph, program.analysis.captured
    variable = captured_name(handle)
    writers = program.analysis.writes.get(variable, ())
    new = []
    for user in users:
        node, name = graph.nodes[user], captured_name(user)
        is_written = node.op not in READS_VARIABLE | PASSES_HANDLE and handle in map(_data_producer, node.input)
        stands_for_writer = name.partition(ASSIGNED)[0] in writers
        if is_written and not stands_for_writer and variable not in captured.producers.get(name, ()):
            new.append(user)
    if is_state:
        new = new[1:]
    for position, user in enumerate(new):
        if position or not user.startswith(f"{KERNEL_SCOPE}/"):
            raise InvalidGraphError(
                f"variable '{handle}' has two writers, one of them new:\n{neighbourhood(graph, graph.nodes[user])}"
            )
    for user in users if new else ():
        if user != new[0] and new[0] not in graph.producers[user]:
            raise InvalidGraphError(
                f"variable '{handle}' has two writers, or is read meanwhile: '{user}' does not wait for "
                f"'{new[0]}', which assigns it:\n{neighbourhood(graph, graph.nodes[user])}"
            )


def _data_producer(name: str) -> str | None:
    return None if name.startswith("^") else op_of(name)


def _check_combined(program: Program, changed: Sequence[tf.compat.v1.NodeDef]) -> None:
    if program.is_single:
        return  # There is nothing to combine.
    captured, varying = program.analysis.captured, program.analysis.varying
    names = {node.name for node in changed}
    recorded = [
        (f"the gradient of '{one.variable}'", tensor) for one in program.item.gradients for tensor in one.tensors
    ]
    recorded += [("a statistic", one.tensor) for one in program.item.statistics if one.reduction != "same"]
    whatever = [one for one in program.item.gradients if one.reduction in ("add", "average")]
    added = {tensor for one in whatever for tensor in one.tensors}
    added |= {one.tensor for one in program.item.statistics if one.reduction == "add"}
    parts = {one.tensor for one in program.item.statistics if one.reduction in ("part", "own", "cut")}
    for what, tensor in recorded:
        if tensor not in parts | added and op_of(captured.nodes[op_of(tensor)].input[0]) not in varying:
            continue
        for marker in map(op_of, program.copies(tensor)):
            node = program.graph.nodes.get(marker)
            if node is None or marker not in names:
                continue  # A server reads it; or it is as it was.
            if not node.input[0].startswith(f"{KERNEL_SCOPE}/"):
                raise InvalidGraphError(
                    f"{what} is not combined over the replicas:\n{neighbourhood(program.graph, node)}"
                )


def _check_written(program: Program, _: Sequence[tf.compat.v1.NodeDef]) -> None:
    captured, writes = program.analysis.captured, program.analysis.writes
    nodes, worker, held = program.graph.nodes, program.topology.worker, program.held
    wanted = captured.ancestors(_ends(program.item))
    runs = program.graph.ancestors(map(op_of, (*program.fetches, *program.run_ops)))
    served = Counter(captured_name(op) for server in program.lowered.servers for op in server.update.run_ops)
    for handle, writers in writes.items():
        home = held.get(handle)
        for writer in wanted.intersection(writers):
            copies = [name for name in program.copies(writer) if name in nodes]
            own = [name for name in copies if nodes[name].op == captured.nodes[writer].op]
            if handle in program.kept:
                _require_written_on_each(program, writer, copies, runs)
            here = sum(replica_of(name) == 0 for name in own) if home is None else 0
            times = served[writer] + here
            if times != (home in (None, worker)):
                where = "each worker" if home is None else f"worker {home}"
                raise InvalidGraphError(
                    f"'{writer}' writes variable '{handle}', which lives on {where}; worker {worker} does it {times} "
                    "times in a step"
                )
            # What other replicas write holds for the step alone: the next one begins with the first replica's values.
            if idle := [name for name in own if replica_of(name) == 0 and name not in runs]:
                raise InvalidGraphError(
                    f"'{idle[0]}' writes variable '{handle}', and nothing that is fetched or run waits for it:\n"
                    + neighbourhood(program.graph, nodes[idle[0]])
                )
    _require_assigned(program, {handle for handle in program.refreshed if wanted.intersection(writes[handle])}, runs)


def _require_written_on_each(program: Program, writer: str, copies: Sequence[str], runs: Collection[str]) -> None:
    """Each replica's own variable is written in each step, as none begins with the first replica's value."""
    written = [name for name in copies if name in runs]
    if len(written) != program.num_local_replicas:
        raise InvalidGraphError(
            f"'{writer}' writes a variable of which each replica keeps its own; of {program.num_local_replicas} "
            f"replicas {len(written)} do: {', '.join(written) or 'none'}"
        )


def _runs_no_less(program: Program, before: Program, changed: Sequence[tf.compat.v1.NodeDef]) -> bool:
    """Whether all that `before` runs is run, and writes what it wrote: ops have other devices, or wait for more."""
    if not {*before.fetches, *before.run_ops} <= {*program.fetches, *program.run_ops}:
        return False
    if before.lowered.servers != program.lowered.servers or before.schedule is not program.schedule:
        return False
    nodes, producers, now = before.graph.nodes, before.graph.producers, program.graph.producers
    return all(
        node.name in nodes
        and nodes[node.name].op == node.op
        and (now[node.name] == producers[node.name] or set(producers[node.name]) <= set(now[node.name]))
        for node in changed
    )


def _require_assigned(program: Program, refreshed: Collection[str], runs: Collection[str]) -> None:
    """The step gives each replica's variables the values that servers answer; a server's own one has it."""
    held = program.held
    elsewhere = {handle for handle in refreshed if held[handle] != program.topology.worker}
    copies = {on_replica(0, handle): handle for handle in elsewhere}  # Further replicas' hold for the step alone.
    for name, users in program.graph.users(copies).items() if copies else ():
        handle = copies[name]
        if not any(user in runs and _assigns(program, user, handle) for user in users):
            raise InvalidGraphError(
                f"variable '{name}' lives on worker {held[handle]}, and nothing that is fetched or run waits "
                "until it has its new value"
            )


def _assigns(program: Program, op: str, handle: str) -> bool:
    """Whether the op stands in the place of one that writes the variable, and assigns it."""
    writer = captured_name(op).partition(ASSIGNED)[0]
    return program.graph.nodes[op].op == "AssignVariableOp" and writer in program.analysis.writes[handle]


def _ends(item: GraphItem) -> Iterator[str]:
    """The ops of the captured graph that are fetched or run."""
    yield from (op_of(output.tensor) for output in item.outputs)
    yield from item.run_ops


def _check_placed(program: Program, changed: Sequence[tf.compat.v1.NodeDef]) -> None:
    nodes = program.graph.nodes
    writers = {
        copy: handle
        for variable, names in program.analysis.writes.items()
        for name in names
        for copy, handle in zip(program.copies(name), program.copies(variable), strict=True)
    }
    names = {node.name for node in changed}
    for node in changed:
        if not node.device:
            raise InvalidGraphError(f"an op has no device: {format_node(node)}")
    for name, handle in writers.items():
        if name in nodes and not names.isdisjoint((name, handle)) and nodes[handle].device != nodes[name].device:
            raise InvalidGraphError(
                f"'{name}' writes a variable of another device, '{nodes[handle].device}': {format_node(nodes[name])}"
            )


def _check_order(program: Program, _: Sequence[tf.compat.v1.NodeDef]) -> None:
    require_scheduled(program)
    for one in misordered(program):
        raise InvalidGraphError(f"worker {program.topology.worker}: {one}")
    named = {op for one in program.lowered.collectives if one.by_name for op in one.ops}
    if idle := named - set(program.run_ops):
        raise InvalidGraphError(f"collective '{min(idle)}' is not among the ops to run: a worker could leave it out")
    for earlier, later in program.issue_order():
        for op in later.ops:
            missing = {f"^{name}" for name in earlier.ops} - set(program.graph.nodes[op].input)
            if missing:
                raise InvalidGraphError(
                    f"collective '{op}' does not wait for {', '.join(sorted(missing))}: "
                    "workers could issue them in different orders"
                )


_CHECKS: Mapping[Invariant, Callable[[Program, Sequence[tf.compat.v1.NodeDef]], None]] = {
    **ON_THE_WAY,
    Invariant.COMBINED: _check_combined,
    Invariant.WRITTEN: _check_written,
    Invariant.PLACED: _check_placed,
    Invariant.ORDERED: _check_order,
}
"""What checks each invariant, given the program and the ops that may break it."""

_OF_CAPTURED = frozenset({Invariant.UNBRANCHED, Invariant.CUT, Invariant.SCHEDULED})
"""What is said of the captured graph and the strategy, which the pass that ensures it has before it."""


def neighbourhood(view: GraphView, node: tf.compat.v1.NodeDef) -> str:
    """`node` as text, between what it reads and what reads it."""

    def lines() -> Iterator[str]:
        for producer in dict.fromkeys(map(op_of, node.input)):
            yield f"    {format_node(view.nodes[producer])}"
        yield f"  > {format_node(node)}"
        for consumer in sorted(view.digraph.succ[node.name]):
            yield f"    {format_node(view.nodes[consumer])}"

    return "\n".join(lines())
