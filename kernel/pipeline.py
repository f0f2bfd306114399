"""The compiler's passes, in order, and `compile`: from three values to a program that one worker runs."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from autodist_py.kernel.analysis import analyse, require_replicated_writes
from autodist_py.kernel.device import Place
from autodist_py.kernel.flaws import blamed
from autodist_py.kernel.graph_view import VARIABLE_OP, GraphView
from autodist_py.kernel.memory import Memory
from autodist_py.kernel.names import captured_name, on_replica, op_of
from autodist_py.kernel.passes.combine import Combine
from autodist_py.kernel.passes.fetch import Fetch
from autodist_py.kernel.passes.look_up import LookUp
from autodist_py.kernel.passes.order import Order
from autodist_py.kernel.passes.partition import Partition
from autodist_py.kernel.passes.place import PlaceOps
from autodist_py.kernel.passes.read_data import ReadData
from autodist_py.kernel.passes.refresh import Refresh
from autodist_py.kernel.passes.replicate import Replicate
from autodist_py.kernel.passes.serve import Serve
from autodist_py.kernel.passes.split_batch import SplitBatch
from autodist_py.kernel.passes.synchronize import Synchronize
from autodist_py.kernel.program import Channel, Launch, Options, Program, ServerProgram, Shards
from autodist_py.kernel.rewrite import Observer, Pass, run_passes
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.strategy import Strategy
from autodist_py.proto.synchronizers import Pace

PASSES: tuple[Pass, ...] = (
    LookUp(),
    Partition(),
    Replicate(),
    Refresh(),
    ReadData(),
    SplitBatch(),
    Combine(),
    Synchronize(),
    Serve(),
    Fetch(),
    PlaceOps(),
    Order(),
)


@dataclass(frozen=True, slots=True)
class BoundVariable:
    """A variable handle of the compiled graph: its op and device, the variable, and whose copy (local replica)."""

    op: str
    variable: str
    replica: int
    device: str


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """What one worker runs each step.

    Attributes:
        item: what was captured; its inputs stand in the graph under their own names.
        place: where it runs.
        pace: how far apart workers may be.
        graph: the rewritten graph.
        fetches: for each of the item's outputs, the tensor to fetch.
        run_ops: ops to run beside.
        variables: the graph's variable handles; of shards, and on further replicas, those that are used.
        shards: the variables that are cut, whose shards are among `variables`.
        left_whole: those that were to be cut and cannot be, with the reasons.
        channels: how it exchanges messages with servers.
        servers: what this worker runs as a server, in order.
        held: for each variable that lives on a server of several workers, the server's rank.
        refreshed: those of them whose new values the step brings to this worker.
        memories: what it keeps beside the user's variables; each worker's value lives there, as a shard of a variable.
        idle: the item's variables that nothing trains, and which no op on this worker uses; and memories as wholes.
        launches: its collectives, in launch order.
        next_instance_key: the first instance key that it does not use.
    """

    item: GraphItem
    place: Place
    pace: Pace
    graph: GraphView
    fetches: tuple[str, ...]
    run_ops: tuple[str, ...]
    variables: tuple[BoundVariable, ...]
    shards: tuple[Shards, ...]
    left_whole: Mapping[str, str]
    channels: tuple[Channel, ...]
    servers: tuple[ServerProgram, ...]
    held: Mapping[str, int]
    refreshed: frozenset[str]
    memories: tuple[Memory, ...]
    idle: frozenset[str]
    launches: tuple[Launch, ...]
    next_instance_key: int


def start(item: GraphItem, strategy: Strategy, place: Place, options: Options) -> Program:
    """The program before its first pass: the captured graph as it is."""
    analysis = analyse(item, batch=options.batch)
    return Program(
        item=item,
        analysis=analysis,
        strategy=strategy,
        place=place,
        options=options,
        graph=analysis.captured,
        fetches=tuple(output.tensor for output in item.outputs),
        run_ops=item.run_ops,
        next_instance_key=options.first_instance_key,
    )


@contextmanager
def _collection_deferred() -> Iterator[None]:
    """No garbage collection meanwhile: a compilation makes many small objects, which it would walk again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def compile(
    item: GraphItem,
    strategy: Strategy,
    place: Place,
    options: Options | None = None,
    *,
    observers: Sequence[Observer] = (),
) -> CompiledProgram:
    """Rewrite `item` for the worker at `place`, as `strategy` says.

    Raises:
        StrategyError: the strategy asks for what these devices, or this version, cannot do.
        CaptureError: state is written in a way that replicas cannot be kept equal by.
        InvalidGraphError: a pass failed; the message names it.
        GraphItemError: the item's graph is none that TensorFlow takes, or lacks what the item names.
    """
    with _collection_deferred(), blamed(item):
        paced = place if strategy.pace.is_together else place.apart()
        first = start(item, strategy, paced, options or Options())
        if not first.is_single:
            require_replicated_writes(item, first.analysis)
        program = run_passes(first, PASSES, observers)
        return CompiledProgram(
            item=item,
            place=paced,
            pace=strategy.pace,
            graph=program.graph,
            fetches=program.fetches,
            run_ops=program.run_ops,
            variables=tuple(_bound(program)),
            shards=(*program.shards, *(_shards(program, memory) for memory in program.memories)),
            left_whole=program.left_whole,
            channels=program.channels,
            servers=program.servers,
            held={**program.held, **_remembered(program)},
            refreshed=program.refreshed,
            memories=program.memories,
            idle=_idle(item, program) | {memory.name for memory in program.memories},
            launches=program.launches,
            next_instance_key=program.next_instance_key,
        )


def _bound(program: Program) -> Iterator[BoundVariable]:
    """The handles of the program's variables, and memories; on further replicas, and of shards, those that are used."""
    handles = [node.name for node in program.analysis.captured.of_type({VARIABLE_OP})]
    shards = {name for one in program.shards for name in one.names}
    asked = {on_replica(0, name) for name in shards}
    asked |= {on_replica(replica, handle) for replica in range(1, program.num_local_replicas) for handle in handles}
    served = _used_by_servers(program)
    users = program.graph.users(asked) if asked else {}
    for replica in range(program.num_local_replicas):
        for handle in handles:
            op = on_replica(replica, handle)
            if op not in asked or users[op] or op in served:
                yield BoundVariable(op, handle, replica, program.graph.nodes[op].device)
    position = program.place.all_workers.index(program.place.worker)
    for memory in program.memories:
        yield BoundVariable(memory.op, memory.part(position), 0, program.graph.nodes[memory.op].device)


def _shards(program: Program, memory: Memory) -> Shards:
    """The workers' values of the memory."""
    return Shards(memory.name, 0, ((1, *memory.slot.shape),) * len(program.place.all_workers), is_whole=False)


def _remembered(program: Program) -> dict[str, int]:
    """Where each worker's value of each memory lives: on that worker."""
    return {
        memory.part(position): rank
        for memory in program.memories
        for position, rank in enumerate(program.place.all_workers)
    }


def _idle(item: GraphItem, program: Program) -> frozenset[str]:
    """The state that no op on this worker uses; a read that nobody reads, as Keras's embeddings leave, is no use."""
    if not program.held and not program.shards:
        return frozenset()
    state = {variable.name for variable in item.variables} - {gradient.variable for gradient in item.gradients}
    graph, wanted = program.graph, {op_of(name) for name in (*program.fetches, *program.run_ops)}
    used = _used_by_servers(program)
    for node in graph.of_type({VARIABLE_OP}):
        for user in graph.dataflow_consumers([node.name]):
            is_read = graph.nodes[user].op == "ReadVariableOp" and user not in wanted
            if not is_read or graph.dataflow_consumers([user]):
                used.add(node.name)
    return frozenset(state - {captured_name(name) for name in used})


def _used_by_servers(program: Program) -> set[str]:
    """The variables' handles, on the first replica, that this worker uses as a server."""
    graphs = [part.graph for one in program.servers for part in (one.update, one.answer)]
    return {node.name for graph in graphs for node in graph.of_type({VARIABLE_OP})}
