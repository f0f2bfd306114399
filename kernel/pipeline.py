"""The compiler's passes, in order, and `compile`: from three values to a program that one worker runs."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from autodist_py.kernel.analysis.own_parts import require_own_parts
from autodist_py.kernel.events import Collective, Schedule
from autodist_py.kernel.flaws import blamed
from autodist_py.kernel.ir.dataflow import analyse, require_replicated_writes
from autodist_py.kernel.ir.graph import VARIABLE_OP, GraphView
from autodist_py.kernel.ir.names import captured_name, on_replica, op_of
from autodist_py.kernel.ir.state import CompressorState
from autodist_py.kernel.passes.look_up import LookUp
from autodist_py.kernel.passes.lower_collectives import LowerCollectives
from autodist_py.kernel.passes.lower_exchanges import LowerExchanges
from autodist_py.kernel.passes.order import Order
from autodist_py.kernel.passes.partition import Partition
from autodist_py.kernel.passes.place import PlaceOps
from autodist_py.kernel.passes.plan_communication import PlanCommunication
from autodist_py.kernel.passes.read_data import ReadData
from autodist_py.kernel.passes.refresh import Refresh
from autodist_py.kernel.passes.replicate import Replicate
from autodist_py.kernel.passes.split_batch import SplitBatch
from autodist_py.kernel.passes.unbranch import Unbranch
from autodist_py.kernel.program import Channel, Lowered, Options, Program, ServerProgram, Shards
from autodist_py.kernel.runner import AddedPass, Observer, Pass, run_passes, with_added
from autodist_py.kernel.topology import Topology
from autodist_py.proto.graph_item import GraphItem, Input, Output
from autodist_py.proto.strategy import Strategy
from autodist_py.proto.synchronizers import Consistency

PASSES: tuple[Pass, ...] = (
    Unbranch(),
    LookUp(),
    Partition(),
    PlanCommunication(),
    Replicate(),
    Refresh(),
    ReadData(),
    SplitBatch(),
    LowerCollectives(),
    LowerExchanges(),
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
        item: what was captured.
        feeds: the graph's ops that are fed in each step, each with the input that it is of: under the input's own name,
            or for a part, on each local replica, in order.
        topology: where it runs.
        consistency: how far apart workers may be.
        graph: the rewritten graph.
        fetches: for each of the item's outputs, the tensor to fetch, or those of all local replicas.
        fetched: for each of the fetches, the output that it is of.
        run_ops: ops to run beside.
        variables: the graph's variable handles; of shards, and on further replicas, those that are used.
        shards: the variables that are cut, whose shards are among `variables`.
        left_whole: those that were to be cut and cannot be, with the reasons.
        channels: how it exchanges messages with servers.
        servers: what this worker runs as a server, in order.
        held: for each variable that lives on a server of several workers, the server's rank.
        refreshed: those of them whose new values the step brings to this worker.
        compressor_states: what compressors keep; each worker's value lives there, as a shard of a variable.
        idle: the item's variables that nothing trains, and which no op on this worker uses; and the whole variables of
            compressors' states.
        schedule: what the workers tell one another in a step.
        collectives: those of the schedule's events, in the order of their issue.
        next_instance_key: the first instance key that it does not use.
    """

    item: GraphItem
    feeds: tuple[tuple[str, Input], ...]
    topology: Topology
    consistency: Consistency
    graph: GraphView
    fetches: tuple[str, ...]
    fetched: tuple[Output, ...]
    run_ops: tuple[str, ...]
    variables: tuple[BoundVariable, ...]
    shards: tuple[Shards, ...]
    left_whole: Mapping[str, str]
    channels: tuple[Channel, ...]
    servers: tuple[ServerProgram, ...]
    held: Mapping[str, int]
    refreshed: frozenset[str]
    compressor_states: tuple[CompressorState, ...]
    idle: frozenset[str]
    schedule: Schedule
    collectives: tuple[Collective, ...]
    next_instance_key: int


def start(item: GraphItem, strategy: Strategy, topology: Topology, options: Options) -> Program:
    """The program before its first pass: the captured graph as it is."""
    analysis = analyse(item, batch=options.batch, is_together=topology.is_together)
    return Program(
        analysis=analysis,
        strategy=strategy,
        topology=topology,
        options=options,
        graph=analysis.captured,
        fetches=tuple(output.tensor for output in item.outputs),
        run_ops=item.run_ops,
        lowered=Lowered(next_instance_key=options.first_instance_key),
    )


def planned(item: GraphItem, strategy: Strategy, topology: Topology, options: Options) -> Schedule:
    """What workers would tell one another in a step, as `compile` plans it.

    Raises:
        AutoDistError: as `compile`.
    """
    names = [step.name for step in PASSES]
    last = names.index(PlanCommunication.name)
    with _collection_deferred(), blamed(item):
        return run_passes(_first(item, strategy, topology, options), PASSES[: last + 1]).schedule


def _first(item: GraphItem, strategy: Strategy, topology: Topology, options: Options) -> Program:
    """The program before its first pass, where each worker takes its steps as the strategy's consistency says."""
    first = start(item, strategy, topology if strategy.consistency.is_bsp else topology.apart(), options)
    if not first.is_single:
        require_replicated_writes(item, first.analysis)
        require_own_parts(first)
    return first


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
    topology: Topology,
    options: Options | None = None,
    *,
    observers: Sequence[Observer] = (),
    added: Sequence[AddedPass] = (),
) -> CompiledProgram:
    """Rewrite `item` for the worker of `topology`, as `strategy` says, by `PASSES` and those `added`.

    Raises:
        StrategyError: the strategy asks for what these devices, or this version, cannot do.
        CaptureError: state is written in a way that replicas cannot be kept equal by.
        InvalidGraphError: a pass failed; the message names it.
        GraphItemError: the item's graph is none that TensorFlow takes, or lacks what the item names.
    """
    with _collection_deferred(), blamed(item):
        first = _first(item, strategy, topology, options or Options())
        program = run_passes(first, with_added(PASSES, added), observers)
        lowered = program.lowered
        return CompiledProgram(
            item=item,
            feeds=tuple(_feeds(program)),
            topology=program.topology,
            consistency=strategy.consistency,
            graph=program.graph,
            fetches=program.fetches,
            fetched=tuple(output for output, names in program.fetched() for _ in names),
            run_ops=program.run_ops,
            variables=tuple(_bound(program)),
            shards=(*program.cuts.shards, *(_shards(program, state) for state in lowered.compressor_states)),
            left_whole=program.cuts.left_whole,
            channels=lowered.channels,
            servers=lowered.servers,
            held={**program.held, **_remembered(program)},
            refreshed=program.refreshed,
            compressor_states=lowered.compressor_states,
            idle=_idle(item, program) | {state.name for state in lowered.compressor_states},
            schedule=program.schedule,
            collectives=lowered.collectives,
            next_instance_key=lowered.next_instance_key,
        )


def _feeds(program: Program) -> Iterator[tuple[str, Input]]:
    for source in program.item.inputs:
        if source.kind == "feed":
            yield source.name, source
        elif source.kind == "part":
            yield from ((name, source) for name in program.copies(source.name))


def _bound(program: Program) -> Iterator[BoundVariable]:
    """The handles of variables and compressors' states; on further replicas, and of shards, those that are used."""
    handles = [node.name for node in program.analysis.captured.of_type({VARIABLE_OP})]
    shards = {name for one in program.cuts.shards for name in one.names}
    asked = {on_replica(0, name) for name in shards}
    asked |= {on_replica(replica, handle) for replica in range(1, program.num_local_replicas) for handle in handles}
    served = _used_by_servers(program)
    users = program.graph.users(asked) if asked else {}
    for replica in range(program.num_local_replicas):
        for handle in handles:
            op = on_replica(replica, handle)
            if op not in asked or users[op] or op in served:
                yield BoundVariable(op, handle, replica, program.graph.nodes[op].device)
    position = program.topology.all_workers.index(program.topology.worker)
    for state in program.lowered.compressor_states:
        yield BoundVariable(state.op, state.part(position), 0, program.graph.nodes[state.op].device)


def _shards(program: Program, state: CompressorState) -> Shards:
    """The workers' values of a compressor's state."""
    return Shards(state.name, 0, ((1, *state.slot.shape),) * len(program.topology.all_workers), is_whole=False)


def _remembered(program: Program) -> dict[str, int]:
    """Where each worker's value of each compressor's state lives: on that worker."""
    return {
        state.part(position): rank
        for state in program.lowered.compressor_states
        for position, rank in enumerate(program.topology.all_workers)
    }


def _idle(item: GraphItem, program: Program) -> frozenset[str]:
    """The state that no op on this worker uses; a read that nobody reads, as Keras's embeddings leave, is no use."""
    if not program.held and not program.cuts.shards:
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
    graphs = [part.graph for one in program.lowered.servers for part in (one.update, one.answer)]
    return {node.name for graph in graphs for node in graph.of_type({VARIABLE_OP})}
