"""The user's eager variables: they show the running state, and what is written to them is what the next step sees."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.cluster_pool import ONE_DEVICE, TWO_REPLICAS, UNEVEN_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.oracle import Training, Values, compare_function
from tests.support.oracle_programs import HandWritten, batches, initial_values, keras_model, predict, squared_error

pytestmark = pytest.mark.parametrize(
    "cluster", [ONE_DEVICE, TWO_REPLICAS, UNEVEN_WORKERS], ids=lambda s: s.name, indirect=True, scope="module"
)


halves: dict[int, Callable[[], tf.Tensor]] = {}
"""By the step's id: a function of the user's that halves a weight, traced before the first step."""


def build_program(seed: int) -> Training:
    """Momentum with a learning rate that is a variable, and functions of the user's that write to the weights."""
    weights = {name: tf.Variable(value, name=name) for name, value in initial_values("both", seed).items()}
    updates = HandWritten.make("momentum", list(weights.values()))
    rate = tf.Variable(np.float64(0.1), trainable=False, name="rate")
    halve = tf.function(lambda: weights["out"].assign(weights["out"] * 0.5))
    halve()

    def step(x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            predictions = predict(weights, [x, ids])
            loss = squared_error(predictions, y)
        updates.apply([tf.convert_to_tensor(g) * rate for g in tape.gradient(loss, updates.weights)])
        return {"loss": loss, "predictions": predictions}

    halves[id(step)] = halve
    return Training(step, lambda: {**weights, **updates.slots, "rate": rate})


def assign(training: Training, number: int) -> None:
    kernel = training.variables()["kernel"]
    kernel.assign(np.random.default_rng(number).normal(size=kernel.shape))
    assert np.array_equal(kernel.numpy(), np.random.default_rng(number).normal(size=kernel.shape))


def assign_relative(training: Training, number: int) -> None:
    variables = training.variables()
    variables["bias"].assign_add(np.full(variables["bias"].shape, 0.1 * number))
    variables["table"].assign_sub(0.1 * variables["table"])


def assign_rows(training: Training, number: int) -> None:
    table = training.variables()["table"]
    rows = np.full([2, table.shape[1]], 0.1 * number)
    table.scatter_update(tf.IndexedSlices(tf.constant(rows), tf.constant([1, 3])))
    table.scatter_nd_add([[0]], rows[:1])


def assign_slice(training: Training, number: int) -> None:
    training.variables()["kernel"][1:3].assign(np.full([2, 3], 0.1 * number))


def assign_rate(training: Training, number: int) -> None:
    training.variables()["rate"].assign(0.1 / (number + 1))


def call_traced_before(training: Training, number: int) -> None:
    halves[id(training.step)]()


def call_traced_now(training: Training, number: int) -> None:
    kernel = training.variables()["kernel"]
    tf.function(lambda: kernel.assign(kernel * 0.5))()


def reset_slots(training: Training, number: int) -> None:
    for name, variable in training.variables().items():
        if name.endswith("momentum"):
            variable.assign(tf.zeros_like(variable))


WRITES: Mapping[str, Callable[[Training, int], None]] = {
    "assign": assign,
    "assign-relative": assign_relative,
    "assign-rows": assign_rows,
    "assign-slice": assign_slice,
    "assign-rate": assign_rate,
    "function-traced-before": call_traced_before,
    "function-traced-now": call_traced_now,
    "reset-slots": reset_slots,
}


def train_and_write(name: str) -> Values:
    return compare_function(build_program, batches("both"), between=WRITES[name])


@pytest.mark.parametrize("name", WRITES)
def test_the_next_step_sees_what_the_user_wrote(cluster: Cluster, name: str):
    same(cluster.run(train_and_write, name=name))


def restore_checkpoint(directory: str) -> Values:
    saved: dict[int, str] = {}

    def between(training: Training, number: int) -> None:
        checkpoint = tf.train.Checkpoint(**{name.replace("/", "_"): v for name, v in training.variables().items()})
        if number == 0:
            saved[id(training)] = checkpoint.write(f"{directory}/{os.getpid()}-{len(saved)}")
        if number == 2:
            checkpoint.read(saved[id(training)]).assert_consumed()

    return compare_function(build_program, batches("both"), between=between)


def test_the_next_step_sees_a_restored_checkpoint(cluster: Cluster, tmp_path: Path):
    same(cluster.run(restore_checkpoint, directory=str(tmp_path)))


def write_to_keras(what: str) -> Values:
    programs: dict[int, tuple[keras.Model, keras.Optimizer]] = {}

    def build(seed: int) -> Training:
        keras.config.set_floatx("float64")
        network = keras_model("both", seed)
        optimizer = keras.optimizers.Adam(0.05)
        optimizer.build(network.trainable_variables)

        def step(x: tf.Tensor, ids: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = squared_error(network([x, ids], training=True), y)
            optimizer.apply(tape.gradient(loss, network.trainable_variables), network.trainable_variables)
            return loss

        state = (*network.variables, *optimizer.variables)
        programs[id(step)] = (network, optimizer)
        return Training(step, lambda: {str(i): v.value for i, v in enumerate(state)})

    def between(training: Training, number: int) -> None:
        network, optimizer = programs[id(training.step)]
        rng = np.random.default_rng(number)
        if what == "set_weights":
            network.set_weights([rng.normal(size=w.shape) for w in network.get_weights()])
        elif what == "learning_rate":
            optimizer.learning_rate = 0.05 / (number + 2)
        else:
            inputs = [rng.normal(size=(3, 4)), rng.integers(0, 7, (3, 5))]
            assert np.isfinite(network.predict(inputs, verbose=0)).all()

    return compare_function(build, batches("both"), between=between)


@pytest.mark.parametrize("what", ["set_weights", "learning_rate", "predict"])
def test_keras_objects_stay_the_users_own(cluster: Cluster, what: str):
    same(cluster.run(write_to_keras, what=what))
