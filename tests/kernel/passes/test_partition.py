"""Partition: a step whose variables are cut computes, on one device, what the step computes."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist_py.kernel.analysis.row_access import adds_rows_up
from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import op_of
from autodist_py.proto.graph_item import Gradient, GraphItem, Input, Variable
from autodist_py.proto.strategy import VariableStrategy, shard_name
from tests.support import kernel_programs
from tests.support.cutting import (
    REDUCED,
    SERVED,
    Cutting,
    captured,
    cut,
    node_of,
    require_same,
)
from tests.support.oracle_programs import FUNCTION_FAMILIES, batches

raw = tf.raw_ops
pytestmark = pytest.mark.usefixtures("keras_of_float64")


# -- Any shape, any update --------------------------------------------------------------------------------------------


@st.composite
def cuttings(draw: Any) -> tuple[tuple[int, ...], Cutting]:
    """The shape of a variable, an axis of it, and sizes of 1 to 5 shards along that, even or not."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    axis = draw(st.integers(0, len(shape) - 1))
    inner = draw(st.sets(st.integers(1, max(1, shape[axis] - 1)), max_size=min(4, shape[axis] - 1)))
    edges = [0, *sorted(inner), shape[axis]]
    return shape, Cutting(axis, [after - before for before, after in itertools.pairwise(edges)])


def updated(kind: str, shape: Sequence[int]) -> Callable[..., Any]:
    """A step whose variable `w` has a gradient of its own shape, dense or of rows, and an update of that kind."""
    rng = np.random.default_rng(3)
    w = tf.Variable(rng.normal(size=shape), name="w")
    m, v = (tf.Variable(rng.uniform(0.5, 1, size=shape), name=name, trainable=False) for name in "mv")
    rate = tf.Variable(0.1, name="rate", trainable=False, dtype=tf.float64)
    mask = tf.constant(rng.integers(0, 2, size=shape).astype(np.float64))

    def step(x: tf.Tensor) -> Any:
        is_sparse = kind.endswith("-rows")
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(w, tf.cast(x[:, 0], tf.int64) % shape[0]) if is_sparse else w * mask
            loss = tf.reduce_mean(x) * tf.reduce_sum(rows**2) + tf.reduce_mean(x**2)
        gradient = tape.gradient(loss, w)
        norm = tf.constant(0.0, tf.float64)
        if kind.startswith("clipped"):
            (gradient,), norm = tf.clip_by_global_norm([gradient], 0.3)
        if kind.startswith("fused"):
            handles = {"var": w.handle, "m": m.handle, "v": v.handle}
            numbers = {
                "beta1_power": 0.9,
                "beta2_power": 0.99,
                "lr": rate,
                "beta1": 0.9,
                "beta2": 0.99,
                "epsilon": 1e-3,
            }
            if is_sparse:
                raw.ResourceSparseApplyMomentum(
                    var=w.handle,
                    accum=m.handle,
                    lr=rate,
                    grad=gradient.values,
                    indices=gradient.indices,
                    momentum=tf.constant(0.9, tf.float64),
                )
            else:
                numbers = {key: tf.cast(value, tf.float64) for key, value in numbers.items()}
                raw.ResourceApplyAdam(**handles, **numbers, grad=gradient)
        elif is_sparse:
            rows, positions = tf.unique(gradient.indices)
            values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
            v.scatter_add(tf.IndexedSlices(values**2, rows))
            w.scatter_sub(tf.IndexedSlices(rate * values / tf.sqrt(tf.gather(v, rows)), rows))
        else:
            m.assign(0.9 * m + tf.where(mask > 0, gradient, 2.0 * gradient))
            v.assign_add(tf.square(gradient) + 0.0 * mask)
            w.assign_sub(rate * m / tf.sqrt(v) + 0.01 * w)
        return loss, norm

    return step


KINDS = ("dense", "clipped-dense", "fused-dense", "rows", "clipped-rows", "fused-rows")


@settings(max_examples=25, deadline=None)
@given(cutting=cuttings(), kind=st.sampled_from([f"-{kind}" if kind == "rows" else kind for kind in KINDS]))
def test_a_variable_of_any_shape_may_be_cut_along_any_axis(cutting, kind):
    shape, where = cutting
    steps = [(np.random.default_rng(number).normal(size=(3, 2)) * 4,) for number in range(3)]
    step = captured(updated(kind, shape), *steps[0])
    program = cut(step.item, [node_of(step.item, "w", where)])
    assert bool(program.cuts.shards) == (len(where.sizes) > 1)
    require_same(step, program, steps)


def thirds(item: GraphItem, name: str, axis: int) -> VariableStrategy:
    """The variable in up to three shards along the axis, or along its first."""
    shape = item.variable(name).shape
    axis = min(axis, len(shape) - 1)
    count = min(3, shape[axis])
    sizes = [len(part) for part in np.array_split(np.arange(shape[axis]), count)]
    return node_of(item, name, Cutting(axis, sizes))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("family", FUNCTION_FAMILIES)
@pytest.mark.parametrize(("model", "optimizer"), [("both", "adam"), ("both", "momentum"), ("dense", "adagrad")])
def test_the_update_of_an_optimizer_is_cut_with_its_state(family, model, optimizer, axis):
    training = FUNCTION_FAMILIES[family](model, optimizer, clip=True)(1)
    steps = batches(model)[:3]
    step = captured(training.step, *steps[0])
    program = cut(step.item, [thirds(step.item, variable.name, axis) for variable in step.item.trainable_variables])
    trained = {variable.name for variable in step.item.trainable_variables}
    state = {shards.variable for shards in program.cuts.shards} - trained
    assert len(state) == len(program.cuts.shards) * (2 if optimizer == "adam" else 1) // (
        3 if optimizer == "adam" else 2
    )
    assert not any(shards.is_whole for shards in program.cuts.shards if shards.variable in state)
    require_same(step, program, steps)


# -- What is whole, and what is not -----------------------------------------------------------------------------------


def test_rows_are_looked_up_in_the_shards_that_have_them_and_the_table_is_gone():
    step = captured(updated("-rows", (6, 2)), np.ones((3, 2)))
    program = cut(step.item, [node_of(step.item, "w", Cutting(0, (1, 3, 2)))])
    (table,) = (shards for shards in program.cuts.shards if shards.variable == "w")
    assert not table.is_whole
    assert "w" not in {variable.name for variable in program.item.variables}
    assert "w" not in program.graph.nodes
    assert [program.item.variable(name).shape for name in table.names] == [(1, 2), (3, 2), (2, 2)]
    require_same(step, program, [(np.array([[5.0, 0.0], [0.0, 1.0], [5.0, 2.0]]),)] * 3)


def test_scalars_stay_one():
    step = captured(updated("clipped-dense", (4,)), np.ones((3, 2)))
    program = cut(step.item, [node_of(step.item, "w", Cutting(0, (2, 2)))])
    assert {shards.variable for shards in program.cuts.shards} == {"w", "m", "v"}
    assert "rate" in {variable.name for variable in program.item.variables}
    (norm,) = {op for op in program.graph.nodes if op.endswith("global_norm")}
    assert shard_name(norm, 0) not in program.graph.nodes


def test_where_all_shards_are_reduced_the_gradient_alone_is_cut():
    step = captured(updated("clipped-dense", (4, 3)), np.ones((3, 2)))
    program = cut(step.item, [node_of(step.item, "w", Cutting(1, (1, 2)), [REDUCED])])
    assert not program.cuts.shards
    assert [gradient.variable for gradient in program.item.gradients] == ["w/part_0", "w/part_1"]
    assert [program.item.variable(name).shape for name in ("w/part_0", "w/part_1")] == [(4, 1), (4, 2)]
    require_same(step, program, [(np.full((3, 2), number),) for number in (1.0, 2.0, 3.0)])


@pytest.mark.parametrize("synchronizers", [(SERVED, REDUCED), (REDUCED,)])
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_of_a_sparse_gradient_go_to_their_shards_whatever_synchronizes_them(synchronizers, axis):
    step = captured(updated("-rows", (5, 4)), np.ones((3, 2)))
    program = cut(
        step.item, [node_of(step.item, "w", Cutting(axis, (3, 1)) if axis else Cutting(0, (2, 3)), synchronizers)]
    )
    require_same(step, program, [(np.random.default_rng(number).normal(size=(4, 2)) * 5,) for number in range(3)])


def uses(what: str) -> Callable[..., Any]:
    """A step that uses a variable, its state or its gradient in another way than by its update."""
    w = tf.Variable(np.linspace(-1, 1, 6).reshape(3, 2), name="w")
    m = tf.Variable(np.full((3, 2), 0.5), name="m", trainable=False)

    @tf.function
    def halved(value: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(2):
            value = value + 0.1 * w
        return value

    def step(x: tf.Tensor) -> Any:
        ids = tf.constant([0, 2, 2])
        with tf.GradientTape() as tape:
            weights = w
            if what == "in a loop":
                weights = halved(w)
            elif what == "under a condition":
                weights = tf.cond(x[0, 0] > 1.5, lambda: 2.0 * w, lambda: w + 1.0)
            elif what == "tied":
                weights = w + tf.reduce_sum(tf.gather(w, ids), axis=0)
            loss = tf.reduce_mean(tf.matmul(x, weights) ** 2)
        if what == "two gradients":
            with tf.GradientTape() as first:
                one = tf.reduce_mean(tf.matmul(x, w) ** 2)
            with tf.GradientTape() as second:
                other = tf.reduce_mean(tf.nn.embedding_lookup(w, ids) ** 2) * tf.reduce_mean(x)
            gradient = first.gradient(one, w)
            rows = second.gradient(other, w)
            w.scatter_sub(tf.IndexedSlices(0.1 * rows.values, rows.indices))
        else:
            gradient = tape.gradient(loss, w)
        before = tf.reduce_max(m) if what == "state before" else tf.constant(0.0, tf.float64)
        m.assign(0.9 * m + gradient)
        w.assign_sub(0.1 * m)
        results = {"loss": loss, "before": before}
        if what == "gradient returned":
            results |= {"gradient": gradient, "norm": tf.norm(gradient), "column": tf.reduce_sum(gradient, axis=0)}
        if what == "new value returned":
            results |= {"w": w.read_value(), "m": m + 0.0, "product": tf.matmul(x, w)}
        return results

    return step


WAYS = (
    "in a loop",
    "under a condition",
    "tied",
    "two gradients",
    "gradient returned",
    "new value returned",
    "state before",
)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("what", WAYS)
def test_what_else_uses_a_variable_sees_it_whole(what, axis):
    steps = [(np.random.default_rng(number).normal(size=(4, 3)) + 1.5,) for number in range(3)]
    step = captured(uses(what), *steps[0])
    program = cut(step.item, [node_of(step.item, "w", Cutting(axis, (2, 1) if axis == 0 else (1, 1)))])
    assert {shards.variable for shards in program.cuts.shards} == {"w", "m"}
    assert {shards.variable: shards.is_whole for shards in program.cuts.shards}["w"]
    require_same(step, program, steps)


@pytest.mark.parametrize(("what", "is_joined"), [("tied", False), ("gradient returned", True)])
def test_a_gradient_is_joined_only_where_something_reads_it_whole(what, is_joined):
    step = captured(uses(what), np.ones((4, 3)))
    (marker,) = (op_of(tensor) for gradient in step.item.gradients for tensor in gradient.tensors)
    program = cut(step.item, [node_of(step.item, "w", Cutting(0, (2, 1)))])
    assert (marker in program.graph.nodes) is is_joined
    readers = program.graph.dataflow_consumers(shard_name(marker, index) for index in range(2))
    assert any(program.graph.nodes[op].op == "ConcatV2" for op in readers) is is_joined


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("family", FUNCTION_FAMILIES)
def test_rows_of_shards_may_be_added_up_before_where_those_of_the_table_may(family, optimizer, clip, axis):
    training = FUNCTION_FAMILIES[family]("both", optimizer, clip=clip)(1)
    step = captured(training.step, *batches("both")[0])
    sums = []
    for nodes in ([], [thirds(step.item, variable.name, axis) for variable in step.item.trainable_variables]):
        program = cut(step.item, nodes)
        sparse = [gradient for gradient in program.item.gradients if gradient.is_sparse]
        sums.append({adds_rows_up(program, gradient) for gradient in sparse})
    assert sums == [{optimizer == "sgd" and not clip}] * 2


# -- In which order -------------------------------------------------------------------------------------------------


def test_a_whole_read_is_over_before_the_new_value_is_there():
    with tf.Graph().as_default() as graph:
        x = kernel_programs.placeholder("x", None, 2)
        w = kernel_programs.handle("w", 3, 2)
        old = kernel_programs.read(w)
        error = raw.MatMul(a=x, b=old, transpose_b=True, name="error")
        summed = raw.MatMul(a=error, b=x, transpose_a=True, name="summed")
        gradient = raw.Identity(input=summed, name="gradient/w")
        raw.AssignSubVariableOp(resource=w, value=raw.Mul(x=gradient, y=old, name="scaled"), name="update")
        item = kernel_programs.captured(
            graph,
            variables=[Variable("w", "float64", (3, 2), update_ops=("update",))],
            gradients=[Gradient("w", ("gradient/w:0",))],
            inputs=[Input("x", "float64", (None, 2), batched=True)],
            outputs=[old],
            run_ops=["update"],
        )
    program = cut(item, [node_of(item, "w", Cutting(0, (2, 1)))])
    assert "^w/Read" in program.graph.nodes["w/joined"].input


def test_rows_are_looked_up_before_they_are_written():
    table = tf.Variable(np.arange(12.0).reshape(6, 2), name="w")

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.raw_ops.GatherV2(params=table, indices=[5, 1], axis=0)) * tf.reduce_mean(x)
        gradient = tape.gradient(loss, table)
        late = tf.raw_ops.GatherV2(params=table, indices=tf.cast(x[:, 0], tf.int32), axis=0)
        table.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
        return loss, late

    found = captured(step, np.ones((3, 2)))
    program = cut(found.item, [node_of(found.item, "w", Cutting(0, (2, 4)))])
    assert not program.cuts.shards[0].is_whole
    lookups = [name for name, node in program.graph.nodes.items() if node.op == "ResourceGather"]
    (write,) = (name for name in program.graph.nodes if name.endswith("ResourceScatterSub/part_1"))
    assert len(lookups) == 4
    own = {name for name in lookups if name.endswith("/part_1")}
    assert own <= program.graph.ancestors([write])
    require_same(found, program, [(np.array([[5.0, 0.0], [0.0, 1.0], [3.0, 2.0]]),)] * 3)


def test_a_gradient_that_updates_nothing_is_not_cut():
    w = tf.Variable(np.ones((4, 2)), name="w")

    def norm(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(x, w) ** 2)
        return tf.norm(tape.gradient(loss, w))

    found = captured(norm, np.ones((3, 4)))
    program = cut(found.item, [node_of(found.item, "w", Cutting(0, (2, 2)))])
    assert (program.cuts.shards, program.cuts.left_whole, program.strategy.node("w").shards) == ((), {}, ())


def test_one_replica_is_left_as_it_is():
    step = captured(updated("dense", (4,)), np.ones((3, 2)))
    program = cut(step.item, [node_of(step.item, "w", Cutting(0, (2, 2)))], where=kernel_programs.topology(1))
    assert (program.item, program.cuts.shards) == (step.item, ())


def test_what_a_removed_op_was_waited_for_is_waited_for_still():
    step = captured(uses("new value returned"), np.ones((4, 3)))
    program = cut(step.item, [node_of(step.item, "w", Cutting(0, (2, 1)))])
    view: GraphView = program.graph
    reads = [node for node in view.nodes.values() if node.op == "ReadVariableOp" and node.input[0] == "w"]
    late = [node for node in reads if "^w/joined" in node.input]
    assert late and len(late) < len(reads), "those behind the update wait for the whole variable, others do not"
