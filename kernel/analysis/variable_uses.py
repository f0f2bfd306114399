"""Whether what writes a variable and what else uses it run in the captured order: in a step, and on a server."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from autodist_py.kernel.ir.control_flow import BACK_EDGE
from autodist_py.kernel.ir.graph import PASSES_HANDLE, GraphView
from autodist_py.kernel.ir.names import ASSIGNED, KERNEL_SCOPE, captured_name, on_replica, op_of
from autodist_py.kernel.program import Channel, Program
from autodist_py.proto.errors import InvalidGraphError


class Use(NamedTuple):
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


_Uses = dict[tuple[int, str], list[Use]]
"""The uses of a variable on this worker, by local replica, whose copy it is, and captured op."""


class Misordered(NamedTuple):
    """Two uses of a variable which were captured in an order that the program does not keep; one of them writes.

    Attributes:
        variable: the variable.
        pair: the captured ops, in the captured order.
        replica: the local replica whose variable they use.
        earlier: the use by the first one; None: it writes, and is not run for that replica.
        later: the use by the second one, which does not wait for it.
    """

    variable: str
    pair: tuple[str, str]
    replica: int
    earlier: Use | None
    later: Use

    def __str__(self) -> str:
        first, second = self.pair
        what = f"'{second}' uses variable '{self.variable}' of replica {self.replica} after '{first}'"
        if self.earlier is None:
            return f"{what} in the captured step; here nothing does what '{first}' does"
        waits, awaited = (self.later.first, self.earlier.last)
        if self.earlier.channel == self.later.channel:
            waits, awaited = self.later.op, self.earlier.op
        return f"{what} in the captured step; here '{waits}' does not wait for '{awaited}'"


def misordered(program: Program) -> Iterator[Misordered]:
    """Each write and other use of a variable on this worker that may run in another order than the captured one."""
    captured = program.analysis.captured
    written = {handle: writers for handle, writers in program.analysis.writes.items() if writers}
    users = _users(captured, written)
    order = _Order(captured, set().union(*users.values()))
    uses = _uses(program, users)
    orders = _orders(program, [one for own in uses.values() for several in own.values() for one in several])
    for handle, writers in written.items():
        for user in sorted(users[handle]):
            behind = [writer for writer in writers if writer != user and order.has(writer, user)]
            pairs = [(writer, user) for writer in behind]
            if user not in writers:
                pairs += [(user, writer) for writer in writers if order.has(user, writer)]
                yield from _not_written(program, handle, uses[handle], behind, user)
            for pair in pairs:
                yield from _of_pair(program, orders, handle, uses[handle], pair)


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
        behind, bits, seen = self._behind, self._bits, set[str]()
        pending = [(op, self._producers(op))]
        while pending:
            op, producers = pending[-1]
            unknown = [one for one in producers if one not in behind]
            if unknown:
                if op in seen:
                    raise InvalidGraphError(f"'{op}' waits for itself, by way of '{unknown[0]}'")
                seen.add(op)
                pending += [(one, self._producers(one)) for one in unknown]
                continue
            found = 0
            for producer in producers:
                found |= behind[producer] | bits.get(producer, 0)
            behind[op] = found
            pending.pop()

    def _producers(self, op: str) -> list[str]:
        """What the op waits for in the same turn of a loop, and in the same graph: workers send a server some."""
        nodes = self._view.nodes
        return [one for one in self._view.producers[op] if one in nodes and nodes[one].op not in BACK_EDGE]


def _users(view: GraphView, handles: Iterable[str]) -> dict[str, set[str]]:
    """For each variable the ops that are given its handle."""
    found: dict[str, set[str]] = {handle: set() for handle in handles}
    passing: dict[str, set[str]] = {}
    given = {handle: {handle} for handle in found}
    while given:
        passed: dict[str, set[str]] = {}
        for op, users in view.users(given).items():
            for user in users:
                node = view.nodes[user]
                if op not in (op_of(name) for name in node.input if name[0] != "^"):
                    continue
                if node.op not in PASSES_HANDLE:
                    for handle in given[op]:
                        found[handle].add(user)
                elif new := given[op] - passing.get(user, set()):  # A loop passes it on and on.
                    passing.setdefault(user, set()).update(new)
                    passed.setdefault(user, set()).update(new)
        given = passed
    return found


def _uses(program: Program, users: Mapping[str, set[str]]) -> dict[str, _Uses]:
    """What uses each variable on this worker: ops of its step that are run, and those of its updates as a server."""
    found: dict[str, _Uses] = {handle: {} for handle in users}

    def add(handle: str, replica: int, use: Use) -> None:
        op = captured_name(use.op).partition(ASSIGNED)[0]
        if op in users[handle]:
            found[handle].setdefault((replica, op), []).append(use)

    graph, replicas = program.graph, range(program.num_local_replicas)
    run = graph.ancestors(map(op_of, (*program.fetches, *program.run_ops)))
    copies = {on_replica(replica, handle): (handle, replica) for handle in users for replica in replicas}
    for copy, ops in _users(graph, copies.keys() & graph.nodes.keys()).items():
        for op in ops & run:
            add(*copies[copy], Use(op, op, op))
    for server in program.lowered.servers:
        view, ends = server.update.graph, _message(program, server.channel)
        for copy, ops in _users(view, copies.keys() & view.nodes.keys()).items():
            for op in ops:
                add(*copies[copy], Use(op, *ends, server.channel.name))
    return found


def _message(program: Program, channel: Channel) -> tuple[str, str]:
    """The ops by which this worker sends its server a message of the channel, and takes the answer."""
    nodes, worker = program.graph.nodes, program.topology.worker
    queues = {channel.push(worker), channel.answer(worker)}
    first, last = sorted(
        (node.op == "QueueDequeueV2", node.name)
        for node in program.graph.of_type({"QueueEnqueueV2", "QueueDequeueV2"})
        if node.name.startswith(f"{KERNEL_SCOPE}/{channel.name}/")
        and nodes[op_of(node.input[0])].attr["shared_name"].s.decode() in queues
    )
    return first[1], last[1]


def _orders(program: Program, uses: Sequence[Use]) -> dict[str, _Order]:
    """That of the step, under no name, and those of this worker's updates as a server, by their channels."""
    graphs = {"": program.graph} | {server.channel.name: server.update.graph for server in program.lowered.servers}
    ends = {one.last for one in uses}
    return {
        channel: _Order(graph, {one.op for one in uses if one.channel == channel} if channel else ends)
        for channel, graph in graphs.items()
    }


def _of_pair(
    program: Program, orders: Mapping[str, _Order], handle: str, uses: _Uses, pair: tuple[str, str]
) -> Iterator[Misordered]:
    """On each replica, the uses by the pair's second op that do not wait for those by the first one."""
    for replica in range(program.num_local_replicas):
        for one, other in product(*(uses.get((replica, op), ()) for op in pair)):
            if one.channel == other.channel:
                is_before = orders[one.channel].has(one.op, other.op)
            else:
                is_before = orders[""].has(one.last, other.first)
            if not is_before:
                yield Misordered(handle, pair, replica, one, other)


def _not_written(program: Program, handle: str, uses: _Uses, writers: Sequence[str], user: str) -> Iterator[Misordered]:
    """The uses on each replica whose variable none of the writers before them writes; the last may do so for all."""
    for replica in range(program.num_local_replicas) if writers else ():
        if not any(uses.get((replica, writer)) for writer in writers):
            for use in uses.get((replica, user), ()):
                yield Misordered(handle, (writers[-1], user), replica, None, use)
