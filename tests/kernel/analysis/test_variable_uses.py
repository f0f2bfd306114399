"""That a write and other uses of a variable run in the captured order: of programs as compiled, and broken once."""

from dataclasses import replace
from functools import cache

import pytest
import tensorflow as tf

from autodist_py.kernel.analysis.variable_uses import misordered
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import KERNEL_SCOPE, captured_name, on_replica
from autodist_py.kernel.program import Program
from autodist_py.kernel.verify import verify
from autodist_py.proto.errors import InvalidGraphError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer, PSSynchronizer
from tests.support import capture_steps, kernel_programs

SERVER = "127.0.0.1:CPU:0"


@cache
def counted() -> GraphItem:
    """Every other step trains a weight and a bias, at a rate that is made of the step's number in the branch."""
    weight, bias = tf.Variable([1.0, 2.0, 3.0], name="weight"), tf.Variable(0.5, name="bias")
    count = tf.Variable(0, trainable=False, name="count")

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.linalg.matvec(x, weight) + bias)
        of_weight, of_bias = tape.gradient(loss, [weight, bias])
        if count % 2 == 0:
            weight.assign_sub(tf.cast(count + 1, tf.float32) * of_weight)
            bias.assign_sub(tf.cast(count + 2, tf.float32) * of_bias)
        count.assign_add(1)
        return loss, count.read_value()

    return capture_steps.capture(step, tf.ones([4, 3])).item


@cache
def compiled(worker: int = 0) -> Program:
    """The weight lives on worker 0, whose server counts in its place, too; the bias is on both workers."""
    where = replace(kernel_programs.topology(1, 1, worker=worker), servers={SERVER: 0})
    nodes = (
        VariableStrategy("weight", PSSynchronizer(SERVER)),
        VariableStrategy("bias", AllReduceSynchronizer()),
    )
    return kernel_programs.after("order", counted(), where, Strategy(nodes, (SERVER, "127.0.0.2:CPU:0")))


IN_BRANCH, AFTER = "AutoDist-Branches/cond/then/ReadVariableOp_6", "Read/ReadVariableOp"
"""The reads of the count for the bias's rate, and at the step's end."""
COUNTS = "AssignAddVariableOp"


def without_waits(view: GraphView, *names: str) -> GraphView:
    """`view`, in which the first replica's ops of these names, or those of the kernel, wait for nothing but tensors."""
    graph = tf.compat.v1.GraphDef()
    graph.CopyFrom(view.graph_def())
    for node in graph.node:
        if captured_name(node.name) in names:
            data = [name for name in node.input if name[0] != "^"]
            del node.input[:]
            node.input.extend(data)
    return GraphView(graph)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_count_that_a_branch_reads_is_written_in_order_on_all_workers(worker: int) -> None:
    program = compiled(worker)
    assert {IN_BRANCH, AFTER} <= {captured_name(node.name) for node in program.graph.of_type({"ReadVariableOp"})}
    verify(program)


def test_a_server_counts_once_its_worker_has_read() -> None:
    program = compiled()
    assert on_replica(0, COUNTS) in program.lowered.servers[0].update.graph.nodes
    sends = f"{KERNEL_SCOPE}/channel/0/0/QueueEnqueueV2"
    assert on_replica(0, IN_BRANCH) in program.graph.producers[sends]
    with pytest.raises(InvalidGraphError, match=f"'{COUNTS}' uses.* after 'AutoDist-Br.*here '{sends}' does not wait"):
        verify(replace(program, graph=without_waits(program.graph, sends)))


@pytest.mark.parametrize("worker", [0, 1], ids=["its-server-counts", "it-counts"])
def test_a_worker_reads_after_the_count(worker: int) -> None:
    program = compiled(worker)
    with pytest.raises(InvalidGraphError, match=f"worker {worker}: '{AFTER}' uses variable 'count'.* after '{COUNTS}'"):
        verify(replace(program, graph=without_waits(program.graph, AFTER)))


def test_a_worker_counts_after_it_has_read() -> None:
    program = compiled(worker=1)
    counts = on_replica(0, COUNTS)
    with pytest.raises(InvalidGraphError, match=f"worker 1: '{COUNTS}' uses.*; here '{counts}' does not wait for"):
        verify(replace(program, graph=without_waits(program.graph, COUNTS)))


def test_a_server_counts_after_it_has_read() -> None:
    program = compiled()
    (server,) = program.lowered.servers
    update = replace(server.update, graph=without_waits(server.update.graph, COUNTS))
    lowered = replace(program.lowered, servers=(replace(server, update=update),))
    counts = on_replica(0, COUNTS)
    with pytest.raises(InvalidGraphError, match=f"worker 0: '{COUNTS}' uses.*; here '{counts}' does not wait for"):
        verify(replace(program, lowered=lowered))


def test_a_step_that_leaves_out_a_count_is_refused() -> None:
    program = compiled(worker=1)
    graph = tf.compat.v1.GraphDef()
    graph.CopyFrom(program.graph.graph_def())
    (counts,) = (node for node in graph.node if node.name == on_replica(0, COUNTS))
    counts.op = "NoOp"
    del counts.input[:2]
    counts.attr.clear()
    (found,) = map(str, misordered(replace(program, graph=GraphView(graph))))
    assert found.startswith(f"'{AFTER}' uses variable 'count' of replica 0 after '{COUNTS}'")
    assert found.endswith(f"here nothing does what '{COUNTS}' does")
