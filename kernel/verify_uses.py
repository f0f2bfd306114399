"""Whether what uses a variable and what writes it run in the captured order: in a worker's step, and on its server."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from autodist_py.kernel.ir.control_flow import BACK_EDGE
from autodist_py.kernel.ir.graph import PASSES_HANDLE, GraphView
from autodist_py.kernel.ir.names import ASSIGNED, captured_name, on_replica, op_of
from autodist_py.kernel.program import Channel, Program
from autodist_py.proto.errors import InvalidGraphError


class _Use(NamedTuple):
    """One run of a captured op that uses a variable.

    Attributes:
        op: its name where it is run.
        first: the op of the step before which it does not begin: itself, or the one that sends a message to the server.
        last: the op of the step after which it has ended: itself, or the one that takes the server's answer.
        channel: the name of the channel of the exchange in whose update the server runs it; "": it is run in the step.
    """

    op: str
    first: str
    last: str
    channel: str = ""


_Uses = dict[tuple[int, str], list[_Use]]
"""The uses of a variable on this worker, by local replica, whose copy it is, and captured op."""


def require_in_order(program: Program) -> None:
    """Compare the order of each write with that of all other uses of the variable in the captured graph.

    Raises:
        InvalidGraphError: a use and a write may run in another order than they were captured in.
    """
    captured = program.analysis.captured
    written = {handle: writers for handle, writers in program.analysis.writes.items() if writers}
    users = _users(captured, written)
    order = _Order(captured, set().union(*users.values()))
    uses = _uses(program, users)
    orders = _orders(program, [one for own in uses.values() for several in own.values() for one in several])
    for handle, writers in written.items():
        for writer in writers:
            for user in sorted(users[handle] - {writer}):
                if order.has(user, writer):
                    _require(program, orders, handle, uses[handle], (user, writer))
                elif order.has(writer, user):
                    _require(program, orders, handle, uses[handle], (writer, user))


class _Order:
    """Which of the `marked` ops of a graph others wait for, directly or through others; each op is looked at once."""

    def __init__(self, view: GraphView, marked: Collection[str]):
        self._view = view
        self._bits = {op: 1 << index for index, op in enumerate(sorted(marked))}
        self._behind: dict[str, int] = {}

    def has(self, earlier: str, later: str) -> bool:
        """Whether `later` waits for `earlier`, which is one of the marked ops."""
        if later not in self._behind:
            self._walk(later)
        return bool(self._behind[later] & self._bits[earlier])

    def _walk(self, op: str) -> None:
        behind, bits = self._behind, self._bits
        pending = [op]
        while pending:
            producers = self._producers(pending[-1])
            unknown = [one for one in producers if one not in behind]
            if unknown:
                pending += unknown
                continue
            found = 0
            for producer in producers:
                found |= behind[producer] | bits.get(producer, 0)
            behind[pending.pop()] = found

    def _producers(self, op: str) -> list[str]:
        """What the op waits for in the same turn of a loop, and in the same graph: workers send a server some."""
        nodes = self._view.nodes
        return [one for one in self._view.producers[op] if one in nodes and nodes[one].op not in BACK_EDGE]


def _users(view: GraphView, handles: Iterable[str]) -> dict[str, set[str]]:
    """For each variable the ops that are given its handle."""
    found: dict[str, set[str]] = {}
    for handle in handles:
        pending, own = [handle], set[str]()
        while pending:
            for op in view.dataflow_consumers([pending.pop()]) - own:
                own.add(op)
                if view.nodes[op].op in PASSES_HANDLE:
                    pending.append(op)
        found[handle] = {op for op in own if view.nodes[op].op not in PASSES_HANDLE}
    return found


def _uses(program: Program, users: Mapping[str, set[str]]) -> dict[str, _Uses]:
    """What uses each variable on this worker: ops of its step that are run, and those of its updates as a server."""
    found: dict[str, _Uses] = {handle: {} for handle in users}

    def add(handle: str, replica: int, use: _Use) -> None:
        op = captured_name(use.op).partition(ASSIGNED)[0]
        if op in users[handle]:
            found[handle].setdefault((replica, op), []).append(use)

    graph, replicas = program.graph, range(program.num_local_replicas)
    run = graph.ancestors(map(op_of, (*program.fetches, *program.run_ops)))
    copies = {on_replica(replica, handle): (handle, replica) for handle in users for replica in replicas}
    for copy, ops in _users(graph, copies.keys() & graph.nodes.keys()).items():
        for op in ops & run:
            add(*copies[copy], _Use(op, op, op))
    for server in program.lowered.servers:
        view, ends = server.update.graph, _message(program, server.channel)
        for copy, ops in _users(view, copies.keys() & view.nodes.keys()).items():
            for op in ops:
                add(*copies[copy], _Use(op, *ends, server.channel.name))
    return found


def _message(program: Program, channel: Channel) -> tuple[str, str]:
    """The ops by which this worker sends its server a message of the channel, and takes the answer."""
    nodes, worker = program.graph.nodes, program.topology.worker
    queues = {channel.push(worker), channel.answer(worker)}
    first, last = sorted(
        (node.op == "QueueDequeueV2", node.name)
        for node in program.graph.of_type({"QueueEnqueueV2", "QueueDequeueV2"})
        if nodes[op_of(node.input[0])].attr["shared_name"].s.decode() in queues
    )
    return first[1], last[1]


def _orders(program: Program, uses: Sequence[_Use]) -> dict[str, _Order]:
    """That of the step, under no name, and those of this worker's updates as a server, by their channels."""
    graphs = {"": program.graph} | {server.channel.name: server.update.graph for server in program.lowered.servers}
    ends = {one.last for one in uses}
    return {
        channel: _Order(graph, {one.op for one in uses if one.channel == channel} if channel else ends)
        for channel, graph in graphs.items()
    }


def _require(program: Program, orders: Mapping[str, _Order], handle: str, uses: _Uses, pair: tuple[str, str]) -> None:
    """The uses by the pair's first op, on each replica, end before those by the second one begin."""
    for replica in range(program.num_local_replicas):
        for one, other in product(*(uses.get((replica, op), ()) for op in pair)):
            if one.channel == other.channel:
                is_before = orders[one.channel].has(one.op, other.op)
            else:
                is_before = orders[""].has(one.last, other.first)
            if not is_before:
                raise InvalidGraphError(
                    f"worker {program.topology.worker} may run '{pair[1]}' before '{pair[0]}', which uses variable "
                    f"'{handle}' earlier in the captured step: '{other.first}' does not wait for '{one.last}'"
                )
