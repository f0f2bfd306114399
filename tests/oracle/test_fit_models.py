"""`fit` of models with state, masks, and training steps of their own, as on one device.

One module, though long: its clusters start once.
"""

import itertools
import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from tests.support.cluster_pool import THREE_WORKERS, TWO_REPLICAS, TWO_WORKERS, CaseFailedError, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.fit_oracle import TOLERANCE, WEIGHTS, X, Y, compare, compiled, fitted, in_half_precision, named
from tests.support.gan import fit_gan
from tests.support.oracle import assert_close

pytestmark = pytest.mark.parametrize(
    "cluster", [TWO_REPLICAS, TWO_WORKERS, THREE_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)


class ReplicaBatchNormalization(keras.layers.BatchNormalization):
    """On one device: each replica's slice is normalized by itself; the averages are weighted by examples."""

    def __init__(self, replicas: int):
        super().__init__()
        self.replicas = replicas

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if not training:
            return super().call(inputs, training=False)
        size, outputs, means, variances = tf.shape(inputs)[0], [], [], []
        ends = [(size * index + self.replicas - 1) // self.replicas for index in range(self.replicas + 1)]
        for begin, end in itertools.pairwise(ends):
            part = inputs[begin:end]
            mean, variance = tf.nn.moments(part, [0])
            outputs.append((part - mean) * tf.math.rsqrt(variance + self.epsilon) * self.gamma + self.beta)
            share = tf.cast(end - begin, part.dtype) / tf.cast(size, part.dtype)
            means.append(share * mean)
            variances.append(share * variance)
        for average, values in ((self.moving_mean, means), (self.moving_variance, variances)):
            average.assign(average * self.momentum + tf.add_n(values) * (1.0 - self.momentum))
        return tf.concat(outputs, axis=0)


def batch_normalization() -> dict[str, Any]:
    def train(layer: Callable[[], keras.layers.Layer]) -> dict[str, Any]:
        def network() -> keras.Model:
            return keras.Sequential([keras.layers.Dense(5, use_bias=False), layer(), keras.layers.Dense(3)])

        model = compiled("adam", network)
        values = fitted(model, X, Y, batch_size=8)
        return {**values, "evaluated": np.array(model.evaluate(X, Y, batch_size=8, verbose=0))}

    with AutoDist(batch_statistics="replica") as autodist:
        replicas = len(autodist.resources.replica_devices)
        expected = train(lambda: ReplicaBatchNormalization(replicas))
        with autodist.scope():
            values = train(keras.layers.BatchNormalization)
    for name, wanted in expected.items():
        assert_close(values[name], wanted, name, TOLERANCE)
    return values


def test_batch_normalization_is_each_replicas_and_its_averages_are_of_all(cluster: Cluster) -> None:
    same(cluster.run(batch_normalization))


class Dropping(keras.Model):
    """Drops units; `masks`, where given, say which: else it draws, and notes what it drew."""

    def __init__(self, masks: list[np.ndarray] | None):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(3)
        self.dropout = keras.layers.Dropout(0.5, seed=3)
        self.is_given = masks is not None

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self.out(self.hidden(inputs))

    def train_step(self, data: Any) -> dict[str, Any]:
        (x, given), y, _ = data
        with tf.GradientTape() as tape:
            hidden = self.hidden(x)
            mask = given if self.is_given else self.dropout(tf.ones_like(hidden), training=True)
            loss = self.compute_loss(x, y, self.out(hidden * mask))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss, "mask": mask}


def dropout() -> dict[str, Any]:
    def train(masks: list[np.ndarray] | None) -> tuple[dict[str, Any], list[np.ndarray]]:
        model = compiled("adam", lambda: Dropping(masks), metrics=None)
        drawn, losses = [], []
        for step, size in enumerate((8, 8, 6)):
            rows = slice(8 * step, 8 * step + size)
            mask = np.zeros([size, 6]) if masks is None else masks[step]
            logs = model.train_on_batch([X[rows], mask], Y[rows], return_dict=True)
            drawn.append(np.array(logs["mask"]))
            losses.append(np.array(logs["loss"]))
        slots = named("slot", model.optimizer.variables)
        return {**named("weight", model.trainable_variables), **slots, "losses": np.array(losses)}, drawn

    with AutoDist(seed=1) as autodist, autodist.scope():
        values, drawn = train(None)
    expected, _ = train(drawn)
    for name, wanted in expected.items():
        assert_close(values[name], wanted, name, TOLERANCE)
    for mask in drawn:
        assert set(np.unique(mask)) == {0.0, 2.0}
        assert len(np.unique(mask, axis=0)) > 4, "replicas drew the same masks"
    return values


def test_dropout_is_that_of_one_device_with_the_replicas_masks(cluster: Cluster) -> None:
    same(cluster.run(dropout))


def dropping() -> keras.Model:
    return keras.Sequential([keras.layers.Dense(6, "tanh"), keras.layers.Dropout(0.5, seed=3), keras.layers.Dense(3)])


def dropout_of_one_device() -> dict[str, Any]:
    def train() -> dict[str, Any]:
        model = compiled("adam", dropping, metrics=None)
        model.fit(X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0)
        return {**named("weight", model.trainable_variables), **named("slot", model.optimizer.variables)}

    with AutoDist(random="global") as autodist, autodist.scope():
        values = train()
    for name, wanted in train().items():
        assert_close(values[name], wanted, name, TOLERANCE)
    return values


def test_dropout_can_be_that_of_one_device(cluster: Cluster) -> None:
    same(cluster.run(dropout_of_one_device))


TOKENS = np.random.default_rng(5).integers(0, 7, [22, 4])  # 0 is padding.


def masked_losses_of_two_outputs() -> dict[str, Any]:
    def network() -> keras.Model:
        inputs = keras.Input([4], dtype="int32")
        embedded = keras.layers.Embedding(7, 5, mask_zero=True)(inputs)
        hidden = keras.layers.GRU(6, return_sequences=True)(embedded)
        words = keras.layers.Dense(7, name="words")(hidden)
        total = keras.layers.Dense(1, name="total")(keras.layers.GRU(3)(hidden))
        return keras.Model(inputs, {"words": words, "total": total})

    def train() -> dict[str, Any]:
        keras.utils.set_random_seed(11)
        model = network()
        model.compile(
            keras.optimizers.Adam(0.05),
            {
                "words": keras.losses.SparseCategoricalCrossentropy(
                    from_logits=True, reduction="mean_with_sample_weight"
                ),
                "total": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
            },
            metrics={"words": ["accuracy"]},
            weighted_metrics={"total": ["mae"]},
            jit_compile=False,
        )
        targets = {"words": np.roll(TOKENS, 1, axis=1), "total": TOKENS.sum(axis=1, keepdims=True) * 0.1}
        weights = {"words": np.ones([22, 4]) * WEIGHTS[:, None], "total": WEIGHTS}
        values = fitted(model, TOKENS, targets, sample_weight=weights, batch_size=8)
        return {**values, "evaluated": np.array(model.evaluate(TOKENS, targets, batch_size=8, verbose=0))}

    return compare(train)


def sequences_of_any_length() -> dict[str, Any]:
    def network() -> keras.Model:
        inputs = keras.Input([None], dtype="int32")
        embedded = keras.layers.Embedding(7, 4)(inputs)
        attended = keras.layers.MultiHeadAttention(2, 3, use_bias=False)(embedded, embedded, use_causal_mask=True)
        hidden = keras.layers.LayerNormalization()(embedded + attended)
        hidden = keras.layers.Bidirectional(keras.layers.LSTM(3, return_sequences=True))(hidden)
        return keras.Model(inputs, keras.layers.Dense(7)(hidden))

    def train() -> dict[str, Any]:
        model = compiled("adam", network)
        data = tf.data.Dataset.from_tensor_slices((TOKENS, np.roll(TOKENS, 1, axis=1))).batch(8)
        return fitted(model, data, validation_data=data.take(2))

    return compare(train)


@keras.saving.register_keras_serializable()
class Farthest(keras.metrics.Metric):
    """Not additive: the largest error of all examples so far, and the product of the batches' largest."""

    def __init__(self, name: str = "farthest"):
        super().__init__(name=name)
        self.largest = self.add_weight(name="largest", initializer="zeros")
        self.product = self.add_weight(name="product", initializer="ones")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        largest = tf.reduce_max(tf.abs(tf.cast(y_true, y_pred.dtype) - y_pred))
        self.largest.assign(tf.maximum(self.largest, tf.cast(largest, self.largest.dtype)))
        self.product.assign(self.product * tf.cast(largest, self.product.dtype))

    def result(self) -> Any:
        return self.largest + self.product


def metrics_that_are_no_sums() -> dict[str, Any]:
    def train() -> dict[str, Any]:
        keras.utils.set_random_seed(11)
        model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
        metrics = [
            Farthest(),
            keras.metrics.R2Score(name="r2"),
            keras.metrics.RootMeanSquaredError(name="root"),
            keras.metrics.CosineSimilarity(name="cosine"),
        ]
        model.compile("sgd", "mse", metrics=metrics, jit_compile=False)
        values = fitted(model, X, WEIGHTS[:, None], batch_size=8, validation_data=(X[:9], WEIGHTS[:9, None]))
        binary = keras.Sequential([keras.layers.Dense(1, activation="sigmoid")])
        names = [
            keras.metrics.AUC(num_thresholds=20, name="auc"),
            keras.metrics.Precision(name="precision"),
            keras.metrics.Recall(name="recall"),
            keras.metrics.F1Score(name="f1", threshold=0.5),
        ]
        binary.compile("sgd", "binary_crossentropy", metrics=names, jit_compile=False)
        others = fitted(binary, X, (Y > 0)[:, None].astype(float), batch_size=8)
        return {**values, **{f"binary {name}": value for name, value in others.items()}}

    return compare(train, tolerance=1e-6)  # Keras's metrics are float32.


def two_networks_with_an_optimizer_each() -> dict[str, Any]:
    return compare(fit_gan)


def a_loss_that_becomes_nan() -> dict[str, Any]:
    def train() -> dict[str, Any]:
        x = X.copy()
        x[20] = np.nan
        return fitted(compiled("sgd", metrics=None), x, Y, batch_size=8, shuffle=False)

    values = compare(train)
    assert np.isnan(values["history of loss"]).all()
    return values


def constraints_and_regularizers_and_added_losses() -> dict[str, Any]:
    class Penalized(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(0.1 * tf.reduce_mean(tf.square(inputs)))
            return inputs

    def network() -> keras.Model:
        return keras.Sequential(
            [
                keras.layers.Dense(5, kernel_constraint="unit_norm", kernel_regularizer="l2"),
                Penalized(),
                keras.layers.Dense(3, kernel_constraint="non_neg", activity_regularizer="l1"),
            ]
        )

    return compare(lambda: fitted(compiled("sgd", network), X, Y, batch_size=8))


def weights_written_between_batches() -> dict[str, Any]:
    class Clip(keras.callbacks.Callback):
        """Clips weights, and reads them: they are those of this step."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.norms: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            kernel = self.model.layers[0].kernel
            self.norms.append(float(np.linalg.norm(kernel)))
            kernel.assign(np.clip(kernel, -0.4, 0.4))

    def train() -> dict[str, Any]:
        clip = Clip()
        values = fitted(compiled(keras.optimizers.SGD(0.3)), X, Y, batch_size=8, callbacks=[clip])
        return {**values, "norms": np.array(clip.norms)}

    return compare(train)


def weighted_mean(y_true: Any, y_pred: Any) -> Any:
    """A loss with a normalizer of its own, which no weight of the model changes."""
    weights = tf.abs(tf.cast(y_true, y_pred.dtype))
    return tf.reduce_sum(weights * tf.square(y_pred[:, 0] - 1.0)) / (1.0 + tf.reduce_sum(weights))


def a_loss_with_a_normalizer_of_its_own() -> dict[str, Any]:
    def train() -> dict[str, Any]:
        model = compiled("sgd", metrics=None)
        model.compile("sgd", weighted_mean, jit_compile=False)
        return fitted(model, X, Y, batch_size=8)

    return compare(train)


class Centred(keras.Model):
    """Gives layers what is computed of the whole batch, and rows that are."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(3)
        self.centre = keras.layers.Activation(lambda x: x - tf.reduce_mean(x, axis=0))

    def call(self, x: Any) -> Any:
        mean = tf.reduce_mean(x, axis=0, keepdims=True)
        return self.out(self.hidden(keras.layers.Subtract()([self.centre(x * x), mean])))


def layers_that_are_given_statistics() -> dict[str, Any]:
    return compare(lambda: fitted(compiled("sgd", Centred), X, Y, batch_size=8))


def sums_with_regularizers() -> dict[str, Any]:
    def train() -> dict[str, Any]:
        keras.utils.set_random_seed(11)
        model = keras.Sequential(
            [
                keras.layers.Dense(5, kernel_regularizer="l2"),
                keras.layers.Dense(1, bias_regularizer="l1"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction="sum"), jit_compile=False)
        return fitted(model, X, WEIGHTS[:, None], batch_size=8)

    return compare(train)


def sums_over_sequences_with_regularizers() -> dict[str, Any]:
    def train() -> dict[str, Any]:
        keras.utils.set_random_seed(11)
        model = keras.Sequential([keras.layers.Dense(5, kernel_regularizer=keras.regularizers.L2(0.5)) for _ in "ab"])
        model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction="sum"), jit_compile=False)
        return fitted(model, X.reshape(-1, 3, 2), WEIGHTS[:, None, None] * np.ones([3, 5]), batch_size=8)

    return compare(train)


class Halving(keras.Sequential):
    """A step that is a tf.function, with a branch on a tensor."""

    @tf.function
    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        gradients = [self.halved(one) for one in tape.gradient(loss, self.trainable_variables)]
        self.optimizer.apply(gradients, self.trainable_variables)
        if loss > 1.0:
            loss = loss * 2.0
        return {"loss": loss}

    @tf.function
    def halved(self, gradient: Any) -> Any:
        if tf.reduce_max(tf.abs(gradient)) > 0.1:
            return gradient * 0.5
        return gradient


def a_step_that_branches() -> dict[str, Any]:
    def network() -> keras.Model:
        return Halving([keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)])

    return compare(lambda: fitted(compiled("sgd", network, metrics=None), X, Y, batch_size=8))


CASES = [
    masked_losses_of_two_outputs,
    sequences_of_any_length,
    metrics_that_are_no_sums,
    two_networks_with_an_optimizer_each,
    a_loss_that_becomes_nan,
    constraints_and_regularizers_and_added_losses,
    weights_written_between_batches,
    a_loss_with_a_normalizer_of_its_own,
    layers_that_are_given_statistics,
    sums_with_regularizers,
    sums_over_sequences_with_regularizers,
    a_step_that_branches,
]


@pytest.mark.on(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.replace("_", "-"))
def test_fit_does_what_it_does_on_one_device(cluster: Cluster, case: Callable[[], dict[str, Any]]) -> None:
    same(cluster.run(case))


def single_precision() -> dict[str, Any]:
    def train() -> dict[str, Any]:
        keras.config.set_floatx("float32")
        keras.utils.set_random_seed(11)
        model = keras.Sequential([keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], jit_compile=False)
        return fitted(model, X.astype(np.float32), Y, batch_size=8)

    try:
        return compare(train, tolerance=1e-4)
    finally:
        keras.config.set_floatx("float64")


def test_single_precision_is_exact_to_its_rounding(cluster: Cluster) -> None:
    same(cluster.run(single_precision))


def normalized_by_what_is_learnt(y_true: Any, y_pred: Any) -> Any:
    return tf.reduce_sum(tf.square(y_pred[:, 0] - 1.0)) / tf.reduce_sum(tf.square(y_pred))


def a_loss_normalized_by_what_is_learnt(**options: Any) -> list[str]:
    """What is said of it."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    said: list[str] = []
    notes = Notes()
    logging.getLogger("autodist_py").addHandler(notes)
    try:
        with AutoDist(**options) as autodist, autodist.scope():
            model = compiled("sgd", metrics=None)
            model.compile("sgd", normalized_by_what_is_learnt, jit_compile=False)
            model.fit(X, Y, batch_size=8, verbose=0)
    finally:
        logging.getLogger("autodist_py").removeHandler(notes)
    return said


def test_a_loss_that_is_no_mean_is_refused(cluster: Cluster) -> None:
    message = r"which trains '.*truediv.*, line [0-9]+: return tf\.reduce_sum.*no sum or mean over examples"
    with pytest.raises(CaseFailedError, match=rf"(?s){message}.*, loss_reduction=.*AutoDist\(strict=False\)"):
        cluster.run(a_loss_normalized_by_what_is_learnt, batch_statistics="replica")


@pytest.mark.parametrize("options", [{"strict": False}, {"loss_reduction": "mean"}], ids=str)
def test_a_loss_that_is_no_mean_is_warned_of_where_that_is_allowed(cluster: Cluster, options: dict[str, Any]) -> None:
    chief, *others = cluster.run(a_loss_normalized_by_what_is_learnt, batch_statistics="replica", **options)
    (said,) = [text for text in chief if "mixes the examples" in text]
    assert "truediv" in said and "taken for a mean over its parts" in said
    assert not any("over examples, as far as" in text or "is not seen" in text for text in chief), chief
    assert not any(others)  # Once is enough.


def mixed(policy: str) -> dict[str, Any]:
    def train() -> dict[str, Any]:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(policy)
        try:
            keras.utils.set_random_seed(11)
            model = keras.Sequential([keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3, dtype="float32")])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
            if policy == "mixed_float16":
                assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            return fitted(model, X.astype(np.float32), Y, batch_size=8)
        finally:
            keras.config.set_dtype_policy("float64")

    return compare(train, tolerance={"mixed_float16": 2e-3, "mixed_bfloat16": 2e-2}[policy])


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_is_as_exact_as_its_types(cluster: Cluster, policy: str) -> None:
    same(cluster.run(mixed, policy=policy))


def overflowing(builder: str) -> dict[str, Any]:
    """The loss scale begins far too large, and is doubled after two steps: gradients are infinite time and again."""

    def train() -> dict[str, Any]:
        model = in_half_precision(keras)
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**20, dynamic_growth_steps=2)
        model.compile(scaled, "sparse_categorical_crossentropy", jit_compile=False)
        values = fitted(model, X.astype(np.float32), Y, batch_size=8, epochs=3)
        keras.config.set_floatx("float64")
        assert 0 < int(inner.iterations) < 9  # It has skipped steps, and taken others.
        return values

    return compare(train, tolerance=4e-3, strategy_builder=builder)


@pytest.mark.on(1)
@pytest.mark.parametrize("builder", ["AllReduce", "PSLoadBalancing", "ShardedOptimizer"])
def test_a_loss_scale_falls_and_rises_as_on_one_device(cluster: Cluster, builder: str) -> None:
    same(cluster.run(overflowing, builder=builder))
