"""The programs of `tower_programs.py`, as `tf.distribute` has them: functions of one of its strategies."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support.distribute_cases import MEAN, REPLICA, STEPS, SUM, components
from tests.support.tower_data import dataset, gradients_of, numbered, regression

v1 = tf.compat.v1
PROGRAMS: dict[str, Callable[[Any], Any]] = {}


def reference(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    PROGRAMS[function.__name__] = function
    return function


def dealt(strategy: Any, make: Callable[[], Any] = dataset) -> Any:
    return strategy.distribute_datasets_from_function(lambda _: make())


def standard_pattern(strategy: Any, wrap: Callable[..., Any]) -> Any:
    extended = strategy.extended
    with strategy.scope():
        weights, bias = regression()

        @wrap
        def step(batch: Any) -> Any:
            loss, slopes = strategy.run(lambda batch: gradients_of(batch, weights, bias), (batch,))
            sums = extended.batch_reduce_to(SUM, list(zip(slopes, [weights, bias], strict=True)))
            for variable, slope in zip([weights, bias], sums, strict=True):
                extended.update(variable, lambda v, slope: v.assign_sub(0.05 * slope), (slope,))
            return strategy.reduce(MEAN, loss, axis=None), strategy.reduce(SUM, loss, axis=None)

        results = [step(batch) for _, batch in zip(range(STEPS), dealt(strategy), strict=False)]
    return results, components([weights, bias])


@reference
def the_standard_pattern(strategy: Any) -> Any:
    return standard_pattern(strategy, tf.function)


@reference
def the_standard_pattern_eagerly(strategy: Any) -> Any:
    return standard_pattern(strategy, lambda step: step)


@reference
def optimizers_in_towers(strategy: Any) -> Any:
    with strategy.scope():
        weights, bias = regression()
        made = [v1.train.AdamOptimizer(0.1), v1.train.MomentumOptimizer(0.1, 0.9)]

        def replica_fn(batch: Any, optimizer: Any) -> Any:
            loss, slopes = gradients_of(batch, weights, bias)
            optimizer.apply_gradients(list(zip(slopes, [weights, bias], strict=True)))
            return loss

        @tf.function
        def step(batch: Any) -> Any:
            return tuple(strategy.run(replica_fn, (batch, optimizer)) for optimizer in made)

        iterator = iter(dealt(strategy))
        results = [strategy.experimental_local_results(step(next(iterator))) for _ in range(STEPS)]
    slots = [made[0].get_slot(weights, "m"), made[0].get_slot(bias, "v"), made[1].get_slot(bias, "momentum")]
    return results, components([weights, bias, *slots])


@reference
def what_a_merge_call_does(strategy: Any) -> Any:
    with strategy.scope():
        v = tf.Variable([1.0, 2.0])

        def merge_fn(strategy: Any, value: Any) -> Any:
            extended = strategy.extended
            total, mean = extended.reduce_to(SUM, value, v), extended.reduce_to(MEAN, value, v)
            extended.update(v, lambda v, total, mean: v.assign_add(0.5 * total + mean), (total, mean))
            doubled = extended.update(v, lambda v: v.read_value() * 2.0, group=False)
            more = extended.update(v, lambda v, total: 2.0 + total, (total,))
            return total, tf.reduce_sum(doubled[0]), strategy.experimental_local_results(value)[0], more

        def replica_fn(x: Any) -> Any:
            context = REPLICA()
            own = x[0, :2] * tf.cast(context.replica_id_in_sync_group + 1, tf.float32) / context.num_replicas_in_sync
            return context.merge_call(merge_fn, (own,)), v.read_value()

        step = tf.function(lambda batch: strategy.run(replica_fn, (batch[0],)))
        iterator = iter(dealt(strategy))
        results = [strategy.experimental_local_results(step(next(iterator))) for _ in range(STEPS)]
    return results, components([v])


@reference
def tower_local_variables(strategy: Any) -> Any:
    on_read = tf.VariableSynchronization.ON_READ
    with strategy.scope():
        total = tf.Variable(0.0, synchronization=on_read, aggregation=tf.VariableAggregation.SUM, trainable=False)
        mean = tf.Variable(0.0, synchronization=on_read, aggregation=tf.VariableAggregation.MEAN, trainable=False)

        def replica_fn(batch: Any) -> Any:
            total.assign_add(tf.reduce_sum(batch[0]))
            mean.assign_add(tf.reduce_mean(batch[0]))
            return total.read_value()

        @tf.function
        def step(batch: Any) -> Any:
            own = strategy.run(replica_fn, (batch,))
            return own, total.read_value(), mean.read_value(), total.read_value() / strategy.num_replicas_in_sync

        flat = []
        for _, batch in zip(range(STEPS), dealt(strategy), strict=False):
            own, summed, averaged, both = map(strategy.experimental_local_results, step(batch))
            flat.append([own, summed, averaged, both])
        return flat, components([total, mean]), [False, False]


@reference
def variables_beside_others(strategy: Any) -> Any:
    extended = strategy.extended
    with strategy.scope():
        weights, bias = regression()
        slot, power = tf.Variable(tf.ones_like(weights), trainable=False), tf.Variable(0.9)

        def update_fn(v: Any, slot: Any, slope: Any) -> Any:
            slot.assign(0.9 * slot + slope)
            return v.assign_sub(0.1 * slot)

        @tf.function
        def step(batch: Any) -> Any:
            loss, slopes = strategy.run(lambda batch: gradients_of(batch, weights, bias), (batch,))
            changed = extended.update(weights, update_fn, (slot, extended.reduce_to(SUM, slopes[0], weights)))
            apart = extended.update(bias, lambda v: v.assign_add([1.0]), group=False)
            extended.update(power, lambda power: power.assign(power * 0.9))
            return strategy.experimental_local_results(changed), apart, strategy.experimental_local_results(loss)

        results = [step(batch) for _, batch in zip(range(STEPS), dealt(strategy), strict=False)]
    return results, components([weights, bias, slot, power])


@reference
def sparse_gradients(strategy: Any) -> Any:
    extended = strategy.extended
    with strategy.scope():
        table = tf.Variable(tf.reshape(tf.range(12.0), [6, 2]))

        def replica_fn(batch: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, tf.cast(batch[1], tf.int32) % 6) ** 2)
            return tape.gradient(loss, table)

        def update_fn(v: Any, slope: Any) -> Any:
            return v.scatter_sub(tf.IndexedSlices(0.1 * slope.values, slope.indices, slope.dense_shape))

        @tf.function
        def step(batch: Any) -> None:
            slope = extended.reduce_to(MEAN, strategy.run(replica_fn, (batch,)), table)
            extended.update(table, update_fn, (slope,))

        for _, batch in zip(range(STEPS), dealt(strategy, numbered), strict=False):
            step(batch)
    return components([table])


@reference
def a_loop_in_a_function(strategy: Any) -> Any:
    batches = dealt(strategy, lambda: numbered().take(3 * strategy.num_replicas_in_sync))

    @tf.function
    def epoch() -> Any:
        total = tf.constant(0.0)
        for batch in batches:
            own = strategy.run(lambda batch: tf.reduce_sum(batch[0]), (batch,))
            total += strategy.reduce(SUM, own, axis=None)
        return total

    return [epoch() for _ in range(2)]


@reference
def without_a_strategy(_: Any) -> Any:
    weights, bias = regression()

    @tf.function
    def step(batch: Any) -> Any:
        loss, slopes = gradients_of(batch, weights, bias)
        for variable, slope in zip([weights, bias], slopes, strict=True):
            variable.assign_sub(0.05 * slope)
        return loss, ([tf.constant(3.0)], 3.0)

    results = [step(batch) for _, batch in zip(range(STEPS), dataset(), strict=False)]
    return results, weights, bias, [1, True, False, False]


@reference
def numbers_and_devices(strategy: Any) -> Any:
    number = strategy.num_replicas_in_sync
    devices = [f"CPU:{index}" for index in range(number)]
    traced = [tuple(map(np.int32, (index, index, number))) for index in range(number)]
    return [(index, index, number, index) for index in range(number)], traced, np.array([devices] * 3)


@reference
def of_one_tower(_: Any) -> Any:
    references = [the_standard_pattern, what_a_merge_call_does, tower_local_variables, sparse_gradients]
    return [each(tf.distribute.MirroredStrategy(["/cpu:0"])) for each in references]
