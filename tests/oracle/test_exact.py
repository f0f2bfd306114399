"""The equivalence contract beyond gradients: other writes, losses, and results, each as one device has them.

Every case is a step with something in it that a naive data-parallel program gets wrong. Batches are uneven, and one of
them leaves replicas without an example. One module, though long: its clusters start once.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.cluster_pool import SHAPES, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.oracle import Batch, Training, Values, compare_function

pytestmark = pytest.mark.parametrize("cluster", SHAPES, ids=lambda shape: shape.name, indirect=True, scope="module")

SIZES = (6, 5, 1, 7)
CLASSES = 3
STATE = ("total", "seen", "average", "histogram", "queue", "best", "spread", "calls")


def batches() -> list[Batch]:
    """Features, labels, weights of examples (some 0), and a mask over three positions."""
    rng = np.random.default_rng(7)
    return [
        (
            rng.normal(size=(size, 4)),
            rng.integers(0, CLASSES, size=size),
            rng.integers(0, 3, size=size) + (np.arange(size) == 0) * 1.0,
            (rng.uniform(size=(size, CLASSES)) > 0.4) | (np.arange(CLASSES) == 0),
        )
        for size in SIZES
    ]


class Model:
    """A linear classifier with state of every kind; `case` is what its step does beside."""

    def __init__(self, case: Callable[..., Any], seed: int):
        rng = np.random.default_rng(seed)
        self.kernel = tf.Variable(rng.normal(size=(4, CLASSES)), name="kernel")
        self.bias = tf.Variable(np.zeros(CLASSES), name="bias")
        zeros: Mapping[str, Any] = {
            "total": 0.0,
            "seen": np.int64(0),
            "average": np.zeros(4),
            "histogram": np.zeros(CLASSES),
            "queue": np.zeros([5, 4]),
            "best": 100.0,
            "spread": np.ones(4),
            "calls": np.int64(0),
        }
        dtypes = {"seen": tf.int64, "calls": tf.int64}
        self.state = {
            name: tf.Variable(zeros[name], trainable=False, dtype=dtypes.get(name, tf.float64), name=name)
            for name in STATE
        }
        self.metrics: list[Any] = METRICS.get(case, list)()
        self.case = case

    def __getattr__(self, name: str) -> tf.Variable:
        return vars(self)["state"][name]

    def losses(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Each example's, and the logits."""
        logits = tf.matmul(x, self.kernel) + self.bias
        return tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits), logits

    def apply(self, gradients: list[Any]) -> None:
        for variable, gradient in zip((self.kernel, self.bias), gradients, strict=True):
            variable.assign_sub(0.3 * tf.convert_to_tensor(gradient))

    def variables(self) -> dict[str, tf.Variable]:
        metrics = {
            f"{metric.name}/{variable.name}": variable.value for metric in self.metrics for variable in metric.variables
        }
        return {"kernel": self.kernel, "bias": self.bias, **self.state, **metrics}


def program(case: Callable[..., Any]) -> Callable[[int], Training]:
    def build(seed: int) -> Training:
        keras.config.set_floatx("float64")
        model = Model(case, seed)

        def step(x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                loss, results = case(model, x, y, w, mask)
            model.apply(tape.gradient(loss, [model.kernel, model.bias]))
            model.calls.assign_add(1)
            return loss, results

        return Training(step, model.variables)

    return build


# Other writes ---------------------------------------------------------------------------------------------------------


def a_sum_over_examples(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    losses, _ = model.losses(x, y)
    model.total.assign_add(tf.reduce_sum(losses * w))
    model.seen.assign(model.seen + tf.shape(x, out_type=tf.int64)[0])
    return tf.reduce_mean(losses), (model.total.read_value(), model.seen.read_value())


def a_mean_counted_once(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    loss = tf.reduce_mean(model.losses(x, y)[0])
    model.total.assign_add(loss)
    model.average.assign(0.9 * model.average + 0.1 * tf.reduce_mean(x, axis=0))
    return loss, model.total / tf.cast(model.calls + 1, tf.float64)


def what_is_not_linear_in_a_mean(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    loss = tf.reduce_mean(model.losses(x, y)[0])
    mean = tf.reduce_mean(x, axis=0)
    model.spread.assign(tf.sqrt(tf.reduce_mean(tf.square(x), axis=0) - tf.square(mean) + 1.0))
    model.best.assign(tf.minimum(model.best, tf.exp(loss)))
    return loss, tf.sqrt(loss)


def rows_that_are_kept(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    model.queue.assign(tf.concat([x, model.queue], axis=0)[:5])
    model.histogram.scatter_add(tf.IndexedSlices(w, y))
    return tf.reduce_mean(model.losses(x, y)[0]), tf.reduce_max(x, axis=0)


def a_write_in_a_branch(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    loss = tf.reduce_mean(model.losses(x, y)[0])
    if loss < model.best:
        model.best.assign(loss)
        model.seen.assign_add(1)
    return loss, model.best.read_value()


def keras_metrics(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    mean_loss, mean_of_losses, accuracy, error, top, auc = model.metrics
    losses, logits = model.losses(x, y)
    loss = tf.reduce_mean(losses)
    mean_loss.update_state(loss)
    mean_of_losses.update_state(losses, sample_weight=w)
    accuracy.update_state(y, logits, sample_weight=w)
    error.update_state(tf.one_hot(y, CLASSES, dtype=tf.float64), logits)
    top.update_state(y, tf.cast(logits, tf.float32))
    auc.update_state(tf.cast(y, tf.float64) / 2.0, tf.nn.sigmoid(logits[:, 0]))
    return loss, [metric.result() for metric in model.metrics]


def terms_of_a_loss_that_metrics_read(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    losses, logits = model.losses(x, y)
    followed = [tf.reduce_mean(losses), tf.reduce_mean(tf.square(logits)), tf.reduce_mean(logits * w[:, tf.newaxis])]
    hidden = [tf.reduce_mean(tf.map_fn(lambda row, n=n: tf.reduce_sum(row**n), logits)) for n in (1, 2)]
    return with_metrics(model, followed, hidden)


def unseen_terms_that_metrics_read(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    """Means over examples of complex numbers that no rule follows: of the loss it is not seen what it is."""
    losses, logits = model.losses(x, y)
    followed = [tf.reduce_mean(losses), tf.reduce_mean(tf.square(logits))]
    hidden = [tf.reduce_mean(spectrum(logits)), 0.5 * tf.reduce_mean(tf.sqrt(1.0 + spectrum(logits)))]
    return with_metrics(model, followed, hidden)


def spectrum(rows: tf.Tensor) -> tf.Tensor:
    """The power spectrum of each row, whose layout is not known."""
    return tf.square(tf.abs(tf.signal.fft(tf.cast(rows, tf.complex128))))


def with_metrics(model: Model, followed: list[tf.Tensor], hidden: list[tf.Tensor]) -> Any:
    """A loss of the hidden terms and of some that are random functions of all, and the metrics of each."""
    terms = random_terms([*followed, *hidden], random.Random(5))
    total = tf.add_n([*hidden, *terms[-3:]])
    for metric, term in zip(model.metrics, [total, *terms], strict=True):
        metric.update_state(term)
    return 0.05 * total, [metric.result() for metric in model.metrics]


NUM_TERMS = 12


def random_terms(terms: list[tf.Tensor], rng: random.Random) -> list[tf.Tensor]:
    """`terms` and linear functions of some that come before, `NUM_TERMS` together."""
    makers: list[Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = [
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: tf.add_n([a, b, a]),
        lambda a, b: 0.5 * a,
        lambda a, b: -a,
        lambda a, b: a / 3.0 + tf.stop_gradient(b),
    ]
    while len(terms) < NUM_TERMS:
        terms.append(rng.choice(makers)(*rng.sample(terms, 2)))
    return terms


METRICS: Mapping[Callable[..., Any], Callable[[], list[Any]]] = {
    keras_metrics: lambda: [
        keras.metrics.Mean(name="mean_loss"),
        keras.metrics.Mean(name="mean_of_losses"),
        keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
        keras.metrics.MeanSquaredError(name="error"),
        keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top"),
        keras.metrics.AUC(num_thresholds=5, name="auc"),
    ],
    **dict.fromkeys(
        (terms_of_a_loss_that_metrics_read, unseen_terms_that_metrics_read),
        lambda: [keras.metrics.Mean(name=f"term_{number}") for number in range(NUM_TERMS + 1)],
    ),
}


# Losses ---------------------------------------------------------------------------------------------------------------


def a_masked_mean(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    weights = tf.cast(mask, tf.float64)
    errors = tf.square(model.losses(x, y)[1] - 1.0)
    return tf.reduce_sum(errors * weights) / tf.reduce_sum(weights), tf.reduce_sum(weights)


def a_masked_mean_with_an_epsilon(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    loss = tf.reduce_sum(model.losses(x, y)[0] * w) / (tf.reduce_sum(w) + 0.5)
    return loss, ()


def masked_means_beside_means(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    """What a mask is summed to is changed before it divides: by an epsilon, as BERT does, and by a bound, as DETR."""
    losses, logits = model.losses(x, y)
    masked = tf.reduce_sum(losses * w) / (tf.reduce_sum(w) + 0.5)
    bounded = tf.reduce_sum(tf.square(logits) * w[:, tf.newaxis]) / tf.maximum(tf.reduce_sum(w), 4.0)
    sure = tf.cast(tf.reduce_max(tf.nn.softmax(logits), axis=1) > 0.4, tf.float64)
    confident = tf.math.divide_no_nan(tf.reduce_sum(sure * losses), tf.maximum(tf.reduce_sum(sure), 1.0))
    loss = tf.reduce_mean(losses) + 0.5 * (masked - 0.1 * bounded) + confident + 0.1 * tf.nn.l2_loss(model.kernel)
    return loss, (masked, bounded, confident)


def a_masked_mean_of_rows_by_their_places(
    model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor
) -> Any:
    """Places in the flattened batch, as BERT computes them; the loss cannot be followed, and is taken for a mean."""
    losses, logits = model.losses(x, y)
    places = tf.range(tf.shape(y)[0]) * CLASSES
    flat = tf.reshape(places[:, tf.newaxis] + tf.constant([0, 2]), [-1])
    picked = tf.gather(tf.reshape(tf.nn.log_softmax(logits), [-1]), flat)
    weights = tf.reshape(tf.stack([w, tf.ones_like(w)], axis=1), [-1])
    return tf.reduce_mean(losses) - tf.reduce_sum(picked * weights) / (tf.reduce_sum(weights) + 0.5), ()


def sums_over_two_batches(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    """One behind the other, beside each other, and turned round; metrics are made of both, too."""
    labels = tf.concat([y, y], axis=0)
    losses, logits = model.losses(tf.concat([x, 1.0 - x], axis=0), labels)
    of_each = tf.stack([losses * tf.concat([w, 2.0 * w], axis=0), losses])
    hits = tf.cast(tf.equal(tf.argmax(logits, axis=1), labels), tf.float64)
    model.total.assign_add(tf.reduce_sum(hits))
    model.average.assign(0.9 * model.average + 0.1 * tf.reduce_mean(hits))
    loss = tf.reduce_sum(of_each) + 0.1 * tf.reduce_sum(tf.transpose(logits) ** 2)
    return loss, (tf.reduce_sum(losses), tf.reduce_mean(logits, axis=0), tf.reduce_mean(hits))


def a_sum_over_a_mapped_function(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    def of_one(row: Any) -> tf.Tensor:
        logits = tf.linalg.matvec(model.kernel, row[0], transpose_a=True) + model.bias
        return row[2] * tf.nn.sparse_softmax_cross_entropy_with_logits(row[1], logits)

    losses = tf.map_fn(of_one, (x, y, w), fn_output_signature=tf.float64)
    return 0.1 * tf.reduce_sum(losses), losses


def a_weighted_mean_with_a_regularizer(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    loss = tf.math.divide_no_nan(tf.reduce_sum(model.losses(x, y)[0] * w), tf.reduce_sum(w))
    return loss + 0.1 * tf.nn.l2_loss(model.kernel) + tf.reduce_mean(model.losses(x, y)[0]), ()


def keras_losses(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    logits = model.losses(x, y)[1]
    one = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, logits, sample_weight=w)
    other = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")(
        tf.one_hot(y, CLASSES, dtype=tf.float64), logits, sample_weight=w
    )
    masked = tf.identity(logits)
    masked._keras_mask = w > 0.0
    third = keras.losses.MeanAbsoluteError()(tf.ones_like(logits), masked)
    return one + other + third, (one, other, third)


def a_sum_that_nobody_declared(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    return tf.reduce_sum(model.losses(x, y)[0]) * 0.1, ()


def an_average_over_a_constant_batch(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    return tf.nn.compute_average_loss(model.losses(x, y)[0], sample_weight=w, global_batch_size=8), ()


def rows_that_are_picked_by_their_number(
    model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor
) -> Any:
    numbers = tf.range(tf.shape(x, out_type=tf.int64)[0])
    picked = tf.gather_nd(tf.nn.log_softmax(model.losses(x, y)[1]), tf.stack([numbers, y], axis=1))
    return -tf.reduce_mean(picked), ()


def a_normalizer_of_two_kinds(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    doubled = 2.0 * tf.reduce_sum(w)
    mean = tf.reduce_sum(model.losses(x, y)[0] * w)
    return mean / tf.sqrt(doubled) + mean / tf.maximum(tf.reduce_sum(w), 1.0), ()


def a_sum_by_the_number_of_rows(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    rows = tf.cast(tf.shape(x)[0], tf.float64)
    loss = (tf.reduce_sum(model.losses(x, y)[0]) + tf.nn.l2_loss(model.kernel)) / rows
    return loss + tf.nn.l2_loss(model.bias) * tf.sqrt(rows), tf.cast(rows * 0.5, tf.int32)


def an_average_with_a_regularizer(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    loss = tf.nn.compute_average_loss(model.losses(x, y)[0], global_batch_size=8) + 0.1 * tf.nn.l2_loss(model.kernel)
    model.total.assign_add(loss)
    return loss, (tf.sqrt(loss), model.total.read_value())


def a_sum_with_regularizers_behind_what_examples_use(
    model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor
) -> Any:
    kernel = tf.nn.relu(tf.transpose(2.0 * tf.transpose(model.kernel)))  # As a cast of a weight stands before both.
    logits = tf.matmul(x, kernel) + model.bias
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
    return tf.exp(0.1 * model.bias[0]) * (tf.reduce_sum(losses) + tf.nn.l2_loss(kernel)), ()


def a_sum_with_regularizers_of_parts_of_weights(
    model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor
) -> Any:
    upper, lower = tf.split(tf.clip_by_value(model.kernel, -1.0, 1.0), 2)
    lower = tf.concat([lower, model.bias[tf.newaxis]], axis=0)
    stacked = tf.stack([upper, 2.0 * upper])
    logits = tf.matmul(x[:, :2], stacked[1]) + tf.matmul(x[:, 2:], lower[:2]) + lower[2]
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
    return tf.reduce_sum(losses) + tf.nn.l2_loss(upper) + tf.nn.l2_loss(stacked) + tf.reduce_sum(lower**3.0), ()


def a_sum_with_regularizers_of_rows(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    of_examples = tf.reduce_sum(tf.gather(model.kernel, y) * x[:, :CLASSES])
    of_none = tf.nn.l2_loss(tf.gather(model.kernel, [0, 1, 1]))
    both = tf.gather(model.kernel, [2, 3])
    return of_examples + of_none + tf.reduce_sum(w) * tf.reduce_sum(both) + tf.nn.l2_loss(both + model.bias), ()


@tf.custom_gradient
def both(value: tf.Tensor) -> Any:
    """The value, for two readers whose gradients are added by a plain sum."""
    return (tf.identity(value), tf.identity(value)), lambda one, other: one + other


def a_sum_over_sequences_with_a_regularizer(
    model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor
) -> Any:
    sequences = x[:, tf.newaxis] * tf.range(1.0, 4.0, dtype=tf.float64)[:, tf.newaxis]
    kernel, regularized = both(model.kernel)
    folded = tf.reshape(tf.reshape(sequences, [-1, 4]) @ kernel + model.bias, [-1, 3, CLASSES])
    both_ways = tf.tensordot(sequences, kernel, 1) * folded
    return 0.01 * tf.reduce_sum(tf.tanh(both_ways)) + tf.nn.l2_loss(regularized), ()


def a_sum_over_places_of_sequences(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    logits = tf.tensordot(tf.stack([x, 2.0 * x, x + 1.0], axis=1), model.kernel, 1) + model.bias
    chosen = keras.ops.take_along_axis(logits, (y[:, tf.newaxis, tf.newaxis] + [[0], [1]]) % 3, axis=1)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.stack([y, y], axis=1), chosen)
    return tf.reduce_sum(losses * w[:, tf.newaxis]), tf.reduce_mean(losses)


def a_write_of_what_is_equal_everywhere(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    features = tf.shape(tf.reshape(x, [tf.shape(x)[0], -1]), out_type=tf.int64)[1]
    model.seen.assign_add(features)
    model.total.assign(tf.cast(features, tf.float64) * model.total)
    return tf.reduce_mean(model.losses(x, y)[0]), features


def a_sum_of_columns(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    logits = tf.matmul(model.kernel, x, transpose_a=True, transpose_b=True) + model.bias[:, tf.newaxis]
    rows = tf.cast(tf.shape(x)[0], tf.float64)
    return 20.0 / rows * tf.reduce_sum(tf.square(logits - 1.0)) - 0.1 * tf.nn.l2_loss(model.kernel), ()


def a_sum_over_centres(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    nearness = tf.tanh(tf.tensordot(model.kernel, x, [[0], [-1]]) + model.bias[:, tf.newaxis])
    turned = tf.transpose(tf.tensordot(tf.eye(CLASSES, dtype=tf.float64), tf.cumsum(x)[:, :CLASSES], [[0], [-1]]))
    return 0.1 * tf.reduce_sum(nearness**2 * w) + tf.nn.l2_loss(model.kernel), turned


def an_unseen_sum_by_the_number_of_rows(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    rows = tf.cast(tf.shape(x)[0], tf.float64)
    return 0.1 / rows * tf.reduce_sum(spectrum(model.losses(x, y)[1])), ()


def encoded_numbers_and_a_softmax(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    numbers = tf.cast(tf.abs(2.0 * x), tf.int32)
    encoded = tf.math.bincount(numbers, minlength=4, maxlength=4, axis=-1, binary_output=True)
    logits = tf.reverse(tf.cast(encoded, tf.float64) @ model.kernel, [1]) + model.bias
    targets = tf.one_hot(y, CLASSES, dtype=tf.float64)
    return tf.reduce_sum(keras.losses.categorical_crossentropy(targets, tf.nn.softmax(logits), label_smoothing=0.1)), ()


def a_loss_for_each_example(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    return 0.1 * model.losses(x, y)[0], ()


# Results --------------------------------------------------------------------------------------------------------------


def results_of_every_kind(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    losses, logits = model.losses(x, y)
    right = tf.equal(tf.argmax(logits, axis=1), y)
    results = {
        "sum": tf.reduce_sum(losses),
        "count": tf.reduce_sum(tf.cast(right, tf.int32)),
        "rows": tf.shape(x)[0],
        "shape": tf.shape(logits)[1],
        "accuracy": tf.reduce_mean(tf.cast(right, tf.float64)),
        "root": tf.sqrt(tf.reduce_mean(tf.square(logits))),
        "largest": tf.reduce_max(logits),
        "any": tf.reduce_any(right),
        "classes": tf.math.bincount(tf.cast(y, tf.int32), minlength=CLASSES, maxlength=CLASSES),
        "where": tf.where(mask),
        "per example": losses,
        "predicted": tf.argmax(logits, axis=1),
        "nothing": None,
        "constant": tf.constant([1.0, 2.0]),
        "covariance": tf.matmul(x, x, transpose_a=True),
    }
    return tf.reduce_mean(losses), results


def a_mean_over_the_confident_ones(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    """How many are is found by the weights that are trained; no gradient flows through a comparison."""
    losses, logits = model.losses(x, y)
    confident = tf.stop_gradient(tf.reduce_max(tf.nn.softmax(logits), axis=1)) > 0.36
    weights = tf.cast(confident, losses.dtype)
    return tf.math.divide_no_nan(tf.reduce_sum(losses * weights), tf.reduce_sum(weights)), tf.reduce_sum(weights)


def rows_that_are_chosen_by_a_mask(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    """Also as results, and as what is written: which rows they are, and how many, nobody knows before."""
    losses, logits = model.losses(x, y)
    of_mask = mask if mask.shape.rank == 1 else tf.reduce_any(mask, axis=list(range(1, mask.shape.rank)))
    picked = tf.boolean_mask(losses, of_mask)
    outside = tf.boolean_mask(logits, of_mask)
    distinct, _, counts = tf.unique_with_counts(tf.argmax(logits, axis=1))
    results = (picked, outside, tf.where(of_mask), distinct, counts, tf.size(distinct), tf.reduce_mean(outside, axis=0))
    return tf.reduce_sum(picked), results


def results_beside_a_whole_batch(model: Model, x: tf.Tensor, y: tf.Tensor, w: tf.Tensor, mask: tf.Tensor) -> Any:
    chosen = tf.cond(tf.reduce_sum(x) > 0.0, lambda: x * 2.0, lambda: x - 1.0)  # Computed of all examples.
    return tf.reduce_mean(model.losses(x, y)[0]), (chosen, chosen + tf.reduce_mean(x), tf.reduce_max(chosen, axis=1))


CASES = [
    a_sum_over_examples,
    a_mean_counted_once,
    what_is_not_linear_in_a_mean,
    rows_that_are_kept,
    a_write_in_a_branch,
    keras_metrics,
    terms_of_a_loss_that_metrics_read,
    a_masked_mean,
    sums_over_two_batches,
    a_sum_over_a_mapped_function,
    a_masked_mean_with_an_epsilon,
    masked_means_beside_means,
    a_masked_mean_of_rows_by_their_places,
    a_weighted_mean_with_a_regularizer,
    keras_losses,
    a_sum_that_nobody_declared,
    an_average_over_a_constant_batch,
    rows_that_are_picked_by_their_number,
    a_normalizer_of_two_kinds,
    a_sum_by_the_number_of_rows,
    an_average_with_a_regularizer,
    a_sum_with_regularizers_behind_what_examples_use,
    a_sum_with_regularizers_of_parts_of_weights,
    a_sum_with_regularizers_of_rows,
    a_sum_over_sequences_with_a_regularizer,
    a_sum_over_places_of_sequences,
    a_write_of_what_is_equal_everywhere,
    a_sum_of_columns,
    a_sum_over_centres,
    an_unseen_sum_by_the_number_of_rows,
    unseen_terms_that_metrics_read,
    encoded_numbers_and_a_softmax,
    a_loss_for_each_example,
    results_of_every_kind,
    a_mean_over_the_confident_ones,
    rows_that_are_chosen_by_a_mask,
    results_beside_a_whole_batch,
]


def train(what: Callable[..., Any]) -> Values:
    return compare_function(program(what), batches())


@pytest.mark.on(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.replace("_", "-"))
def test_a_step_does_what_one_device_does(cluster: Cluster, case: Callable[..., Any]) -> None:
    same(cluster.run(train, what=case))
