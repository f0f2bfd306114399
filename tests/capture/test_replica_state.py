"""State that TensorFlow's ops hold, other than in variables: several replicas would hold several."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import function as tf_function

from autodist_py import AutoDist
from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.doors.function import CapturedFunction
from autodist_py.capture.doors.graph import GraphScope, Signature
from autodist_py.kernel.ir.dataflow import op_types
from autodist_py.program.step_function import DistributedFunction, Program
from autodist_py.proto.errors import CaptureError
from tests.support.loop_programs import control_flow_of_tensorflow_1

v1 = tf.compat.v1
Step = Callable[[tf.Tensor], Any]
TWO_REPLICAS = CaptureOptions(num_replicas=2)
ROWS = np.random.default_rng(5).normal(size=(6, 3))


def not_compiled(name: str, captured: CapturedFunction) -> Program:
    raise NotImplementedError("the step is only captured")


def captured(step: Step, options: CaptureOptions = TWO_REPLICAS) -> CapturedFunction:
    return DistributedFunction(step, not_compiled, name="step", options=options, batched=None).captured(ROWS)


def trained(use: Step) -> tuple[Step, tf.Variable]:
    """A step that trains on what `use` makes of the rows."""
    kernel = tf.Variable(np.ones((3, 1)), name="kernel")

    def step(x: tf.Tensor) -> tf.Tensor:
        rows = tf.reshape(use(x), [-1, 3])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((rows @ kernel) ** 2)
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))
        return loss

    return step, kernel


def staged(x: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([tf.raw_ops.Stage(values=[x], shared_name="rows", name="puts")]):
        return tf.raw_ops.Unstage(dtypes=[tf.float64], shared_name="rows", name="takes")[0]


def mapped(x: tf.Tensor) -> tf.Tensor:
    given = {"key": tf.constant(1, tf.int64), "indices": [0], "dtypes": [tf.float64], "shared_name": "mapped rows"}
    with tf.control_dependencies([tf.raw_ops.MapStage(values=[x], name="puts", **given)]):
        given["indices"] = tf.constant([0])
        return tf.raw_ops.MapUnstage(name="takes", **given)[0]


def stacked(x: tf.Tensor) -> tf.Tensor:
    stack = tf.raw_ops.StackV2(max_size=2, elem_type=tf.float64, name="stack")
    with tf.control_dependencies([tf.raw_ops.StackPushV2(handle=stack, elem=x)]):
        return tf.raw_ops.StackPopV2(handle=stack, elem_type=tf.float64)


def unseen(x: tf.Tensor) -> tf.Tensor:
    return x + tf.cast(tf.raw_ops.NonDeterministicInts(shape=[], dtype=tf.int64, name="numbers"), x.dtype) * 0.0


def locked(x: tf.Tensor) -> tf.Tensor:
    lock = tf.raw_ops.MutexLock(mutex=tf.raw_ops.MutexV2(shared_name="rows", name="mutex"))
    with tf.control_dependencies([tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)]):
        return tf.identity(x)


def counted(x: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([tf.raw_ops.StageClear(dtypes=[tf.float64], shared_name="none", name="clears")]):
        return tf.identity(x)


HOLDING: Mapping[str, tuple[Step, str]] = {
    "Stage": (staged, "puts"),
    "MapStage": (mapped, "puts"),
    "StackV2": (stacked, "stack"),
    "NonDeterministicInts": (unseen, "numbers"),
    "MutexV2": (locked, "mutex"),
    "StageClear": (counted, "clears"),
}


def in_cond(use: Step) -> Step:
    return lambda x: tf.cond(tf.size(x) > 1000, lambda: x, lambda: tf.ensure_shape(use(x), x.shape))


def in_loop(use: Step) -> Step:
    def body(turn: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return turn + 1, tf.ensure_shape(use(x), x.shape)

    return lambda x: tf.while_loop(lambda turn, _: turn < 2, body, [0, x])[1]


def in_cond_in_loop(use: Step) -> Step:
    return in_loop(in_cond(use))


@pytest.mark.parametrize("op_type", HOLDING)
def test_state_that_each_replica_would_hold_is_refused_with_the_op_and_the_line(op_type: str) -> None:
    use, name = HOLDING[op_type]
    message = rf"'{name}' \(.*test_replica_state.py, line \d+: .*\) is an op of type {op_type}.*tf\.Variable"
    with pytest.raises(CaptureError, match=message):
        captured(trained(use)[0])


@pytest.mark.parametrize("within", [in_cond, in_loop, in_cond_in_loop])
@pytest.mark.parametrize("op_type", HOLDING)
def test_so_is_what_a_function_holds(op_type: str, within: Callable[[Step], Step]) -> None:
    use, name = HOLDING[op_type]
    message = rf"'\S+' \(.*test_replica_state.py, line \d+: .*\) runs '\S*/{name}', which is an op of type {op_type}\."
    with pytest.raises(CaptureError, match=message):
        captured(trained(within(use))[0])


def read_within_a_loop(x: tf.Tensor) -> tf.Tensor:
    return in_loop(lambda value: value + next(ITERATOR))(x)


ITERATOR = iter(tf.data.Dataset.from_tensors(np.ones(3)).repeat())


def read_if_any(x: tf.Tensor) -> tf.Tensor:
    for value in ITERATOR:
        x += value
        if tf.reduce_sum(x) > 10.0:
            break
    return x


@pytest.mark.parametrize(
    ("use", "op_type"), [(read_within_a_loop, "IteratorGetNext"), (read_if_any, "IteratorGetNextAsOptional")]
)
def test_so_are_elements_that_each_replica_would_take_for_itself(use: Step, op_type: str) -> None:
    with pytest.raises(CaptureError, match=rf"'while' \(.*\) runs '\S+', which is an op of type {op_type}\."):
        captured(trained(use)[0])


def test_so_is_what_a_called_function_holds() -> None:
    with pytest.raises(CaptureError, match=r"puts' .*is an op of type Stage\."):
        captured(trained(tf.function(staged))[0])


def test_so_is_what_a_function_of_tensorflow_1_holds() -> None:
    """An op that calls it has its name for a type."""

    @tf_function.Defun(tf.float64)
    def held(x: tf.Tensor) -> tf.Tensor:
        return staged(x)

    with pytest.raises(CaptureError, match=r"runs '\S*puts', which is an op of type Stage\."):
        built(held, TWO_REPLICAS)[0].item(TWO_REPLICAS)


@pytest.mark.parametrize("use", [staged, mapped, stacked, in_cond(staged), in_cond_in_loop(stacked)])
def test_one_replica_holds_what_one_device_does(use: Step) -> None:
    step, expected = trained(use)
    of_one_device = tf.function(step)
    with AutoDist() as autodist:
        step, kernel = trained(use)
        distributed = autodist.function(step)
        for _ in range(3):
            np.testing.assert_allclose(distributed(ROWS), of_one_device(tf.constant(ROWS)), rtol=1e-12)
        np.testing.assert_allclose(kernel, expected, rtol=1e-12)


def accumulated(x: tf.Tensor) -> tf.Tensor:
    sums = v1.ConditionalAccumulator(tf.float64, [3], name="sums")
    with tf.control_dependencies([sums.apply_grad(tf.reduce_sum(x, 0), local_step=9)]):
        return x + sums.take_grad(1)


def inserted(x: tf.Tensor) -> tf.Tensor:
    barrier = tf.raw_ops.Barrier(component_types=[tf.float64], shapes=[[3]], name="barrier")
    insert = tf.raw_ops.BarrierInsertMany(handle=barrier, keys=["a"], values=[x[0]], component_index=0)
    with tf.control_dependencies([insert]):
        return x + tf.raw_ops.BarrierTakeMany(handle=barrier, num_elements=1, component_types=[tf.float64]).values[0]


def read(x: tf.Tensor) -> tf.Tensor:
    reader, queue = v1.IdentityReader(name="reader"), tf.queue.FIFOQueue(9, [tf.string], [[]])
    with tf.control_dependencies([queue.enqueue(["1.0"])]):
        return x * tf.strings.to_number(reader.read(queue)[1], tf.float64)


def built(use: Step, options: CaptureOptions) -> tuple[GraphScope, tf.Tensor, tf.Operation]:
    """A graph of TensorFlow 1 that trains, and its placeholder and training op."""
    scope = GraphScope(tf.Graph(), options, seed=None)
    with scope.graph.as_default(), scope.recording():
        x, step = in_graph(use)
    return scope, x, step


def in_graph(use: Step) -> tuple[tf.Tensor, tf.Operation]:
    x = v1.placeholder(tf.float64, [None, 3], name="x")
    kernel = v1.get_variable("kernel", initializer=np.ones((3, 1)), use_resource=True)
    step = v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean((tf.reshape(use(x), [-1, 3]) @ kernel) ** 2))
    return x, step


@pytest.mark.parametrize(
    ("use", "name", "op_type"),
    [
        (staged, "puts", "Stage"),
        (accumulated, "sums", "ResourceConditionalAccumulator"),
        (inserted, "barrier", "Barrier"),
        (read, "reader", "IdentityReaderV2"),
    ],
)
def test_so_is_what_a_graph_of_tensorflow_1_holds(use: Step, name: str, op_type: str) -> None:
    scope, _, _ = built(use, TWO_REPLICAS)
    message = rf"'{name}' \(.*test_replica_state.py, line \d+: .*\) is an op of type {op_type}\."
    with pytest.raises(CaptureError, match=message):
        scope.item(TWO_REPLICAS)


def test_what_one_worker_runs_alone_may_hold_what_it_will() -> None:
    """Several replicas share a run of a session that trains; not so one that fills a staging area, say."""
    scope = GraphScope(tf.Graph(), TWO_REPLICAS, seed=None)
    with scope.graph.as_default(), scope.recording():
        fill = tf.raw_ops.Stage(values=[tf.constant(ROWS)], name="fill")
        in_graph(tf.identity)
    assert op_types(scope.cut(Signature((), (), (fill.name,)), TWO_REPLICAS))["fill"] == "Stage"


@pytest.mark.parametrize("use", [staged, accumulated, inserted, read])
def test_one_replica_of_a_session_holds_what_one_device_does(use: Step) -> None:
    def run(autodist: AutoDist | None) -> np.ndarray:
        with tf.Graph().as_default() as graph, autodist.scope() if autodist else graph.as_default():
            x, step = in_graph(use)
            with autodist.create_distributed_session() if autodist else v1.Session() as session:
                session.run(v1.global_variables_initializer())
                for _ in range(3):
                    session.run(step, {x: ROWS})
                kernel: np.ndarray = session.run("kernel/Read/ReadVariableOp:0")
                return kernel

    expected = run(None)
    with AutoDist() as autodist:
        np.testing.assert_allclose(run(autodist), expected, rtol=1e-12)


def looped(x: tf.Tensor) -> tf.Tensor:
    """Its gradient keeps values on stacks of TensorFlow 1."""
    with control_flow_of_tensorflow_1():
        return in_loop(tf.tanh)(x * v1.get_variable("factor", [], tf.float64, use_resource=True))


def summed(x: tf.Tensor) -> tf.Tensor:
    elements = tf.data.Dataset.range(3).map(lambda i: tf.cast(i, tf.float64))
    return x + elements.reduce(tf.constant(0.0, tf.float64), tf.add)


KNOWN: Mapping[str, Step] = {
    "elements of one step": summed,
    "a tensor array": lambda x: tf.map_fn(tf.tanh, x),
    "the time": lambda x: x + 0.0 * tf.timestamp(),
    "a check": lambda x: tf.debugging.check_numerics(x, "rows"),
    "a printed value": lambda x: v1.Print(x, [tf.size(x)]),
}


def test_the_time_is_read_outside_of_branches() -> None:
    """There replicas read it together: see tests/oracle/test_random.py."""
    assert not captured(trained(KNOWN["the time"])[0]).item.mixtures
    (mixture,) = captured(trained(in_cond(KNOWN["the time"]))[0]).item.mixtures
    assert "reads the time" in mixture


@pytest.mark.parametrize("use", KNOWN.values(), ids=KNOWN)
def test_what_is_known_of_is_not_refused(use: Step) -> None:
    for one in (use, in_cond(use)):
        assert captured(trained(one)[0]).item.gradients


def test_elements_that_a_worker_takes_for_all_its_replicas_are_not_refused() -> None:
    assert captured(trained(lambda x: x + next(ITERATOR))[0]).item.gradients


def test_a_stack_of_a_loop_of_tensorflow_1_is_not_refused() -> None:
    scope, _, _ = built(looped, TWO_REPLICAS)
    assert "StackPopV2" in op_types(scope.item(TWO_REPLICAS)).values()
