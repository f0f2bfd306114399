"""Programs of `tf.distribute`, each a function of a strategy: what it returns and leaves behind is compared.

They are run under TensorFlow's own strategy and under ours, in processes of their own: see `distribute_worker.py`.
Those of `OURS` ask what only ours has.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

STEPS = 5
Case = Callable[[Any], Any]
CASES: dict[str, Case] = {}
OURS: dict[str, Case] = {}
REPLICA = tf.distribute.get_replica_context
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def our_case(function: Case) -> Case:
    OURS[function.__name__] = function
    return function


def data(rows: int = 12, features: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(rows, features)).astype(np.float32), rng.integers(0, 3, rows)


def components(variables: Any) -> list[Any]:
    """Each replica's component of variables, Keras's and TensorFlow's, by their paths."""
    found = []
    for variable in variables:
        inner = getattr(variable, "value", variable)
        inner = inner if isinstance(inner, tf.Variable) else variable
        found.append([one.numpy() for one in getattr(inner, "values", [inner])])
    return found


def own_parts(strategy: Any, value: np.ndarray, more: int = 0) -> Any:
    """Each replica's rows of `value`, of different numbers; of two replicas, by so many `more` for the first."""
    n = strategy.num_replicas_in_sync
    bounds = [0, *(len(value) * (one + 1) // n + (one % 2 or more) for one in range(n - 1)), len(value)]
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(
            value[bounds[context.replica_id_in_sync_group] : bounds[context.replica_id_in_sync_group + 1]]
        )
    )


@case
def all_reduce_of_a_structure(strategy: Any) -> Any:
    def replica_step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = {"a": tf.reduce_sum(x), "b": [tf.reduce_sum(x, axis=0), tf.reduce_max(x) * tf.ones([2, 3])]}
            sums = REPLICA().all_reduce(SUM, value)
            means = REPLICA().all_reduce("MEAN", value)
            y = tf.square(sums["a"]) + tf.reduce_sum(means["b"][0] ** 3)
        return sums, means, tape.gradient(y, x)

    results = tf.function(lambda x: strategy.run(replica_step, (x,)))(own_parts(strategy, data()[0]))
    return tf.nest.map_structure(strategy.experimental_local_results, results)


@case
def all_reduce_of_ints_and_sparse(strategy: Any) -> Any:
    def replica_step(x: tf.Tensor) -> Any:
        slices = tf.IndexedSlices(x, tf.range(tf.shape(x)[0]), tf.constant([20, 4]))
        reduced = REPLICA().all_reduce(SUM, slices)
        mean = REPLICA().all_reduce(MEAN, slices)
        return (
            REPLICA().all_reduce(SUM, tf.shape(x)[0]),
            REPLICA().all_reduce(SUM, tf.cast(tf.size(x), tf.int64)),
            tf.convert_to_tensor(reduced),
            tf.convert_to_tensor(mean),
        )

    results = tf.function(lambda x: strategy.run(replica_step, (x,)))(own_parts(strategy, data()[0]))
    return tf.nest.map_structure(strategy.experimental_local_results, results)


@case
def all_gather_and_its_gradient(strategy: Any) -> Any:
    def replica_step(x: tf.Tensor) -> Any:
        number = tf.cast(REPLICA().replica_id_in_sync_group + 1, tf.float32)
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = REPLICA().all_gather(x, axis=0)
            columns = REPLICA().all_gather(tf.ones([2, 3]) * number, axis=1)
            y = tf.reduce_sum(rows**2 * tf.range(12.0)[:, None])
        ragged = REPLICA().all_gather(tf.transpose(x), axis=1)
        return rows, columns, ragged, tape.gradient(y, x)

    results = tf.function(lambda x: strategy.run(replica_step, (x,)))(own_parts(strategy, data()[0]))
    return tf.nest.map_structure(strategy.experimental_local_results, results)


@case
def parts_of_other_sizes(strategy: Any) -> Any:
    """Also where each worker has one, whose shape is static, and where it is no PerReplica."""

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> Any:
        return tf.shape(x), REPLICA().all_reduce(SUM, tf.reduce_sum(x) + tf.reduce_sum(y)), x * 2.0, tf.shape(y)

    parts = own_parts(strategy, data()[0], more=1)
    number = getattr(strategy.extended, "_id_in_cluster", 0)
    results = tf.function(lambda x, y: strategy.run(replica_step, (x, y)))(parts, tf.ones([3 + number]))
    return tf.nest.map_structure(strategy.experimental_local_results, results)


@case
def what_each_worker_has(strategy: Any) -> Any:
    """As an argument, closed over, and in a variable of no strategy. One machine has one of each."""
    number = float(getattr(strategy.extended, "_id_in_cluster", 0)) + 1.0
    outside = tf.Variable(number)
    is_of_workers = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
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
        is_of_workers = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        inside = outside if is_of_workers else strategy.experimental_distribute_values_from_function(make)
        sums = [strategy.extended.reduce_to(SUM, value, v) for value in (outside, inside)]
        strategy.extended.update(v, lambda v, one, other: v.assign_add(tf.reduce_max(one + other)), args=tuple(sums))
        return sums

    results = tf.function(lambda: strategy.run(lambda: REPLICA().merge_call(merge)))()
    return tf.nest.map_structure(strategy.experimental_local_results, results), components([v])


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
def a_loop_over_a_distributed_dataset(strategy: Any) -> Any:
    x, _ = data(20)
    with strategy.scope():
        w = tf.Variable(tf.ones([4, 1]))
        optimizer = keras.optimizers.SGD(0.01)
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(x).batch(6))

    def replica_step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((x @ w) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])
        return loss

    @tf.function
    def epoch() -> tf.Tensor:
        total = 0.0
        for batch in batches:
            total += strategy.reduce(SUM, strategy.run(replica_step, (batch,)), axis=None)
        return total

    with strategy.scope():
        optimizer.build([w])
    return [epoch() for _ in range(3)], components([w, *optimizer.variables])


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
def structures_and_python_values(strategy: Any) -> Any:
    constant = tf.constant([5.0, 6.0])
    with strategy.scope():
        v = tf.Variable(3.0)

    def replica_step(x: tf.Tensor, flag: bool, none: Any) -> Any:
        assert none is None
        return {"x": x * 2.0, "flag": flag, "outer": constant, "nested": [(x[0], "text", 3)], "v": v, "none": none}

    result = tf.function(lambda x: strategy.run(replica_step, (x, True), {"none": None}))(
        own_parts(strategy, data()[0])
    )
    flat = strategy.experimental_local_results(result["x"]), strategy.experimental_local_results(result["nested"][0][0])
    kept = [result["flag"], result["nested"][0][1], result["nested"][0][2], result["none"] is None]
    return flat, [str(one) for one in kept], strategy.experimental_local_results(result["outer"])


@case
def a_function_given_to_run_eagerly(strategy: Any) -> Any:
    with strategy.scope():
        v = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)

    @tf.function
    def replica_step(x: tf.Tensor) -> tf.Tensor:
        own = tf.reduce_sum(x)
        if own > 0.0:
            own *= 3.0
        v.assign_add(own)
        return own

    results = [strategy.run(replica_step, (own_parts(strategy, data()[0]),)) for _ in range(STEPS)]
    eager = strategy.run(lambda x: tf.reduce_sum(x) + v, (own_parts(strategy, data()[0]),))
    return tf.nest.map_structure(strategy.experimental_local_results, (results, eager)), components([v])


@case
def reduce_along_an_axis_and_gather(strategy: Any) -> Any:
    parts = own_parts(strategy, data()[0])

    @tf.function
    def step(parts: Any) -> Any:
        doubled = strategy.run(lambda x: x * 2.0, (parts,))
        return (
            strategy.reduce(SUM, doubled, axis=0),
            strategy.reduce(MEAN, doubled, axis=0),
            strategy.gather(doubled, axis=0),
        )

    return step(parts)


@case
def a_legacy_optimizer(strategy: Any) -> Any:
    with strategy.scope():
        v = tf.Variable([1.0, -2.0])
        optimizer = tf.compat.v1.train.AdamOptimizer(0.1)
        optimizer_2 = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)

    def replica_step(x: tf.Tensor) -> tf.Tensor:
        for each in (optimizer, optimizer_2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((x[:, :2] * v) ** 2)
            each.apply_gradients([(tape.gradient(loss, v), v)])
        return loss

    @tf.function
    def step(x: Any) -> Any:
        return strategy.run(replica_step, (x,))

    results = [strategy.experimental_local_results(step(own_parts(strategy, data()[0]))) for _ in range(STEPS)]
    slots = [optimizer.get_slot(v, "m"), optimizer.get_slot(v, "v"), optimizer_2.get_slot(v, "momentum")]
    return results, components([v, *slots])


@case
def dropout_draws_one_mask(strategy: Any) -> Any:
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=7)

    step = tf.function(lambda: strategy.run(lambda: layer(tf.ones([6]), training=True)))
    results = [strategy.experimental_local_results(step()) for _ in range(STEPS)]
    return results, components(layer.variables)


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
def lookup_tables_and_summaries(strategy: Any) -> Any:
    keys = tf.lookup.KeyValueTensorInitializer(["a", "b"], [1.0, 2.0])
    table = tf.lookup.StaticHashTable(keys, 0.0)
    folder = tempfile.mkdtemp()
    writer = tf.summary.create_file_writer(folder)

    def replica_step() -> tf.Tensor:
        found = table.lookup(tf.constant(["a", "c"]))
        own = tf.cast(REPLICA().replica_id_in_sync_group, tf.float32)
        tf.summary.scalar("own", own + 5.0, step=1)
        return found + own

    @tf.function
    def step() -> Any:
        with writer.as_default():
            return strategy.run(replica_step)

    results = strategy.experimental_local_results(step())
    writer.flush()
    (file,) = Path(folder).iterdir()
    events = [tf.compat.v1.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(file))]
    return results, [tf.make_ndarray(value.tensor) for event in events for value in event.summary.value]


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
def replica_functions_are_traced_once(strategy: Any) -> Any:
    """How often the body of a function is called, and of one that makes a variable."""
    calls = [0, 0]
    holder = tf.Module()
    holder.v = None

    def replica_step() -> tf.Tensor:
        calls[0] += 1
        return tf.constant(1.0)

    def making_step() -> tf.Tensor:
        calls[1] += 1
        if holder.v is None:
            holder.v = tf.Variable(1.0)
        return holder.v.read_value()

    tf.function(lambda: strategy.run(replica_step))()
    with strategy.scope():
        strategy.run(tf.function(making_step))
    return calls


@our_case
def random_numbers_of_a_seed(strategy: Any) -> Any:
    """Whether replicas draw alike: of a stateful op with a global seed, and of a stateless one."""
    tf.random.set_seed(3)

    def replica_step() -> Any:
        return tf.random.uniform([2]), tf.random.stateless_uniform([2], [1, 2])

    drawn = tf.function(lambda: strategy.run(replica_step))()
    first = [strategy.experimental_local_results(each)[:2] for each in drawn]
    return [bool(tf.reduce_all(one == other)) for one, other in first]


@our_case
def what_a_merge_call_returns_is_one_value(strategy: Any) -> Any:
    def replica_step(x: tf.Tensor) -> Any:
        merge = lambda strategy, x: tf.add_n(strategy.experimental_local_results(x))  # noqa: E731
        return REPLICA().merge_call(merge, (tf.reduce_sum(x),)), x

    one, own = tf.function(lambda x: strategy.run(replica_step, (x,)))(own_parts(strategy, data()[0]))
    return [isinstance(one, tf.Tensor), isinstance(own, tf.Tensor)]
