"""The tensors that are said to be computed of the whole batch have these shapes on a replica."""

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.capture.doors.function import CapturedFunction
from autodist_py.kernel.analysis.whole_batch_sizes import WholeTensor, gathers_rows, whole_tensors
from autodist_py.kernel.ir.names import on_replica
from autodist_py.kernel.pipeline import compile
from autodist_py.kernel.program import Options
from autodist_py.proto.graph_item import GraphItem
from tests.support import kernel_programs
from tests.support.mixing_losses import LOSSES, Weights, batch_of, step_of

EXAMPLES, REPLICAS = 6, 2


def captured(step: Callable[..., object], *arguments: np.ndarray) -> CapturedFunction:
    with AutoDist() as autodist:
        return autodist.function(step).captured(*arguments)


def whole(item: GraphItem, examples: int = EXAMPLES, replicas: int = REPLICAS) -> tuple[WholeTensor, ...]:
    given = {one.name: (examples, *one.shape[1:]) for one in item.inputs if one.shape}
    return whole_tensors(item, given, replicas=replicas)


def shapes_on_a_replica(step: CapturedFunction, ops: set[str]) -> dict[str, set[tuple[int, ...]]]:
    """For each of the ops the shapes of its results in a step, and those of its rows of all examples."""
    item = step.item
    program = compile(item, kernel_programs.all_reduce(item), kernel_programs.topology(REPLICAS), Options())
    initial = {name: np.asarray(variable) for name, variable in step.variables.items()}
    fed = [one.name for one in item.inputs]
    with kernel_programs.initialized(program, initial) as (running, _):
        found = {
            op: [result for made in running.graph.get_operations() if _is_of(made.name, op) for result in made.outputs]
            for op in ops
        }
        feeds = {f"{name}:0": value for name, value in zip(fed, batch_of(EXAMPLES), strict=True)}
        values = running.run(found, feeds)
    return {op: {result.shape for result in results} for op, results in values.items()}


def _is_of(name: str, op: str) -> bool:
    copy = on_replica(0, op)
    return name in (op, copy) or name.startswith(f"{copy}/statistic_rows")


@pytest.mark.parametrize("loss", LOSSES)
def test_shapes_are_those_that_a_replica_makes(loss: str) -> None:
    step = captured(step_of(loss, Weights(1)), *batch_of(EXAMPLES))
    tensors = whole(step.item)
    assert tensors or not gathers_rows(step.item)
    made = shapes_on_a_replica(step, {one.op for one in tensors})
    assert [one for one in tensors if one.shape not in made[one.op]] == []
    assert list(tensors) == sorted(tensors, key=lambda one: -one.nbytes)


def test_rows_of_a_replicas_own_are_counted_as_its_part() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.nn.log_softmax(tf.linalg.matmul(x, tf.transpose(tf.sin(x)), name="scores")))

    item = captured(step, np.ones([6, 3], np.float32)).item
    scores = next(one for one in whole(item, 600, 3) if one.op == "scores")
    assert scores == WholeTensor("scores", "MatMul", "float32", (200, 600), 480_000)


def test_what_may_not_run_in_a_step_is_left_out() -> None:
    """A branch of TensorFlow 1's control flow."""
    raw = tf.raw_ops

    def step(x: tf.Tensor) -> tf.Tensor:
        z = tf.sort(x, axis=0)
        rows, others = raw.Switch(data=z, pred=z[0, 0] > 0.0)
        scores = tf.linalg.matmul(others, others, transpose_b=True, name="scores")
        return tf.reduce_mean(raw.Merge(inputs=[rows[:, 0], scores[0]]).output)

    item = captured(step, np.ones([6, 3], np.float32)).item
    assert b"scores" in item.graph_def
    tensors = whole(item)
    assert (6, 3) in {one.shape for one in tensors}
    assert "scores" not in {one.op for one in tensors}


def test_a_size_that_depends_on_values_is_no_guess() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        z = tf.sort(x, axis=0)
        positive = tf.boolean_mask(z, z[:, 0] > 0.0)
        return tf.reduce_sum(tf.linalg.matmul(positive, positive, transpose_b=True, name="scores"))

    tensors = whole(captured(step, np.ones([6, 3], np.float32)).item)
    assert tensors and "scores" not in {one.op for one in tensors}


def test_shapes_that_no_step_can_have_are_left_to_it() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.sort(x @ tf.ones([3, 2]), axis=0) ** 2)

    item = captured(step, np.ones([6, 3], np.float32)).item
    assert whole_tensors(item, {item.inputs[0].name: (6, 3)}, replicas=REPLICAS)
    assert whole_tensors(item, {item.inputs[0].name: (6, 4)}, replicas=REPLICAS) == ()
