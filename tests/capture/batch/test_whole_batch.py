"""What mixes the examples of a batch is computed of the whole batch: as on one device, also of one row a replica.

It is long, as it has a case for each way in which a step may mix examples, or may seem to.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from autodist_py import AutoDist
from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.inexact import inexact
from autodist_py.kernel.ir.graph import DRAWN_ALIKE
from autodist_py.proto.errors import CaptureError
from autodist_py.proto.graph_item import GraphItem
from autodist_py.testing import assert_equivalent
from tests.support.capture_steps import capture_with
from tests.support.precision import in_float64

SIZES = (6, 5, 1, 2, 7)
REPLICAS = 3

Loss = Callable[[tf.Tensor, tf.Tensor, tf.Variable, tf.Variable], tf.Tensor]
"""Of rows `z` of 4 numbers, labels `y` below 3, a table of 5 rows, and a number."""


def count(z: tf.Tensor) -> tf.Tensor:
    return tf.shape(z)[0]


def number(sizes: tf.Tensor) -> tf.Tensor:
    return tf.cast(sizes, tf.float64)


def root(z: tf.Tensor) -> tf.Tensor:
    """What needs the whole batch."""
    return tf.sqrt(tf.reduce_mean(z**2) + 0.1)


def asserted(z: tf.Tensor, y: tf.Tensor, t: tf.Variable, s: tf.Variable) -> tf.Tensor:
    scores = z @ tf.transpose(z)
    tf.debugging.assert_equal(count(z), tf.shape(y)[0])
    tf.debugging.assert_equal(tf.shape(scores)[1], tf.shape(y)[0])
    tf.debugging.assert_shapes([(z, ("N", 4)), (y, ("N",))])
    tf.debugging.assert_non_negative(z**2)
    return tf.reduce_mean(tf.nn.log_softmax(scores))


def normalized_again(z: tf.Tensor, y: tf.Tensor, t: tf.Variable, s: tf.Variable) -> tf.Tensor:
    return tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a / root(a) + 0.1 * z), [0, z])[1][0, 0] ** 2


def of_classes(z: tf.Tensor, y: tf.Tensor, t: tf.Variable, s: tf.Variable) -> tf.Tensor:
    parts = tf.dynamic_partition(z, tf.cast(y, tf.int32), 3)
    return tf.add_n([root(tf.concat([part, tf.ones([1, 4], tf.float64)], 0)) for part in parts])


def after_a_step(z: tf.Tensor, y: tf.Tensor, t: tf.Variable, s: tf.Variable) -> tf.Tensor:
    """The loss after each example has trained a matrix of its own, as MAML's tasks do."""
    own = tf.tile(t[None, :4], [count(z), 1, 1])
    rows = z[:, None]
    (gradient,) = tf.gradients(tf.reduce_sum(tf.tanh(rows @ own) ** 2), own)
    return tf.reduce_mean((rows @ (own - 0.1 * gradient)) ** 2)


LOSSES: dict[str, Loss] = {
    "asserts": asserted,
    "a shape as numbers": lambda z, y, t, s: tf.reduce_sum(z[:, :2] * number(tf.shape(z))),
    "the number of rows, in a vector": lambda z, y, t, s: tf.reduce_sum(z / number(tf.shape(z)[:1])),
    "numbers that begin with that of rows": lambda z, y, t, s: tf.reduce_sum(
        (z[:, :2] + tf.stack([number(count(z)), 1.0])) ** 2
    ),
    "a shape that is compared": lambda z, y, t, s: tf.reduce_sum(tf.maximum(z[:, :2] * 20.0, number(tf.shape(z)))),
    "no sizes": lambda z, y, t, s: tf.reduce_mean(z) * number(tf.reduce_prod(tf.shape(z)[:-2])),
    "sizes that are not multiplied": lambda z, y, t, s: tf.reduce_sum(
        z[:, :2] * number(tf.reduce_prod(tf.shape(z), axis=[]))
    ),
    "the number plus one": lambda z, y, t, s: tf.reduce_sum(z**2) / number(count(z) + 1),
    "the number times a weight": lambda z, y, t, s: s * number(count(z)),
    "several ids each": lambda z, y, t, s: tf.reduce_mean(tf.gather(t, tf.stack([y, (y + 1) % 5], 1)) ** 2),
    "all elements in a row": lambda z, y, t, s: tf.reduce_mean(tf.reshape(z, tf.expand_dims(tf.size(z), 0)) ** 3),
    "rows that are not those of the batch": lambda z, y, t, s: tf.reduce_sum(
        tf.gather(t, tf.concat([y, [0, 1]], 0)) ** 2
    ),
    "some ids": lambda z, y, t, s: tf.reduce_sum(tf.gather(t, tf.boolean_mask(y, y > 0)) ** 2),
    "distinct ids": lambda z, y, t, s: tf.reduce_sum(tf.gather(t, tf.unique(y)[0]) ** 2),
    "ids of half of the batch": lambda z, y, t, s: tf.reduce_sum(tf.gather(t, y[: count(z) // 2]) ** 2),
    "rows times a column": lambda z, y, t, s: tf.reduce_mean(((z * number(y + 1)[:, None]) @ tf.transpose(z)) ** 2),
    "one-hot among the batch": lambda z, y, t, s: tf.reduce_mean(
        tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(y, count(z), dtype=tf.float64), z @ tf.transpose(z))
    ),
    "weights of rows of scores": lambda z, y, t, s: tf.reduce_mean(
        number(y + 1) * tf.reduce_logsumexp(z @ tf.transpose(z), 1)
    ),
    "weights of columns of scores": lambda z, y, t, s: tf.reduce_mean(
        number(y + 1) * tf.nn.softmax(z @ tf.transpose(z))
    ),
    "the largest scores by rows": lambda z, y, t, s: tf.reduce_mean(tf.reduce_max(z @ tf.transpose(z), 1) * z[:, 0]),
    "all beside the first": lambda z, y, t, s: tf.reduce_mean((z - z[:1]) ** 2),
    "a median": lambda z, y, t, s: tf.reduce_mean((z - tf.sort(z, 0)[count(z) // 2]) ** 2),
    "the hardest half": lambda z, y, t, s: tf.reduce_mean(
        tf.sort(tf.reduce_sum(z**2, 1), direction="DESCENDING")[: tf.maximum(count(z) // 2, 1)]
    ),
    "each row as often as there are rows": lambda z, y, t, s: tf.reduce_mean(tf.repeat(z, count(z), axis=0) ** 2),
    "singular values": lambda z, y, t, s: tf.reduce_sum(tf.linalg.svd(z, compute_uv=False)),
    "a regularizer beside it": lambda z, y, t, s: tf.nn.l2_loss(t) + s**2,
    "a branch": lambda z, y, t, s: tf.cond(tf.reduce_mean(z) > 0, lambda: root(z), lambda: tf.reduce_sum(z**2)),
    "a loop": normalized_again,
    "a scan over the batch": lambda z, y, t, s: tf.reduce_mean(tf.scan(lambda a, b: a * 0.5 + b, z) ** 2),
    "parts by class": of_classes,
    "a second gradient": after_a_step,
    "a gradient's norm": lambda z, y, t, s: root(tf.gradients(tf.reduce_mean(tf.sin(z) ** 2), z)[0]),
    "a mean that is checked": lambda z, y, t, s: tf.debugging.check_numerics(tf.reduce_mean(z), "is no number"),
    "a count of integers": lambda z, y, t, s: (
        tf.reduce_sum(z**2) / number(tf.reduce_sum(tf.cast(y > 0, tf.int32)) + 1) ** 2
    ),
}


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(7)
    return [(rng.normal(size=(size, 3)), rng.integers(0, 3, size)) for size in SIZES]


def trained(loss_of: Loss) -> Callable[..., Any]:
    rng = np.random.default_rng(3)
    first, bias, table, scale = (tf.Variable(rng.normal(size=shape)) for shape in ((3, 4), (4,), (5, 4), ()))

    def step(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        variables = (first, bias, table, scale)
        with tf.GradientTape() as tape:
            z = tf.tanh(x @ first) * (1.0 + bias)
            loss = loss_of(z, y, table, scale) + root(z)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                variable.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
            elif gradient is not None:
                variable.assign_sub(0.1 * gradient)
        return [loss, z, tf.shape(z), tf.reshape(tf.sort(z, 0), [count(z), 4])]

    return step


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_the_whole_batch(name: str) -> None:
    assert_equivalent(trained(LOSSES[name]), batches(), replicas=REPLICAS, batch_statistics="global", tolerance=1e-9)


def residual(layers: Any, library: Any) -> Any:
    """Convolutions and normalizations, added up and joined."""
    inputs = library.Input((6, 6, 3))
    x = layers.Conv2D(4, 3, padding="same")(inputs)
    for _ in range(2):
        y = layers.Activation("tanh")(layers.BatchNormalization()(x))
        x = layers.Add()([x, layers.Conv2D(4, 3, padding="same")(y)])
    x = layers.Concatenate()([x, layers.BatchNormalization(synchronized=True)(x)])
    x = layers.ZeroPadding2D(1)(layers.MaxPooling2D(2)(layers.LayerNormalization()(x)))
    return library.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def attention(layers: Any, library: Any) -> Any:
    inputs = library.Input((6, 6, 3))
    x = layers.Dense(4)(layers.Reshape((36, 3))(inputs))
    x = layers.BatchNormalization()(layers.MultiHeadAttention(2, 4)(x, x))
    return library.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


@pytest.mark.parametrize("library", [keras, tf_keras], ids=lambda library: library.__name__)
@pytest.mark.parametrize("make", [residual, attention], ids=lambda make: make.__name__)
def test_batch_normalization_is_that_of_the_whole_batch(make: Callable[..., Any], library: Any) -> None:
    """Statistics are combined, and no rows gathered."""
    library.utils.set_random_seed(1)
    with in_float64(library):
        model = make(library.layers, library)
        optimizer = library.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
        loss_of = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    rng = np.random.default_rng(2)
    given = [(rng.normal(size=(size, 6, 6, 3)), rng.integers(0, 3, size)) for size in (6, 5, 7)]

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    assert_equivalent(step, given, replicas=REPLICAS, batch_statistics="global", tolerance=1e-9)
    reductions = [one.reduction for one in item_of(step, given[0]).statistics]
    assert "rows" not in reductions and "own" not in reductions


def item_of(step: Callable[..., Any], batch: Sequence[np.ndarray]) -> GraphItem:
    with AutoDist(batch_statistics="global") as autodist:
        return autodist.function(step).captured(*batch).item


def test_statistics_are_combined_where_they_are_made() -> None:
    """One message forward, of the mean and the variance, and two sums backward; sizes beside."""
    scale = tf.Variable(np.ones(4))
    weight = tf.Variable(np.random.default_rng(0).normal(size=(3, 4)))
    average = tf.Variable(np.zeros(4), trainable=False)

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            z = x @ weight
            mean, variance = tf.nn.moments(z, [0])
            average.assign(0.9 * average + 0.1 * mean)
            loss = tf.reduce_mean(tf.tanh(tf.nn.batch_normalization(z, mean, variance, None, scale, 1e-2)))
        for variable, gradient in zip((weight, scale), tape.gradient(loss, (weight, scale)), strict=True):
            variable.assign_sub(0.1 * gradient)

    combined = [one for one in item_of(step, batches()[0]).statistics if one.shape]
    assert sorted(one.reduction for one in combined) == ["moments", "sum", "sum"], combined


def linear(result: Callable[[tf.Tensor], tf.Tensor]) -> Callable[..., tf.Tensor]:
    """A step whose loss is a mean over examples, and which returns this of its rows of 4 numbers."""
    weight = tf.Variable(np.ones((3, 4)), name="weight")

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            z = x @ weight
            loss = tf.reduce_mean(z**2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return result(z)

    return step


def test_what_does_not_mix_is_as_it_was() -> None:
    with AutoDist(batch_statistics="replica") as autodist:
        plain = autodist.function(linear(tf.reduce_mean)).captured(*batches()[0]).item
    assert item_of(linear(tf.reduce_mean), batches()[0]).statistics == plain.statistics


def drawn(*shape: int) -> tf.Tensor:
    return tf.random.normal(shape, dtype=tf.float64, seed=3)


def mixed(z: tf.Tensor) -> tf.Tensor:
    return tf.math.log(tf.reduce_mean(tf.exp(z)))


def noisy_turns(z: tf.Tensor, y: tf.Tensor, t: tf.Variable, s: tf.Variable) -> tf.Tensor:
    """One device's turns must not overlap either, or their numbers have no order."""

    def turn(i: tf.Tensor, a: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return i + 1, a / root(a) + drawn(4)

    return mixed(tf.while_loop(lambda i, a: i < 3, turn, [0, z], parallel_iterations=1)[1])


DRAWN: dict[str, Loss] = {
    "other examples": lambda z, y, t, s: mixed(tf.random.shuffle(z, seed=5) * z),
    "a number": lambda z, y, t, s: mixed(z * drawn()),
    "noise on a weight": lambda z, y, t, s: mixed(z @ tf.transpose(t + drawn(*t.shape))),
    "noise by a seed": lambda z, y, t, s: mixed(z + tf.random.stateless_normal([4], [1, 2], dtype=tf.float64)),
    "a dropped column": lambda z, y, t, s: mixed(tf.nn.dropout(z, 0.5, noise_shape=[1, 4], seed=7)),
    "of all pairs": lambda z, y, t, s: tf.reduce_sum(tf.nn.dropout(tf.tanh(z @ tf.transpose(z)), 0.5, seed=7)),
    "in a branch": lambda z, y, t, s: tf.cond(root(z) > 0.0, lambda: mixed(z * drawn(4)), lambda: tf.reduce_sum(z)),
    "in a loop": noisy_turns,
    "by what was before": lambda z, y, t, s: mixed(tf.scan(lambda a, b: a * drawn() + b, z, parallel_iterations=1)),
}
"""Numbers that are drawn for the whole batch, or for none of its examples."""


@pytest.mark.parametrize("name", DRAWN)
def test_numbers_of_no_example_are_drawn_alike(name: str) -> None:
    """Number by number as on one device: batches have one size, or TensorFlow traces twice, and draws anew."""
    given = [batches()[0]] * 4
    assert_equivalent(trained(DRAWN[name]), given, replicas=REPLICAS, batch_statistics="global", tolerance=1e-9)


def test_turns_that_draw_alike_do_not_overlap() -> None:
    """Nothing would say which of them draws first."""

    def noisy(z: tf.Tensor, y: tf.Tensor, t: tf.Variable, s: tf.Variable) -> tf.Tensor:
        return mixed(tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a / root(a) + drawn(4)), [0, z])[1])

    graph = tf.compat.v1.GraphDef.FromString(item_of(trained(noisy), batches()[0]).graph_def)
    (turns,) = {node.attr["parallel_iterations"].i for node in graph.node if DRAWN_ALIKE in node.attr}
    assert turns == 1


def test_a_result_that_is_not_followed_is_warned_of() -> None:
    """What is trained is known; of what Python returns beside it the user is told."""
    step = linear(lambda z: tf.ensure_shape(tf.numpy_function(np.sum, [z], tf.float64), []))
    item = item_of(step, batches()[0])
    assert not item.mixtures
    assert "it is not seen what the results" in " ".join(inexact(item))


def test_places_that_a_loss_reads_can_be_a_result() -> None:
    weight = tf.Variable(np.ones((3, 4)))

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            z = x @ weight
            places = tf.where(y > 0)
            loss = tf.reduce_sum(tf.gather(tf.tanh(z), places[:, 0]) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return places

    assert_equivalent(step, batches(), replicas=REPLICAS, batch_statistics="global", tolerance=1e-9)
    with pytest.raises(CaptureError, match="made of each replica's own rows"):
        assert_equivalent(step, batches(), replicas=REPLICAS, batch_statistics="replica")


def test_a_size_that_all_replicas_have_can_be_written() -> None:
    weight, width = tf.Variable(np.ones((3, 4))), tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            z = x @ weight
            loss = root(z)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        width.assign(width + number(tf.shape(z[:, None])[2]))
        return loss

    assert_equivalent(step, batches(), replicas=REPLICAS, batch_statistics="global", tolerance=1e-9)


FOLDED: dict[str, Loss] = {
    "by a number": lambda z, y, t, s: mixed(tf.reduce_prod(tf.tanh(tf.reshape(z, [count(z), -1])), axis=0)),
    "by another's number": lambda z, y, t, s: mixed(tf.sort(tf.exp(tf.reshape(z, [tf.shape(y)[0], -1])), axis=0)),
    "with others": lambda z, y, t, s: mixed(tf.cumsum(tf.reshape(z, [count(z), 2, -1]))),
    "several rows of each": lambda z, y, t, s: mixed(
        tf.reverse(tf.reshape(tf.reshape(z, [-1, 2]), [count(z), -1]), [0])
    ),
    "then joined": lambda z, y, t, s: mixed(tf.cumsum(tf.concat([tf.reshape(z, [count(z), -1]), z], 1))),
}
"""Rows whose length the graph does not say. Of a part without examples no reshape can tell it, so none is empty."""


@pytest.mark.parametrize("name", FOLDED)
def test_rows_whose_length_follows_are_gathered(name: str) -> None:
    given = [batch for batch in batches() if len(batch[0]) >= REPLICAS]
    assert_equivalent(trained(FOLDED[name]), given, replicas=REPLICAS, batch_statistics="global", tolerance=1e-9)


def test_a_mean_of_rows_whose_length_follows_can_be_a_result() -> None:
    step = linear(lambda z: tf.reduce_mean(tf.reshape(z, [count(z), -1]), 0))
    given = [batch for batch in batches() if len(batch[0]) >= REPLICAS]
    assert_equivalent(step, given, replicas=REPLICAS, batch_statistics="global", tolerance=1e-9)


def unseeded(z: tf.Tensor, y: tf.Tensor, t: tf.Variable, s: tf.Variable) -> tf.Tensor:
    return mixed(z * tf.raw_ops.RandomUniform(shape=tf.constant([1]), dtype=tf.float64))


def by_python(z: tf.Tensor, y: tf.Tensor, t: tf.Variable, s: tf.Variable) -> tf.Tensor:
    return tf.reduce_mean(tf.stop_gradient(tf.ensure_shape(tf.py_function(np.sin, [z], tf.float64), [None, 4])) * z)


def in_inner_loop(z: tf.Tensor, y: tf.Tensor, t: tf.Variable, s: tf.Variable) -> tf.Tensor:
    """Its turns may overlap, and replicas would draw in different orders."""
    noisy = partial(tf.while_loop, lambda i, a: i < 3, lambda i, a: (i + 1, a + drawn(4)))
    return mixed(tf.cond(root(z) > 0.0, lambda: noisy([0, z])[1], lambda: z))


@pytest.mark.parametrize("loss_of", [unseeded, by_python, in_inner_loop], ids=lambda loss: loss.__name__)
def test_what_cannot_be_followed_is_refused_with_its_line(loss_of: Loss) -> None:
    with pytest.raises(CaptureError, match=r"(?s)test_whole_batch\.py, line \d+.*not computed of the whole batch"):
        assert_equivalent(trained(loss_of), batches(), replicas=REPLICAS, batch_statistics="global")


@pytest.mark.parametrize("builder", ["PS", "PartitionedPS"])
def test_rows_of_all_that_an_update_makes_are_taken_apart_on_each_replica(builder: str) -> None:
    """One replica alone runs what leads to a write of a variable on a server; here all read rows of it, too."""
    rng = np.random.default_rng(1)
    weight, top = tf.Variable(rng.normal(size=(3, 2))), tf.Variable(rng.normal(size=(2, 1)))
    total = tf.Variable(np.zeros(2), trainable=False)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            first = tf.reduce_mean((x @ weight) ** 2)
        weight.assign_sub(0.1 * tape.gradient(first, weight))
        ordered = tf.sort(x, axis=0) @ weight
        total.assign(0.5 * total + tf.reduce_sum(ordered, 0))
        with tf.GradientTape() as tape:
            second = tf.reduce_mean(tf.tanh(ordered * x[:, :2]) @ top)
        top.assign_sub(0.1 * tape.gradient(second, top))
        return first, second

    given = [(rng.normal(size=(rows, 3)),) for rows in (7, 4, 5)]
    assert_equivalent(step, given, replicas=2, tolerance=1e-9, strategy_builder=builder)


def curvature(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
    """What a physics-informed network squares: a second derivative by one of the features, and a first by another."""
    first, others = x[:, :1], x[:, 1:]
    with tf.GradientTape() as outer:
        outer.watch(first)
        with tf.GradientTape(persistent=True) as inner:
            inner.watch([first, others])
            z = tf.tanh(tf.concat([first, others], axis=1) @ weight)
        slope, slopes = inner.gradient(z, first), inner.gradient(z, others)
    return slopes + z[:, :1] * outer.gradient(slope, first)


def spectrum(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
    return tf.signal.irfft(tf.signal.rfft(x @ weight) * [1.0 + 2.0j, 0.5, 3.0j]) * x[:, :1]


def solved(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
    """As sparse Gaussian processes have it: a column for each example."""
    factor = tf.linalg.cholesky(weight @ tf.transpose(weight) + 3.0 * tf.eye(3, dtype=tf.float64))
    return tf.transpose(tf.linalg.triangular_solve(factor, tf.transpose(x)))


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("rows_of", [curvature, spectrum, solved])
def test_examples_stay_apart(rows_of: Callable[[tf.Tensor, tf.Variable], tf.Tensor], normalized: bool) -> None:
    rng = np.random.default_rng(4)
    weight = tf.Variable(rng.normal(size=(3, 4)))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = rows_of(x, weight)
            loss = tf.reduce_mean((rows / root(rows) if normalized else rows) ** 4)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    item = capture_with(CaptureOptions(num_replicas=REPLICAS), step, rng.normal(size=(6, 3))).item
    assert {one.reduction for one in item.statistics} <= {"count", "mean", "same", "sum"}
    assert_equivalent(step, [(rng.normal(size=(rows, 3)),) for rows in SIZES], replicas=REPLICAS, tolerance=1e-9)


def test_shapes_of_several_rows_for_each_example_differ_by_the_number_of_examples() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            z = x @ weight
            twice = tf.reshape(tf.concat([z, z], 1), [-1, 4])
            difference = tf.shape(twice) - tf.shape(z)
            loss = root(z) * (1.0 + tf.reduce_sum(number(difference)))
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return difference

    rng = np.random.default_rng(4)
    weight = tf.Variable(rng.normal(size=(3, 4)))
    assert_equivalent(step, [(rng.normal(size=(rows, 3)),) for rows in SIZES], replicas=REPLICAS, tolerance=1e-9)


def test_rows_of_a_tensor_product_are_gathered_where_its_result_is_read_in_a_fixed_shape() -> None:
    """`tf.tensordot` makes 3 rows of each example, of a length that only its arithmetic of shapes tells."""

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            all_of_them = tf.reshape(tf.tensordot(x, weight, 1), [4, 2, 3])
            loss = root(tf.reduce_sum(all_of_them, axis=0))
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss

    rng = np.random.default_rng(4)
    weight = tf.Variable(rng.normal(size=(5, 2)))
    assert_equivalent(step, [(rng.normal(size=(4, 3, 5)),) for _ in range(3)], replicas=REPLICAS, tolerance=1e-9)


OF_TWO_BATCHES = {
    "joined in two orders": lambda a, b, w: tf.concat([tf.tanh(a @ w), tf.tanh(b @ w)], 0) * tf.concat([b, a], 0),
    "as many as the other has": lambda a, b, w: tf.tanh(tf.concat([a, b], 0) @ w)[: tf.shape(b)[0]],
    "after as many as the other has": lambda a, b, w: tf.tanh(tf.concat([a, b], 0) @ w)[tf.shape(b)[0] :],
    "zeros before": lambda a, b, w: tf.concat([tf.zeros_like(b), tf.tanh(a @ w)], 0) * tf.concat([a, b], 0),
    "drawn before": lambda a, b, w: (
        tf.concat([beside_drawn(b), tf.tanh(a @ w)], 0) * tf.concat([a, beside_drawn(b)], 0)
    ),
}


def beside_drawn(rows: tf.Tensor) -> tf.Tensor:
    return 0.0 * tf.random.stateless_normal(tf.shape(rows), [1, 2], dtype=tf.float64) + rows


@pytest.mark.parametrize("rows", OF_TWO_BATCHES.values(), ids=OF_TWO_BATCHES.keys())
def test_rows_of_batches_of_two_sizes_stand_at_other_places(rows: Callable[..., tf.Tensor]) -> None:
    """Of 6 and 12 rows in three parts each, those of the other batch are not where this one's would be."""
    rng = np.random.default_rng(4)
    weight, steps = tf.Variable(rng.normal(size=(3, 3))), 3
    sources = [
        tf.data.Dataset.from_tensor_slices(rng.normal(size=(count * steps, 3))).batch(count) for count in (12, 6)
    ]
    iterator = iter(tf.data.Dataset.zip(tuple(sources)).repeat())

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(rows(*next(iterator), weight))
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss

    assert_equivalent(step, [()] * steps, replicas=REPLICAS, tolerance=1e-9)


def test_shapes_of_other_rows_of_an_iterator_differ_by_their_numbers() -> None:
    """Three labelled examples, and nine others, are cut in the same proportions."""
    rng = np.random.default_rng(4)
    weight, steps = tf.Variable(rng.normal(size=(3, 2))), 3
    sources = [tf.data.Dataset.from_tensor_slices(rng.normal(size=(count * steps, 3))).batch(count) for count in (3, 9)]
    iterator = iter(tf.data.Dataset.zip(tuple(sources)).repeat())

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        few, many = next(iterator)
        with tf.GradientTape() as tape:
            difference = tf.shape(many) - tf.shape(few)
            loss = root(few @ weight) * number(difference[0]) + root(many @ weight)
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss, difference

    assert_equivalent(step, [()] * steps, replicas=REPLICAS, tolerance=1e-9)
