"""Programs of `tf.distribute`, each a function of a strategy: what it returns and leaves behind is compared.

They are run under TensorFlow's own strategy and under ours, in processes of their own: see `distribute_worker.py`.
Those of `OURS` ask what only ours has. It is long, as it is a list of them.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from autodist_py import CaptureError
from autodist_py.distribute import MirroredStrategy
from autodist_py.strategy_builders.all_reduce import AllReduce

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


def compiled_items(strategy: Any) -> list[Any]:
    """The items that the strategy compiles from now on, as its builder is given them."""
    seen: list[Any] = []
    builder = strategy.extended.placement.strategy_builder

    class Recorded:
        def build(self, item: Any, resources: Any) -> Any:
            seen.append(item)
            return builder.build(item, resources)

    strategy.extended.placement.strategy_builder = Recorded()
    return seen


def components(variables: Any) -> list[Any]:
    """Each replica's component of variables, Keras's and TensorFlow's: the same, if they have one together."""
    found = []
    for variable in variables:
        inner = getattr(variable, "value", variable)
        inner = inner if isinstance(inner, tf.Variable) else variable
        own = [one.numpy() for one in getattr(inner, "values", [inner])]
        strategy = getattr(inner, "distribute_strategy", None)
        found.append(own * (len(strategy.extended.worker_devices) if strategy and len(own) == 1 else 1))
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
def arrays_of_each_replica(strategy: Any) -> Any:
    arrays = strategy.experimental_distribute_values_from_function(
        lambda context: np.ones([3, int(context.replica_id_in_sync_group) + 1])
    )

    def replica_step(array: tf.Tensor) -> Any:
        return tf.reduce_sum(array), tf.shape(array)

    results = tf.function(lambda array: strategy.run(replica_step, (array,)))(arrays)
    return tf.nest.map_structure(strategy.experimental_local_results, results)


@case
def scattered_updates_of_the_first_replica(strategy: Any) -> Any:
    """The dense shape may be a tuple, as TensorFlow's methods take it."""
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    with strategy.scope():
        least, set_ = (tf.Variable([0.0, 0.0, 0.0], aggregation=first) for _ in range(2))

    def replica_step() -> None:
        own = tf.cast(REPLICA().replica_id_in_sync_group, tf.float32) + 1.0
        least.scatter_min(tf.IndexedSlices(tf.constant([-1.0]), tf.constant([1]), (3,)))
        set_.scatter_update(tf.IndexedSlices(tf.stack([own, own * 2.0]), tf.constant([0, 2]), (3,)))

    tf.function(lambda: strategy.run(replica_step))()
    return components([least, set_])


@case
def a_variable_made_in_the_first_step_of_what_the_step_computes(strategy: Any) -> Any:
    made: list[Any] = []

    def replica_step() -> tf.Tensor:
        if not made:
            made.append(tf.Variable(2.0 * tf.random.stateless_uniform([3], seed=[1, 2])))
        return REPLICA().all_reduce(SUM, made[0] * 1.0)

    with strategy.scope():
        total = tf.function(lambda: strategy.run(replica_step))()
    return strategy.experimental_local_results(total)[0], components(made)


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


def legacy_optimizers(strategy: Any, compiled: Callable[[Case], Case]) -> Any:
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

    step = compiled(lambda x: strategy.run(replica_step, (x,)))
    results = [strategy.experimental_local_results(step(own_parts(strategy, data()[0]))) for _ in range(STEPS)]
    slots = [optimizer.get_slot(v, "m"), optimizer.get_slot(v, "v"), optimizer_2.get_slot(v, "momentum")]
    return results, components([v, *slots])


@case
def a_legacy_optimizer(strategy: Any) -> Any:
    return legacy_optimizers(strategy, tf.function)


@case
def a_legacy_optimizer_in_a_plain_function(strategy: Any) -> Any:
    return legacy_optimizers(strategy, lambda step: step)


@case
def writes_by_a_handle(strategy: Any) -> Any:
    """In an update, in one of no variable in particular, and in a plain function that each replica runs."""
    with strategy.scope():
        v, beside = tf.Variable([1.0, -2.0]), tf.Variable([3.0, 4.0])

    def added(*_: Any) -> Any:
        return tf.raw_ops.AssignAddVariableOp(resource=v.handle, value=tf.ones([2]))

    extended = strategy.extended
    with strategy.scope():
        extended.update(v, added)
        extended.update_non_slot(extended.non_slot_devices([v, beside]), added)
    strategy.run(added)
    return components([v])


@case
def dropout_draws_one_mask(strategy: Any) -> Any:
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=7)

    step = tf.function(lambda: strategy.run(lambda: layer(tf.ones([6]), training=True)))
    results = [strategy.experimental_local_results(step()) for _ in range(STEPS)]
    return results, components(layer.variables)


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
    """Whether replicas draw alike: of a stateful op with a global seed, of a stateless one, and by Keras's dropout."""
    tf.random.set_seed(3)
    with strategy.scope():
        dropout = keras.layers.Dropout(0.5, seed=7)

    def replica_step() -> Any:
        mask = dropout(tf.ones([40]), training=True)
        return tf.random.uniform([2]), tf.random.stateless_uniform([2], [1, 2]), mask

    drawn = tf.function(lambda: strategy.run(replica_step))()
    first = [strategy.experimental_local_results(each)[:2] for each in drawn]
    (states,) = components(dropout.variables)
    assert all(np.array_equal(states[0], other) for other in states)
    return [bool(tf.reduce_all(one == other)) for one, other in first]


@our_case
def random_numbers_of_a_seed_for_each_replica(strategy: Any) -> Any:
    """The same, where each replica draws its own by a seed. Its state is one, and advances alike."""
    return random_numbers_of_a_seed(MirroredStrategy(strategy.extended.worker_devices, decorrelate=True))


@our_case
def python_numbers_of_each_replica(strategy: Any) -> Any:
    """Refused: as int32 this product would overflow, which Python's does not."""
    numbers = strategy.experimental_distribute_values_from_function(
        lambda context: 100_000 + int(context.replica_id_in_sync_group)
    )
    try:
        tf.function(lambda: strategy.run(lambda number: number * 100_000, (numbers,)))()
    except CaptureError as error:
        return ["is given an object of its own, (100000, 100001" in str(error)]
    return [False]


@our_case
def several_strategies_by_rings(strategy: Any) -> Any:
    """Of one process: TensorFlow remembers the shape of each collective's key, so no two have the same."""
    sums = []
    for size in (3, 5):
        one = MirroredStrategy(strategy.extended.worker_devices, strategy_builder=AllReduce(all_reduce_spec="RING"))
        with one.scope():
            v = tf.Variable(tf.zeros([size]))
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([v])

        def replica_step(v: Any = v, optimizer: Any = optimizer) -> None:
            optimizer.apply_gradients([(tf.ones_like(v), v)])

        tf.function(lambda one=one, step=replica_step: one.run(step))()
        sums.append(v.numpy().sum() == -size * strategy.num_replicas_in_sync)
    return sums


@our_case
def a_seed_of_each_replica_in_a_merge_call(strategy: Any) -> Any:
    """Refused: what is drawn for all replicas each would draw for itself."""
    strategy = MirroredStrategy(strategy.extended.worker_devices, decorrelate=True)

    def replica_step() -> Any:
        return REPLICA().merge_call(lambda _: tf.random.stateless_uniform([], [1, 2]))

    try:
        tf.function(lambda: strategy.run(replica_step))()
    except CaptureError as error:
        return ["a merge_call draws random numbers" in str(error)]
    return [False]
