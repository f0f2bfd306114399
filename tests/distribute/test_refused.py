"""What a replica function may not do is refused when it is traced, with the way out, by any number of replicas."""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from autodist_py import CaptureError
from autodist_py.distribute import MirroredStrategy
from autodist_py.proto.errors import StrategyError

REPLICA = tf.distribute.get_replica_context


def own() -> tf.Tensor:
    return tf.cast(REPLICA().replica_id_in_sync_group, tf.float32)


def combined_in_a_loop() -> Any:
    return tf.while_loop(lambda x: x < 3.0, lambda x: [x + REPLICA().all_reduce("SUM", own())], [1.0])


def merged_in_a_loop() -> Any:
    return tf.while_loop(lambda x: x < 3.0, lambda x: [REPLICA().merge_call(lambda _, x: x, (x,))], [1.0])


def in_a_branch(function: Callable[[], Any]) -> Any:
    return tf.cond(own() > 0.0, function, own)


def combined_in_a_switched_branch() -> Any:
    return tf.switch_case(tf.cast(own(), tf.int32), [lambda: REPLICA().all_reduce("SUM", own()), own])


def drawn_in_a_branch() -> Any:
    return in_a_branch(lambda: REPLICA().all_reduce("SUM", tf.random.uniform([]) + own()))


def written_in_a_branch() -> Any:
    v = VARIABLES["of the strategy"]

    def written() -> tf.Tensor:
        v.assign_add(own())
        return REPLICA().all_reduce("SUM", v * 2.0)

    return in_a_branch(written)


def merged_behind_its_back_in_a_branch() -> Any:
    value = own() * 2.0
    return in_a_branch(lambda: REPLICA().merge_call(lambda _: value + 1.0))


def drawn_in_a_merge_call() -> Any:
    return REPLICA().merge_call(lambda _, x: x.values[0] * tf.random.uniform([]), (own(),))


def combined_in_a_branch(x: tf.Tensor) -> Any:
    return tf.cond(x > 0.0, lambda: REPLICA().all_reduce("SUM", x * x), lambda: x)


def merged_in_a_branch(x: tf.Tensor) -> Any:
    def summed() -> Any:
        return REPLICA().merge_call(lambda strategy, x: strategy.reduce("SUM", x, axis=None), (x * x,))

    return tf.cond(x > 0.0, summed, lambda: x)


def differentiated(function: Callable[[tf.Tensor], Any]) -> Any:
    x = own()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, x)


def differentiated_symbolically(function: Callable[[tf.Tensor], Any]) -> Any:
    x = own()
    return tf.gradients(function(x), x)


THROUGH_A_BRANCH = "a gradient is computed through what replicas combine in a branch. Combine it before"


def merged_behind_its_back() -> Any:
    value = own() * 2.0
    return REPLICA().merge_call(lambda _: value) + 0.0


def of_any_rank() -> tf.Tensor:
    return tf.ones(tf.ones([tf.cast(own(), tf.int32) + 1], tf.int32))


VARIABLES: dict[str, Any] = {}
PLAIN = tf.Variable(1.0)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (combined_in_a_loop, RuntimeError, "values of replicas are combined in a loop.*Do it before"),
        (merged_in_a_loop, RuntimeError, r"merge_call\(\) is called in a loop.*Do it before"),
        (combined_in_a_switched_branch, RuntimeError, "are combined in a tf.switch_case.*Use tf.case"),
        (drawn_in_a_branch, RuntimeError, r"is computed from .*\(RandomUniform\), which the branch does.*before the"),
        (written_in_a_branch, RuntimeError, r"\(ReadVariableOp\), .*or which reads what it has written"),
        (merged_behind_its_back_in_a_branch, CaptureError, "a merge_call returns 'cond/add.*Give it the value"),
        (drawn_in_a_merge_call, CaptureError, "a merge_call draws random numbers.*Draw them before"),
        (lambda: differentiated(combined_in_a_branch), CaptureError, THROUGH_A_BRANCH),
        (lambda: differentiated(merged_in_a_branch), CaptureError, THROUGH_A_BRANCH),
        (lambda: differentiated_symbolically(combined_in_a_branch), CaptureError, THROUGH_A_BRANCH),
        (lambda: differentiated_symbolically(merged_in_a_branch), CaptureError, THROUGH_A_BRANCH),
        (lambda: REPLICA().all_gather(own(), axis=0), ValueError, "scalars are not gathered.*tf.expand_dims"),
        (lambda: REPLICA().all_gather(of_any_rank(), axis=0), ValueError, "if they have the same rank.*ensure_shape"),
        (lambda: REPLICA().all_gather([own()], tf.cast(own(), tf.int32)), ValueError, "along an axis that is known"),
        (lambda: PLAIN.assign_add(own()), CaptureError, "is written by each replica.*within `with strategy.scope"),
        (merged_behind_its_back, CaptureError, "a merge_call returns 'mul.*Give it the value"),
        (lambda: tf.Variable(1.0).read_value(), ValueError, "created on the first call"),
        (lambda: tf.Variable(own()), CaptureError, "is created inside the step.*create it before"),
    ],
)
def test_what_replicas_cannot_do_is_refused(function: Callable[[], Any], error: type[Exception], message: str) -> None:
    strategy = MirroredStrategy(["CPU:0"])
    with strategy.scope():
        VARIABLES["of the strategy"] = tf.Variable(1.0, aggregation=tf.VariableAggregation.NONE)
    with pytest.raises(error, match=message):
        tf.function(lambda: strategy.run(function), autograph=False)()


@pytest.mark.parametrize("aggregation", [tf.VariableAggregation.ONLY_FIRST_REPLICA, tf.VariableAggregation.SUM])
def test_a_merge_call_reads_no_variable_of_a_replica_but_reduced(aggregation: tf.VariableAggregation) -> None:
    strategy = MirroredStrategy(["CPU:0"])
    with strategy.scope():
        seen = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=aggregation)

    def replica_step() -> Any:
        seen.assign_add(own() + 1.0)
        return REPLICA().merge_call(lambda _: seen.read_value() * 2.0)

    step = tf.function(lambda: strategy.run(replica_step), autograph=False)
    if aggregation is tf.VariableAggregation.SUM:
        assert strategy.experimental_local_results(step())[0] == 2.0
        return
    with pytest.raises(CaptureError, match=r"a merge_call reads variable 'Variable.*', of which each replica has"):
        step()


def test_an_error_of_ours_keeps_its_class_through_autograph() -> None:
    strategy = MirroredStrategy(["CPU:0"])

    @tf.function
    def step() -> Any:
        return strategy.run(lambda: PLAIN.assign_add(1.0))

    with pytest.raises(CaptureError, match=r"variable 'Variable.*' is written by each replica"):
        step()


def test_no_gradient_goes_through_run() -> None:
    strategy = MirroredStrategy(["CPU:0"])

    @tf.function
    def outside(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = strategy.run(lambda x: x * x, (x,))
        return tape.gradient(y, x)

    with pytest.raises(CaptureError, match=r"a gradient is computed through run.*with the tape, and what it watches"):
        outside(tf.constant(2.0))


def test_a_builder_that_is_not_known_is_refused_when_the_strategy_is_made() -> None:
    with pytest.raises(StrategyError, match="no strategy builder is called 'Nobody'"):
        MirroredStrategy(["CPU:0"], strategy_builder="Nobody")
