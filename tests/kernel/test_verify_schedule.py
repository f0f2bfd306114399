"""Each rule about what the graph holds of the schedule, broken once."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import tensorflow as tf

from autodist_py.kernel.events import (
    LOCAL,
    SERVER,
    AllReduceBucket,
    Collective,
    CountExamples,
    Event,
    Exchange,
    FetchResults,
    ReduceGradients,
    Schedule,
)
from autodist_py.kernel.ir.edits import Edits
from autodist_py.kernel.ir.names import on_replica, op_of
from autodist_py.kernel.program import Program
from autodist_py.kernel.verify import verify
from autodist_py.kernel.verify_schedule import require_scheduled
from autodist_py.proto.errors import InvalidGraphError
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import PSSynchronizer
from tests.support import kernel_programs
from tests.support.kernel_programs import parsed

SERVERS = {"127.0.0.1:CPU:0": 0, "127.0.0.2:CPU:0": 1}


@cache
def by_rings() -> Program:
    """Three gradients that follow one another, each of which two replicas of one worker sum by a ring."""
    item = kernel_programs.two_stages(stages=3)
    return kernel_programs.after(
        "order", item, kernel_programs.topology(2), kernel_programs.all_reduce(item, spec="RING")
    )


@cache
def by_workers(batch: str = "global") -> Program:
    """A dense gradient, a sparse one and those of another type, of two replicas here and one elsewhere."""
    item = kernel_programs.dense_and_sparse()
    return kernel_programs.after("order", item, kernel_programs.topology(2, 1), batch=batch)


@cache
def by_servers(worker: int = 0) -> Program:
    """Variables of two servers."""
    item = kernel_programs.two_stages()
    nodes = tuple(
        VariableStrategy(one.name, PSSynchronizer(device))
        for one, device in zip(item.trainable_variables, SERVERS, strict=True)
    )
    where = replace(kernel_programs.topology(1, 1, worker=worker), servers=SERVERS)
    return kernel_programs.after("order", item, where, Strategy(nodes, tuple(SERVERS)))


def refused(program: Program, rule: str) -> None:
    with pytest.raises(InvalidGraphError, match=rule):
        require_scheduled(program)


def other_event(program: Program, kind: type[Event], change: Callable[[Any], Event]) -> Program:
    """`program` with another first event of the kind in its schedule."""
    position = program.schedule.position(kind)
    assert position is not None
    events = list(program.schedule.events)
    events[position] = change(events[position])
    return replace(program, schedule=replace(program.schedule, events=tuple(events)))


def noting(program: Program, *collectives: Collective) -> Program:
    """`program`, which says that these are the schedule's collectives."""
    return replace(program, lowered=replace(program.lowered, collectives=collectives))


def edited(program: Program, *edit: Callable[[Edits], None]) -> Program:
    edits = Edits()
    for one in edit:
        one(edits)
    return replace(program, graph=edits.apply(program.graph))


@pytest.mark.parametrize(
    "program",
    [by_rings, by_workers, lambda: by_workers("local"), by_servers, lambda: by_servers(1)],
    ids=["rings", "workers", "local batches", "server 0", "server 1"],
)
def test_what_is_lowered_is_accepted(program):
    require_scheduled(program())


# -- One event each, in order -----------------------------------------------------------------------------------------


def test_a_collective_that_does_not_wait_for_all_ops_of_those_before_but_one():
    program = by_rings()
    first, _, last = program.lowered.collectives
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(program.graph.nodes[last.ops[1]])
    node.input.remove(f"^{first.ops[1]}")
    graph = program.graph.changed(added=(), replaced=[node])
    with pytest.raises(InvalidGraphError, match=rf"collective '{last.ops[1]}' does not wait for \^{first.ops[1]}"):
        verify(replace(program, graph=graph))
    verify(replace(program, graph=graph, holds=frozenset()))


def test_a_collective_that_is_of_no_event_is_named():
    more = parsed("more = CollectiveReduceV2()").node
    refused(edited(by_rings(), lambda edits: edits.add(more)), "collective 'more' is not that of one event")


def test_a_collective_that_is_of_two_events_is_named():
    program = by_rings()
    first, second, last = program.lowered.collectives
    refused(
        noting(program, first, second, second, last),
        f"collective '{second.ops[0]}' is not that of one event",
    )


def test_an_event_without_a_collective_is_named():
    program = by_rings()
    counting = CountExamples(needs=(), gives=(), level=0, engine="RING", members=2)
    events = (*program.schedule.events, counting)
    refused(
        replace(program, schedule=replace(program.schedule, events=events)),
        r"no collective is made of .*CountExamples\[RING, level 0",
    )


def test_a_collective_of_what_stays_on_a_worker_is_named():
    refused(
        other_event(by_rings(), ReduceGradients, lambda event: replace(event, engine=LOCAL)),
        r"what does not travel by one: AllReduceBucket\[LOCAL",
    )


def test_collectives_in_another_order_than_the_schedules_are_refused():
    program = by_rings()
    events = tuple(replace(event, turn=-event.turn) for event in program.schedule.events)
    refused(replace(program, schedule=replace(program.schedule, events=events)), "not in the order of the schedule")


# -- Collectives ------------------------------------------------------------------------------------------------------


def test_a_collective_by_another_engine_than_its_events_is_named():
    program = other_event(by_workers(), AllReduceBucket, lambda event: replace(event, engine="NCCL"))
    refused(program, r"goes by RING, and its event by NCCL: AllReduceBucket\[NCCL")


@pytest.mark.parametrize("members", [1, 4])
def test_a_collective_with_other_members_than_its_events_is_named(members):
    program = other_event(by_workers(), AllReduceBucket, lambda event: replace(event, members=members))
    refused(program, rf"has 2 members, and its event {members}: AllReduceBucket")


def test_each_device_of_a_worker_takes_part_in_a_ring_of_replicas():
    program = by_rings()
    first, *others = program.lowered.collectives
    removed = program.graph.without([first.ops[1]])
    refused(
        noting(replace(program, graph=removed), replace(first, ops=first.ops[:1]), *others),
        "2 of this worker's devices take part; got",
    )


def test_collectives_that_are_given_other_bytes_than_the_events_are_named():
    program = other_event(by_workers(), AllReduceBucket, lambda event: replace(event, nbytes=event.nbytes + 8))
    refused(program, r"24 bytes are planned; the collectives are given 16: AllReduceBucket\[RING")


def test_two_collectives_of_one_key_are_named():
    program = by_rings()
    (first, *_), (second, *_), _ = (one.ops for one in program.lowered.collectives)
    key = program.graph.nodes[first].input[3]
    refused(
        edited(program, lambda edits: edits.set_input(second, 3, key)),
        f"the collectives '{first}' and '{second}' have one key",
    )


@pytest.mark.parametrize(("worker", "kind"), [(0, "CollectiveBcastRecvV2"), (1, "CollectiveBcastSendV2")])
def test_what_is_broadcast_comes_from_the_first_worker(worker, kind):
    where = kernel_programs.topology(1, 1, worker=worker)
    program = kernel_programs.after("order", kernel_programs.linear_regression(), where)
    (op,) = program.lowered.collectives[0].ops
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(program.graph.nodes[op])
    node.op = kind
    if kind == "CollectiveBcastRecvV2":
        del node.input[0]
    refused(
        replace(program, graph=program.graph.changed(added=(), replaced=[node])),
        f"worker 0 sends what is broadcast; worker {worker} has '{op}' for {kind}",
    )


# -- Members ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["a", "table"])
def test_a_gradient_of_a_replica_that_its_event_does_not_read_is_named(variable):
    program = by_workers()
    (gradient,) = program.item.gradients_of(variable)
    marker = gradient.tensors[1 if gradient.is_sparse else 0]
    raw = program.analysis.captured.nodes[op_of(marker)].input[0]
    own, other = on_replica(0, raw), on_replica(1, raw)
    users = [user for user in program.graph.users([op_of(other)])[op_of(other)] if user.startswith("AutoDist/")]
    assert users
    refused(
        edited(program, *(lambda edits, user=user: edits.redirect(user, other, own) for user in users)),
        f"no op of the event reads '{op_of(other)}', a gradient of ",
    )


def test_a_marker_that_reads_past_its_event_is_named():
    program = by_workers()
    marker = on_replica(1, op_of(program.item.gradients_of("a")[0].tensors[0]))
    wrong = program.graph.nodes[on_replica(1, "gradient/half")].input[0]
    refused(
        edited(program, lambda edits: edits.set_input(marker, 0, wrong)),
        f"'{marker}' reads '{wrong}', which is not of its event: AllReduceBucket",
    )


def test_a_result_that_is_fetched_past_its_event_is_named():
    program = kernel_programs.after("order", kernel_programs.linear_regression(), kernel_programs.topology(1, 1))
    own = on_replica(0, "loss")
    refused(replace(program, fetches=(own,)), rf"'{own}' is fetched, which is not of its event: FetchResults")
    assert program.schedule.of_kind(FetchResults)


# -- Messages ---------------------------------------------------------------------------------------------------------


def test_an_exchange_without_a_message_is_refused():
    exchange = Exchange(needs=(), gives=(), level=1, engine=SERVER, server=1, phase=1)
    program = replace(by_rings(), schedule=Schedule((*by_rings().schedule.events, exchange)))
    refused(program, r"exchanges with the servers \[1\]; messages are exchanged with \[\]")


def test_messages_of_another_server_than_the_events_are_refused():
    program = other_event(by_servers(), Exchange, lambda event: replace(event, server=2))
    refused(program, r"no message is exchanged for an event of the schedule: Exchange\[SERVER.* with server 2")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda event: replace(event, values=("x:0",)), "gradient/v0:0, x:0 is planned; gradient/v0:0 is sent"),
        (lambda event: replace(event, refreshed=()), "gradient/v0 is planned; gradient/v0, v0 is answered"),
    ],
    ids=["sent", "answered"],
)
def test_a_message_that_brings_something_else_than_its_event_is_named(change, rule):
    refused(other_event(by_servers(), Exchange, change), rule)


@pytest.mark.parametrize("kind", ["QueueEnqueueV2", "QueueDequeueV2"])
def test_a_message_that_goes_to_another_queue_is_named(kind):
    program = by_servers()
    channel = program.lowered.channels[1]
    name = channel.push(0) if kind == "QueueEnqueueV2" else channel.answer(0)
    (queue,) = (node for node in program.graph.of_type({"FIFOQueueV2"}) if node.attr["shared_name"].s.decode() == name)
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(queue)
    node.attr["shared_name"].s = name.replace("-0", "-1").encode()
    refused(
        replace(program, graph=program.graph.changed(added=(), replaced=[node])),
        f"worker 0 has . ops {kind} of queue '{channel.name}",
    )


def test_a_server_without_a_program_for_an_exchange_is_named():
    program = by_servers(1)
    assert program.lowered.servers
    refused(
        replace(program, lowered=replace(program.lowered, servers=())),
        "worker 1 takes the messages of 1 exchanges, in order; it has programs for none",
    )


def test_what_a_collective_is_given_is_noted():
    given = [one.nbytes for one in by_rings().lowered.collectives]
    assert given == [8, 8, 8]
    assert Collective(("a",), 0, "").nbytes is None
