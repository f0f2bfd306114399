"""Each invariant that passes bring about on the way, broken once."""

from dataclasses import replace

import pytest
import tensorflow as tf

from autodist_py.kernel import verify_passes
from autodist_py.kernel.events import CheckData, ReduceGradients, Schedule
from autodist_py.kernel.ir.names import on_replica
from autodist_py.kernel.program import Invariant
from autodist_py.kernel.verify import verify
from autodist_py.proto.errors import InvalidGraphError
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from tests.support import capture_steps, kernel_programs
from tests.support.kernel_programs import parsed

SERVERS = {"127.0.0.1:CPU:0": 0, "127.0.0.2:CPU:0": 1}


def program_after(name, *, where=None):
    return kernel_programs.after(name, kernel_programs.linear_regression(), where or kernel_programs.topology(2, 1))


def refused(program, rule):
    with pytest.raises(InvalidGraphError, match=rule):
        verify(program)


def changed(program, op, **inputs):
    """`program` with other inputs of an op, by position."""
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(program.graph.nodes[op])
    for position, name in inputs.items():
        node.input[int(position[1:])] = name
    return replace(program, graph=program.graph.changed(added=(), replaced=[node]))


def test_another_graph_than_the_one_that_has_been_analysed():
    program = program_after("partition")
    more = program.graph.changed(added=parsed("more = Const()").node, replaced=())
    refused(replace(program, graph=more), "another than the one that has been analysed")


def test_a_variable_that_is_to_be_cut_and_is_not():
    shards = (
        VariableStrategy("w/part_0", AllReduceSynchronizer()),
        VariableStrategy("w/part_1", PSSynchronizer("127.0.0.2:CPU:0")),
    )
    program = program_after("partition")
    cut = Strategy((VariableStrategy("w", None, "1,2", shards, (2, 1)),), tuple(SERVERS))
    refused(replace(program, strategy=cut), "variable 'w' is to be cut, and is not")


def test_an_event_of_a_tensor_that_the_captured_graph_does_not_have():
    program = program_after("plan-communication")
    (event,) = program.schedule.of_kind(ReduceGradients)
    wrong = Schedule((replace(event, needs=("gone:0",)),))
    refused(replace(program, schedule=wrong), "the captured graph has no 'gone:0': AllReduceBucket")


def test_an_op_of_no_replica():
    program = program_after("replicate")
    graph = program.graph.changed(added=parsed("mine = Const()").node, replaced=())
    refused(replace(program, graph=graph), r"an op is of no replica, and not shared: mine = Const\(\)")


def test_a_further_replicas_variable_that_is_not_given_the_first_ones_value():
    program = program_after("refresh")
    (assign,) = (node.name for node in program.graph.of_type({"AssignVariableOp"}) if on_replica(1, "w") in node.input)
    users = program.graph.without([assign])
    refused(replace(program, graph=users), f"variable '{on_replica(1, 'w')}' is not given the first replica's value")


def test_an_iterator_that_is_read_whether_others_have_data_or_not():
    program = program_after("read-data")
    data = CheckData(needs=(), gives=(), level=0, engine="RING", members=2)
    graph = program.graph.changed(added=parsed("AutoDist/next = IteratorGetNext()").node, replaced=())
    wrong = replace(program, graph=graph, schedule=Schedule((data,)))
    refused(wrong, "an iterator is read whether the other workers have data or not: AutoDist/next")


def test_an_op_of_a_replica_that_reads_the_whole_batch():
    refused(
        changed(program_after("split-batch"), on_replica(1, "prediction"), _0="x"),
        "an op of a replica reads the whole batch: AutoDist-Replica-1/prediction",
    )


def test_an_event_that_travels_and_has_no_collective():
    program = program_after("lower-collectives")
    refused(
        replace(program, lowered=replace(program.lowered, collectives=())),
        "no collective is made of an event of the schedule: FetchResults",
    )


def test_a_branch_that_updates_what_lives_apart(monkeypatch):
    step, arguments = capture_steps.control_flow()
    item = capture_steps.capture(step, *arguments).item
    devices = tuple(SERVERS)
    nodes = tuple(
        VariableStrategy(one.name, PSSynchronizer(devices[index % 2]))
        for index, one in enumerate(item.trainable_variables)
    )
    where = replace(kernel_programs.topology(1, 1), servers=SERVERS)
    program = kernel_programs.after("unbranch", item, where, Strategy(nodes, devices))
    (branch, *_) = program.graph.nodes.values()
    monkeypatch.setattr(verify_passes, "spread_branches", lambda program: [branch])
    refused(program, f"a branch updates variables that live apart: {branch.name}")
    verify(replace(program, cuts=replace(program.cuts, whole_branches={branch.name: "a reason"})))


def test_what_is_said_of_the_captured_graph_is_not_asked_once_replicas_stand():
    program = program_after("replicate")
    assert Invariant.CAPTURED not in program.holds
    assert {Invariant.CUT, Invariant.SCHEDULED, Invariant.REPLICATED} <= program.holds
