"""Place and order: every op has a device, and every worker launches its collectives in the same order."""

import itertools

import networkx as nx
import pytest
import tensorflow as tf

from autodist_py.kernel.names import op_of
from autodist_py.kernel.passes.order import Order
from autodist_py.kernel.program import Promise
from autodist_py.proto.graph_item import GraphItem
from tests.kernel import programs

ITEMS = {"stages": programs.two_stages(stages=3), "sparse": programs.dense_and_sparse()}
INSTANCE_KEY = 3


def key(program, launch):
    """The instance key, which is a constant, or a constant plus what depends on the sizes; the same for all its ops."""
    nodes = {node.name: node for node in program.graph.nodes.values()}
    made = [nodes[op_of(nodes[op].input[INSTANCE_KEY])] for op in launch.ops]
    constants = [
        constant
        for node in made
        for constant in ([node] if node.op == "Const" else [nodes[op_of(name)] for name in node.input])
        if constant.op == "Const"
    ]
    assert len(constants) == len(launch.ops)
    (one,) = {int(tf.make_ndarray(constant.attr["value"].tensor)) for constant in constants}
    return one


@pytest.mark.parametrize("batch", ["global", "local"])
@pytest.mark.parametrize("spec", ["AUTO", "RING"])
@pytest.mark.parametrize("name", ITEMS)
def test_workers_with_different_numbers_of_replicas_launch_in_one_order_under_the_same_keys(name, spec, batch):
    item = ITEMS[name]
    strategy = programs.all_reduce(item, spec=spec, chunk_size=1)
    options = {"batch": batch, "first_instance_key": 40}
    orders, ends = [], set()
    for worker in range(3):
        place = programs.place(2, 1, 3, worker=worker)
        program = programs.after("order", item, place, strategy, **options)
        orders.append([(launch.rank, launch.what, key(program, launch)) for launch in program.launches])
        ends.add(program.next_instance_key)
    assert orders[0] == orders[1] == orders[2]
    used = sorted(number for _, _, number in orders[0])
    assert len(used) == len(set(used)) >= 3
    assert len(ends) == 1
    assert used[0] == 40
    assert used[-1] < ends.pop()


def test_launches_stand_in_the_order_of_their_ranks():
    launches = programs.after("order", ITEMS["sparse"], programs.place(1, 1)).launches
    assert [launch.rank for launch in launches] == sorted(launch.rank for launch in launches)
    assert launches[0].what == "sparse gradients of table"  # It is ready before the dense ones.


def test_the_order_is_not_that_in_which_a_pass_made_the_collectives():
    item = ITEMS["sparse"]
    strategy = programs.all_reduce(item, chunk_size=1)
    made = programs.after("fetch", item, programs.place(1, 1), strategy).launches
    ordered = programs.after("order", item, programs.place(1, 1), strategy).launches
    assert set(made) == set(ordered)
    assert made != ordered


def test_a_group_is_launched_after_the_combined_gradients_that_it_is_computed_from():
    launches = programs.after("order", ITEMS["stages"], programs.place(1, 1)).launches
    assert [launch.what for launch in launches] == [f"dense gradients of v{index}" for index in range(3)]


@pytest.mark.parametrize("hint", [b"ring", b"nccl"])
def test_each_collective_waits_for_all_before_it_but_one_and_nccls_for_all(hint):
    strategy = programs.all_reduce(ITEMS["sparse"], spec="RING", chunk_size=1)
    program = programs.after("fetch", ITEMS["sparse"], programs.place(2, 2), strategy)
    for launch in program.launches:
        for op in launch.ops:
            program.graph.nodes[op].attr["communication_hint"].s = hint
    program = Order()(program)
    assert Promise.ORDERED in program.holds
    assert len(program.launches) > 4
    assert max(len(launch.ops) for launch in program.launches) == 2
    graph = program.graph.digraph
    waits_for_the_one_before = []
    for number, later in enumerate(program.launches):
        for op in later.ops:
            behind = nx.ancestors(graph, op)
            awaited = [set(earlier.ops) <= behind for earlier in program.launches[:number]]
            assert all(awaited[:-1]), "all before it but one"
            waits_for_the_one_before += awaited[-1:]
    assert all(waits_for_the_one_before) == (hint == b"nccl")


def test_where_some_are_nccls_each_collective_waits_for_the_one_before_it():
    strategy = programs.all_reduce(ITEMS["sparse"], spec="RING", chunk_size=1)
    program = programs.after("fetch", ITEMS["sparse"], programs.place(2, 2), strategy)
    reductions = [node for node in program.graph.nodes.values() if node.op == "CollectiveReduceV2"]
    for node in reductions:
        node.attr["communication_hint"].s = b"nccl"
    program = Order()(program)
    assert 0 < len(reductions) < sum(len(launch.ops) for launch in program.launches), "gathers are rings"
    graph = program.graph.digraph
    for earlier, later in itertools.pairwise(program.launches):
        for op in later.ops:
            assert set(earlier.ops) <= nx.ancestors(graph, op)


def test_every_op_has_a_device_and_an_update_that_of_its_variable():
    program = programs.after("place", ITEMS["sparse"], programs.place(2))
    assert all(node.device for node in program.graph.nodes.values())
    view = program.graph
    for handle, writers in view.writes.items():
        assert writers
        assert {view.nodes[writer].device for writer in writers} == {view.nodes[handle].device}


def test_an_update_that_the_user_put_on_a_cpu_follows_its_variable():
    item = programs.linear_regression()
    definition = tf.compat.v1.GraphDef.FromString(item.graph_def)
    programs.node(definition, "update").device = "/device:CPU:0"
    moved = GraphItem(
        graph_def=definition.SerializeToString(),
        variables=item.variables,
        gradients=item.gradients,
        inputs=item.inputs,
        outputs=item.outputs,
        run_ops=item.run_ops,
    )
    graph = programs.after("place", moved, programs.place(2)).graph
    assert programs.node(graph, "AutoDist-Replica-1/update").device == "/device:CPU:1"
