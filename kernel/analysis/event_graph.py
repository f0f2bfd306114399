"""Which events of a step wait for which, through the ops of the captured graph: `waits`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import networkx as nx

from autodist_py.kernel.events import CheckData, CountExamples, Event, Exchange, ServerPlans
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of
from autodist_py.kernel.program import Program

_OF_PLACE = "|"
"""Between the kind of a worker and an op of its graph; no op has it in its name."""


@dataclass(frozen=True, slots=True)
class Waits:
    """What waits for what.

    Attributes:
        behind: for each event, those that it waits for, as a set of bits by position.
        cycle: the positions of events that wait for one another; empty: there are none.
        ops: the ops of the graph on their way.
    """

    behind: tuple[int, ...]
    cycle: tuple[int, ...] = ()
    ops: frozenset[str] = frozenset()


def waits(program: Program, events: Sequence[Event], plans: ServerPlans | None) -> Waits:
    """How the events wait for one another; with a cycle, the first one that there is.

    All workers have the same events, but not the same ops between them: a server counts in its own worker's place. So
    each kind of worker has the ops of the graph for itself.
    """
    places = _places(program, plans)
    digraph: nx.DiGraph[str] = program.analysis.captured.digraph
    if len(places) > 1:
        digraph = cast("nx.DiGraph[str]", nx.union_all([digraph] * len(places), rename=list(map(_prefix, places))))
    needs = [_of_places(places, partial(_needs, program, event, plans)) for event in events]
    gives = [_of_places(places, partial(_gives, program, event, plans)) for event in events]
    following = _following(events)
    takers: dict[str, list[int]] = {}
    waiting = {op: len(producers) for op, producers in digraph.pred.items()}
    missing = [len(ops) for ops in needs]
    for index, needed in enumerate(needs):
        for op in needed:
            takers.setdefault(op, []).append(index)
        for op in gives[index]:
            waiting[op] += 1
        for later in following[index]:
            missing[later] += 1
    behind = [0] * len(events)
    before = dict.fromkeys(waiting, 0)
    ready: list[str | int] = [op for op, count in waiting.items() if not count]
    ready += [index for index, count in enumerate(missing) if not count]
    successors: Mapping[str, Iterable[str]] = digraph.succ
    ops: Iterable[str]
    done = 0
    while ready:
        one = ready.pop()
        done += 1
        if isinstance(one, str):
            bits, ops, later_events = before[one], successors[one], takers.get(one, [])
        else:
            bits, ops, later_events = behind[one] | 1 << one, gives[one], following[one]
        for op in ops:
            before[op] |= bits
            waiting[op] -= 1
            if not waiting[op]:
                ready.append(op)
        for index in later_events:
            behind[index] |= bits
            missing[index] -= 1
            if not missing[index]:
                ready.append(index)
    if done == len(waiting) + len(events):
        return Waits(tuple(behind))
    graph: nx.DiGraph[str | int] = nx.DiGraph()
    stuck = {op for op, count in waiting.items() if count}
    graph.add_edges_from((op, other) for op in stuck for other in digraph.succ[op])
    for index in range(len(events)):
        graph.add_edges_from((op, index) for op in needs[index] if op in stuck)
        graph.add_edges_from((index, op) for op in gives[index])
        graph.add_edges_from((index, later) for later in following[index])
    return _first_cycle(graph, tuple(behind))


def _first_cycle(graph: "nx.DiGraph[str | int]", behind: tuple[int, ...]) -> Waits:
    found = [
        (sorted(one for one in members if isinstance(one, int)), members)
        for members in nx.strongly_connected_components(graph)
        if len(members) > 1
    ]
    positions, members = min(found, key=lambda each: each[0])
    ops = (one.rpartition(_OF_PLACE)[2] for one in members if isinstance(one, str))
    return Waits(behind, tuple(positions), frozenset(ops))


def _places(program: Program, plans: ServerPlans | None) -> list[int | None]:
    """The kinds of workers: a server that runs mirrored ops for its own worker, by its rank, and the others."""
    counting = [plan.worker for plan in plans.plans if plan.mirrored_ops] if plans is not None else []
    others = set(program.topology.workers) - set(counting)
    return [*([None] if others else []), *counting]


def _prefix(place: int | None) -> str:
    return f"{place}{_OF_PLACE}"


def _of_places(places: Sequence[int | None], ops: Callable[[int | None], set[str]]) -> set[str]:
    """The ops of all kinds of workers, as they are called in the graph of all of them."""
    if len(places) == 1:
        return ops(places[0])
    return {f"{_prefix(place)}{op}" for place in places for op in ops(place)}


def _needs(program: Program, event: Event, plans: ServerPlans | None, place: int | None) -> set[str]:
    """The ops that the event waits for on a worker of that kind."""
    found = set(map(op_of, event.needs))
    if plans is None or not isinstance(event, Exchange) or event.lookups:
        return found
    return found | awaited(program.analysis.captured, event, plans, place)


def awaited(view: GraphView, exchange: Exchange, plans: ServerPlans, worker: int | None) -> frozenset[str]:
    """The ops of the captured graph that a worker runs before it sends the message of an exchange that is no lookup.

    They are the reads of variables that the exchange writes, and what the ops that the server runs in the worker's
    place wait for. In the place of a mirrored op it is what that waits for: the server has run its own, and the
    worker's may wait for another server.

    Args:
        view: the captured graph.
        exchange: the exchange.
        plans: how the step is divided.
        worker: its rank; on the server's own worker the mirrored ops, too, are run in its place. None: another worker.
    """
    mirrored = _mirrored(plans, exchange, exchange.server)
    run_there = (plans.server_ops | _mirrored(plans, exchange, worker)) & exchange.ops
    waited_for, pending = set[str](), set(run_there)
    while pending:
        found = {op_of(name) for op in pending for name in view.nodes[op].input if name.startswith("^")} - waited_for
        waited_for |= found
        pending = (found & mirrored) - run_there
    waited_for &= plans.worker_ops - run_there - mirrored
    return exchange.read_before | (waited_for - _descendants(view, run_there))


def _gives(program: Program, event: Event, plans: ServerPlans | None, place: int | None) -> set[str]:
    """The ops that wait for the event on a worker of that kind."""
    found = set(map(op_of, event.gives))
    if plans is None or not isinstance(event, Exchange) or event.lookups:
        return found
    ours = plans.server_ops
    if program.strategy.consistency.is_bsp:  # On the server's own worker they wait for its answer.
        ours |= _mirrored(plans, event, place)
    return found | ((event.ops | event.markers) & ours)


def _mirrored(plans: ServerPlans, event: Exchange, place: int | None) -> frozenset[str]:
    """The mirrored ops that the server of this exchange runs in the place of a worker of that kind."""
    if place != event.server:
        return frozenset()
    return frozenset().union(*(plan.mirrored_ops for plan in plans.plans if plan.worker == event.server))


def _following(events: Sequence[Event]) -> list[list[int]]:
    """For each event those that follow it in any case: a server's next exchange, and all that examples weigh."""
    found: list[list[int]] = [[] for _ in events]
    latest: dict[int, int] = {}
    for index, event in enumerate(events):
        if isinstance(event, Exchange):
            if event.server in latest:
                found[latest[event.server]].append(index)
            latest[event.server] = index
        if isinstance(event, CountExamples):
            found[index] = [
                other for other, one in enumerate(events) if not isinstance(one, (CheckData, CountExamples))
            ]
    return found


def _descendants(view: GraphView, ops: Iterable[str]) -> set[str]:
    """All that waits for one of `ops`, without these."""
    found: set[str] = set()
    pending = list(ops)
    while pending:
        for op in view.digraph.succ[pending.pop()]:
            if op not in found:
                found.add(op)
                pending.append(op)
    return found
