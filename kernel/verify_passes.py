"""What passes bring about on the way to a program that can be run: `ON_THE_WAY`, a check for each invariant."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from autodist_py.kernel.events import CheckData
from autodist_py.kernel.ir.batched import batched_tensors
from autodist_py.kernel.ir.graph import ITERATOR_NEXT
from autodist_py.kernel.ir.names import KERNEL_SCOPE, REPLICA_SCOPE, on_replica, op_of, parse, replica_of
from autodist_py.kernel.printer import format_node
from autodist_py.kernel.program import Invariant, Program
from autodist_py.kernel.sharding.spread import spread_branches
from autodist_py.proto.errors import InvalidGraphError

_Nodes = Sequence[tf.compat.v1.NodeDef]


def _check_captured(program: Program, _: _Nodes) -> None:
    if program.graph is not program.analysis.captured:
        raise InvalidGraphError("the graph is another than the one that has been analysed")


def _check_unbranched(program: Program, _: _Nodes) -> None:
    if program.is_single:
        return
    for node in spread_branches(program):
        if node.name not in program.cuts.whole_branches:
            raise InvalidGraphError(f"a branch updates variables that live apart: {format_node(node)}")


def _check_cut(program: Program, _: _Nodes) -> None:
    cut = [node.var_name for node in program.strategy.node_config if node.shards]
    if cut and not program.is_single:
        raise InvalidGraphError(f"variable '{cut[0]}' is to be cut, and is not")


def _check_scheduled(program: Program, _: _Nodes) -> None:
    nodes = program.analysis.captured.nodes
    for event in program.schedule.events:
        for tensor in (*event.needs, *event.gives):
            if op_of(tensor) not in nodes:
                raise InvalidGraphError(f"the captured graph has no '{tensor}': {event}")


def _check_replicated(program: Program, nodes: _Nodes) -> None:
    for node in nodes:
        is_own = node.name.startswith((REPLICA_SCOPE, f"{KERNEL_SCOPE}/"))
        if not is_own and node.name not in program.replication.shared:
            raise InvalidGraphError(f"an op is of no replica, and not shared: {format_node(node)}")


def _check_refreshed(program: Program, _: _Nodes) -> None:
    further = range(1, program.num_local_replicas)
    handles = program.graph.nodes.keys() & {on_replica(one, name) for one in further for name in program.copied}
    for handle, users in program.graph.users(handles).items() if handles else ():
        if not any(user.startswith(f"{KERNEL_SCOPE}/") and _is_assignment(program, user) for user in users):
            raise InvalidGraphError(f"variable '{handle}' is not given the first replica's value")


def _is_assignment(program: Program, op: str) -> bool:
    return program.graph.nodes[op].op == "AssignVariableOp"


def _check_read(program: Program, nodes: _Nodes) -> None:
    if program.schedule.position(CheckData) is None:
        return
    for node in nodes:
        if node.op in ITERATOR_NEXT:
            raise InvalidGraphError(
                f"an iterator is read whether the other workers have data or not: {format_node(node)}"
            )


def _check_split(program: Program, nodes: _Nodes) -> None:
    if program.is_single:
        return
    names = [source.name for source in batched_tensors(program.item, program.analysis.captured)]
    batches = {*names, *(str(parse(name)) for name in names)}
    for node in nodes if batches else ():
        if not batches.isdisjoint(node.input) and replica_of(node.name) is not None:
            raise InvalidGraphError(f"an op of a replica reads the whole batch: {format_node(node)}")


def _check_reduced(program: Program, _: _Nodes) -> None:
    made = Counter(one.event for one in program.lowered.collectives)
    for position, event in enumerate(program.schedule.events):
        if event.travels and event.nbytes != 0 and not made[position]:
            raise InvalidGraphError(f"no collective is made of an event of the schedule: {event}")


ON_THE_WAY: Mapping[Invariant, Callable[[Program, _Nodes], None]] = {
    Invariant.CAPTURED: _check_captured,
    Invariant.UNBRANCHED: _check_unbranched,
    Invariant.CUT: _check_cut,
    Invariant.SCHEDULED: _check_scheduled,
    Invariant.REPLICATED: _check_replicated,
    Invariant.REFRESHED: _check_refreshed,
    Invariant.READ: _check_read,
    Invariant.SPLIT: _check_split,
    Invariant.REDUCED: _check_reduced,
}
"""What checks each of them, given the program and the ops that may break it."""
