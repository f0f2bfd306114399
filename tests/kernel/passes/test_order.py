"""Place and order: every op has a device, and every worker issues its collectives in the same order."""

import itertools
from dataclasses import replace

import networkx as nx
import pytest
import tensorflow as tf

from autodist_py.kernel.ir.names import on_replica, op_of
from autodist_py.kernel.passes.order import Order
from autodist_py.proto.graph_item import Gradient, GraphItem, Input, Variable
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import PSSynchronizer
from tests.support import capture_steps, kernel_programs

ITEMS = {"stages": kernel_programs.two_stages(stages=3), "sparse": kernel_programs.dense_and_sparse()}
INSTANCE_KEY = 3


def key(program, collective):
    """The instance key, which is a constant, or a constant plus what depends on the sizes; the same for all its ops."""
    nodes = {node.name: node for node in program.graph.nodes.values()}
    made = [nodes[op_of(nodes[op].input[INSTANCE_KEY])] for op in collective.ops]
    constants = [
        constant
        for node in made
        for constant in ([node] if node.op == "Const" else [nodes[op_of(name)] for name in node.input])
        if constant.op == "Const"
    ]
    assert len(constants) == len(collective.ops)
    (one,) = {int(tf.make_ndarray(constant.attr["value"].tensor)) for constant in constants}
    return one


@pytest.mark.parametrize("batch", ["global", "local"])
@pytest.mark.parametrize("spec", ["AUTO", "RING"])
@pytest.mark.parametrize("name", ITEMS)
def test_workers_with_different_numbers_of_replicas_issue_in_one_order_under_the_same_keys(name, spec, batch):
    item = ITEMS[name]
    strategy = kernel_programs.all_reduce(item, spec=spec, chunk_size=1)
    options = {"batch": batch, "first_instance_key": 40}
    orders, ends = [], set()
    for worker in range(3):
        topology = kernel_programs.topology(2, 1, 3, worker=worker)
        program = kernel_programs.after("order", item, topology, strategy, **options)
        orders.append([(one.event, one.what, key(program, one)) for one in program.lowered.collectives])
        ends.add(program.lowered.next_instance_key)
    assert orders[0] == orders[1] == orders[2]
    used = sorted(number for _, _, number in orders[0])
    assert len(used) == len(set(used)) >= 3
    assert len(ends) == 1
    assert used[0] == 40
    assert used[-1] < ends.pop()


def test_collectives_stand_in_the_order_of_their_events():
    collectives = kernel_programs.after("order", ITEMS["sparse"], kernel_programs.topology(1, 1)).lowered.collectives
    assert [one.event for one in collectives] == sorted(one.event for one in collectives)
    assert collectives[0].what == "sparse gradients of table"  # It is ready before the dense ones.


def test_gradients_that_are_ready_at_once_take_turns():
    tables = [tf.Variable(tf.ones([3, 2]), name=name) for name in ("one", "other")]

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_mean(tf.nn.embedding_lookup(table, ids)) for table in tables])
        for table, rows in zip(tables, tape.gradient(loss, tables), strict=True):
            table.scatter_sub(rows)

    item = capture_steps.capture(step, tf.constant([0, 1])).item
    strategy = kernel_programs.all_reduce(item, chunk_size=1)
    collectives = kernel_programs.after("order", item, kernel_programs.topology(1, 1), strategy).lowered.collectives
    names = ["sparse gradients of one", "sparse gradients of other"]
    assert [one.what for one in collectives] == names * 2, "how many rows each has, then the rows"


def test_a_bucket_is_issued_after_the_combined_gradients_that_it_is_computed_from():
    collectives = kernel_programs.after("order", ITEMS["stages"], kernel_programs.topology(1, 1)).lowered.collectives
    assert [one.what for one in collectives] == [f"dense gradients of v{index}" for index in range(3)]


@pytest.mark.parametrize("hint", [b"ring", b"nccl"])
def test_each_collective_waits_for_all_before_it_but_one_and_nccls_for_all(hint):
    strategy = kernel_programs.all_reduce(ITEMS["sparse"], spec="RING", chunk_size=1)
    program = kernel_programs.after("lower-exchanges", ITEMS["sparse"], kernel_programs.topology(2, 2), strategy)
    for one in program.lowered.collectives:
        for op in one.ops:
            program.graph.nodes[op].attr["communication_hint"].s = hint
    program = Order()(program)
    assert len(program.lowered.collectives) > 4
    assert max(len(one.ops) for one in program.lowered.collectives) == 2
    graph = program.graph.digraph
    waits_for_the_one_before = []
    for number, later in enumerate(program.lowered.collectives):
        for op in later.ops:
            behind = nx.ancestors(graph, op)
            awaited = [set(earlier.ops) <= behind for earlier in program.lowered.collectives[:number]]
            assert all(awaited[:-1]), "all before it but one"
            waits_for_the_one_before += awaited[-1:]
    assert all(waits_for_the_one_before) == (hint == b"nccl")


def test_where_some_are_nccls_each_collective_waits_for_the_one_before_it():
    strategy = kernel_programs.all_reduce(ITEMS["sparse"], spec="RING", chunk_size=1)
    program = kernel_programs.after("lower-exchanges", ITEMS["sparse"], kernel_programs.topology(2, 2), strategy)
    reductions = [node for node in program.graph.nodes.values() if node.op == "CollectiveReduceV2"]
    for node in reductions:
        node.attr["communication_hint"].s = b"nccl"
    program = Order()(program)
    assert 0 < len(reductions) < sum(len(one.ops) for one in program.lowered.collectives), "gathers are rings"
    graph = program.graph.digraph
    for earlier, later in itertools.pairwise(program.lowered.collectives):
        for op in later.ops:
            assert set(earlier.ops) <= nx.ancestors(graph, op)


def test_every_op_has_a_device_and_an_update_that_of_its_variable():
    program = kernel_programs.after("place", ITEMS["sparse"], kernel_programs.topology(2))
    assert all(node.device for node in program.graph.nodes.values())
    view = program.graph
    for handle, writers in view.writes.items():
        assert writers
        assert {view.nodes[writer].device for writer in writers} == {view.nodes[handle].device}


def test_an_update_that_the_user_put_on_a_cpu_follows_its_variable():
    item = kernel_programs.linear_regression()
    definition = tf.compat.v1.GraphDef.FromString(item.graph_def)
    kernel_programs.node(definition, "update").device = "/device:CPU:0"
    moved = GraphItem(
        graph_def=definition.SerializeToString(),
        variables=item.variables,
        gradients=item.gradients,
        inputs=item.inputs,
        outputs=item.outputs,
        run_ops=item.run_ops,
    )
    graph = kernel_programs.after("place", moved, kernel_programs.topology(2)).graph
    assert kernel_programs.node(graph, "AutoDist-Replica-1/update").device == "/device:CPU:1"


def test_an_update_by_another_replicas_gradient_waits_for_what_its_own_replica_reads():
    with tf.Graph().as_default() as graph:
        x, w = kernel_programs.placeholder("x", None), kernel_programs.handle("w")
        value = kernel_programs.read(w)
        loss = tf.raw_ops.Mean(input=x * value, axis=tf.constant([0]), name="loss")
        decay = tf.raw_ops.Identity(input=2.0 * value, name="gradient/w")  # The same on all replicas.
        tf.raw_ops.AssignSubVariableOp(resource=w, value=decay, name="update")
        item = kernel_programs.captured(
            graph,
            variables=[Variable("w", "float64", ())],
            gradients=[Gradient("w", ("gradient/w:0",))],
            inputs=[Input("x", "float64", (None,), batched=True)],
            outputs=[loss],
            run_ops=["update"],
        )
    where = replace(kernel_programs.topology(2), servers={"127.0.0.1:CPU:0": 0})
    strategy = Strategy(
        (VariableStrategy("w", PSSynchronizer("127.0.0.1:CPU:0")),), ("127.0.0.1:CPU:0", "127.0.0.1:CPU:1")
    )
    before = kernel_programs.after("place", item, where, strategy).graph
    program = kernel_programs.after("order", item, where, strategy)
    read, update = on_replica(1, "w/Read"), on_replica(1, "update")
    assert read not in before.ancestors([update])
    assert read in program.graph.producers[update]
    assert on_replica(0, "w/Read") in before.ancestors([on_replica(0, "update")])
