"""Mistakes: each gives one clear message (the rule, the values, the way out) where it is made."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist, AutoDistError, CaptureError, SessionError, StrategyError


@pytest.fixture
def autodist() -> Iterator[AutoDist]:
    with AutoDist() as autodist:
        yield autodist


class Linear:
    """A linear regression in graph mode."""

    def __init__(self) -> None:
        self.x = tf.compat.v1.placeholder(tf.float32, [None, 3], "x")
        self.y = tf.compat.v1.placeholder(tf.float32, [None], "y")
        self.weights = tf.compat.v1.get_variable("weights", [3, 1])
        self.loss = tf.reduce_mean((tf.squeeze(self.x @ self.weights, 1) - self.y) ** 2)
        self.train = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(self.loss)
        self.init = tf.compat.v1.global_variables_initializer()

    def feeds(self, rows: int = 4) -> dict[tf.Tensor, np.ndarray]:
        return {self.x: np.ones([rows, 3]), self.y: np.ones([rows])}


@pytest.fixture
def linear(autodist: AutoDist) -> Iterator[tuple[Linear, Any]]:
    with tf.Graph().as_default(), autodist.scope():
        program = Linear()
        session = autodist.create_distributed_session()
        session.run(program.init)
        yield program, session


def test_a_step_whose_gradients_reach_no_variable_is_refused(autodist: AutoDist) -> None:
    weight = tf.Variable(1.0, name="weight")

    @autodist.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(weight * x)
        tape.gradient(loss, weight)
        return loss

    with pytest.raises(CaptureError, match=r"gradients \(of weight\).*nothing would train.*apply_gradients"):
        step(np.ones(4, np.float32))


def test_a_variable_created_inside_the_step_is_refused(autodist: AutoDist) -> None:
    @autodist.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(x * tf.Variable(1.0, name="scale"))

    with pytest.raises(CaptureError, match=r"\(scale\) is created inside the step.*To keep one, create it before"):
        step(np.ones(4, np.float32))


def test_batched_arguments_of_different_sizes_are_refused(autodist: AutoDist) -> None:
    @autodist.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(x) + tf.reduce_sum(y)

    step(np.ones([4, 2]), np.ones(4))
    with pytest.raises(CaptureError, match=r"same number of examples.*\(5, 2\), \(4,\).*batched="):
        step(np.ones([5, 2]), np.ones(4))


def test_arguments_whose_sizes_differ_in_the_first_call_are_named(autodist: AutoDist) -> None:
    @autodist.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(x - y)

    with pytest.raises(CaptureError, match=r"x \(5,\), y \(4,\).*same number of examples.*batched=") as caught:
        step(np.ones(5), np.ones(4))
    assert isinstance(caught.value.__cause__, tf.errors.InvalidArgumentError)
    assert step(np.ones(5), np.ones(5)) == 0.0


def test_a_failure_of_arguments_of_one_size_stays_what_it_is(autodist: AutoDist) -> None:
    @autodist.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.debugging.check_numerics(x, "not finite")

    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        step(np.array([1.0, np.nan]))


def test_a_step_that_needs_a_static_batch_size_is_told_that_it_is_unknown(autodist: AutoDist) -> None:
    @autodist.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.zeros([x.shape[0]]) + x

    with pytest.raises(Exception) as caught:
        step(np.ones(4, np.float32))
    assert "tf.shape(x)[0]" in "".join(caught.value.__notes__)


def test_a_step_called_inside_another_function_is_refused(autodist: AutoDist) -> None:
    step = autodist.function(lambda x: x + 1)

    with pytest.raises(CaptureError, match="call it from plain Python"):
        tf.function(lambda: step(tf.ones(2)))()


def test_a_ragged_argument_is_refused(autodist: AutoDist) -> None:
    step = autodist.function(lambda x: x)

    with pytest.raises(CaptureError, match="RaggedTensor, which cannot be shared out by rows"):
        step(tf.ragged.constant([[1], [2, 3]]))


def test_a_tensor_of_another_graph_cannot_be_fetched(linear: tuple[Linear, Any]) -> None:
    with tf.Graph().as_default():
        stranger = tf.constant(1.0, name="stranger")
    with pytest.raises(SessionError, match=r"of the session's graph.*stranger"):
        linear[1].run(stranger)


def test_a_feed_of_a_wrong_shape_is_refused(linear: tuple[Linear, Any]) -> None:
    program, session = linear
    with pytest.raises(SessionError, match=r"shape \(4, 2\).*cannot be fed to 'x:0', which has shape \(None, 3\)"):
        session.run(program.loss, program.feeds() | {program.x: np.ones([4, 2])})


def test_feeds_of_different_batch_sizes_are_refused(linear: tuple[Linear, Any]) -> None:
    program, session = linear
    with pytest.raises(SessionError, match="same number of examples; received x:0: 4, y:0: 5"):
        session.run(program.loss, program.feeds() | {program.y: np.ones([5])})


def test_a_placeholder_that_is_not_fed_is_named(linear: tuple[Linear, Any]) -> None:
    program, session = linear
    with pytest.raises(CaptureError, match="placeholder 'y' must be fed"):
        session.run(program.loss, {program.x: np.ones([4, 3])})


def test_what_trains_and_is_added_after_the_session_exists_is_refused(linear: tuple[Linear, Any]) -> None:
    program, session = linear
    late = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(program.loss, name="late")
    with pytest.raises(SessionError, match=r"edited after the session was created: late/update_weights.*before create"):
        session.run(late, program.feeds())


def test_a_variable_that_is_added_after_the_session_exists_is_refused(linear: tuple[Linear, Any]) -> None:
    late = tf.compat.v1.get_variable("late", [2])
    with pytest.raises(SessionError, match="edited after the session was created: late"):
        linear[1].run(late.initializer)


def test_initializers_may_be_added_after_the_session_exists(linear: tuple[Linear, Any]) -> None:
    program, session = linear
    session.run(tf.compat.v1.global_variables_initializer())
    assert np.isfinite(session.run(program.loss, program.feeds()))


def test_a_second_graph_under_one_autodist_is_refused(linear: tuple[Linear, Any], autodist: AutoDist) -> None:
    with (
        pytest.raises(CaptureError, match=r"one AutoDist object compiles one graph.*make another AutoDist"),
        tf.Graph().as_default(),
        autodist.scope(),
    ):
        pass


def test_a_second_open_session_is_refused(linear: tuple[Linear, Any], autodist: AutoDist) -> None:
    with pytest.raises(CaptureError, match="open session already; close it first"):
        autodist.create_distributed_session()


def test_a_session_without_a_graph_is_refused(autodist: AutoDist) -> None:
    with pytest.raises(CaptureError, match=r"no graph was built in scope\(\).*@autodist.function"):
        autodist.create_distributed_session()


def test_a_closed_session_says_so(linear: tuple[Linear, Any]) -> None:
    program, session = linear
    session.close()
    with pytest.raises(SessionError, match="the session is closed"):
        session.run(program.loss, program.feeds())


def test_reference_variables_are_refused(autodist: AutoDist) -> None:
    with tf.Graph().as_default(), autodist.scope():
        tf.compat.v1.get_variable("old", [2], use_resource=False)
        with pytest.raises(CaptureError, match=r"'old' is a reference variable.*make it in scope\(\)"):
            autodist.create_distributed_session()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: AutoDist(batch="globl"), AutoDistError, "batch must be one of global, local; received 'globl'"),
        (lambda: AutoDist(loss_reduction="avg"), AutoDistError, "loss_reduction must be one of mean, sum"),
        (lambda: AutoDist(strategy_builder="AllReduc"), StrategyError, "AllReduce"),
        (lambda: AutoDist(strategy_builder="AllReduce(chunk=3)"), StrategyError, "chunk_size"),
        (lambda: AutoDist("missing.yml"), AutoDistError, "missing.yml"),
    ],
)
def test_wrong_arguments_of_autodist_name_what_is_allowed(
    make: Callable[[], AutoDist], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_closed_autodist_says_so() -> None:
    autodist = AutoDist()
    step = autodist.function(lambda x: x + 1)
    autodist.close()
    with pytest.raises(AutoDistError, match="closed; make a new one"):
        step(tf.ones(2))


def test_a_step_function_in_a_graph_says_what_to_leave_out(autodist: AutoDist) -> None:
    with tf.Graph().as_default(), autodist.scope():
        step = autodist.function(lambda x: x + 1)
        with pytest.raises(
            CaptureError, match=r"Leave `tf\.Graph\(\)\.as_default\(\)`.*Or leave @autodist\.function out"
        ):
            step(tf.zeros([4]))


@pytest.mark.parametrize("name", ["AutoDist/x", "AutoDist-Replica-0/x", "w/AutoDist-Assign-1"])
def test_names_of_the_kernels_own_are_refused(autodist: AutoDist, name: str) -> None:
    with pytest.raises(CaptureError, match=f"'{name}' is named as what autodist_py adds.*another name"):
        autodist.function(lambda x: tf.identity(x, name=name))(tf.zeros([4]))


def test_other_names_like_ours_are_the_users(autodist: AutoDist) -> None:
    def step(autodist_x: tf.Tensor) -> tf.Tensor:
        return tf.identity(autodist_x + 1.0, name="AutoDistribution")

    assert np.array_equal(autodist.function(step)(tf.zeros([2])), [1.0, 1.0])
