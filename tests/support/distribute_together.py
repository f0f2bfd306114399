"""What replicas that have a variable together may do, and what is refused with the way out.

A check is given what makes a strategy of two replicas, by a builder. It runs in a process of two devices.
"""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from autodist_py import AutoDist, AutoDistError, CaptureError, StrategyError
from autodist_py.distribute import AutoDistStrategy, CentralStorageStrategy
from autodist_py.proto.resource_spec import NodeSpec, ResourceSpec
from tests.support.cutting import CutInTwo

DEVICES = ["CPU:0", "CPU:1"]
REPLICA = tf.distribute.get_replica_context


Make = Callable[[Any], AutoDistStrategy]
CHECKS: dict[str, Callable[[Make], None]] = {}


def check(function: Callable[[Make], None]) -> Callable[[Make], None]:
    CHECKS[function.__name__] = function
    return function


def of_two_replicas(builder: Any) -> AutoDistStrategy:
    """The strategy of an AutoDist with two devices."""
    return AutoDistStrategy(AutoDist(ResourceSpec((NodeSpec("127.0.0.1", cpus=(0, 1)),)), builder))


def own() -> tf.Tensor:
    return tf.cast(REPLICA().replica_id_in_sync_group, tf.float32) + 1.0


def variable(strategy: Any, **options: Any) -> Any:
    with strategy.scope():
        return tf.Variable(tf.ones([4]), **options)


def momentum_of(step: Any) -> Any:
    """The momentum of the variable that `step` trains."""
    (momentum,) = step.optimizer.variables[2:]
    return momentum.value


def trained(strategy: Any, v: Any) -> Any:
    """A step that trains `v`, with its optimizer."""
    with strategy.scope():
        optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build([v])
    step = tf.function(lambda: strategy.run(lambda: optimizer.apply_gradients([(v * own(), v)])))
    step.optimizer = optimizer
    return step


@check
def a_variable_is_there_once(made: Make) -> None:
    for strategy in (made("PS()"), CentralStorageStrategy(DEVICES)):
        v = variable(strategy)
        assert len(v.values) == 1 and len(strategy.experimental_local_results(v)) == 1
        counts = variable(strategy, synchronization=tf.VariableSynchronization.ON_READ)
        assert len(counts.values) == 2


@check
def the_parameters_have_a_device_of_their_own(made: Make) -> None:
    strategy = CentralStorageStrategy(DEVICES, "CPU:1")
    v = variable(strategy)
    trained(strategy, v)()
    assert v.values[0].device.endswith("CPU:1")
    assert [one.rpartition(":")[2] for one in strategy.extended.parameter_devices] == ["1"]
    assert isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy)
    assert abs(v.numpy()[0] - (1.0 - 0.1 * 3.0)) < 1e-6


@check
def what_differs_between_replicas_is_not_written_to_what_they_have_together(made: Make) -> None:
    """As under TensorFlow's, which asks for an aggregation."""
    for strategy in (CentralStorageStrategy(DEVICES), tf.distribute.experimental.CentralStorageStrategy(DEVICES)):
        v = variable(strategy)
        with pytest.raises(ValueError, match="aggregation"):
            tf.function(lambda strategy=strategy, v=v: strategy.run(lambda: v.assign_add(tf.ones([4]) * own())))()


@check
def replicas_that_run_one_after_the_other_do_not_write_what_the_one_before_has_written(made: Make) -> None:
    central = CentralStorageStrategy(DEVICES)
    v = variable(central)
    with pytest.raises(CaptureError, match="is one for all replicas, and 'run' writes"):
        central.run(lambda: v.assign(v * 0.5))
    summed = variable(central, aggregation=tf.VariableAggregation.SUM)
    central.run(lambda: summed.assign_add(tf.ones([4])))
    assert summed.numpy()[0] == 3.0
    strategy = made("PS()")
    with pytest.raises(CaptureError, match=r"Give it tf.function\(...\)"):
        strategy.run(lambda: variable(strategy))
    parts = strategy.experimental_distribute_values_from_function(lambda context: tf.ones([2, 3]))
    assert strategy.reduce("MEAN", parts, axis=0).numpy().tolist() == [1.0, 1.0, 1.0]


@check
def what_each_replica_has_for_itself_is_trained_in_no_shards(made: Make) -> None:
    for builder in (CutInTwo(), "PS()"):
        strategy = made(builder)
        v = variable(strategy)
        write = tf.function(lambda strategy=strategy, v=v: strategy.run(lambda: v.assign_add(tf.ones([4]) * own())))
        write()
        with pytest.raises(StrategyError, match=r"is on no server, and in no shards. Give it AllReduce"):
            trained(strategy, v)()


@check
def a_weight_is_read_between_steps_of_one_function(made: Make) -> None:
    for builder in (CutInTwo(), "PS()"):
        strategy = made(builder)
        v = variable(strategy)
        step = trained(strategy, v)

        @tf.function
        def two_steps(step: Any = step, v: Any = v) -> Any:
            step()
            between = v.read_value() + 0.0
            step()
            return between, v.read_value() + 0.0

        results = [float(one[0]) for _ in range(2) for one in two_steps()]
        expected, weight, momentum = [], 1.0, 0.0
        for _ in range(4):
            momentum = 0.9 * momentum - 0.1 * 3.0 * weight
            weight += momentum
            expected.append(weight)
        assert all(abs(one - other) < 1e-5 for one, other in zip(results, expected, strict=True))


@check
def a_value_that_was_read_as_one_is_not_given_to_each_replica_later(made: Make) -> None:
    strategy = made("PS()")
    v = variable(strategy)
    tf.function(lambda: strategy.run(lambda: v * 2.0))()
    write = tf.function(lambda: strategy.run(lambda: v.assign_add(tf.ones([4]) * own())))
    with pytest.raises(CaptureError, match=r"read as one for all. Run this one first, as fit\(\) before evaluate\(\)"):
        write()
    other = variable(strategy)
    tf.function(lambda: strategy.run(lambda: other.assign_add(tf.ones([4]) * own())))()
    assert [one.numpy()[0] for one in other.values] == [2.0, 3.0]
    read = tf.function(lambda: strategy.run(lambda: other * 2.0))
    assert [one.numpy()[0] for one in strategy.experimental_local_results(read())] == [4.0, 6.0]


@check
def a_variable_that_is_given_other_values_is_each_replicas_own(made: Make) -> None:
    strategy = made("PS()")
    v, aggregated = variable(strategy), variable(strategy, aggregation=tf.VariableAggregation.SUM)
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.fill([4], 10.0 * (context.replica_id_in_sync_group + 1))
    )
    strategy.extended.update(v, lambda v, value: v.assign(value), args=(values,))
    assert [one.numpy()[0] for one in v.values] == [10.0, 20.0]
    with pytest.raises(CaptureError, match="is one for all replicas"):
        strategy.extended.update(aggregated, lambda v, value: v.assign(value), args=(values,))


@check
def an_update_of_several_components_writes_nothing_that_is_there_once(made: Make) -> None:
    strategy = made("PS()")
    once, beside = variable(strategy), variable(strategy, aggregation=tf.VariableAggregation.SUM)
    local = variable(strategy, synchronization=tf.VariableSynchronization.ON_READ)
    devices, extended, ones = strategy.extended.worker_devices, strategy.extended, tf.ones([4])
    with pytest.raises(CaptureError, match="calls its function 2 times, once for each component"):
        extended.update(local, lambda _: once.assign_add(ones))
    with pytest.raises(CaptureError, match="calls its function 2 times"):
        extended.update(local, lambda _: once[:1].assign(once[:1] + 1.0))
    with pytest.raises(CaptureError, match="calls its function 2 times"):
        extended.update_non_slot(devices, lambda: once.assign_add(ones))
    with pytest.raises(CaptureError, match="calls its function 2 times"):
        extended.update(local, lambda _: tf.raw_ops.AssignAddVariableOp(resource=once.handle, value=ones))
    extended.update(once, lambda one: (one.assign_add(ones), beside.assign_add(one))[1])
    assert [one.numpy()[0] for one in (*once.values, *beside.values)] == [2.0, 3.0]
    extended.update_non_slot(devices, lambda: local.assign(ones * 5.0))
    assert [one.numpy()[0] for one in local.values] == [5.0, 5.0]


@check
def a_variable_that_a_function_writes_for_all_is_not_given_to_each_replica_later(made: Make) -> None:
    strategy = made("PS()")
    values = strategy.experimental_distribute_values_from_function(lambda _: tf.zeros([4]))
    refused = r"'{}' gives each replica its own value .*a tf.function writes for all outside of run\(\)"

    def updated(v: Any) -> Any:
        return strategy.extended.update(v, lambda one, value: one.assign(value), args=(values,))

    written, run, within = (variable(strategy) for _ in range(3))
    writes = [tf.function(lambda v=v: v.assign(tf.ones([4]) * 7.0)) for v in (written, run)]
    for write in writes:
        write()
    with pytest.raises(CaptureError, match=refused.format("extended.update")):
        updated(written)
    with pytest.raises(CaptureError, match=refused.format(".*")):
        tf.function(lambda: strategy.run(lambda: run.assign_add(tf.ones([4]) * own())))()
    with pytest.raises(CaptureError, match=refused.format("extended.update")):
        tf.function(lambda: updated(within))()
    for write in writes:
        write()
    assert [len(v.values) for v in (written, run, within)] == [1, 1, 1]
    read = variable(strategy)
    double = tf.function(lambda: read * 2.0)
    assert double().numpy()[0] == 2.0
    updated(read)
    assert double().numpy()[0] == 0.0


@check
def eager_code_sees_what_every_step_has_left_in_shards(made: Make) -> None:
    strategy = made(CutInTwo())
    v = variable(strategy)
    step, expected, momentum = trained(strategy, v), 1.0, 0.0
    for _ in range(3):
        step()
        momentum = 0.9 * momentum - 0.1 * 3.0 * expected
        expected += momentum
        assert abs(v.numpy()[0] - expected) < 1e-5
        assert abs(momentum_of(step).numpy()[0] - momentum) < 1e-5


@check
def an_old_value_is_read_by_no_function(made: Make) -> None:
    for way in ("sum", "component", "reduced", "update", "write"):
        for reads_first in (True, False):
            _require_no_old_value(made, way, reads_first=reads_first)


def _require_no_old_value(made: Make, way: str, *, reads_first: bool) -> None:
    """A weight that each step reads whole is as new as can be; a momentum is in its shards."""
    strategy = made(CutInTwo())
    v = variable(strategy)
    step = trained(strategy, v)
    momentum = momentum_of(step)
    reads = {
        "sum": lambda: tf.reduce_sum(momentum),
        "component": lambda: strategy.experimental_local_results(momentum)[0] + 0.0,
        "reduced": lambda: strategy.reduce("MEAN", momentum, axis=None) + 0.0,
        "update": lambda: strategy.extended.update(momentum, lambda one: one.read_value() * 1.0),
        "write": lambda: momentum.assign_add(tf.ones([4])),
    }
    read = tf.function(reads[way])
    first, then = (read, step) if reads_first else (step, read)
    first()
    with pytest.raises(ValueError, match=r"in shards\. A tf.function reads or writes it outside of run\(\)"):
        then()
    written = 4.0 if reads_first and way == "write" else 0.0
    assert abs(tf.reduce_sum(momentum).numpy() - (written if reads_first else -1.2)) < 1e-6  # Eagerly it is seen.
    if not reads_first:
        step()
        assert abs(tf.function(lambda: tf.reduce_sum(v))().numpy() - tf.reduce_sum(v).numpy()) < 1e-6


@check
def workers_that_take_their_steps_by_themselves_are_refused(made: Make) -> None:
    strategy = made("PS(sync=False)")
    v = variable(strategy)
    with pytest.raises(StrategyError, match=r"take each step together.*Leave sync=False, staleness"):
        trained(strategy, v)()


@check
def a_closed_autodist_has_no_strategy(made: Make) -> None:
    autodist = AutoDist(ResourceSpec((NodeSpec("127.0.0.1", cpus=(0,)),)))
    autodist.close()
    with pytest.raises(AutoDistError, match="AutoDistStrategy"):
        AutoDistStrategy(autodist)
    with pytest.raises(StrategyError, match="autodist"):
        AutoDistStrategy("PS()")  # type: ignore[arg-type]


@check
def a_compressor_may_remember_what_it_has_left_out(made: Make) -> None:
    strategy = made("AllReduce(compressor='TopKCompressor')")
    v = variable(strategy)
    step = trained(strategy, v)
    for _ in range(3):
        step()
    assert v.numpy()[0] < 1.0
