"""Whether what writes a variable and what else uses it run in the captured order: in a step, and on a server."""

from collections.abc import Collection, Iterable, Iterator, Mapping
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


class UsePair(NamedTuple):
    """Two uses of a variable, of which at least one writes it.

    Attributes:
        variable: the variable.
        ops: the captured ops, in the captured order.
        replica: the local replica whose variable they use.
        earlier: the use by the first one; None: it writes, and is not run for that replica.
        later: the use by the second one.
    """

    variable: str
    ops: tuple[str, str]
    replica: int
    earlier: Use | None
    later: Use

    def __str__(self) -> str:
        first, second = self.ops
        what = f"'{second}' uses variable '{self.variable}' of replica {self.replica} after '{first}'"
        if self.earlier is None:
            return f"{what} in the captured step; here nothing does what '{first}' does"
        _, waited, waits = _ends(self.earlier, self.later)
        return f"{what} in the captured step; here '{waits}' does not wait for '{waited}'"


def misordered(program: Program) -> Iterator[UsePair]:
    """The uses of variables on this worker that may run in another order than the captured one.

    Where workers take their steps by themselves, others' messages begin updates at any time: of a use in the step and
    one in an update nothing is said then.
    """
    is_bsp = program.strategy.consistency.is_bsp
    graphs = {"": program.graph} | {server.channel.name: server.update.graph for server in program.lowered.servers}
    indirect: dict[str, list[tuple[UsePair, str, str]]] = {graph: [] for graph in graphs}
    for pair in _pairs(program):
        if pair.earlier is None:
            yield pair
            continue
        if pair.earlier.channel != pair.later.channel and not is_bsp:
            continue
        graph, waited, waits = _ends(pair.earlier, pair.later)
        if waited not in graphs[graph].producers[waits]:
            indirect[graph].append((pair, waited, waits))
    for graph, found in indirect.items():
        order = _Order(graphs[graph], {waited for _, waited, _ in found})
        yield from (pair for pair, waited, waits in found if not order.has(waited, waits))


def _ends(earlier: Use, later: Use) -> tuple[str, str, str]:
    """The graph in which one use must wait for the other, by its channel; the op waited for, and the one that waits."""
    if earlier.channel == later.channel:
        return earlier.channel, earlier.op, later.op
    return "", earlier.last, later.first


def _pairs(program: Program) -> Iterator[UsePair]:
    """All pairs of uses on this worker of which the captured step says in which order they run."""
    captured, replicas = program.analysis.captured, range(program.num_local_replicas)
    written = {handle: writers for handle, writers in program.analysis.writes.items() if writers}
    users = _users(captured, written)
    order = _Order(captured, set().union(*users.values()))
    for handle, uses in _uses(program, users).items():
        for user in sorted(users[handle]):
            behind = [writer for writer in written[handle] if writer != user and order.has(writer, user)]
            pairs = [(writer, user) for writer in behind]
            if user not in written[handle]:
                pairs += [(user, writer) for writer in written[handle] if order.has(user, writer)]
            for ops, replica in product(pairs, replicas):
                for earlier, later in product(*(uses.get((replica, op), ()) for op in ops)):
                    yield UsePair(handle, ops, replica, earlier, later)
            # The last of several writers may write for all of them.
            for replica in replicas if behind and user not in written[handle] else ():
                if not any(uses.get((replica, writer)) for writer in behind):
                    for use in uses.get((replica, user), ()):
                        yield UsePair(handle, (behind[-1], user), replica, None, use)


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
