"""Programs of `tf.distribute` whose variables and `merge_call`s are looked at: see `distribute_cases.py`."""

import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.distribute_cases import (
    MEAN,
    REPLICA,
    STEPS,
    SUM,
    case,
    components,
    data,
    our_case,
    own_parts,
)


def on_several_workers(strategy: Any) -> bool:
    return bool(getattr(strategy.extended, "_num_workers", 1) > 1)


@case
def what_each_worker_has(strategy: Any) -> Any:
    """As an argument, closed over, and in a variable of no strategy. One machine has one of each."""
    number = float(getattr(strategy.extended, "_id_in_cluster", 0)) + 1.0
    outside = tf.Variable(number)
    is_of_workers = on_several_workers(strategy)
    with strategy.scope():
        v = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)

    def merge(strategy: Any, value: Any) -> Any:
        mean = strategy.extended.reduce_to(MEAN, value, v)
        if not is_of_workers:
            return mean
        one = [strategy.extended.reduce_to(kind, tf.constant(3.0), v) for kind in (MEAN, SUM)]
        first = strategy.experimental_local_results(value)[0]
        return mean, one, [strategy.extended.reduce_to(kind, first, v) for kind in (MEAN, SUM)]

    @tf.function
    def step(given: tf.Tensor) -> Any:
        closed = given * 2.0

        def replica_step(x: tf.Tensor) -> Any:
            total = REPLICA().all_reduce(SUM, x + closed * 10.0 + outside * 100.0)
            sums = [REPLICA().all_reduce(SUM, each * 1.0) for each in (x, closed, outside)]
            v.assign_add(x * closed)
            return total, sums, x + outside, REPLICA().merge_call(merge, (total,))

        return strategy.run(replica_step, (given,))

    results = [step(tf.constant(number)) for _ in range(STEPS)]
    values = [np.float32(number), tf.constant(number)] if is_of_workers else []
    reduced = [strategy.reduce(kind, value, axis=None) for kind in (SUM, MEAN) for value in values]
    return tf.nest.map_structure(strategy.experimental_local_results, results), reduced, components([v])


@case
def merge_calls(strategy: Any) -> Any:
    with strategy.scope():
        v = tf.Variable([1.0, 2.0])

    def merge(strategy: Any, value: Any, other: Any, factor: float) -> Any:
        total, mean = strategy.extended.batch_reduce_to(SUM, [(value, v), (other, v)])
        updated = strategy.extended.update(v, lambda v, x: v.assign_add(factor * x), args=(total,))
        first = strategy.experimental_local_results(value)[0]
        last = strategy.experimental_local_results(other)[-1]
        return total, mean, first, last, value, strategy.extended.reduce_to("MEAN", other, "/device:CPU:0"), updated

    def replica_step(x: tf.Tensor) -> Any:
        own = tf.reduce_sum(x[:, :2], axis=0)
        return REPLICA().merge_call(merge, args=(own, own * 2.0), kwargs={"factor": 0.5})[:-1], v.read_value()

    step = tf.function(lambda x: strategy.run(replica_step, (x,)))
    results = [step(own_parts(strategy, data()[0])) for _ in range(STEPS)]
    return tf.nest.map_structure(strategy.experimental_local_results, results), components([v])


@case
def numbers_are_assigned(strategy: Any) -> Any:
    """-1 stands for an error: on one machine numbers are not added up."""
    results = []
    for kind in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
        with strategy.scope():
            v = tf.Variable(1.0, aggregation=getattr(tf.VariableAggregation, kind))
        try:
            tf.function(lambda v=v: strategy.run(lambda: v.assign_add(2.0)))()
        except ValueError:
            results.append([-1.0])
        else:
            results += components([v])
    return results


@case
def a_variable_that_replicas_wrote_apart(strategy: Any) -> Any:
    """It is read by a later function, as what each replica has."""
    with strategy.scope():
        v = tf.Variable(1.0)
    own = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(10.0 * (context.replica_id_in_sync_group + 1))
    )
    strategy.extended.update(v, lambda v, value: v.assign(value), args=(own,))

    def replica_step() -> Any:
        merge = lambda strategy, value: tf.stack(strategy.experimental_local_results(value))  # noqa: E731
        return REPLICA().merge_call(merge, (v.read_value() * 10.0,))

    return strategy.experimental_local_results(tf.function(lambda: strategy.run(replica_step))()), components([v])


@case
def what_a_merge_call_closes_over(strategy: Any) -> Any:
    """Values of each replica that are made outside, and on one machine in it, as graphs are the same on all workers."""
    with strategy.scope():
        v = tf.Variable(1.0)
    make = lambda context: tf.fill([200], context.replica_id_in_sync_group + 1.0)  # noqa: E731
    outside = strategy.experimental_distribute_values_from_function(make)

    def merge(strategy: Any) -> Any:
        is_of_workers = on_several_workers(strategy)
        inside = outside if is_of_workers else strategy.experimental_distribute_values_from_function(make)
        sums = [strategy.extended.reduce_to(SUM, value, v) for value in (outside, inside)]
        strategy.extended.update(v, lambda v, one, other: v.assign_add(tf.reduce_max(one + other)), args=tuple(sums))
        return sums

    results = tf.function(lambda: strategy.run(lambda: REPLICA().merge_call(merge)))()
    return tf.nest.map_structure(strategy.experimental_local_results, results), components([v])


@case
def writes_after_reads(strategy: Any) -> Any:
    """What is written after a run is not what replicas read in it, though nothing else makes the one wait."""
    with strategy.scope():
        v = tf.Variable(tf.ones([300, 300]))

    @tf.function
    def step() -> Any:
        read = strategy.run(lambda: tf.gather(v, [3])[0, :2])
        strategy.extended.update(v, lambda v: v.assign_add(tf.ones([300, 300])), group=False)
        return read

    results = [strategy.experimental_local_results(step()) for _ in range(STEPS)]
    return results, components([v])


@case
def assignments_of_each_aggregation(strategy: Any) -> Any:
    kinds = ["SUM", "MEAN", "ONLY_FIRST_REPLICA", "NONE"]
    with strategy.scope():
        variables = [tf.Variable(1.0, aggregation=getattr(tf.VariableAggregation, kind)) for kind in kinds]
        count = tf.Variable(0, aggregation=tf.VariableAggregation.SUM, dtype=tf.int64)
        follows = tf.Variable(0.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def replica_step(x: tf.Tensor) -> Any:
        for variable in variables:
            variable.assign_add(tf.reduce_sum(x))
        count.assign_add(tf.cast(tf.shape(x)[0], tf.int64))
        follows.assign(variables[2] + 1.0)
        return [variable.read_value() for variable in variables]

    step = tf.function(lambda x: strategy.run(replica_step, (x,)))
    results = [step(own_parts(strategy, data()[0])) for _ in range(STEPS)]
    return tf.nest.map_structure(strategy.experimental_local_results, results), components([*variables, count, follows])


@case
def sync_on_read(strategy: Any) -> Any:
    on_read = tf.VariableSynchronization.ON_READ
    with strategy.scope():
        total = tf.Variable(0.0, synchronization=on_read, aggregation=tf.VariableAggregation.SUM)
        mean = tf.Variable(0.0, synchronization=on_read, aggregation=tf.VariableAggregation.MEAN)
        first = tf.Variable(0.0, synchronization=on_read, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def replica_step(x: tf.Tensor) -> Any:
        for variable in (total, mean, first):
            variable.assign_add(tf.reduce_sum(x))
        return total.read_value()

    @tf.function
    def step(x: Any) -> Any:
        result = strategy.run(replica_step, (x,))
        return result, total.read_value(), mean.read_value()

    results = [step(own_parts(strategy, data()[0])) for _ in range(STEPS)]
    read = [total.numpy(), mean.numpy(), first.numpy()]
    return tf.nest.map_structure(strategy.experimental_local_results, results), read, components([total, mean, first])


@case
def variables_made_in_the_first_call(strategy: Any) -> Any:
    class Holder(tf.Module):
        v: Any = None

    holder = Holder()

    @tf.function
    def step(x: Any) -> Any:
        def replica_step(x: tf.Tensor) -> tf.Tensor:
            if holder.v is None:
                holder.v = tf.Variable(tf.ones([4]), aggregation=tf.VariableAggregation.SUM)
            holder.v.assign_add(tf.reduce_sum(x, axis=0))
            return holder.v * 2.0

        return strategy.run(replica_step, (x,))

    results = [step(own_parts(strategy, data()[0])) for _ in range(STEPS)]
    return tf.nest.map_structure(strategy.experimental_local_results, results), components([holder.v])


@case
def slots_made_in_the_first_step(strategy: Any) -> Any:
    with strategy.scope():
        v = keras.Variable(2.0)
    optimizer_of: list[Any] = []
    with strategy.scope():
        optimizer_of.append(keras.optimizers.Adam(0.1))

    def replica_step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = v.value * v.value * tf.cast(REPLICA().replica_id_in_sync_group + 1, tf.float32)
        optimizer_of[0].apply_gradients([(tape.gradient(loss, v.value), v)])
        return loss

    step = tf.function(lambda: strategy.run(replica_step))
    results = [strategy.experimental_local_results(step()) for _ in range(STEPS)]
    return results, components([v, *optimizer_of[0].variables])


@case
def updates_for_all_replicas(strategy: Any) -> Any:
    with strategy.scope():
        v = tf.Variable([1.0, 2.0])

    def merge(strategy: Any) -> Any:
        assigned = strategy.extended.update(v, lambda v: v.assign_add([1.0, 1.0]))
        doubled = strategy.extended.update(v, lambda v: v.read_value() * 2.0)
        apart = strategy.extended.update(v, lambda v: v.read_value() * 3.0, group=False)
        sizes = [len(strategy.experimental_local_results(one)) for one in (assigned, doubled)]
        return [*sizes, len(apart)], doubled

    sizes, doubled = tf.function(lambda: strategy.run(lambda: REPLICA().merge_call(merge)))()
    return sizes, strategy.experimental_local_results(doubled), components([v])


@case
def checkpoints_and_saved_models(strategy: Any) -> Any:
    with strategy.scope():
        v = tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.SUM)
        total = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )

    def replica_step(x: tf.Tensor) -> None:
        v.assign_add(tf.reduce_sum(x[:, :2], axis=0))
        total.assign_add(tf.reduce_sum(x))

    step = tf.function(lambda x: strategy.run(replica_step, (x,)))
    step(own_parts(strategy, data()[0]))
    folder = tempfile.mkdtemp()
    written = tf.train.Checkpoint(v=v, total=total).write(f"{folder}/checkpoint")
    alone, alone_total = tf.Variable([0.0, 0.0]), tf.Variable(0.0)
    tf.train.Checkpoint(v=alone, total=alone_total).read(written).assert_consumed()
    module = tf.Module()
    module.v, module.doubled = v, tf.function(lambda: v * 2.0, input_signature=[])
    tf.saved_model.save(module, f"{folder}/model")
    loaded = tf.saved_model.load(f"{folder}/model")
    step(own_parts(strategy, data()[0]))
    tf.train.Checkpoint(v=v, total=total).read(written)
    return alone, alone_total, loaded.doubled(), components([v, total])


@our_case
def what_a_merge_call_returns_is_one_value(strategy: Any) -> Any:
    def replica_step(x: tf.Tensor) -> Any:
        merge = lambda strategy, x: tf.add_n(strategy.experimental_local_results(x))  # noqa: E731
        return REPLICA().merge_call(merge, (tf.reduce_sum(x),)), x

    one, own = tf.function(lambda x: strategy.run(replica_step, (x,)))(own_parts(strategy, data()[0]))
    return [isinstance(one, tf.Tensor), isinstance(own, tf.Tensor)]


@our_case
def a_random_number_that_a_merge_call_reads(strategy: Any) -> Any:
    """Whether all replicas write the first one's."""
    with strategy.scope():
        v = tf.Variable(0.0)

    def merge(strategy: Any, value: Any) -> None:
        first = strategy.experimental_local_results(value)[0]
        strategy.extended.update(v, lambda v, first: v.assign(first), args=(first,))

    tf.function(lambda: strategy.run(lambda: REPLICA().merge_call(merge, (tf.random.uniform([]),))))()
    (values,) = components([v])
    return [len(set(map(float, values))) == 1]
