"""Programs of the tower API, each a function of a tower strategy: what it returns and leaves behind is compared.

`tower_references.py` has each program again, under the same name, as `tf.distribute` has it today.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py.distribute import towers
from tests.support.distribute_cases import STEPS, components
from tests.support.tower_data import dataset, gradients_of, numbered, regression

v1 = tf.compat.v1
Program = Callable[[towers.MirroredStrategy], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def standard_pattern(d: towers.MirroredStrategy, wrap: Callable[..., Any]) -> Any:
    with d.scope():
        weights, bias = regression()

        def tower_fn(batch: Any) -> Any:
            return gradients_of(batch, weights, bias)

        @wrap
        def step(batch: Any) -> Any:
            loss, slopes = d.call_for_each_tower(tower_fn, batch, run_concurrently=False)
            sums = d.batch_reduce("sum", list(zip(slopes, [weights, bias], strict=True)))
            for variable, slope in zip([weights, bias], sums, strict=True):
                d.update(variable, lambda v, slope, rate: v.assign_sub(rate * slope), slope, rate=0.05)
            return d.reduce("mean", loss, destinations="/cpu:0"), d.fetch(d.reduce("sum", loss))

        results = [step(batch) for _, batch in zip(range(STEPS), d.distribute_dataset(dataset), strict=False)]
    return results, components([weights, bias])


@program
def the_standard_pattern(d: towers.MirroredStrategy) -> Any:
    return standard_pattern(d, tf.function)


@program
def the_standard_pattern_eagerly(d: towers.MirroredStrategy) -> Any:
    return standard_pattern(d, lambda step: step)


@program
def optimizers_in_towers(d: towers.MirroredStrategy) -> Any:
    with d.scope():
        weights, bias = regression()
        adam, momentum = v1.train.AdamOptimizer(0.1), v1.train.MomentumOptimizer(0.1, 0.9)

        def tower_fn(batch: Any) -> Any:
            loss, slopes = gradients_of(batch, weights, bias)
            adam.apply_gradients(list(zip(slopes, [weights, bias], strict=True)))
            return loss

        def manual_fn(batch: Any) -> Any:
            loss, slopes = gradients_of(batch, weights, bias)
            pairs = list(zip(slopes, [weights, bias], strict=True))
            towers.get_tower_context().merge_call(momentum._distributed_apply, pairs)
            return loss

        @tf.function
        def step(batch: Any) -> Any:
            return d.call_for_each_tower(tower_fn, batch), d.call_for_each_tower(manual_fn, batch)

        iterator = v1.data.make_one_shot_iterator(d.distribute_dataset(dataset()))
        results = [d.unwrap(step(iterator.get_next())) for _ in range(STEPS)]
    slots = [adam.get_slot(weights, "m"), adam.get_slot(bias, "v"), momentum.get_slot(bias, "momentum")]
    return results, components([weights, bias, *slots])


@program
def what_a_merge_call_does(d: towers.MirroredStrategy) -> Any:
    with d.scope():
        v = tf.Variable([1.0, 2.0])

        def merge_fn(d: Any, value: Any, factor: float) -> Any:
            total = d.reduce("sum", value, destinations=v)
            (mean,) = d.batch_reduce("mean", [(value, None)])
            d.update(v, lambda v, total, mean: v.assign_add(factor * total + mean), total, mean)
            doubled = d.update(v, lambda v: v.read_value() * 2.0)
            first = d.unwrap(value)[0]
            two = d.broadcast(tf.constant(2.0))
            more = d.update_non_slot(d.non_slot_devices([v]), lambda two, total: two + total, two, total)
            return total, d.fetch(doubled, "/cpu:0", fn=tf.reduce_sum), first, more

        def tower_fn(x: Any) -> Any:
            context = towers.get_tower_context()
            own = x[0, :2] * tf.cast(context.tower_id + 1, tf.float32) / context.num_towers
            return context.merge_call(merge_fn, own, factor=0.5), v.read_value()

        @tf.function
        def step(batch: Any) -> Any:
            return d.call_for_each_tower(tower_fn, batch[0])

        iterator = iter(d.distribute_dataset(dataset))
        results = [d.unwrap(step(next(iterator))) for _ in range(STEPS)]
    return results, components([v])


@program
def tower_local_variables(d: towers.MirroredStrategy) -> Any:
    with d.scope():
        with d.tower_local_var_scope("sum"):
            total = tf.Variable(0.0)
        with d.tower_local_var_scope(tf.VariableAggregation.MEAN):
            mean = tf.Variable(0.0)

        def tower_fn(batch: Any) -> Any:
            total.assign_add(tf.reduce_sum(batch[0]))
            mean.assign_add(tf.reduce_mean(batch[0]))
            return total.read_value()

        @tf.function
        def step(batch: Any) -> Any:
            own = d.call_for_each_tower(tower_fn, batch)
            return own, d.read_var(total), d.fetch(mean), d.reduce("mean", total)

        results = [step(batch) for _, batch in zip(range(STEPS), d.distribute_dataset(dataset), strict=False)]
        flat = [[d.unwrap(value) for value in result] for result in results]
        return flat, components([total, mean]), [total.trainable, mean.trainable]


@program
def variables_beside_others(d: towers.MirroredStrategy) -> Any:
    with d.scope():
        weights, bias = regression()
        with d.colocate_vars_with(weights):
            slot = tf.Variable(tf.ones_like(weights), trainable=False)
        devices = d.non_slot_devices([weights, bias])
        with d.colocate_vars_with(devices):
            power = tf.Variable(0.9)

        def update_fn(v: Any, slot: Any, slope: Any) -> Any:
            slot.assign(0.9 * slot + slope)
            return v.assign_sub(0.1 * slot)

        @tf.function
        def step(batch: Any) -> Any:
            loss, slopes = d.call_for_each_tower(lambda batch: gradients_of(batch, weights, bias), batch)
            changed = d.update(weights, update_fn, slot, d.reduce("sum", slopes[0], weights))
            apart = d.update(bias, lambda v: v.assign_add([1.0]), grouped=False)
            d.update_non_slot(devices, lambda power: power.assign(power * 0.9), power)
            return d.unwrap(changed), apart, d.unwrap(loss)

        results = [step(batch) for _, batch in zip(range(STEPS), d.distribute_dataset(dataset), strict=False)]
    return results, components([weights, bias, slot, power])


@program
def sparse_gradients(d: towers.MirroredStrategy) -> Any:
    with d.scope():
        table = tf.Variable(tf.reshape(tf.range(12.0), [6, 2]))

        def tower_fn(batch: Any) -> Any:
            ids = tf.cast(batch[1], tf.int32) % 6
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, ids) ** 2)
            return tape.gradient(loss, table)

        def update_fn(v: Any, slope: Any) -> Any:
            return v.scatter_sub(tf.IndexedSlices(0.1 * slope.values, slope.indices, slope.dense_shape))

        @tf.function
        def step(batch: Any) -> None:
            d.update(table, update_fn, d.reduce("mean", d.call_for_each_tower(tower_fn, batch), destinations=table))

        for batch in d.distribute_dataset(lambda: numbered().take(STEPS * d.num_towers)):
            step(batch)
    return components([table])


@program
def a_loop_in_a_function(d: towers.MirroredStrategy) -> Any:
    """The last element is left out: it is too little for all towers."""
    with d.scope():
        batches = d.distribute_dataset(lambda: numbered().take(3 * d.num_towers + 1))

        @tf.function
        def epoch() -> Any:
            total = tf.constant(0.0)
            for batch in batches:
                total += d.reduce("sum", d.call_for_each_tower(lambda batch: tf.reduce_sum(batch[0]), batch), "/cpu:0")
            return total

        return [epoch() for _ in range(2)]


@program
def without_a_strategy(_: towers.MirroredStrategy) -> Any:
    d = towers.get_distribution_strategy()
    weights, bias = regression()

    def merge_fn(d: Any, slopes: Any) -> Any:
        assert towers.get_cross_tower_context() is d
        sums = d.batch_reduce("sum", list(zip(slopes, [weights, bias], strict=True)))
        for variable, slope in zip([weights, bias], sums, strict=True):
            d.update(variable, lambda v, slope: v.assign_sub(0.05 * slope), slope)
        return d.unwrap(d.broadcast(3.0)), d.call_for_each_tower(lambda x: x + 1.0, 2.0)

    @tf.function
    def step(batch: Any) -> Any:
        loss, slopes = gradients_of(batch, weights, bias)
        return loss, towers.get_tower_context().merge_call(merge_fn, slopes)

    results = [step(batch) for _, batch in zip(range(STEPS), d.distribute_dataset(dataset), strict=False)]
    kept = [d.num_towers, d.is_single_tower, towers.has_distribution_strategy(), towers.in_cross_tower_context()]
    return results, weights, bias, kept


@program
def numbers_and_devices(d: towers.MirroredStrategy) -> Any:
    """Of each tower, in a function that is called for each and in one that is traced once."""

    def tower_fn(index: Any) -> Any:
        context = towers.get_tower_context()
        return context.tower_id, index, context.num_towers

    with d.scope():
        eager = d.call_for_each_tower(
            lambda index: (*tower_fn(index), list(range(index + 1))[-1]), d.worker_device_index
        )
        traced = tf.function(lambda: d.call_for_each_tower(tower_fn, d.worker_device_index))()
        devices = d.unwrap(d.call_for_each_tower(lambda: towers.get_tower_context().device))
    names = [list(d.worker_devices), list(d.parameter_devices), devices]
    return d.unwrap(eager), d.unwrap(traced), np.array([[name[-5:] for name in each] for each in names])


@program
def of_one_tower(_: towers.MirroredStrategy) -> Any:
    programs = [the_standard_pattern, what_a_merge_call_does, tower_local_variables, sparse_gradients]
    return [each(towers.MirroredStrategy(num_gpus=0)) for each in programs]
