"""Programs in which each replica is fed its own part, and what is combined is added up whatever examples it is of.

Their replicas keep their own variables, as the components of tf.distribute's mirrored variables are kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.kernel.ir.graph import GraphView
from autodist_py.kernel.ir.names import on_replica
from autodist_py.kernel.pipeline import compile
from autodist_py.kernel.program import Options
from autodist_py.kernel.topology import Replica, Topology
from autodist_py.kernel.verify import verify
from autodist_py.proto.errors import CaptureError, GraphItemError, InvalidGraphError, StrategyError
from autodist_py.proto.graph_item import Gradient, GraphItem, Input, Output, Statistic, Variable
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import PSSynchronizer
from tests.support import kernel_programs
from tests.support.kernel_programs import after, all_reduce, captured, handle, placeholder, raw, read, run_steps

RATE = 0.1
SERVER = "127.0.0.1:CPU:0"
PARTS = [np.array([1.0, 3.0, 5.0]), np.array([0.5]), np.array([-2.0, 4.0])]


def replica_function(*, is_own: bool = True) -> GraphItem:
    """`w` is updated by added-up gradients, of examples and of none, and `seen` counts each replica's own examples."""
    with tf.Graph().as_default() as graph:
        x, rows = placeholder("x", None), tf.constant([0])
        w, seen = handle("w"), handle("seen", dtype=tf.int64)
        own = raw.Identity(input=raw.Mean(input=x, axis=rows), name="own")
        marked = raw.Identity(input=raw.Mul(x=own, y=read(w)), name="gradient/w")
        decay = raw.Identity(input=raw.Mul(x=tf.constant(0.5, tf.float64), y=read(w)), name="decay/w")
        raw.Identity(input=raw.Max(input=x, axis=rows), name="largest")
        step = raw.Mul(x=tf.constant(RATE, tf.float64), y=raw.AddV2(x=marked, y=decay))
        raw.AssignSubVariableOp(resource=w, value=step, name="update")
        raw.AssignAddVariableOp(resource=seen, value=raw.Size(input=x, out_type=tf.int64), name="count")
        item = captured(
            graph,
            variables=[Variable("w", "float64", ()), Variable("seen", "int64", (), per_replica=is_own)],
            gradients=[Gradient("w", (f"{name}/w:0",), "add") for name in ("gradient", "decay")],
            inputs=[Input("x", "float64", (None,), batched=False, kind="part")],
            run_ops=["update", "count"],
        )
        view = GraphView(graph.as_graph_def())
        outputs = (Output("own:0", "float64", (), per_replica=True), Output("largest:0", "float64", ()))
        return replace(
            item,
            variables=tuple(replace(one, update_ops=view.writes[one.name]) for one in item.variables),
            outputs=outputs,
            statistics=(Statistic("largest:0", "float64", (), "add"),),
        )


def fed(parts: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return {on_replica(position, "x"): part for position, part in enumerate(parts)}


Initial = Mapping[str, np.ndarray | Sequence[np.ndarray]]
ON_SERVER = Strategy((VariableStrategy("w", PSSynchronizer(SERVER)),), (SERVER,))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_each_replica_reads_its_part_and_adds_what_it_has_whatever_it_is_of(replicas: int):
    """A gradient of no example counts once for each replica, as one of examples does, not by shares."""
    parts, where = PARTS[:replicas], kernel_programs.topology(replicas)
    initial: Initial = {"w": np.array(2.0), "seen": [np.array(10 * position) for position in range(replicas)]}
    state, results = run_steps(replica_function(), where, [fed(parts)] * 3, initial, keeps_copies=True)
    w = 2.0
    for _ in range(3):
        w -= RATE * (sum(part.mean() * w for part in parts) + replicas * 0.5 * w)
    for position, (own, part) in enumerate(zip(state, parts, strict=True)):
        np.testing.assert_allclose(own["w"], w, rtol=1e-12)
        assert own["seen"] == 10 * position + 3 * len(part)
    for fetched in results:
        *means, largest = fetched
        np.testing.assert_array_equal(means, [part.mean() for part in parts])
        assert largest == sum(part.max() for part in parts)


def test_a_replica_without_examples_is_not_left_out():
    """The mean of none is NaN: whoever adds it up has it."""
    parts = [PARTS[0], np.zeros(0)]
    initial: Initial = {"w": np.array(2.0), "seen": np.array(0)}
    state, _ = run_steps(replica_function(), kernel_programs.topology(2), [fed(parts)], initial, keeps_copies=True)
    assert np.isnan(state[0]["w"]) and np.isnan(state[1]["w"])
    assert [own["seen"] for own in state] == [3, 0]


def test_a_replicas_own_value_is_written_only_where_each_has_its_own():
    with pytest.raises(CaptureError, match="variable 'seen' is written by 'count' with what differs between replicas"):
        compile(replica_function(is_own=False), all_reduce(replica_function()), kernel_programs.topology(2))


def test_a_result_that_reads_a_replicas_own_value_is_not_the_first_replicas():
    item = replica_function()
    with kernel_programs.import_graph(
        GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def))
    ).as_default() as graph:
        read(graph.get_tensor_by_name("seen:0"), tf.int64)
        definition = graph.as_graph_def().SerializeToString(deterministic=True)
    item = replace(item, graph_def=definition, outputs=(Output("seen/Read:0", "int64", ()),))
    with pytest.raises(CaptureError, match="result 'seen/Read:0' differs between replicas, so it is to be per_replica"):
        compile(item, all_reduce(item), kernel_programs.topology(2), Options(keeps_copies=True))


def changed(**parts: Any) -> GraphItem:
    return replace(replica_function(), **parts)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            changed(gradients=(Gradient("w", ("gradient/w:0",), "sum"),)),
            "so gradients are added up; that of variable 'w' has the reduction 'sum'",
        ),
        (
            changed(statistics=(Statistic("largest:0", "float64", (), "mean"),)),
            "'largest:0' of type float64 has the reduction 'mean'",
        ),
        (
            changed(statistics=(Statistic("largest:0", "string", (), "add"),)),
            "'largest:0' of type string has the reduction 'add'",
        ),
        (
            changed(outputs=(Output("own:0", "float64", (), "sum"),)),
            "result 'own:0' differs between replicas, so it is to be per_replica",
        ),
    ],
)
def test_what_would_count_replicas_by_examples_is_refused(item: GraphItem, message: str):
    with pytest.raises(CaptureError, match=message):
        compile(item, all_reduce(item), kernel_programs.topology(2), Options(keeps_copies=True))


def test_a_part_is_no_batch():
    batched = (*replica_function().inputs, Input("y", "float64", (None,), batched=True))
    graph = tf.compat.v1.GraphDef.FromString(replica_function().graph_def)
    graph.node.add(name="y", op="Placeholder").attr["dtype"].type = tf.float64.as_datatype_enum
    item = changed(graph_def=graph.SerializeToString(), inputs=batched)
    with pytest.raises(CaptureError, match="and share out 'y:0': one or the other"):
        compile(item, all_reduce(item), kernel_programs.topology(2), Options(keeps_copies=True))


def test_variables_that_replicas_keep_are_on_no_server():
    where = replace(kernel_programs.topology(2), servers={SERVER: 0})
    with pytest.raises(StrategyError, match="which servers and shards have but once; variable 'w' is to have one"):
        compile(replica_function(), ON_SERVER, where, Options(keeps_copies=True))


def test_a_worker_that_only_serves_keeps_no_variables():
    where = Topology(0, (Replica(0, 0, "/device:CPU:0"), Replica(1, 1, "/device:CPU:0", trains=False)))
    with pytest.raises(StrategyError, match="so each worker trains; worker 1 is to serve only"):
        compile(replica_function(), all_reduce(replica_function()), where)


def test_a_variable_that_is_there_once_is_copied_for_each_step_and_each_replicas_own_is_kept():
    """On a server, too: the update is made once, of all that replicas add up."""
    where = replace(kernel_programs.topology(2), servers={SERVER: 0})
    initial: Initial = {"w": [np.array(2.0), np.array(np.nan)], "seen": [np.array(0), np.array(10)]}
    results = [run_steps(replica_function(), where, [fed(PARTS[:2])] * 3, initial, one) for one in (None, ON_SERVER)]
    w = 2.0
    for _ in range(3):
        w -= RATE * (sum(part.mean() * w for part in PARTS[:2]) + 2 * 0.5 * w)
    for state, fetched in results:
        np.testing.assert_allclose(state[0]["w"], w, rtol=1e-12)
        assert [own["seen"] for own in state] == [9, 13]
        np.testing.assert_array_equal(fetched, [[3.0, 0.5, 5.5]] * 3)


def test_a_value_of_each_replicas_own_lives_with_the_workers_whatever_it_is_made_of():
    """Here of a gradient that a server combines."""
    item = replica_function()
    with kernel_programs.import_graph(
        GraphView(tf.compat.v1.GraphDef.FromString(item.graph_def))
    ).as_default() as graph:
        total = raw.Neg(x=graph.get_tensor_by_name("gradient/w:0"))
        raw.AssignVariableOp(resource=handle("last"), value=total, name="note")
        definition = graph.as_graph_def().SerializeToString(deterministic=True)
    last = Variable("last", "float64", (), update_ops=("note",), per_replica=True)
    item = replace(item, graph_def=definition, variables=(*item.variables, last), run_ops=(*item.run_ops, "note"))
    where = replace(kernel_programs.topology(2), servers={SERVER: 0})
    initial: Initial = {"w": np.array(2.0), "seen": np.array(0), "last": np.array(0.0)}
    for strategy in (None, ON_SERVER):
        state, _ = run_steps(item, where, [fed([np.array([1.0]), np.array([9.0])])], initial, strategy)
        assert [own["last"] for own in state] == [-20.0, -20.0]


def test_a_result_may_be_combined_and_each_replicas_own():
    """They are of one tensor."""
    item = changed(outputs=(Output("own:0", "float64", (), per_replica=True), *replica_function().outputs))
    initial: Initial = {"w": np.array(2.0), "seen": np.array(0)}
    _, [fetched] = run_steps(item, kernel_programs.topology(2), [fed(PARTS[:2])], initial, keeps_copies=True)
    assert fetched == [3.0, 0.5, 3.0, 0.5, 5.5]


def test_a_gradient_that_replicas_have_alike_and_is_not_added_up_is_found():
    program = after("lower-exchanges", replica_function(), kernel_programs.topology(2), keeps_copies=True)
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(program.graph.nodes[on_replica(0, "decay/w")])
    node.input[0] = on_replica(0, "Mul_1")
    with pytest.raises(InvalidGraphError, match="the gradient of 'w' is not combined over the replicas"):
        verify(replace(program, graph=program.graph.changed(added=(), replaced=[node])))


def test_copies_that_are_kept_are_not_assigned_the_first_replicas_values():
    where = kernel_programs.topology(2)
    ops = [name for name in after("refresh", replica_function(), where, keeps_copies=True).graph.nodes]
    assert not [name for name in ops if "Refresh" in name]
    assert [name for name in after("refresh", replica_function(), where).graph.nodes if "Refresh" in name]


def test_a_copy_that_is_kept_and_not_written_is_found():
    program = after("lower-exchanges", replica_function(), kernel_programs.topology(2), keeps_copies=True)
    verify(program)
    broken = replace(program, run_ops=tuple(op for op in program.run_ops if op != on_replica(1, "update")))
    with pytest.raises(InvalidGraphError, match="of 2 replicas 1 do: AutoDist-Replica-0/update"):
        verify(broken)


def crop() -> tf.Tensor:
    boxes = tf.constant([[[0.2, 0.2, 0.8, 0.8]]])
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box([1000, 1000, 3], boxes, [1, 2], 0.1)
    return tf.cast(tf.concat([begin[:2], size[:2]], 0), tf.float64)


@pytest.mark.parametrize("draw", [lambda: tf.random.stateless_uniform([4], [1, 2], dtype=tf.float64), crop])
@pytest.mark.parametrize("folds_seeds", [True, False])
def test_stateless_numbers_are_each_replicas_own_or_the_same_as_is_asked(folds_seeds: bool, draw: Any):
    with tf.Graph().as_default() as graph:
        raw.Identity(input=draw(), name="drawn")
        outputs = (Output("drawn:0", "float64", (4,), per_replica=True),)
        item = replace(captured(graph), outputs=outputs)
    where = kernel_programs.topology(2)
    _, [[first, second]] = run_steps(item, where, [{}], {}, folds_seeds=folds_seeds)
    assert np.array_equal(first, second) is not folds_seeds


def test_each_workers_program_is_fed_the_parts_of_its_own_replicas():
    item = replica_function()
    for worker, feeds in enumerate((2, 1)):
        where = kernel_programs.topology(2, 1, worker=worker)
        program = compile(item, all_reduce(item), where, Options(keeps_copies=True))
        assert [name for name, _ in program.feeds] == [on_replica(position, "x") for position in range(feeds)]
        assert len(program.fetches) == feeds + 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Input("x", "float32", (None,), batched=True, kind="part"), "input 'x' is each replica's own part"),
        (lambda: Output("y:0", "float32", (), "mean", per_replica=True), "output 'y:0' is per_replica.*'mean'"),
        (lambda: Gradient("w", ("g:0",), "add", in_parts=True), "has the reduction 'add', and is in_parts"),
    ],
)
def test_what_contradicts_itself_is_refused(make, message: str):
    with pytest.raises(GraphItemError, match=message):
        make()


def test_the_wire_form_keeps_what_is_each_replicas_own():
    item = replica_function()
    assert GraphItem.from_proto(item.to_proto()) == item
    assert "per replica" in str(item) and "added up" in str(item) and "no       part" in str(item)
    other = replace(item, variables=tuple(replace(one, per_replica=False) for one in item.variables))
    assert other.fingerprint != item.fingerprint
