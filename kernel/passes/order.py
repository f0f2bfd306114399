"""Order: collectives are issued as the schedule lists them, and variables are read and written as captured."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import networkx as nx

from autodist_py.kernel.analysis.variable_uses import misordered
from autodist_py.kernel.ir.edits import Edits
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import on_replica
from autodist_py.kernel.program import Invariant, Program
from autodist_py.kernel.runner import Contract


@dataclass(frozen=True, slots=True)
class Order:
    """Collectives are issued as the schedule lists their events, on every worker.

    Ensures: each waits for those before it, but for one that may be under way with it (`Program.issue_order`). Those
        that workers find by name need no order, but are ops to run: TensorFlow might leave one out on one worker alone,
        where nothing needs its result. An op waits for the one that the schedule has computed before it. Pieces of a
        gradient wait for one another. A write of a variable and each other use of it run in the captured order: where
        the gradient of one replica is that of all, an update would wait for the first replica's reads alone.

    Example, on worker 0 of two: three gradients, each computed from the one before when that is combined.

        - AllReduce/3 = ops(Batch, 0/AddV2_2)
        + AllReduce/3 = ops(Batch, 0/AddV2_2, ^AllReduce/1)
    """

    name: ClassVar[str] = "order"
    contract: ClassVar[Contract] = Contract(
        requires={Invariant.REDUCED, Invariant.COMBINED}, ensures={Invariant.ORDERED}
    )

    def __call__(self, program: Program) -> Program:
        collectives = program.schedule.in_order(program.lowered.collectives)
        ordered = replace(program, lowered=replace(program.lowered, collectives=collectives))
        edits = Edits()
        for earlier, later in ordered.issue_order():
            for op in later.ops:
                for dependency in earlier.ops:
                    edits.add_control(op, dependency)
        for op, dependency in _computed_first(program):
            edits.add_control(op, dependency)
        named = (op for one in collectives if one.by_name for op in one.ops)
        run_ops = (*program.run_ops, *named)
        ordered = replace(ordered, graph=edits.apply(program.graph), run_ops=run_ops)
        return replace(ordered, graph=_in_captured_order(ordered)) if program.num_local_replicas > 1 else ordered


def _in_captured_order(program: Program) -> GraphView:
    """The graph, in which what uses a variable in the step waits for what was captured before it."""
    captured, edits = program.analysis.captured, Edits()
    for one in misordered(program):
        if one.earlier is None or one.earlier.channel or one.later.channel:
            continue  # It is no matter of control edges.
        earlier, later = one.ops
        behind: set[str] = nx.descendants(captured.digraph, later)
        for op in (captured.ends_of_branch(earlier) - behind - {later}) or {earlier}:
            edits.add_control(one.later.op, on_replica(one.replica, op))
    return edits.apply(program.graph)


def _computed_first(program: Program) -> Iterator[tuple[str, str]]:
    """Ops of this worker's replicas, each with the one that it waits for."""
    pieces, nodes = program.lowered.pieces, program.graph.nodes
    for own in pieces.values():
        yield from ((later, earlier) for earlier, later in pairwise(own))
    for pair in program.schedule.computed_first:
        for replica in range(program.num_local_replicas):
            first, rival = (pieces.get(op, (op,)) for op in (on_replica(replica, one) for one in pair))
            if first[-1] in nodes and rival[0] in nodes:
                yield rival[0], first[-1]
