"""Whether the graph holds the schedule's events: the collectives and messages that they need, and no others.

1. Each collective is of one event. An event that travels has some, and in the order of the schedule.
2. Their engine, their number of members and their bytes are the event's; no key stands for two of them.
3. What is broadcast comes from the first worker.
4. An event's ops read the raw gradients of all local replicas, and what the event gives is read from its ops.
5. Each exchange has one channel, which brings what the exchange lists. This worker sends to its queue there once, and
   takes its own answer once. A server has a program for each of its exchanges.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import tensorflow as tf

from autodist_py.kernel.analysis.row_access import by_table
from autodist_py.kernel.events import (
    SERVER,
    AllReduceBucket,
    Collective,
    Event,
    Exchange,
    FetchResults,
    GatherFactors,
    ReduceGradients,
    ReduceStatistics,
)
from autodist_py.kernel.ir.graph import COLLECTIVES
from autodist_py.kernel.ir.names import KERNEL_SCOPE, REPLICA_SCOPE, on_replica, op_of
from autodist_py.kernel.ir.tf_adapter import argument_names
from autodist_py.kernel.program import Program
from autodist_py.proto.errors import InvalidGraphError

_FROM_FIRST = {"CollectiveBcastSendV2": True, "CollectiveBcastRecvV2": False}


def require_scheduled(program: Program) -> None:
    """Check the rules above.

    Raises:
        InvalidGraphError: the first one that does not hold, with the event.
    """
    _require_one_event_each(program)
    made: list[list[Collective]] = [[] for _ in program.schedule.events]
    for one in program.lowered.collectives:
        made[one.event].append(one)
    for event, collectives in zip(program.schedule.events, made, strict=True):
        if collectives and not event.travels:
            raise InvalidGraphError(f"a collective is made of what does not travel by one: {event}")
        if not collectives and event.travels and event.nbytes != 0:
            raise InvalidGraphError(f"no collective is made of an event of the schedule: {event}")
    if program.lowered.collectives != program.schedule.in_order(program.lowered.collectives):
        raise InvalidGraphError("collectives are not in the order of the schedule's events")
    for event, collectives in zip(program.schedule.events, made, strict=True):
        for one in collectives:
            _require_as_planned(program, event, one)
        _require_bytes(event, collectives)
    _require_own_keys(program)
    _require_members(program)
    _require_messages(program)


def _require_one_event_each(program: Program) -> None:
    noted = Counter(op for one in program.lowered.collectives for op in one.ops)
    found = {node.name for node in program.graph.of_type(COLLECTIVES) if not node.name.startswith(REPLICA_SCOPE)}
    found -= program.replication.shared
    if other := (found ^ noted.keys()) | {op for op, times in noted.items() if times > 1}:
        raise InvalidGraphError(f"collective '{min(other)}' is not that of one event of the schedule")


# -- Collectives ------------------------------------------------------------------------------------------------------


def _require_as_planned(program: Program, event: Event, one: Collective) -> None:
    """Its engine and its members; and who sends, where one worker does."""
    topology = program.topology
    is_each = event.members == topology.num_replicas and event.members != len(topology.workers)
    own = len(topology.local_replicas) if is_each else 1
    if len(one.ops) != own:
        raise InvalidGraphError(f"{own} of this worker's devices take part; got {', '.join(one.ops)}: {event}")
    for op in one.ops:
        node = program.graph.nodes[op]
        engine = "HOROVOD" if node.op == "HorovodAllreduce" else node.attr["communication_hint"].s.decode().upper()
        if engine != event.engine:
            raise InvalidGraphError(f"collective '{op}' goes by {engine}, and its event by {event.engine}: {event}")
        if node.op != "HorovodAllreduce" and (size := _argument(program, node, "group_size")) != event.members:
            raise InvalidGraphError(f"collective '{op}' has {size} members, and its event {event.members}: {event}")
        is_first = topology.worker == topology.workers[0]
        if _FROM_FIRST.get(node.op, is_first) != is_first:
            raise InvalidGraphError(
                f"worker {topology.workers[0]} sends what is broadcast; worker {topology.worker} has '{op}' for "
                f"{node.op}: {event}"
            )


def _argument(program: Program, node: tf.compat.v1.NodeDef, name: str) -> int | None:
    """The value of an argument of the op; None: it is known in a step only."""
    value = program.graph.constant(node.input[argument_names(node).index(name)])
    return None if value is None else int(value)


def _require_bytes(event: Event, collectives: Sequence[Collective]) -> None:
    """What is not coded has the planned bytes. Compressors say what theirs are of each gradient by itself."""
    is_coded = isinstance(event, ReduceGradients) and not event.compressor.passes_through
    if is_coded or event.nbytes is None or not collectives:
        return
    given = [one.nbytes for one in collectives]
    if None in given or sum(one or 0 for one in given) != event.nbytes:
        raise InvalidGraphError(
            f"{event.nbytes} bytes are planned; the collectives are given {', '.join(map(str, given))}: {event}"
        )


def _require_own_keys(program: Program) -> None:
    """Collectives of one group are told apart by their keys."""
    used: dict[tuple[int | None, int], str] = {}
    for one in program.lowered.collectives:
        node = program.graph.nodes[one.ops[0]]
        if node.op == "HorovodAllreduce":
            continue
        instance = _argument(program, node, "instance_key")
        if instance is None:
            continue  # One of a range of keys, by the step's number of rows.
        other = used.setdefault((_argument(program, node, "group_key"), instance), node.name)
        if other != node.name:
            raise InvalidGraphError(f"the collectives '{other}' and '{node.name}' have one key, {instance}")


# -- Members ----------------------------------------------------------------------------------------------------------


def _require_members(program: Program) -> None:
    """Gradients go into their event, and what is combined comes out of it."""
    scoped = [
        one for one in program.schedule.events if isinstance(one, (ReduceGradients, ReduceStatistics, FetchResults))
    ]
    read = _read_by_scope(program, {event.scope for event in scoped})
    fetched = {output.tensor: names[0] for output, names in program.fetched() if not output.per_replica}
    replicas = range(program.num_local_replicas)
    for event in scoped:
        if isinstance(event, ReduceGradients):
            _require_read(program, event, read[event.scope])
        for marker in map(op_of, event.gives):
            for replica in replicas:
                node = program.graph.nodes.get(on_replica(replica, marker))
                if node is not None and not node.input[0].startswith(f"{event.scope}/"):
                    raise InvalidGraphError(
                        f"'{node.name}' reads '{node.input[0]}', which is not of its event: {event}"
                    )
        for output in () if isinstance(event, ReduceStatistics) else event.outputs:
            if not fetched[output.tensor].startswith(f"{event.scope}/"):
                raise InvalidGraphError(f"'{fetched[output.tensor]}' is fetched, which is not of its event: {event}")


def _read_by_scope(program: Program, scopes: set[str]) -> dict[str, set[str]]:
    """For each scope the ops outside of it that its ops read."""
    read: dict[str, set[str]] = {scope: set() for scope in scopes}
    owners: dict[str, str | None] = {}
    for name in program.graph.nodes:
        if not name.startswith(f"{KERNEL_SCOPE}/"):
            continue
        folder = name.rpartition("/")[0]
        if folder not in owners:
            owners[folder] = next((one for one in _around(folder) if one in read), None)
        scope = owners[folder]
        if scope is not None:
            read[scope].update(one for one in program.graph.producers[name] if not one.startswith(f"{scope}/"))
    return read


def _around(scope: str) -> Iterator[str]:
    """The scope, and those that it is in."""
    while scope:
        yield scope
        scope = scope.rpartition("/")[0]


def _require_read(program: Program, event: ReduceGradients, read: set[str]) -> None:
    for tensor, variable in _given(program, event).items():
        for copy in map(op_of, program.copies(tensor)):
            if copy not in read and copy in program.graph.nodes and not _is_split(program, copy):
                raise InvalidGraphError(f"no op of the event reads '{copy}', a gradient of '{variable}': {event}")


def _given(program: Program, event: ReduceGradients) -> dict[str, str]:
    """The tensors of the captured graph that go into the event, each with the variable that it is for."""
    captured, given = program.analysis.captured, {}
    if isinstance(event, GatherFactors):
        return dict.fromkeys((factor.tensor for factor in event.factors), event.variables)
    if isinstance(event, AllReduceBucket) and event.product is not None:
        return dict.fromkeys((factor.tensor for factor in event.product.factors), event.variables)
    for gradient in event.gradients:
        if 0 in program.item.variable(gradient.variable).shape:
            continue  # TensorFlow leaves out what has no elements.
        marker = gradient.tensors[1 if gradient.is_sparse else 0]
        given[captured.nodes[op_of(marker)].input[0]] = gradient.variable
    return given


def _is_split(program: Program, op: str) -> bool:
    """Whether the op gives the batch, in whose place each replica reads its part."""
    return program.replication.batch is not None and op in program.replication.shared


# -- Messages ---------------------------------------------------------------------------------------------------------


def _require_messages(program: Program) -> None:
    exchanges = [event for event in program.schedule.of_kind(Exchange) if event.engine == SERVER]
    numbers: Counter[int] = Counter()
    channels = {(channel.server, channel.number): channel for channel in program.lowered.channels}
    if len(channels) != len(exchanges) or len(channels) != len(program.lowered.channels):
        raise InvalidGraphError(
            f"the schedule has exchanges with the servers {[event.server for event in exchanges]}; messages are "
            f"exchanged with {[channel.server for channel in program.lowered.channels]}"
        )
    for event in exchanges:
        channel = channels.get((event.server, numbers[event.server]))
        numbers[event.server] += 1
        if channel is None:
            raise InvalidGraphError(f"no message is exchanged for an event of the schedule: {event}")
        for what, layout, planned in zip(
            ("sent", "answered"), (channel.sent, channel.answered), _brought(event), strict=True
        ):
            found = tuple(spec.name for spec in layout.tensors if spec.name)
            if found != planned:
                raise InvalidGraphError(f"{', '.join(planned)} is planned; {', '.join(found)} is {what}: {event}")
    _require_queues(program)
    own = [channel for channel in program.lowered.channels if channel.server == program.topology.worker]
    if [one.channel for one in program.lowered.servers] != own:
        raise InvalidGraphError(
            f"worker {program.topology.worker} takes the messages of {len(own)} exchanges, in order; it has programs "
            f"for {', '.join(one.channel.name for one in program.lowered.servers) or 'none'}"
        )


def _brought(event: Exchange) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of what a message brings, and an answer."""
    if event.lookups:
        tables = tuple(handle for handle, _ in by_table(event.lookups))
        return tables, tables
    gradients = tuple(tensor for gradient in event.gradients for tensor in gradient.tensors)
    return (*gradients, *event.values), (*event.answers, *event.refreshed)


def _require_queues(program: Program) -> None:
    """Each message goes from this worker to the server of its channel, and each answer comes back to it."""
    worker = program.topology.worker
    planned = Counter(("QueueEnqueueV2", channel.push(worker)) for channel in program.lowered.channels)
    planned += Counter(("QueueEnqueueV2", one.bell) for one in program.lowered.channels if one.server == worker)
    planned += Counter(("QueueDequeueV2", channel.answer(worker)) for channel in program.lowered.channels)
    found = Counter(_uses_of_queues(program))
    if found != planned:
        (kind, queue), *_ = sorted((found - planned) + (planned - found))
        raise InvalidGraphError(
            f"worker {worker} has {found[kind, queue]} ops {kind} of queue '{queue}', and its channels need "
            f"{planned[kind, queue]}"
        )


def _uses_of_queues(program: Program) -> Iterator[tuple[str, str]]:
    """For each op of the kernel that uses a queue its type, and the queue's name."""
    for node in program.graph.of_type({"QueueEnqueueV2", "QueueDequeueV2"}):
        if node.name.startswith(f"{KERNEL_SCOPE}/"):
            queue = program.graph.nodes[op_of(node.input[0])]
            yield node.op, queue.attr["shared_name"].s.decode()
