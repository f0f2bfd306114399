"""What all workers must agree on before they run a program together."""

import uuid
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.capture.inexact import inexact
from autodist_py.kernel.pipeline import CompiledProgram, compile
from autodist_py.program.agreement import lowered_text, require_same_schedule, run_together
from autodist_py.proto.errors import AutoDistError
from autodist_py.proto.graph_item import Input, Output
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer
from tests.support import kernel_programs
from tests.support.capture_steps import batch, capture
from tests.support.dense_layers import two_layers
from tests.support.unseen import turned


def planned(worker: int, *, chunk_size: int = 128) -> bytes:
    item = kernel_programs.dense_and_sparse()
    where = kernel_programs.topology(2, 1, worker=worker)
    return lowered_text(compile(item, kernel_programs.all_reduce(item, chunk_size=chunk_size), where)).encode()


def test_workers_with_other_numbers_of_replicas_plan_the_same():
    require_same_schedule({0: planned(0), 1: planned(1)})


def test_a_saver_that_the_chief_alone_makes_is_no_other_graph():
    item = kernel_programs.dense_and_sparse()
    saving = replace(item, savers=(b"saver",), table_initializers=("fill",))
    assert saving.fingerprint != item.fingerprint
    assert run_together(saving).fingerprint == run_together(item).fingerprint
    assert run_together(replace(item, run_ops=())).fingerprint != run_together(item).fingerprint


def of_tables(*shared: str) -> Any:
    graph = tf.compat.v1.GraphDef()
    for index, name in enumerate(shared):
        table = graph.node.add(name=f"table_{index}", op="HashTableV2")
        table.attr["shared_name"].s = f"hash_table_{name}".encode()
    return replace(kernel_programs.dense_and_sparse(), graph_def=graph.SerializeToString(deterministic=True))


def test_random_names_that_each_process_gives_make_no_other_graph():
    first, second, third, fourth = (str(uuid.uuid4()) for _ in range(4))
    own = run_together(of_tables(first, second, first))
    assert own.fingerprint == run_together(of_tables(third, fourth, third)).fingerprint
    assert own.fingerprint != run_together(of_tables(third, fourth, fourth)).fingerprint  # Another table is another.
    assert len(tf.compat.v1.GraphDef.FromString(own.graph_def).node) == 3


def with_python_code(x: tf.Tensor) -> tf.Tensor:
    sine = tf.numpy_function(np.sin, [x], tf.float32)
    cosine = tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.py_function(tf.cos, [x], tf.float32), lambda: x)
    return sine + cosine


def test_names_of_python_code_that_each_process_counts_make_no_other_graph():
    first, again, other = (
        capture(step, batch()).item
        for step in (with_python_code, with_python_code, lambda x: 2.0 * with_python_code(x))
    )
    assert first.fingerprint != again.fingerprint
    assert run_together(first).fingerprint == run_together(again).fingerprint != run_together(other).fingerprint


def test_another_group_on_one_worker_is_named_before_anyone_waits():
    with pytest.raises(AutoDistError, match=r"collectives of worker 1 are not the chief's.*dense gradients of"):
        require_same_schedule({0: planned(0), 1: planned(1, chunk_size=1)})


def test_a_fetch_that_differs_on_one_worker_is_named_before_anyone_waits():
    def of(fetch: str) -> bytes:
        item = replace(kernel_programs.dense_and_sparse(), outputs=(Output(fetch, "float64", (), "mean"),))
        return lowered_text(compile(item, kernel_programs.all_reduce(item), kernel_programs.topology(1, 1))).encode()

    with pytest.raises(AutoDistError, match=r"worker 1 are not the chief's.*gradients of a, b, with mean"):
        require_same_schedule({0: of("mean:0"), 1: of("Neg:0")})


def test_other_collectives_of_the_same_schedule_are_named_before_anyone_waits() -> None:
    def of(dtype: tf.DType) -> CompiledProgram:
        with tf.Graph().as_default() as graph:
            x = kernel_programs.placeholder("x", None)
            total = tf.cast(tf.reduce_sum(x, name="sum"), dtype, name="cast")
            out = tf.identity(total, name="out")
            item = kernel_programs.captured(graph, inputs=[Input("x", "float64", (None,), batched=True)], outputs=[out])
        summed = replace(item, outputs=(replace(item.outputs[0], reduction="sum"),))
        return compile(summed, kernel_programs.all_reduce(item), kernel_programs.topology(1, 1))

    first, other = of(tf.float64), of(tf.int64)
    assert str(first.schedule) == str(other.schedule)
    with pytest.raises(AutoDistError, match=r"CollectiveGatherV2 of float64.* where the other has .*of int64"):
        require_same_schedule({0: lowered_text(first).encode(), 1: lowered_text(other).encode()})


def item_of(loss: Any, **options: Any) -> Any:
    weight = tf.Variable(np.ones(3), name="weight")

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            value = loss(tf.linalg.matvec(x, weight))
        weight.assign_sub(tape.gradient(value, weight))

    with AutoDist(batch_statistics="replica", **options) as autodist:
        return autodist.function(step).captured(np.ones([4, 3])).item


def test_an_exact_step_is_not_warned_of() -> None:
    assert not list(inexact(item_of(tf.reduce_mean)))
    assert not list(inexact(item_of(tf.reduce_sum)))


def test_an_op_that_mixes_a_replicas_own_examples_is_named() -> None:
    (mixed,) = inexact(item_of(lambda z: tf.math.log(tf.reduce_mean(tf.exp(z), name="average"), name="of_all")))
    assert "which trains 'weight', mixes the examples of a batch: 'of_all' (" in mixed
    assert 'name="of_all")))) is no sum or mean over examples' in mixed
    assert "taken for a mean over its parts" in mixed


def test_what_an_unknown_loss_is_taken_for_is_said() -> None:
    *_, unknown = inexact(item_of(lambda z: turned(tf.reduce_sum(z)), loss_reduction="sum"))
    assert "taken for a sum, as AutoDist(loss_reduction=...) says" in unknown


def test_programs_that_compute_in_another_order_are_named() -> None:
    item = two_layers()
    synchronizer = AllReduceSynchronizer(bytes_per_pack=64)
    nodes = tuple(VariableStrategy(one.name, synchronizer) for one in item.trainable_variables)
    strategy = Strategy(nodes, ("127.0.0.1:CPU:0",))
    program = compile(item, strategy, kernel_programs.topology(1, 1))
    other = replace(program, schedule=replace(program.schedule, computed_first=()))
    with pytest.raises(AutoDistError, match="is computed before"):
        require_same_schedule({0: lowered_text(program).encode(), 1: lowered_text(other).encode()})
