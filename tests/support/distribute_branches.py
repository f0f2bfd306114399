"""Programs of `tf.distribute` that combine values in branches: see `distribute_cases.py`."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.distribute_cases import (
    REPLICA,
    STEPS,
    SUM,
    case,
    compiled_items,
    components,
    data,
    our_case,
    own_parts,
)
from tests.support.distribute_training import network

RUN_EAGERLY = {"gradient_accumulation", "accumulation_by_hand"}
"""By TensorFlow, so that the last bits of floats may differ from those of a graph."""


def of_each_replica(strategy: Any, *values: float) -> Any:
    """A number for each replica: the first has the first of `values`, and so on; the last ones have 1."""
    count = strategy.num_replicas_in_sync
    numbers = [*values[:count], *[1.0] * (count - len(values))]
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(numbers[context.replica_id_in_sync_group])
    )


def scaled_training(strategy: Any, inner: Callable[[], Any], *factors: tuple[float, ...]) -> Any:
    """A step for each of `factors`: in each, what the replicas' scaled losses are multiplied by."""
    x, y = data()
    with strategy.scope():
        model = network()
        optimizer = keras.optimizers.LossScaleOptimizer(inner(), initial_scale=2.0**10, dynamic_growth_steps=2)
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def replica_step(x: tf.Tensor, y: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)) / len(data()[0])
            scaled = optimizer.scale_loss(loss) * factor
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def step(x: Any, y: Any, factor: Any) -> Any:
        return strategy.reduce(SUM, strategy.run(replica_step, args=(x, y, factor)), axis=None)

    losses = [step(own_parts(strategy, x), own_parts(strategy, y), of_each_replica(strategy, *one)) for one in factors]
    return losses, components(model.variables), components(optimizer.variables)


@case
def loss_scaling(strategy: Any) -> Any:
    return scaled_training(strategy, lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.5), *[(1.0,)] * STEPS)


@case
def loss_scaling_with_an_infinite_gradient(strategy: Any) -> Any:
    """On the first replica alone, which TensorFlow asks whether its gradients are finite."""
    factors = [(1.0,), (np.inf,), (1.0,), (1.0,), (np.inf,), (1.0,)]
    return scaled_training(strategy, lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01), *factors)


@our_case
def loss_scaling_with_an_infinite_gradient_elsewhere(strategy: Any) -> Any:
    """Whether a step that only the last replica could not take is taken by none, as it is where the first could not.

    Under TensorFlow's strategy the weights are no numbers then.
    """
    last = strategy.num_replicas_in_sync - 1
    first, other = [(1.0,), (np.inf,), (1.0,)], [(1.0,), (*[1.0] * last, np.inf), (1.0,)]
    weights = [scaled_training(strategy, lambda: keras.optimizers.SGD(0.1), *factors)[1:] for factors in (first, other)]
    flat = [[np.asarray(each) for each in tf.nest.flatten(one)] for one in weights]
    return all(np.array_equal(one, same) for one, same in zip(*flat, strict=True))


@case
def fit_with_loss_scaling(strategy: Any) -> Any:
    x, y = data(24)
    with strategy.scope():
        model = network()
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.05), dynamic_growth_steps=3)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(x, y, batch_size=12, epochs=3, shuffle=False, verbose=0)
    return history.history, components(model.variables), components(model.optimizer.variables)


@case
def gradient_accumulation(strategy: Any) -> Any:
    """In a tf.function, where TensorFlow refuses it; there it runs eagerly."""
    is_ours = type(strategy).__module__.startswith("autodist_py")
    x, y = data()
    with strategy.scope():
        model = network()
        optimizer = keras.optimizers.AdamW(0.05, gradient_accumulation_steps=2, global_clipnorm=0.5, use_ema=True)
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)) / len(data()[0])
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    def step(x: Any, y: Any) -> Any:
        return strategy.reduce(SUM, strategy.run(replica_step, args=(x, y)), axis=None)

    step = tf.function(step) if is_ours else step
    losses = [step(own_parts(strategy, x), own_parts(strategy, y)) for _ in range(STEPS)]
    return losses, components(model.variables), components(optimizer.variables)


@case
def accumulation_by_hand(strategy: Any) -> Any:
    """Each replica adds up its own gradients, and every other step their sum trains, in a branch that clears them."""
    is_ours = type(strategy).__module__.startswith("autodist_py")
    x, y = data()
    with strategy.scope():
        model = network()
        optimizer = keras.optimizers.Adam(0.05)
        optimizer.build(model.trainable_variables)
        steps = tf.Variable(0, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        sums = [
            tf.Variable(
                tf.zeros(one.shape),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            for one in model.trainable_variables
        ]
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def train() -> None:
        gradients = [one.read_value() for one in sums]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        for one in sums:
            one.assign(tf.zeros_like(one))

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)) / len(data()[0])
        for one, gradient in zip(sums, tape.gradient(loss, model.trainable_variables), strict=True):
            one.assign_add(gradient)
        steps.assign_add(1)
        tf.cond(steps % 2 == 0, train, lambda: None)
        return loss

    def step(x: Any, y: Any) -> Any:
        return strategy.reduce(SUM, strategy.run(replica_step, args=(x, y)), axis=None)

    step = tf.function(step) if is_ours else step
    losses = [step(own_parts(strategy, x), own_parts(strategy, y)) for _ in range(STEPS)]
    return losses, components(model.variables), components(optimizer.variables), components(sums)


@our_case
def branches_are_taken_by_all_or_none(strategy: Any) -> Any:
    """Sums that are taken in both sides of a branch, and in one within it, and what they were if nobody branched."""
    with strategy.scope():
        v = tf.Variable(3.0, aggregation=tf.VariableAggregation.NONE)
    number = of_each_replica(strategy, 2.0, 5.0)

    def sum_of(x: tf.Tensor) -> tf.Tensor:
        return REPLICA().all_reduce(SUM, x * v)

    def replica_step(x: tf.Tensor, all_are: tf.Tensor) -> Any:
        def inner() -> tf.Tensor:
            v.assign_add(1.0)
            return tf.cond(x > 4.0, lambda: x, lambda: REPLICA().all_reduce("MEAN", x + tf.reduce_max(all_are)))

        outer = tf.cond(x < all_are, lambda: sum_of(x), lambda: -sum_of(x + 1.0))
        return outer, tf.cond(x < all_are, inner, lambda: x), v.read_value()

    step = tf.function(lambda x, all_are: strategy.run(replica_step, (x, all_are)))
    results = [step(number, of_each_replica(strategy, *[bound] * 3)) for bound in (3.0, 10.0)]
    shown = tf.nest.map_structure(strategy.experimental_local_results, results)
    x = np.asarray(strategy.experimental_local_results(number))
    plain = (
        [-3.0 * np.sum(x + 1), *x, 3.0],
        [3.0 * np.sum(x), *[np.mean(x) + 10.0] * len(x), 4.0],
    )
    return [
        np.allclose([outer[0], *inner, seen[0]], expected)
        for (outer, inner, seen), expected in zip(shown, plain, strict=True)
    ]


@our_case
def a_merge_call_in_a_branch_that_combines_nothing(strategy: Any) -> Any:
    """Whether all replicas take it or none: the components of what it updates."""
    with strategy.scope():
        v = tf.Variable(1.0)

    def replica_step(x: tf.Tensor, bound: tf.Tensor) -> tf.Tensor:
        total = REPLICA().all_reduce(SUM, x)

        def merge(strategy: Any, total: Any) -> None:
            strategy.extended.update(v, lambda v, total: v.assign_add(total), args=(total,))

        def taken() -> tf.Tensor:
            REPLICA().merge_call(merge, (total,))
            return total

        return tf.cond(x < bound, taken, lambda: -total)

    step = tf.function(lambda x, bound: strategy.run(replica_step, (x, bound)))
    x = of_each_replica(strategy, 2.0, 5.0)
    expected, right = 1.0, []
    for bound in (3.0, 10.0):
        step(x, of_each_replica(strategy, *[bound] * 3))
        expected += float(np.sum(strategy.experimental_local_results(x))) if bound == 10.0 else 0.0
        right.append(bool(np.all(np.asarray(components([v])[0]) == expected)))
    return right


@our_case
def a_gradient_in_a_branch(strategy: Any) -> Any:
    """Whether it goes through what is combined there, as it does without the branch."""

    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = REPLICA().all_reduce(SUM, x * x) * x
        return tape.gradient(y, x)

    def replica_step(x: tf.Tensor) -> Any:
        return gradient(x), tf.cond(x > 0.0, lambda: gradient(x), lambda: x)

    results = tf.function(lambda x: strategy.run(replica_step, (x,)))(of_each_replica(strategy, 2.0, 5.0))
    return np.array_equal(*map(strategy.experimental_local_results, results))


@our_case
def gradients_of_branches_are_seen_as_such(strategy: Any) -> Any:
    """How many gradients there are with loss scaling, of how many variables; and how many variables differ."""
    seen = compiled_items(strategy)
    scaled_training(strategy, lambda: keras.optimizers.Adam(0.05), (1.0,))
    item = seen[-1]
    named = {gradient.variable for gradient in item.gradients}
    return [len(item.gradients), len(named), sum(variable.per_replica for variable in item.variables)]
