"""`fit` of a tf_keras model compiled in `scope()` does what it does on one device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from autodist_py import AutoDist, CaptureError
from autodist_py.keras import ThroughputLogger
from tests.support import fit_oracle
from tests.support.cluster_pool import THREE_WORKERS, TWO_REPLICAS, TWO_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.fit_oracle import VALIDATION, WEIGHTS, X, Y
from tests.support.oracle import assert_close

pytestmark = pytest.mark.parametrize(
    "cluster", [TWO_REPLICAS, TWO_WORKERS, THREE_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)


class Clipped(tf_keras.Model):
    """A subclass with a training step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = tf_keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        if tf.shape(x)[1] > 2:  # Autograph's: Keras 2 asks it to convert what layers do.
            x = 2.0 * x
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.1)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "norm": norm}


def classifier() -> tf_keras.Model:
    return tf_keras.Sequential([tf_keras.layers.Dense(5, activation="tanh"), tf_keras.layers.Dense(3)])


def compiled(optimizer: Any, make: Callable[[], tf_keras.Model] = classifier, **options: Any) -> tf_keras.Model:
    tf_keras.backend.set_floatx("float64")
    tf_keras.utils.set_random_seed(11)
    model = make()
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **{"metrics": ["accuracy"], **options})
    return model


def compare(train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    tf_keras.backend.set_floatx("float64")  # Before `train` makes an optimizer.
    return fit_oracle.compare(train)


def fitted(model: tf_keras.Model, *data: Any, **options: Any) -> dict[str, Any]:
    return fit_oracle.fitted(model, *data, **{"batch_size": 8, **options})


def weights_and_validation() -> dict[str, Any]:
    return fitted(compiled("adam"), X, Y, sample_weight=WEIGHTS, validation_data=VALIDATION)


def several_steps_at_once() -> dict[str, Any]:
    optimizer = tf_keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5)
    return fitted(compiled(optimizer, steps_per_execution=2), X, Y, class_weight={0: 1.0, 1: 3.0, 2: 0.5})


def a_training_step_of_its_own() -> dict[str, Any]:
    return fitted(compiled("sgd", Clipped, metrics=None), X, Y)


def a_dataset_and_batches_by_hand() -> dict[str, Any]:
    model = compiled("rmsprop")
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22, seed=5).batch(8).repeat()
    values = fitted(model, data, batch_size=None, steps_per_epoch=4)
    values["by hand"] = np.array(model.train_on_batch(X[:5], Y[:5]))
    values["tested"] = np.array(model.test_on_batch(X[:5], Y[:5]))
    values["evaluated"] = np.array(model.evaluate(X, Y, verbose=0))
    values["predicted"] = model.predict(X, verbose=0)
    return values


def rates_and_stopping() -> dict[str, Any]:
    callbacks = [
        tf_keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        tf_keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=10.0, patience=1, restore_best_weights=True),
    ]
    return fitted(compiled("sgd"), X, Y, epochs=6, validation_data=VALIDATION, callbacks=callbacks)


def operations_as_layers() -> dict[str, Any]:
    def network() -> tf_keras.Model:
        inputs = tf_keras.Input([6])
        centred = inputs - tf.reduce_mean(inputs, axis=0)
        return tf_keras.Model(inputs, tf_keras.layers.Dense(3)(tf_keras.layers.Dense(4, activation="tanh")(centred)))

    return fitted(compiled("sgd", network), X, Y)


CASES = [
    weights_and_validation,
    several_steps_at_once,
    a_training_step_of_its_own,
    a_dataset_and_batches_by_hand,
    rates_and_stopping,
    operations_as_layers,
]


@pytest.mark.on(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.replace("_", "-"))
def test_fit_does_what_it_does_on_one_device(cluster: Cluster, case: Callable[[], dict[str, Any]]) -> None:
    same(cluster.run(compare, train=case))


def overflowing() -> dict[str, Any]:
    """The loss scale begins far too large, and is doubled after two steps: gradients are infinite time and again."""

    def train() -> dict[str, Any]:
        model = fit_oracle.in_half_precision(tf_keras)
        inner = tf_keras.optimizers.SGD(0.1, momentum=0.9)
        scaled = tf_keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=2.0**20, dynamic_growth_steps=2)
        model.compile(scaled, "sparse_categorical_crossentropy")
        scales: list[Any] = []
        noted = tf_keras.callbacks.LambdaCallback(on_batch_end=lambda batch, logs: scales.append(scaled.loss_scale))
        values = fitted(model, X.astype(np.float32), Y, epochs=3, callbacks=[noted])
        tf_keras.backend.set_floatx("float64")
        assert min(scales) < max(scales[3:])  # It falls, and rises again.
        return {**values, "scales": np.array(scales), "good steps": np.array(scaled.dynamic_counter)}

    return fit_oracle.compare(train, tolerance=4e-3)


@pytest.mark.on(1)
def test_a_loss_scale_falls_and_rises_as_on_one_device(cluster: Cluster) -> None:
    same(cluster.run(overflowing))


def refused(folder: str) -> None:
    with AutoDist() as autodist:
        outside = compiled("sgd")
        with autodist.scope():
            with pytest.raises(CaptureError, match=r"compiled outside of it.*compile it in scope"):
                outside.fit(X, Y, verbose=0)
            with pytest.raises(CaptureError, match=r"compile\(run_eagerly=True\) cannot be distributed"):
                compiled("sgd", run_eagerly=True)
            with pytest.raises(CaptureError, match=r"\(train_on_batch\) in scope.*compiled outside of it"):
                outside.train_on_batch(X, Y)
            model = compiled("sgd")
        history = model.fit(X, Y, verbose=0, callbacks=[ThroughputLogger()]).history
        assert history["examples_per_second"][0] > 0
        if autodist.num_workers > 1:
            with pytest.raises(CaptureError, match="BackupAndRestore of tf_keras"):
                model.fit(X, Y, verbose=0, callbacks=[tf_keras.callbacks.BackupAndRestore(Path(folder))])


def test_what_cannot_be_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(refused, folder=str(tmp_path))


class OwnFunction(tf_keras.Sequential):
    """A model that makes the function that trains it."""

    def make_train_function(self, force: bool = False) -> Any:
        self.train_function = lambda iterator: {"loss": next(iterator)}
        return self.train_function


def refused_beside() -> None:
    """What would train each worker by itself, and what asks for a combination that nobody would do."""
    with AutoDist(batch_statistics="replica") as autodist, autodist.scope():
        if autodist.num_workers > 1:
            with pytest.raises(CaptureError, match=r"OwnFunction has a make_train_function of its own.*every worker"):
                compiled("sgd", OwnFunction)
            with tf.Graph().as_default(), AutoDist() as other, other.scope():
                for model in (tf_keras.Sequential([tf_keras.layers.Dense(1)]), keras.Sequential([])):
                    with pytest.raises(CaptureError, match=r"compiled in scope\(\) in a tf.Graph.*Leave tf.Graph"):
                        model.compile("sgd", "mse")
        with pytest.raises(CaptureError, match="OneDeviceStrategy"), tf.distribute.OneDeviceStrategy("/cpu:0").scope():
            compiled("sgd")
        for layers in (tf_keras.layers, keras.layers):
            layer = layers.BatchNormalization(synchronized=True, name="together")
            layer.build([None, 6])

            @autodist.function
            def normalized(x: Any, training: bool, layer: Any = layer) -> Any:
                return layer(x, training=training)

            assert_close(np.array(normalized(X, False)), np.array(layer(X, training=False)), "what is not synchronized")
            with pytest.raises(CaptureError, match=r"layer 'together' asks tf.distribute.*synchronized=False"):
                normalized(X, True)

        def network() -> tf_keras.Model:
            return tf_keras.Sequential([tf_keras.layers.experimental.SyncBatchNormalization(name="synced")])

        with pytest.raises(CaptureError, match=r"layer 'synced' asks tf\.distribute"):
            compiled("sgd", network, metrics=None).fit(X, Y, verbose=0)


def test_what_would_train_each_worker_by_itself_is_refused(cluster: Cluster) -> None:
    cluster.run(refused_beside)
