"""What crosses between workers and servers: the channels of compiled programs, and what stays on each side.

One module, though long: the same few steps are divided in all of it.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.doors.graph import GraphScope, Signature
from autodist_py.kernel.events import Exchange
from autodist_py.kernel.ir.fragment import TensorSpec
from autodist_py.kernel.ir.message_layout import MessageLayout
from autodist_py.kernel.ir.names import captured_name, on_replica, op_of
from autodist_py.kernel.pipeline import compile
from autodist_py.kernel.program import Options
from autodist_py.kernel.topology import Replica, Topology
from autodist_py.proto.errors import StrategyError
from autodist_py.proto.graph_item import Output
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from tests.support import capture_steps
from tests.support.capture_steps import capture
from tests.support.loop_programs import control_flow_of_tensorflow_1

DEVICES = ("127.0.0.1:CPU:0", "127.0.0.2:CPU:0")


def topology(worker):
    replicas = tuple(Replica(rank, rank, "/device:CPU:0") for rank in range(2))
    return Topology(worker, replicas, {device: rank for rank, device in enumerate(DEVICES)})


def compiled(item, servers, *, worker=0, **synchronizer):
    """`item` with its trainable variables on these servers in turn; None: on the workers."""
    nodes = []
    for index, variable in enumerate(item.trainable_variables):
        rank = servers[index % len(servers)]
        nodes.append(
            VariableStrategy(
                variable.name,
                AllReduceSynchronizer() if rank is None else PSSynchronizer(DEVICES[rank], **synchronizer),
            )
        )
    return compile(item, Strategy(tuple(nodes), DEVICES), topology(worker), Options(channel="c"))


def mlp():
    step, arguments = capture_steps.keras_mlp()
    return capture(step, *arguments).item


def sizes(message_layout):
    return [tf.TensorShape(spec.shape).num_elements() for spec in message_layout.tensors]


@pytest.mark.parametrize("servers", [(0,), (1,)])
def test_one_server_takes_gradients_and_gives_variables_in_one_exchange(servers):
    item = mlp()
    program = compiled(item, servers)
    (channel,) = program.channels
    elements = sorted(variable.num_elements for variable in item.trainable_variables)
    assert channel.server == servers[0]
    assert sorted(sizes(channel.sent)) == elements
    assert sorted(size for size in sizes(channel.answered)) == elements
    slots = {variable.name for variable in item.variables} - {v.name for v in item.trainable_variables}
    assert not slots & {spec.name for spec in channel.answered.tensors}
    assert set(program.held) > {variable.name for variable in item.trainable_variables}, "slots live there too"


@pytest.mark.parametrize("servers", [(0, 1), (0, None), (None, 1)])
def test_a_clip_by_a_global_norm_sends_scalars_beside(servers):
    item = mlp()
    program = compiled(item, servers)
    names = [variable.name for variable in item.trainable_variables]
    for channel in program.channels:
        own = [name for index, name in enumerate(names) if servers[index % 2] == channel.server]
        gradients = {tensor for gradient in item.gradients if gradient.variable in own for tensor in gradient.tensors}
        for message_layout, large in ((channel.sent, gradients), (channel.answered, set(own))):
            for spec in message_layout.tensors:
                assert spec.name in large or output_rank(item, spec.name) == 0, spec.name
    assert {name for name in names if name in program.held} == {
        name for index, name in enumerate(names) if servers[index % 2] is not None
    }


def output_rank(item, tensor):
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(tf.compat.v1.GraphDef.FromString(item.graph_def), name="")
    op, _, index = tensor.partition(":")
    return graph.get_tensor_by_name(f"{op}:{index or 0}").shape.rank


def test_a_server_runs_each_write_once_and_workers_none_of_them():
    item = mlp()
    here, there = (compiled(item, (0,), worker=worker) for worker in (0, 1))
    writers = {op for variable in item.variables if variable.name in here.held for op in variable.update_ops}
    (server,) = here.servers
    assert not there.servers
    assert writers <= {captured_name(name) for name in server.update.graph.nodes}
    for program in (here, there):
        original = {captured_name(name): node for name, node in program.graph.nodes.items()}
        assert {original[op].op for op in writers & original.keys()} <= {"NoOp", "AssignVariableOp"}


def counted_last():
    """Two weights, and a number of steps that the rate is made of. The op that counts reads a constant.

    The constant waits for the updates, so TensorFlow leaves out that the op does. The op alone is run.
    """
    weights = [tf.Variable(tf.ones([3]), name=name) for name in "ab"]
    count = tf.Variable(0.0, trainable=False, name="count")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x * weights[0] - weights[1]))
        gradients = tape.gradient(loss, weights)
        rate = 0.1 / (1.0 + count)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(rate * gradient)
        return rate

    item = capture(step, tf.ones([4, 3])).item
    graph = tf.compat.v1.GraphDef.FromString(item.graph_def)
    (read,) = (node.name for node in graph.node if node.op == "ReadVariableOp" and node.input[0] == "count")
    one = graph.node.add(name="one", op="Const", input=[f"^{op}" for op in item.run_ops])
    one.attr["dtype"].type = tf.float32.as_datatype_enum
    one.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(1.0))
    add = graph.node.add(name="add_count", op="AssignAddVariableOp", input=["count", "one", f"^{read}"])
    add.attr["dtype"].type = tf.float32.as_datatype_enum
    return replace(
        item,
        graph_def=graph.SerializeToString(deterministic=True),
        variables=tuple(
            replace(one, update_ops=("add_count",)) if one.name == "count" else one for one in item.variables
        ),
        run_ops=("add_count",),
    )


@pytest.mark.parametrize("worker", [0, 1])
def test_what_is_run_waits_for_all_that_it_waits_for_on_one_device(worker):
    program = compiled(counted_last(), (0, 1), worker=worker)
    (last,) = (op for op in program.run_ops if captured_name(op) == "add_count")
    behind = program.graph.ancestors([last])
    (server,) = program.servers
    there = {name for name, node in program.graph.nodes.items() if node.op == "AssignVariableOp"} & behind
    assert [program.graph.nodes[op].input[0] for op in there] == [on_replica(0, "ab"[1 - worker])]
    written = [node.input[0] for node in server.update.graph.nodes.values() if node.op.startswith("Assign")]
    assert sorted(written) == sorted([on_replica(0, "ab"[worker]), on_replica(0, "count")])


def test_what_is_returned_of_a_gradient_waits_for_the_update():
    item = counted_last()
    graph = tf.compat.v1.GraphDef.FromString(item.graph_def)
    marker = op_of(item.gradients[0].tensors[0])
    last = graph.node.add(name="last", op="Identity", input=[marker, "^add_count"])
    last.attr["T"].type = tf.float32.as_datatype_enum
    fetched = replace(
        item,
        graph_def=graph.SerializeToString(deterministic=True),
        outputs=(Output("last:0", "float32", (3,)),),
        run_ops=(),
    )
    program = compiled(fetched, (0, 1))
    ends = [*map(op_of, program.fetches), *program.run_ops]
    assert on_replica(0, "add_count") in program.graph.ancestors(ends)


def two_chains():
    """Of five weights `v1` is trained through the updated `a`, `b2` through `b`, and `v2` through `b2`."""
    weights = {name: tf.Variable(tf.ones([3]), name=name) for name in ("a", "v1", "b", "b2", "v2")}

    def train(name, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x * weights[name] - 1.0))
        weights[name].assign_sub(0.1 * tape.gradient(loss, weights[name]))

    def step(x):
        for name, through in (("a", None), ("v1", "a"), ("b", None), ("b2", "b"), ("v2", "b2")):
            train(name, x if through is None else x * weights[through])

    return capture(step, tf.ones([4, 3])).item


@pytest.mark.parametrize("servers", [(0, None, None, None, 0), (0, 0, None, None, 0), (0, None, 0, None, 1)])
def test_no_message_waits_for_a_later_collective_and_keeps_an_earlier_one_waiting(servers):
    item = two_chains()
    for worker in (0, 1):
        program = compiled(item, servers, worker=worker)
        sent = [spec.name for channel in program.channels for spec in channel.sent.tensors]
        assert len(sent) == sum(server is not None for server in servers)
        levels = {"a": 1, "b": 1, "v1": 2, "b2": 2, "v2": 3}
        for exchange in program.schedule.of_kind(Exchange):
            assert len({levels[gradient.variable] for gradient in exchange.gradients}) == 1


def read_between():
    """A weight that a step writes, reads in a second forward pass, and writes again."""
    weight = tf.Variable(tf.ones([3]), name="weight")

    def step(x):
        losses = []
        for _ in range(2):
            with tf.GradientTape() as tape:
                losses.append(tf.reduce_mean(tf.square(x * weight)))
            gradient = tape.gradient(losses[-1], weight)
            weight.assign(0.9 * weight - 0.1 * gradient if len(losses) == 1 else 0.9 * weight)
        weight.assign_sub(0.1 * gradient)
        return losses

    return capture(step, tf.ones([4, 3])).item


def test_a_variable_that_is_read_between_two_writes_is_answered_after_each():
    item = read_between()
    program = compiled(item, (0,))
    first, *later = item.variable("weight").update_ops
    assert [[spec.name for spec in channel.answered.tensors] for channel in program.channels] == [["weight"]] * 2
    written = [set(map(captured_name, server.update.graph.nodes)) & {first, *later} for server in program.servers]
    assert written == [{first}, set(later)]


def test_a_replica_writes_again_when_others_have_been_given_what_was_before():
    item, name = read_between(), "weight"
    replicas = tuple(Replica(index, 0, f"/device:CPU:{index}") for index in range(2))
    where = Topology(0, replicas, {DEVICES[0]: 0})
    program = compile(item, Strategy((VariableStrategy(name, PSSynchronizer(DEVICES[0])),), DEVICES[:1]), where)
    first, *later = item.variable(name).update_ops
    (given,) = (
        op
        for op in program.graph.ancestors([on_replica(1, first)])
        if program.graph.nodes[op].op == "ReadVariableOp" and on_replica(0, first) in program.graph.ancestors([op])
    )
    for writer in later:
        assert given in program.graph.ancestors([on_replica(0, writer)])


def test_workers_that_step_by_themselves_read_nothing_between_two_writes():
    with pytest.raises(StrategyError, match="reads variable 'weight' between two of its writes in a step, and with"):
        compiled(read_between(), (0,), sync=False)


def embedding(update):
    table = tf.Variable(tf.ones([50, 3]), name="table")

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, ids)))
        update(table, tape.gradient(loss, table))
        return loss

    return capture(step, tf.constant([1, 2, 2, 5], tf.int64)).item


def scaled(table, gradient):
    table.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))


def squared(table, gradient):
    table.scatter_sub(tf.IndexedSlices(tf.square(gradient.values), gradient.indices))


def normalized(table, gradient):
    scale = tf.math.rsqrt(tf.reduce_sum(tf.square(gradient.values)))
    table.scatter_sub(tf.IndexedSlices(scale * gradient.values, gradient.indices))


def weighted_rows(table, gradient):
    table.scatter_sub(tf.IndexedSlices(gradient.values * tf.ones([tf.size(gradient.indices), 1]), gradient.indices))


def test_of_a_table_only_the_rows_that_are_used_travel():
    program = compiled(embedding(scaled), (0,))
    asks, update = program.channels
    assert [spec.shape for spec in asks.sent.tensors] == [(None,)]
    assert [spec.shape for spec in asks.answered.tensors] == [(None, 3)]
    assert (50, 3) not in [spec.shape for spec in (*update.sent.tensors, *update.answered.tensors)]
    assert not program.refreshed


def as_dense(table, gradient):
    table.assign_sub(0.1 * tf.convert_to_tensor(gradient))


@pytest.mark.parametrize(("update", "reader"), [(scaled, "ResourceGather"), (as_dense, "ReadVariableOp")])
def test_a_server_reads_a_table_whole_only_where_that_is_no_copy(update, reader):
    """It is one once rows of a variable were written, or looked up in it."""
    looked_up, _ = compiled(embedding(update), (0,)).servers
    users = [
        node.op
        for node in looked_up.answer.graph.nodes.values()
        if any(captured_name(op_of(name)) == "table" for name in node.input)
    ]
    assert users == [reader]


def test_a_proxy_of_a_table_travels_whole():
    program = compiled(embedding(scaled), (0,), local_replication=True)
    (channel,) = program.channels
    assert [spec.shape for spec in channel.answered.tensors] == [(50, 3)]
    assert program.refreshed == {"table"}


@pytest.mark.parametrize(
    ("update", "sums"), [(scaled, True), (squared, False), (normalized, False), (weighted_rows, False)]
)
def test_duplicate_rows_are_added_up_before_they_are_sent_where_that_changes_nothing(update, sums):
    program = compiled(embedding(update), (0,))
    sent = [node for node in program.graph.nodes.values() if node.op == "UnsortedSegmentSum" and "/0/1/" in node.name]
    assert bool(sent) is sums


@pytest.mark.parametrize(("update", "sums"), [(scaled, 1), (squared, 0), (normalized, 0)])
@pytest.mark.parametrize("axis", [0, 1])
def test_duplicate_rows_of_shards_are_added_up_as_those_of_a_table_are(axis, update, sums):
    item = embedding(update)
    synchronizers = [PSSynchronizer(device) for device in DEVICES]
    nodes = tuple(VariableStrategy.partitioned(variable, axis, synchronizers) for variable in item.trainable_variables)
    program = compile(item, Strategy(nodes, DEVICES), topology(1), Options(channel="c"))
    pushes = [channel for channel in program.channels if len(channel.sent.tensors) > 1]
    assert [channel.server for channel in pushes] == [0, 1]
    for channel in pushes:
        made = Counter(node.op for name, node in program.graph.nodes.items() if f"/{channel.name}/" in name)
        assert (made["Unique"], made["UnsortedSegmentSum"]) == (sums, sums), channel


def test_small_tensors_of_a_type_travel_as_one():
    message_layout = MessageLayout(
        (
            TensorSpec("a", tf.float32, (2, 2)),
            TensorSpec("big", tf.float32, (200, 100)),
            TensorSpec("b", tf.float32, ()),
            TensorSpec("ids", tf.int64, (None,)),
            TensorSpec("c", tf.float64, (3,)),
        ),
        ("sum", "sum", "sum", "rows", "sum"),
    )
    values: list[Any] = [
        np.full((2, 2), 1.0, "f"),
        np.full((200, 100), 2.0, "f"),
        np.float32(3.0),
        np.arange(4),
        np.ones(3),
    ]
    message = message_layout.pack([tf.constant(value) for value in values])
    assert [tuple(component.shape) for component in message] == [(5,), (200, 100), (4,), (3,)]
    for actual, expected in zip(
        message_layout.unpack(message_layout.join([message, message_layout.nothing(message)])), values, strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
    doubled = message_layout.unpack(message_layout.join([message, message]))
    np.testing.assert_array_equal(doubled[0], 2 * values[0])
    np.testing.assert_array_equal(doubled[3], np.tile(values[3], 2))


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_half_precision_is_summed_in_single(dtype):
    message_layout = MessageLayout((TensorSpec("g", dtype, (1,)),), ("sum",))
    parts = [1.0, *([0.003] * 40)]
    messages = [message_layout.pack([tf.constant([part], dtype)]) for part in parts]
    expected = tf.cast(sum(float(tf.constant(part, dtype)) for part in parts), dtype)
    assert message_layout.unpack(message_layout.join(messages))[0][0] == expected


def test_one_worker_serves_rows_whose_indices_are_the_same_for_its_replicas():
    table = tf.Variable(tf.ones([8, 3]), name="positions")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x + tf.gather(table, tf.range(tf.shape(x)[1]))))
        table.assign_sub(tf.convert_to_tensor(tape.gradient(loss, table)))
        return loss

    item = capture(step, tf.ones([4, 5, 3])).item
    assert [gradient.indices for gradient in item.gradients] == ["same"]
    devices = tuple(f"127.0.0.1:CPU:{index}" for index in range(2))
    replicas = tuple(Replica(index, 0, f"/device:CPU:{index}") for index in range(2))
    strategy = Strategy((VariableStrategy("positions", PSSynchronizer(devices[0])),), devices)
    compile(item, strategy, Topology(0, replicas, dict.fromkeys(devices, 0)), Options(channel="c"))


def branching(predicate):
    """The item of a graph of TensorFlow 1 that updates where `predicate`, of the batch and the gradient, is so."""
    scope = GraphScope(tf.Graph(), CaptureOptions(batch_statistics="replica"), seed=None)
    with control_flow_of_tensorflow_1(), scope.graph.as_default(), scope.recording():
        x = tf.compat.v1.placeholder(tf.float32, [None, 3], name="x")
        weights = tf.compat.v1.get_variable("weights", [3], use_resource=True)
        (gradient,) = tf.gradients(tf.reduce_mean(tf.linalg.matvec(x, weights)), [weights])
        update = tf.cond(predicate(x, gradient), lambda: tf.group(weights.assign_sub(0.1 * gradient)), tf.no_op)
        tf.group(update, name="train")
    return scope.item(CaptureOptions(batch_statistics="replica"))


def test_what_a_worker_has_in_a_branch_of_tensorflow_1_only_is_not_sent_to_a_server():
    compiled(branching(lambda x, gradient: tf.norm(gradient) < 1.0), (0,))
    with pytest.raises(StrategyError, match=r"needs 'cond/.*', which is computed in a branch.*before the branch"):
        compiled(branching(lambda x, gradient: tf.size(x) > 3), (0,))


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("halves", [False, True], ids=["after-a-branch", "in-a-branch"])
def test_new_values_are_assigned_whatever_branch_of_tensorflow_1_is_chosen(halves, worker):
    """The update waits for a branch, and a second write may stand in one."""
    scope = GraphScope(tf.Graph(), CaptureOptions(), seed=None)
    with control_flow_of_tensorflow_1(), scope.graph.as_default(), scope.recording():
        x = tf.compat.v1.placeholder(tf.float32, (None,), name="x")
        weight, count, step = (
            tf.compat.v1.get_variable(name, (), use_resource=True, trainable=name == "weight")
            for name in ("weight", "count", "step")
        )
        loss = tf.reduce_mean(x * weight)
        is_odd = tf.equal(step.read_value() % 2.0, 1.0)
        counted = tf.cond(is_odd, lambda: tf.group(count.assign_add(1.0)), tf.no_op)
        with tf.control_dependencies([counted]):
            rate = 0.1 / count.read_value()
        update = weight.assign_sub(rate * tf.gradients(loss, weight)[0])
        with tf.control_dependencies([update]):
            halved = tf.cond(is_odd, lambda: tf.group(weight.assign(0.5 * weight.read_value())), tf.no_op)
        with tf.control_dependencies([halved if halves else update]):
            train = tf.group(step.assign_add(1.0), name="train")
    item = scope.cut(Signature(("x:0",), (loss.name,), (train.name,)), CaptureOptions())
    graph = compiled(item, [0], worker=worker).graph
    waiting = {
        name for name, node in graph.nodes.items() for one in node.input if one[0] == "^" and is_switch(graph, one)
    }
    assert not waiting
    new = [node for node in graph.of_type({"AssignVariableOp"}) if node.input[0] == on_replica(0, "weight")]
    assert len(new) == worker  # The first worker is the server.
    assert all(graph.control_flow.runs_once(node.name) for node in new)


def test_a_read_in_a_branch_for_which_nothing_waits_in_each_step_is_refused():
    """What the branch returns of its read waits for the write in it: the message could not wait for the read alone."""
    scope = GraphScope(tf.Graph(), CaptureOptions(), seed=None)
    with control_flow_of_tensorflow_1(), scope.graph.as_default(), scope.recording():
        x = tf.compat.v1.placeholder(tf.float32, (None,), name="x")
        weight, count = (tf.compat.v1.get_variable(name, (), use_resource=True) for name in ("weight", "count"))
        loss = tf.reduce_mean(x * weight)
        change = 0.1 * tf.gradients(loss, weight)[0]

        def update():
            old = tf.square(weight.read_value())
            with tf.control_dependencies([old]):
                written = weight.assign_sub(change)
            with tf.control_dependencies([written]):
                return tf.identity(old)

        returned = tf.cond(count > 0.0, update, lambda: tf.constant(0.0))
    item = scope.cut(Signature(("x:0",), (loss.name, returned.name), ()), CaptureOptions())
    with pytest.raises(StrategyError, match=r"reads variable 'weight' in a branch .* nothing that is run in each step"):
        compiled(item, [0])


def test_a_branch_of_which_workers_need_one_part_before_another_is_refused():
    """By ops of one's own: `tf.cond` gives out nothing of a branch before all that it is given is there."""
    scope = GraphScope(tf.Graph(), CaptureOptions(), seed=None)
    with control_flow_of_tensorflow_1(), scope.graph.as_default(), scope.recording():
        x = tf.compat.v1.placeholder(tf.float32, (None,), name="x")
        first, second = (tf.compat.v1.get_variable(name, (), use_resource=True) for name in ("first", "second"))
        (gradient,) = tf.gradients(tf.reduce_mean(x * first), first)
        kept, doubled = tf.raw_ops.Switch(data=gradient, pred=first > 0.0)
        doubled = tf.multiply(doubled, 2.0, name="doubled")
        update = first.assign_sub(tf.raw_ops.Merge(inputs=[kept, doubled]).output)
        with tf.control_dependencies([update]):
            loss = tf.reduce_mean(x * first.read_value() * second)
        kept, later = tf.raw_ops.Switch(data=tf.gradients(loss, second)[0], pred=first > 0.0)
        train = second.assign_sub(tf.raw_ops.Merge(inputs=[kept, later + doubled]).output, name="train")
    item = scope.cut(Signature(("x:0",), (loss.name,), (train.op.name,)), CaptureOptions())
    with pytest.raises(
        StrategyError, match=r"'Merge' belongs to a branch .*Worker 0, as .* used another part. Make two"
    ):
        compiled(item, [0])


@pytest.mark.parametrize("asserts", [False, True], ids=["shown", "asserted"])
def test_what_is_shown_or_asserted_where_a_server_decides_is_refused(asserts):
    scope = GraphScope(tf.Graph(), CaptureOptions(), seed=None)
    with control_flow_of_tensorflow_1(), scope.graph.as_default(), scope.recording():
        x = tf.compat.v1.placeholder(tf.float32, (None,), name="x")
        weight = tf.compat.v1.get_variable("weight", (), use_resource=True)
        loss = tf.reduce_mean(x * weight)
        change = 0.1 * tf.gradients(loss, weight)[0]

        def update():
            told = tf.raw_ops.Assert(condition=change < 9.0, data=[change]) if asserts else tf.print("it falls")
            with tf.control_dependencies([told]):
                return tf.group(weight.assign_sub(change))

        train = tf.group(tf.cond(change > 0.0, update, tf.no_op), name="train")
    item = scope.cut(Signature(("x:0",), (loss.name,), (train.name,)), CaptureOptions())
    with pytest.raises(StrategyError, match=r"'cond/\w+' shows or asserts something in a branch.*decides by 'Greater'"):
        compiled(item, [0])


def is_switch(graph, name):
    return graph.nodes[op_of(name)].op == "Switch"
