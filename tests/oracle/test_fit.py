"""`fit` of a Keras model compiled in `scope()` does what it does on one device: weights, optimizer state, history."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist, CaptureError
from autodist_py.keras import ThroughputLogger
from tests.support.cluster_pool import THREE_WORKERS, TWO_REPLICAS, TWO_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.fit_oracle import OPTIMIZERS, TOLERANCE, VALIDATION, WEIGHTS, X, Y, compare, compiled, fitted
from tests.support.oracle import assert_close

pytestmark = [
    pytest.mark.first,
    pytest.mark.parametrize(
        "cluster",
        [TWO_REPLICAS, TWO_WORKERS, THREE_WORKERS],
        ids=lambda shape: shape.name,
        indirect=True,
        scope="module",
    ),
]


def fit_with(optimizer: str) -> dict[str, Any]:
    options = {"batch_size": 8, "sample_weight": WEIGHTS, "validation_data": VALIDATION}
    return compare(lambda: fitted(compiled(OPTIMIZERS[optimizer]()), X, Y, **options))


@pytest.mark.on(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_optimizer_trains_as_on_one_device(cluster: Cluster, optimizer: str) -> None:
    same(cluster.run(fit_with, optimizer=optimizer))


def class_weights_and_several_steps_at_once() -> dict[str, Any]:
    return compare(
        lambda: fitted(
            compiled("adam", steps_per_execution=2), X, Y, batch_size=5, class_weight={0: 1.0, 1: 3.0, 2: 0.5}
        )
    )


def a_dataset_without_an_end() -> dict[str, Any]:
    def train() -> dict[str, Any]:
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22, seed=5).batch(8).repeat()
        return fitted(compiled("sgd"), data, steps_per_epoch=4)

    return compare(train)


def several_steps_of_data_of_unknown_length() -> dict[str, Any]:
    def train() -> dict[str, Any]:
        model = compiled("sgd", steps_per_execution=2)
        # Plain Keras counts an iteration too many at such an end: fit and its oracle are told the number of steps.
        values = fitted(model, tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).repeat(2), steps_per_epoch=3)
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5).filter(lambda x, y: True)
        return {**values, "evaluated": np.array(model.evaluate(data, verbose=0))}

    return compare(train)


def generated_batches() -> dict[str, Any]:
    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return X[index * 8 : index * 8 + 8], Y[index * 8 : index * 8 + 8]

    return compare(lambda: fitted(compiled("sgd"), Batches(), shuffle=False))


def two_inputs_and_two_outputs() -> dict[str, Any]:
    def make() -> keras.Model:
        left, right = keras.Input([4], name="left"), keras.Input([2], name="right")
        hidden = keras.layers.Dense(4, activation="tanh")(keras.layers.Concatenate()([left, right]))
        outputs = {
            "kind": keras.layers.Dense(3, name="kind")(hidden),
            "size": keras.layers.Dense(1, name="size")(hidden),
        }
        return keras.Model([left, right], outputs)

    def train() -> dict[str, Any]:
        keras.utils.set_random_seed(11)
        model = make()
        model.compile(
            "adam",
            {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"},
            loss_weights={"kind": 1.0, "size": 0.3},
            metrics={"kind": ["accuracy"], "size": ["mae"]},
            jit_compile=False,
        )
        return fitted(model, [X[:, :4], X[:, 4:]], {"kind": Y, "size": WEIGHTS[:, None]}, batch_size=8)

    return compare(train)


class Clipped(keras.Model):
    """A subclass with a training step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.1)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "norm": norm}


def a_training_step_of_its_own() -> dict[str, Any]:
    return compare(lambda: fitted(compiled("sgd", Clipped, metrics=None), X, Y, batch_size=8))


def fitted_twice_and_by_batches_with_weights_set_between() -> dict[str, Any]:
    def train() -> dict[str, Any]:
        model = compiled("adam")
        fitted(model, X, Y, batch_size=8)
        model.set_weights([weight * 0.5 for weight in model.get_weights()])
        first = model.train_on_batch(X[:5], Y[:5], return_dict=True)
        model.layers[0].trainable = False
        model.compile("sgd", model.loss, jit_compile=False)
        return {"first": np.array(first["loss"]), **fitted(model, X, Y, batch_size=8)}

    return compare(train)


def evaluation_and_prediction_see_what_was_trained() -> dict[str, Any]:
    def train() -> dict[str, Any]:
        model = compiled("sgd")
        values = fitted(model, X, Y, batch_size=8)
        values["evaluated"] = np.array(model.evaluate(X, Y, batch_size=8, verbose=0))
        values["predicted"] = model.predict(X, batch_size=8, verbose=0)
        values["tested batch"] = np.array(model.test_on_batch(X[:5], Y[:5], sample_weight=WEIGHTS[:5]))
        values["predicted batch"] = model.predict_on_batch(X[:5])
        return values

    return compare(train)


CASES = [
    class_weights_and_several_steps_at_once,
    a_dataset_without_an_end,
    several_steps_of_data_of_unknown_length,
    generated_batches,
    two_inputs_and_two_outputs,
    a_training_step_of_its_own,
    fitted_twice_and_by_batches_with_weights_set_between,
    evaluation_and_prediction_see_what_was_trained,
]


@pytest.mark.on(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.replace("_", "-"))
def test_fit_does_what_it_does_on_one_device(cluster: Cluster, case: Callable[[], dict[str, Any]]) -> None:
    same(cluster.run(case))


def stopping_and_learning_rates() -> dict[str, Any]:
    def train() -> dict[str, Any]:
        callbacks = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=10.0, patience=1, restore_best_weights=True),
        ]
        return fitted(compiled("sgd"), X, Y, epochs=6, validation_data=VALIDATION, callbacks=callbacks)

    return compare(train)


def test_callbacks_stop_all_workers_at_one_step_and_set_their_learning_rates(cluster: Cluster) -> None:
    values = same(cluster.run(stopping_and_learning_rates))
    assert len(values["history of loss"]) == 2


class Fitting(keras.Sequential):
    """Has a fit of its own, which takes what it is given."""

    def __init__(self) -> None:
        super().__init__([keras.layers.Dense(3)])

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return super().fit(*args, **kwargs)


def files_of(folder: str) -> None:
    with AutoDist() as autodist, autodist.scope():
        model = compiled("sgd")
        written = Path(folder) / str(autodist.rank)
        callbacks = [
            keras.callbacks.ModelCheckpoint(written / "{epoch}.weights.h5", save_weights_only=True),
            [keras.callbacks.CSVLogger(written / "log.csv")],
            keras.callbacks.TensorBoard(written / "board", update_freq="batch"),
        ]
        written.mkdir()
        model.fit(X, Y, epochs=2, verbose=0, callbacks=callbacks)
        assert len(callbacks) == 3
        own = compiled("sgd", Fitting)
        own.fit(X, Y, verbose=0, callbacks=keras.callbacks.CSVLogger(written / "own.csv"))
        own.evaluate(X, Y, verbose=0, callbacks=[keras.callbacks.TensorBoard(written / "tested")])
        if autodist.num_workers > 1:
            with pytest.raises(CaptureError, match="given as a list, not as a CallbackList"):
                own.fit(X, Y, verbose=0, callbacks=keras.callbacks.CallbackList(model=own))


def test_callbacks_that_write_files_run_on_the_chief(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(files_of, folder=str(tmp_path))
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")}
    assert files == {"0/1.weights.h5", "0/2.weights.h5", "0/log.csv", "0/board", "0/own.csv", "0/tested"}


def restoring(folder: str) -> dict[str, Any]:
    """A run that fails after two epochs goes on where it was, on every worker, though only the chief has the files."""

    class Failing(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    def train(where: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for more in ([Failing()], []):
            model = compiled("adam")
            model.build([None, 6])
            try:
                callbacks = [keras.callbacks.BackupAndRestore(where), *more]
                values |= fitted(model, X, Y, batch_size=8, epochs=3, shuffle=False, callbacks=callbacks)
            except KeyboardInterrupt:
                model.set_weights([weight * 0.0 for weight in model.get_weights()])
        return values

    with AutoDist() as autodist:
        own = Path(folder) / str(autodist.rank)
        expected = train(own / "one_device")
        with autodist.scope():
            values = train(own / "scope")
    assert len(values["history of loss"]) == 1
    for name, wanted in expected.items():
        assert_close(values[name], wanted, name, TOLERANCE)
    return values


def test_a_run_that_ended_goes_on_where_the_chiefs_backup_was(cluster: Cluster, tmp_path: Path) -> None:
    same(cluster.run(restoring, folder=str(tmp_path)))


def throughput() -> dict[str, Any]:
    with AutoDist() as autodist:
        with autodist.scope():
            model = compiled("sgd")
            started = time.perf_counter()
            history = model.fit(X, Y, batch_size=4, epochs=3, verbose=0, callbacks=[ThroughputLogger()]).history
            seconds = time.perf_counter() - started
        plain = compiled("sgd")
        with pytest.raises(CaptureError, match="counts the examples of a model that is compiled in scope"):
            plain.fit(X, Y, verbose=0, callbacks=[ThroughputLogger()])
    return {"seconds": seconds, "examples_per_second": history["examples_per_second"]}


def test_throughput_counts_the_examples_of_all_workers(cluster: Cluster) -> None:
    for worker in cluster.run(throughput):
        # Of 22 examples of an epoch, those of the first step are not counted: nor is the time it takes.
        assert all(18 / worker["seconds"] < rate < 1e6 for rate in worker["examples_per_second"])


def models_that_are_not_hooked() -> None:
    import copy

    with AutoDist() as autodist:
        outside = compiled("sgd")
        with autodist.scope():
            with pytest.raises(CaptureError, match=r"compiled outside of it.*compile it in scope"):
                outside.fit(X, Y, verbose=0)
            model = compiled("sgd")
            with pytest.raises(CaptureError, match=r"compile\(run_eagerly=True\) cannot be distributed"):
                compiled("sgd", run_eagerly=True)
            with pytest.raises(CaptureError, match=r"compile\(jit_compile=True\) cannot be distributed"):
                compiled("sgd", jit_compile=True)
        model.fit(X, Y, verbose=0)
        assert "make_train_function" in vars(model)
        for other in (keras.models.clone_model(model), copy.deepcopy(model)):
            assert "make_train_function" not in vars(other)
        model.compile("sgd", model.loss, jit_compile=False)
        assert "make_train_function" not in vars(model)


def test_only_models_compiled_in_scope_are_hooked(cluster: Cluster) -> None:
    cluster.run(models_that_are_not_hooked)
