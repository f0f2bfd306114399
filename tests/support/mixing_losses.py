"""Losses that mix the examples of a batch, as they are published, each with what it trains.

Each is of the embeddings of a batch (`z`, from the features `x`), other embeddings of the same examples (`v`), labels
`y` below `CLASSES`, and `Weights`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

FEATURES, WIDTH, CLASSES, ITEMS, QUEUE = 5, 4, 3, 11, 8

Loss = Callable[["Weights", tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]


class Weights:
    """Two encoders, tables, and what some losses train or keep beside them."""

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)

        def variable(name: str, *shape: int, scale: float = 1.0, trainable: bool = True) -> tf.Variable:
            return tf.Variable(scale * rng.normal(size=shape), trainable=trainable, name=name)

        self.all = {
            "first": variable("first", FEATURES, WIDTH),
            "second": variable("second", FEATURES, WIDTH),
            "table": variable("table", ITEMS, WIDTH),
            "temperature": variable("temperature", scale=0.3),
            "scale": variable("scale", WIDTH),
            "inducing": variable("inducing", 3, WIDTH),
            "centers": variable("centers", CLASSES, WIDTH, trainable=False),
            "queue": variable("queue", QUEUE, WIDTH, trainable=False),
            "average": variable("average", WIDTH, trainable=False),
        }
        self.used: dict[str, tf.Variable] = {}
        """What a step trains by, or writes: others are not made the chief's."""

    def __getattr__(self, name: str) -> tf.Variable:
        self.used[name] = vars(self)["all"][name]
        return self.used[name]


def _cosines(z: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
    return tf.matmul(tf.math.l2_normalize(z, 1), tf.math.l2_normalize(v, 1), transpose_b=True)


def _distances(z: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(z**2, 1)[:, None] + tf.reduce_sum(v**2, 1)[None] - 2.0 * tf.matmul(z, v, transpose_b=True)


def _covariance(z: tf.Tensor) -> tf.Tensor:
    centered = z - tf.reduce_mean(z, 0)
    return tf.matmul(centered, centered, transpose_a=True) / tf.cast(tf.shape(z)[0], z.dtype)


def _rows(z: tf.Tensor) -> tf.Tensor:
    return tf.range(tf.shape(z)[0])


def sim_clr(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """NT-Xent (Chen et al. 2020): each view's positive is the other one's, of all 2N."""
    both = tf.concat([z, v], 0)
    scores = _cosines(both, both) / 0.5 - 1e9 * tf.eye(tf.shape(both)[0], dtype=z.dtype)
    size = tf.shape(z)[0]
    positives = tf.concat([tf.range(size) + size, tf.range(size)], 0)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(positives, scores))


def clip(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """CLIP (Radford et al. 2021), with a learnt temperature."""
    scores = _cosines(z, v) * tf.exp(w.temperature)
    across = tf.keras.losses.sparse_categorical_crossentropy(_rows(z), scores, from_logits=True)
    down = tf.keras.losses.sparse_categorical_crossentropy(_rows(z), tf.transpose(scores), from_logits=True)
    return (tf.reduce_mean(across) + tf.reduce_mean(down)) / 2.0


def two_towers(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """In-batch softmax with a correction of how often items are drawn (Yi et al. 2019); hits by chance are masked."""
    items = tf.nn.embedding_lookup(w.table, ids)
    often = tf.math.log(tf.cast(ids + 1, z.dtype) / (ITEMS + 1.0))
    scores = tf.matmul(z, items, transpose_b=True) - often[None]
    same = tf.cast(ids[:, None] == ids[None], z.dtype) - tf.eye(tf.shape(z)[0], dtype=z.dtype)
    return tf.reduce_sum(
        tf.nn.softmax_cross_entropy_with_logits(tf.eye(tf.shape(z)[0], dtype=z.dtype), scores - 1e9 * same)
    )


def hard_triplets(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Triplets with the hardest examples of a batch (Hermans et al. 2017)."""
    apart = _distances(z, z)
    same = tf.cast(y[:, None] == y[None], z.dtype)
    furthest = tf.reduce_max(apart * same, 1)
    nearest = tf.reduce_min(apart + 1e6 * same, 1)
    return tf.reduce_mean(tf.nn.softplus(tf.minimum(furthest - nearest, 50.0) / 10.0))


def n_pairs(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """N-pairs (Sohn 2016)."""
    same = tf.cast(y[:, None] == y[None], z.dtype)
    targets = same / tf.reduce_sum(same, 1, keepdims=True)
    scores = tf.matmul(z, v, transpose_b=True)
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(targets, scores)) + 0.01 * tf.reduce_mean(
        tf.reduce_sum(z**2, 1) + tf.reduce_sum(v**2, 1)
    )


def center_loss(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Center loss (Wen et al. 2016): centers move towards the means of a batch's classes."""
    own = tf.gather(w.centers, y)
    counts = tf.math.unsorted_segment_sum(tf.ones_like(z[:, 0]), y, CLASSES)
    moves = tf.math.unsorted_segment_sum(own - tf.stop_gradient(z), y, CLASSES)
    loss = tf.sqrt(tf.reduce_mean((z - own) ** 2))
    w.centers.assign_sub(0.5 * moves / (1.0 + counts)[:, None])
    return loss


def barlow_twins(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Barlow Twins (Zbontar et al. 2021)."""

    def standard(one: tf.Tensor) -> tf.Tensor:
        mean, variance = tf.nn.moments(one, [0])
        return (one - mean) / tf.sqrt(variance + 1e-2)

    crossed = tf.matmul(standard(z), standard(v), transpose_a=True) / tf.cast(tf.shape(z)[0], z.dtype)
    diagonal = tf.linalg.diag_part(crossed)
    return tf.reduce_sum((diagonal - 1.0) ** 2) + 0.1 * (tf.reduce_sum(crossed**2) - tf.reduce_sum(diagonal**2))


def vicreg(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """VICReg (Bardes et al. 2022)."""

    def spread(one: tf.Tensor) -> tf.Tensor:
        deviation = tf.sqrt(tf.math.reduce_variance(one, 0) + 1e-2)
        of_pairs = _covariance(one)
        return tf.reduce_mean(tf.nn.relu(1.0 - deviation)) + tf.reduce_sum(
            (of_pairs - tf.linalg.diag(tf.linalg.diag_part(of_pairs))) ** 2
        )

    return tf.reduce_mean((z - v) ** 2) + spread(z) + spread(v)


def supervised_contrastive(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Supervised contrastive (Khosla et al. 2020)."""
    both, labels = tf.concat([z, v], 0), tf.concat([y, y], 0)
    scores = _cosines(both, both)
    others = 1.0 - tf.eye(tf.shape(both)[0], dtype=z.dtype)
    same = tf.cast(labels[:, None] == labels[None], z.dtype) * others
    logs = scores - tf.math.log(tf.reduce_sum(tf.exp(scores) * others, 1, keepdims=True))
    return -tf.reduce_mean(tf.reduce_sum(same * logs, 1) / tf.reduce_sum(same, 1))


def log_of_mean(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """The logarithm of a mean of weights, as an importance-weighted bound has it over a batch of samples."""
    logs = -0.5 * tf.reduce_sum((z - w.scale) ** 2, 1)
    return -tf.reduce_logsumexp(logs) + tf.math.log(tf.cast(tf.shape(z)[0], z.dtype)) + 0.1 * tf.reduce_mean(v**2)


def focal(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Focal loss (Lin et al. 2017), divided by the root of how many positives a batch has."""
    wanted = tf.cast(y > 0, z.dtype)
    positive = tf.sigmoid(tf.reduce_sum(z * v, 1))
    right = wanted * positive + (1.0 - wanted) * (1.0 - positive)
    return tf.reduce_sum(-((1.0 - right) ** 2) * tf.math.log(right + 1e-6)) / tf.sqrt(1.0 + tf.reduce_sum(wanted))


def dice(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Dice over the whole batch (Milletari et al. 2016)."""
    predicted, wanted = tf.sigmoid(z), tf.one_hot(y, WIDTH, dtype=z.dtype)
    both = tf.reduce_sum(predicted * wanted)
    return 1.0 - (2.0 * both + 1.0) / (tf.reduce_sum(predicted**2) + tf.reduce_sum(wanted**2) + 1.0)


def auc_surrogate(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """A surrogate of the area under the curve: pairs of a positive and a negative."""
    scores = tf.reduce_sum(z * w.scale, 1)
    positive, negative = tf.boolean_mask(scores, y == 1), tf.boolean_mask(scores, y != 1)
    pairs = tf.nn.softplus(negative[None] - positive[:, None])
    return tf.math.divide_no_nan(tf.reduce_sum(pairs), tf.cast(tf.size(pairs), z.dtype)) + 0.1 * tf.reduce_mean(v**2)


def mmd(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Maximum mean discrepancy (Gretton et al. 2012), of two Gaussian kernels."""

    def kernel(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
        return tf.add_n([tf.reduce_mean(tf.exp(-_distances(one, other) / scale)) for scale in (4.0, 16.0)])

    return kernel(z, z) + kernel(v, v) - 2.0 * kernel(z, v)


def coral(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Deep CORAL (Sun and Saenko 2016)."""
    return tf.reduce_sum((_covariance(z) - _covariance(v)) ** 2) / (4.0 * WIDTH**2)


def svgp(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """The marginal likelihood of a Gaussian process whose kernel is over the batch, with inducing points."""
    apart = _distances(tf.concat([z, w.inducing], 0), tf.concat([z, w.inducing], 0))
    size = tf.shape(apart)[0]
    kernel = tf.exp(-apart / 8.0) + 0.5 * tf.eye(size, dtype=z.dtype)
    factor = tf.linalg.cholesky(kernel)
    targets = tf.concat([tf.cast(y, z.dtype)[:, None], tf.zeros([3, 1], z.dtype)], 0)
    solved = tf.linalg.cholesky_solve(factor, targets)
    return tf.reduce_sum(targets * solved) + 2.0 * tf.reduce_sum(tf.math.log(tf.linalg.diag_part(factor)))


def k_means(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """A step of k-means in the batch, whose means the examples are drawn to."""
    nearest = tf.argmin(_distances(z, w.inducing), 1)
    means = tf.math.unsorted_segment_mean(z, nearest, 3)
    return tf.reduce_mean((z - tf.gather(means, nearest)) ** 2) + 0.1 * tf.reduce_mean(_distances(z, w.inducing))


def spectral_norm(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """The largest singular value of the batch, by power iteration."""
    right = tf.ones([WIDTH, 1], z.dtype)
    for _ in range(3):
        left = tf.math.l2_normalize(tf.matmul(z, right))
        right = tf.math.l2_normalize(tf.matmul(z, left, transpose_a=True))
    left, right = tf.stop_gradient(left), tf.stop_gradient(right)
    return tf.reduce_sum(left * tf.matmul(z, right)) + tf.reduce_mean(v**2)


def moco(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """A queue of keys (He et al. 2020): the batch's own ones come in, the oldest go."""
    keys = tf.stop_gradient(tf.math.l2_normalize(v, 1))
    queries = tf.math.l2_normalize(z, 1)
    own = tf.reduce_sum(queries * keys, 1, keepdims=True)
    scores = tf.concat([own, tf.matmul(queries, tf.identity(w.queue), transpose_b=True)], 1)
    loss = tf.sqrt(
        tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.zeros_like(y), scores / 0.2)) + 1e-3
    )
    w.queue.assign(tf.concat([keys, w.queue], 0)[:QUEUE])
    return loss


def normalized(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Batch normalization of raw ops, with its moving average."""
    mean, variance = tf.nn.moments(z, [0])
    w.average.assign(0.9 * w.average + 0.1 * mean)
    outputs = tf.nn.batch_normalization(z, mean, variance, None, w.scale, 1e-2)
    return tf.reduce_mean((tf.tanh(outputs) - v) ** 2)


def renormalized(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Batch renormalization (Ioffe 2017)."""
    mean, variance = tf.nn.moments(z, [0])
    deviation = tf.sqrt(variance + 1e-2)
    ratio = tf.stop_gradient(tf.clip_by_value(deviation, 0.5, 2.0))
    shift = tf.stop_gradient(tf.clip_by_value(mean - w.average, -1.0, 1.0))
    outputs = (z - mean) / deviation * ratio + shift
    w.average.assign(0.9 * w.average + 0.1 * mean)
    return tf.reduce_mean((outputs * w.scale - v) ** 2)


def weighted_by_rank(w: Weights, z: tf.Tensor, v: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Examples in the order of their scores: a listwise loss (Xia et al. 2008)."""
    scores = tf.reduce_sum(z * w.scale, 1)
    ordered = tf.gather(scores, tf.argsort(tf.cast(y, z.dtype) + 0.01 * v[:, 0], direction="DESCENDING"))
    below = tf.math.log(tf.cumsum(tf.exp(ordered), reverse=True))
    return tf.reduce_mean(below - ordered)


LOSSES: Mapping[str, Loss] = {
    loss.__name__: loss
    for loss in (
        sim_clr,
        clip,
        two_towers,
        hard_triplets,
        n_pairs,
        center_loss,
        barlow_twins,
        vicreg,
        supervised_contrastive,
        log_of_mean,
        focal,
        dice,
        auc_surrogate,
        mmd,
        coral,
        svgp,
        k_means,
        spectral_norm,
        moco,
        normalized,
        renormalized,
        weighted_by_rank,
    )
}
"""By name."""


def step_of(name: str, weights: Weights, **settings: Any) -> Callable[..., tf.Tensor]:
    """A step of gradient descent on the loss of that name, of (x, y, ids)."""
    loss_of = LOSSES[name]

    def step(x: tf.Tensor, y: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            z, v = tf.tanh(tf.matmul(x, weights.first)), tf.sin(tf.matmul(x, weights.second))
            loss = loss_of(weights, z, v, y, ids)
        touched = {key: one for key, one in weights.used.items() if one.trainable}
        gradients = tape.gradient(loss, touched)
        for name, gradient in gradients.items():
            variable = touched[name]
            if gradient is None:
                del weights.used[name]
            if isinstance(gradient, tf.IndexedSlices):
                variable.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
            elif gradient is not None:
                variable.assign_sub(0.1 * gradient)
        return loss

    return step


def used_by(name: str) -> list[str]:
    """The names of the variables that the loss touches."""
    weights = Weights()
    tf.function(step_of(name, weights)).get_concrete_function(*map(tf.constant, batch_of(2)))
    return sorted(weights.used)


def batch_of(size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, labels and ids of `size` examples."""
    rng = np.random.default_rng([seed, size])
    labels = rng.integers(0, CLASSES, size)
    return rng.normal(size=(size, FEATURES)), labels, rng.integers(0, ITEMS, size)
