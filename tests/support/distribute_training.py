"""Programs of `tf.distribute` that train Keras's layers: see `distribute_cases.py`."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.distribute_cases import (
    MEAN,
    STEPS,
    SUM,
    case,
    compiled_items,
    components,
    data,
    our_case,
    own_parts,
)


def network(width: int = 5, *, batch_norm: bool | str = False) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers: list[Any] = [keras.layers.Dense(width, activation="tanh")]
    if batch_norm:
        layers.append(keras.layers.BatchNormalization(synchronized=batch_norm == "synchronized"))
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3)])
    return model


def _with_slots(strategy: Any, optimizer: Any, variables: Any) -> None:
    """Make the slots before the first step, where TensorFlow's strategy fails to make them in it."""
    extended = strategy.extended
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and len(extended.worker_devices) > 1:
        optimizer.build(variables)


def trained_by_loop(strategy: Any, optimizer: Callable[[], Any], **options: Any) -> Any:
    x, y = data()
    with strategy.scope():
        model, made = network(**options), optimizer()
        seen = keras.metrics.Mean()
        _with_slots(strategy, made, model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = loss_of(y, model(x, training=True))
            loss = tf.reduce_sum(losses) / len(data()[0])
        made.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        seen.update_state(losses)
        return loss

    @tf.function
    def step(x: Any, y: Any) -> Any:
        losses = strategy.run(replica_step, args=(x, y))
        return strategy.reduce(SUM, losses, axis=None)

    totals = [step(own_parts(strategy, x), own_parts(strategy, y)) for _ in range(STEPS)]
    return totals, seen.result(), components([*model.variables, *made.variables, *seen.variables])


@case
def sgd_with_momentum(strategy: Any) -> Any:
    return trained_by_loop(strategy, lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True))


@case
def adam_with_global_clipnorm(strategy: Any) -> Any:
    return trained_by_loop(strategy, lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.1))


@case
def adamw_with_ema(strategy: Any) -> Any:
    return trained_by_loop(strategy, lambda: keras.optimizers.AdamW(0.05, use_ema=True, ema_momentum=0.8))


@case
def batch_normalization(strategy: Any) -> Any:
    return trained_by_loop(strategy, lambda: keras.optimizers.SGD(0.1), batch_norm=True)


@case
def synchronized_batch_normalization(strategy: Any) -> Any:
    return trained_by_loop(strategy, lambda: keras.optimizers.SGD(0.1), batch_norm="synchronized")


def sparse_embedding(strategy: Any, optimizer: Callable[[], Any]) -> Any:
    rng = np.random.default_rng(2)
    ids, y = rng.integers(0, 7, (12, 2)), rng.normal(size=(12, 1)).astype(np.float32)
    with strategy.scope():
        keras.utils.set_random_seed(3)
        table = keras.layers.Embedding(7, 3)
        table.build(None)
        made = optimizer()
        _with_slots(strategy, made, table.trainable_variables)

    def replica_step(ids: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.reduce_sum(table(ids), axis=[1, 2])[:, None] - y) ** 2) / 12.0
        made.apply_gradients(
            zip(tape.gradient(loss, table.trainable_variables), table.trainable_variables, strict=True)
        )
        return loss

    step = tf.function(lambda ids, y: strategy.run(replica_step, (ids, y)))
    results = [
        strategy.experimental_local_results(step(own_parts(strategy, ids), own_parts(strategy, y)))
        for _ in range(STEPS)
    ]
    return results, components([*table.variables, *made.variables])


@case
def embedding_under_sgd(strategy: Any) -> Any:
    return sparse_embedding(strategy, lambda: keras.optimizers.SGD(0.1))


@case
def embedding_under_adam(strategy: Any) -> Any:
    return sparse_embedding(strategy, lambda: keras.optimizers.Adam(0.1))


@case
def fit_evaluate_predict(strategy: Any) -> Any:
    x, y = data(30)
    with strategy.scope():
        model = network(batch_norm=True)
        model.compile(
            keras.optimizers.Adam(0.05),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0, validation_data=(x[:6], y[:6]))
    return (
        history.history,
        model.evaluate(x, y, batch_size=12, verbose=0),
        model.predict(x, batch_size=12, verbose=0),
        components(model.variables),
        components(model.optimizer.variables),
    )


@our_case
def gradients_are_seen_as_such(strategy: Any) -> Any:
    """Of Adam with a global norm, over batch normalization: how many there are, and of how many variables.

    Then of an embedding: how many, and how many are sparse; and of one that is combined, and clipped by hand.
    """
    seen = compiled_items(strategy)
    trained_by_loop(strategy, lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.1), batch_norm=True)
    item = seen[-1]
    dense = [len(item.gradients), len({gradient.variable for gradient in item.gradients})]
    embedding_under_adam(strategy)
    sparse = [len(seen[-1].gradients), sum(gradient.is_sparse for gradient in seen[-1].gradients)]
    with strategy.scope():
        v = tf.Variable([1.0, 2.0])

    def clipped_step() -> None:
        combined = tf.distribute.get_replica_context().all_reduce(SUM, v * 2.0)
        clipped = combined / tf.maximum(tf.norm(combined), 1.0)
        strategy.extended.update(v, lambda v, gradient: v.assign_sub(gradient), args=(clipped,))

    tf.function(lambda: strategy.run(clipped_step))()
    return [*dense, *sparse, len(seen[-1].gradients)]


@our_case
def what_a_merge_call_updates_a_variable_by_is_its_gradient(strategy: Any) -> Any:
    """How many gradients there are of a variable that is updated by one value, and assigned another one."""
    seen = compiled_items(strategy)
    with strategy.scope():
        v = tf.Variable([1.0, 2.0])

    def merged(_: Any, gradient: Any, value: Any) -> None:
        v.assign(value)
        strategy.extended.update(v, lambda v, gradient: v.assign_sub(gradient), args=(gradient,))

    def step() -> None:
        context = tf.distribute.get_replica_context()
        context.merge_call(merged, args=context.all_reduce(MEAN, [v * 2.0, v * 3.0]))

    tf.function(lambda: strategy.run(step))()
    return [len(seen[-1].gradients)]


def updated_by_one_value(
    strategy: Any, names: tuple[str, str], *, trainable: bool = True, is_tied: bool = False
) -> Any:
    """Two variables of those names that are updated by one gradient, of the second; if tied, by that of both."""
    with strategy.scope():
        first, second = (
            tf.Variable([1.0, 2.0, 3.0, 4.0], name=name, trainable=trainable or position == 1)
            for position, name in enumerate(names)
        )

    def merged(_: Any, gradient: Any) -> None:
        strategy.extended.update(first, lambda v, g: v.assign(0.5 * v + 0.5 * g), args=(gradient,))
        strategy.extended.update(second, lambda v, g: v.assign_sub(0.1 * g), args=(gradient,))

    def replica_step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x @ (first * second if is_tied else second)[:, None])
            loss *= loss
        context = tf.distribute.get_replica_context()
        context.merge_call(merged, args=(context.all_reduce(SUM, tape.gradient(loss, second)),))

    step = tf.function(lambda x: strategy.run(replica_step, (x,)))
    for _ in range(2):
        step(own_parts(strategy, data()[0] / 10.0))
    return components([first, second])


@case
def variables_that_are_updated_by_one_value(strategy: Any) -> Any:
    return [
        updated_by_one_value(strategy, ("average", "weight"), trainable=False),
        updated_by_one_value(strategy, ("trained_average", "another_weight")),
        updated_by_one_value(strategy, ("tied", "tied_too"), is_tied=True),
    ]


@our_case
def a_value_is_the_gradient_of_what_it_is_computed_from(strategy: Any) -> Any:
    """Whether the only gradient is that of the weight, where an average is updated first; where both are weights."""
    seen = compiled_items(strategy)
    variables_that_are_updated_by_one_value(strategy)
    names = [[gradient.variable for gradient in item.gradients] for item in seen]
    return [own == [name] for own, name in zip(names, ("weight", "another_weight", "tied"), strict=True)]


@our_case
def what_each_variable_asks_for_is_computed_once(strategy: Any) -> Any:
    """Adam's powers of its two rates, in a program of several variables."""
    seen = compiled_items(strategy)
    trained_by_loop(strategy, lambda: keras.optimizers.Adam(0.05))
    ops = tf.compat.v1.GraphDef.FromString(seen[-1].graph_def).node
    return [sum(op.op == "Pow" and op.name.startswith("adam") for op in ops)]


@case
def products_of_a_rate_that_is_read_several_times(strategy: Any) -> Any:
    """TensorFlow multiplies `a * x * y` in an order that depends on whether another op reads `a * x`."""
    rng = np.random.default_rng(3)
    x, y = (tf.constant(rng.normal(size=[37, 5]), tf.float32) for _ in range(2))
    with strategy.scope():
        a = tf.Variable(0.3, trainable=False)

    def products(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        x, y = tf.sin(x), tf.cos(y)
        sums = a * x + a * x * y, a * x + a * y + a * x * y, tf.add_n([tf.sin(a) * x, y, tf.sin(a) * x * y])
        swapped = a * x + x * a * y, (2.0 * a) * x + (2.0 * a) * y * 3.0 + (a * 2.0) * x * y
        return *sums, *swapped, tf.identity(a) * x + a * x * y, a * x + a * tf.identity(x) * y

    results = tf.function(lambda: strategy.run(products, (x, y)))()
    return [strategy.experimental_local_results(result) for result in results]
