"""Custom gradients of the user's: equal to one device's, warned of, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from autodist_py.capture.assemble import CaptureOptions
from autodist_py.capture.doors.graph import GraphScope
from autodist_py.capture.inexact import inexact
from autodist_py.proto.graph_item import GraphItem
from autodist_py.testing import NotEquivalentError, assert_equivalent
from tests.support.capture_steps import capture
from tests.support.custom_gradients import BATCHES, Backward, Loss, at, item_of, passing, step_of

v1 = tf.compat.v1


def mean(d: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(d, 0, keepdims=True)


def number(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.shape(x)[0], x.dtype)


MIXING: dict[str, Backward] = {
    "centred": lambda d: d - tf.reduce_mean(d, 0),
    "centred_by_broadcast": lambda d: d - tf.broadcast_to(mean(d), tf.shape(d)),
    "centred_by_tile": lambda d: d - tf.tile(mean(d), [tf.shape(d)[0], 1]),
    "centred_by_add_n": lambda d: tf.add_n([d, tf.broadcast_to(-mean(d), tf.shape(d))]),
    "centred_by_bias": lambda d: tf.nn.bias_add(d, -tf.reduce_mean(d, 0)),
    "with_the_sum": lambda d: d + 0.1 * tf.reduce_sum(d, 0),
    "the_mean": lambda d: tf.broadcast_to(mean(d), tf.shape(d)),
    "the_mean_by_ones": lambda d: tf.ones_like(d) * mean(d),
    "the_mean_by_product": lambda d: tf.ones([tf.shape(d)[0], 1], d.dtype) @ mean(d),
    "running_sum": lambda d: tf.cumsum(d, 0),
    "running_sum_of_columns": lambda d: tf.transpose(tf.cumsum(tf.transpose(d), 1)),
    "in_reverse": lambda d: tf.reverse(d, [0]),
    "rolled": lambda d: tf.roll(d, 1, 0),
    "shuffled": lambda d: tf.random.shuffle(d, seed=1),
    "turned_by_one": lambda d: tf.concat([d[1:], d[:1]], 0),
    "moved_by_one": lambda d: tf.pad(d[:-1], [[1, 0], [0, 0]]),
    "by_the_number": lambda d: d / number(d),
    "times_the_number": lambda d: d * number(d),
    "even_ones_first": lambda d: tf.concat([d[::2], d[1::2]], 0),
}
"""Linear, as a replica's share asks for, but each example is given what others pass back."""
UNSEEN: dict[str, Backward] = {
    "by_places": lambda d: tf.gather(d, tf.range(tf.shape(d)[0] - 1, -1, -1)),
    "first_ones": lambda d: tf.where(tf.range(tf.shape(d)[0])[:, None] < 2, d, tf.zeros_like(d)),
    "scanned": lambda d: tf.scan(lambda last, row: last + row, d),
    "drawn": lambda d: d * tf.random.uniform([], dtype=d.dtype),
    "by_matrix": lambda d: (tf.eye(tf.shape(d)[0], dtype=d.dtype) - 1 / number(d)) @ d,
    "by_classes": lambda d: tf.gather(tf.math.unsorted_segment_sum(d, tf.range(tf.shape(d)[0]) % 2, 2), [0, 1, 0, 1]),
}
"""Likewise, by ops that are not followed."""


@pytest.mark.parametrize("back", MIXING.values(), ids=MIXING)
def test_what_mixes_examples_is_refused_by_name(back: Backward) -> None:
    loss_of = at("logits", back)
    (mixture,) = item_of(loss_of).mixtures
    assert mixture.startswith("back-propagation for 'kernel', 'bias'")
    assert __file__ in mixture
    with pytest.raises(NotEquivalentError):
        assert_equivalent(step_of(loss_of), BATCHES, replicas=3, batch_statistics="replica")


@pytest.mark.parametrize("name", sorted(MIXING.keys() - {"shuffled"}))
def test_what_mixes_examples_can_be_computed_of_the_whole_batch(name: str) -> None:
    assert_equivalent(step_of(at("logits", MIXING[name])), BATCHES, replicas=3, batch_statistics="global")


@pytest.mark.parametrize("back", UNSEEN.values(), ids=UNSEEN)
def test_what_is_not_followed_is_warned_of(back: Backward) -> None:
    item = item_of(at("logits", back))
    assert any("each example's by itself" in one for one in inexact(item))


@tf.custom_gradient
def rounded(x: tf.Tensor) -> Any:
    return tf.round(4 * x) / 4, lambda d: d


@tf.custom_gradient
def softplus(x: tf.Tensor) -> Any:
    e = tf.exp(x)
    return tf.math.log(1 + e), lambda d: d * (1 - 1 / (1 + e))


@tf.custom_gradient
def softmax(x: tf.Tensor) -> Any:
    result = tf.nn.softmax(x)
    return result, lambda d: result * (d - tf.reduce_sum(d * result, 1, keepdims=True))


@tf.custom_gradient
def normalized(x: tf.Tensor) -> Any:
    return x, lambda d: d / (1e-3 + tf.norm(d, axis=1, keepdims=True))


@tf.custom_gradient
def product(x: tf.Tensor, k: tf.Tensor) -> Any:
    return x @ k, lambda d: (tf.matmul(d, k, transpose_b=True), tf.matmul(x, d, transpose_a=True))


@tf.custom_gradient
def einsum(x: tf.Tensor, k: tf.Tensor) -> Any:
    return tf.einsum("bi,ij->bj", x, k), lambda d: (tf.einsum("bj,ij->bi", d, k), tf.einsum("bi,bj->ij", x, d))


@tf.custom_gradient
def both(x: tf.Tensor, k: tf.Tensor) -> Any:
    product = x @ k

    def back(of_product: tf.Tensor, of_sine: tf.Tensor) -> Any:
        d = of_product + of_sine * tf.cos(product)
        return tf.matmul(d, k, transpose_b=True), tf.matmul(x, d, transpose_a=True)

    return (product, tf.sin(product)), back


@tf.custom_gradient
def biased(x: tf.Tensor, b: tf.Tensor) -> Any:
    return x + b, lambda d: (d, tf.reduce_sum(d, 0))


@tf.custom_gradient
def scaled(x: tf.Tensor, b: tf.Tensor) -> Any:
    return x * b[0], lambda d: (d * b[0], tf.concat([[tf.reduce_sum(d * x)], tf.zeros([2], d.dtype)], 0))


@tf.custom_gradient
def images(x: tf.Tensor) -> Any:
    return tf.reshape(x, [-1, 3, 1]), lambda d: tf.reshape(d, tf.shape(x))


@tf.custom_gradient
def mean_error(p: tf.Tensor, y: tf.Tensor) -> Any:
    n = number(p)
    return tf.reduce_sum((p - y) ** 2) / n, lambda d: (d * 2 * (p - y) / n, d * 2 * (y - p) / n)


@tf.custom_gradient
def sum_of_errors(p: tf.Tensor, y: tf.Tensor) -> Any:
    return tf.reduce_sum((p - y) ** 2), lambda d: (d * 2 * (p - y), d * 2 * (y - p))


@tf.custom_gradient
def mean_of_rows(x: tf.Tensor) -> Any:
    return tf.reduce_mean(x, 0), lambda d: tf.broadcast_to(d / number(x), tf.shape(x))


def by(layer: Callable[..., tf.Tensor]) -> Loss:
    """A loss whose logits are what `layer` makes of a batch, a kernel and a bias."""

    def loss(x: tf.Tensor, y: tf.Tensor, trained: list[tf.Variable]) -> tf.Tensor:
        kernel, bias = (tf.convert_to_tensor(one) for one in trained)
        return tf.reduce_mean((tf.reduce_sum(layer(x, kernel, bias), 1) - y) ** 2)

    return loss


def by_predictions(of: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Loss:
    """A loss that `of` makes of predictions and labels."""

    def loss(x: tf.Tensor, y: tf.Tensor, trained: list[tf.Variable]) -> tf.Tensor:
        kernel, bias = (tf.convert_to_tensor(one) for one in trained)
        return of(tf.reduce_sum(tf.tanh(x @ kernel + bias), 1), y)

    return loss


PLAIN: dict[str, Loss] = {
    "rounded": by(lambda x, k, b: rounded(tf.tanh(x @ k) + b)),
    "softplus": by(lambda x, k, b: softplus(x @ k + b)),
    "softmax": by(lambda x, k, b: softmax(x @ k + b) * [1.0, 2.0, 3.0]),
    "normalized": by(lambda x, k, b: normalized(x @ k + b)),
    "product": by(lambda x, k, b: product(x, k) + b),
    "einsum": by(lambda x, k, b: einsum(x, k) + b),
    "both": by(lambda x, k, b: sum(both(x, k)) + b),
    "biased": by(lambda x, k, b: biased(x @ k, b)),
    "scaled": by(lambda x, k, b: scaled(x @ k, b)),
    "images": by(lambda x, k, b: images(x @ k + b)[:, :, 0]),
    "half_a_weight": by(lambda x, k, b: x @ passing(lambda d: 0.5 * d)(k) + b),
    "mean_error": by_predictions(mean_error),
    "sum_of_errors": by_predictions(lambda p, y: 0.01 * sum_of_errors(p, y)),
    "mean_of_rows": by_predictions(lambda p, y: tf.reduce_sum(mean_of_rows(tf.stack([p - y, p * y], 1)))),
}


@pytest.mark.parametrize("loss_of", PLAIN.values(), ids=PLAIN)
def test_what_keeps_examples_apart_is_one_devices_and_not_warned_of(loss_of: Loss) -> None:
    assert not list(inexact(item_of(loss_of)))
    assert_equivalent(step_of(loss_of), BATCHES, replicas=3, batch_statistics="replica")


@tf.custom_gradient
def undivided_mean(p: tf.Tensor) -> Any:
    return tf.reduce_mean(p**2), lambda d: d * 2 * p


@tf.custom_gradient
def divided_sum(p: tf.Tensor) -> Any:
    return tf.reduce_sum(p**2), lambda d: d * 2 * p / number(p)


@pytest.mark.parametrize("of", [undivided_mean, divided_sum], ids=["undivided_mean", "divided_sum"])
def test_a_gradient_with_another_power_of_the_number_of_examples_mixes_examples_and_is_refused(of: Any) -> None:
    (mixture,) = item_of(by_predictions(lambda p, y: of(p - y))).mixtures
    assert "divided by the number of examples" in mixture


@tf.custom_gradient
def square(p: tf.Tensor) -> Any:
    return p**2, lambda d: 2 * p


@tf.custom_gradient
def with_itself(k: tf.Tensor) -> Any:
    return k, lambda d: 0.1 * k


@pytest.mark.parametrize(
    "loss_of",
    [by_predictions(lambda p, y: tf.reduce_mean(square(p - y))), by(lambda x, k, b: x @ with_itself(k) + b)],
    ids=["of_rows", "of_a_weight"],
)
def test_a_gradient_that_does_not_come_of_what_is_given_is_warned_of(loss_of: Loss) -> None:
    assert any("each example's by itself" in one for one in inexact(item_of(loss_of)))


def test_a_result_whose_gradient_is_left_out_changes_nothing() -> None:
    @tf.custom_gradient
    def layer(x: tf.Tensor) -> Any:
        return (tf.sin(x), tf.argmax(x, 1)), lambda of_sine, _: of_sine * tf.cos(x)

    loss_of = by(lambda x, k, b: layer(x @ k + b)[0])
    assert not list(inexact(item_of(loss_of)))
    assert_equivalent(step_of(loss_of), BATCHES, replicas=3, batch_statistics="replica")


def test_sparse_gradients_of_a_variable_are_compared_as_rows() -> None:
    def looked_up(back: Backward) -> GraphItem:
        table = tf.Variable(tf.ones([5, 3], tf.float64), name="table")

        @tf.custom_gradient
        def lookup(ids: tf.Tensor) -> Any:
            def of_rows(d: tf.Tensor, variables: Any = None) -> Any:
                return None, [tf.IndexedSlices(back(d), ids, tf.shape(table))]

            return tf.gather(table, ids), of_rows

        def step(ids: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(lookup(ids) ** 2)
            rows = tape.gradient(loss, table)
            table.scatter_sub(tf.IndexedSlices(0.1 * rows.values, rows.indices))

        return capture(step, tf.constant([0, 1, 1, 4])).item

    assert not looked_up(lambda d: 0.5 * d).mixtures
    assert len(looked_up(lambda d: d - tf.reduce_mean(d, 0)).mixtures) == 1


@tf.custom_gradient
def mean_product(x: tf.Tensor, k: tf.Tensor) -> Any:
    return x @ k, lambda d: (d @ tf.transpose(k), tf.transpose(x) @ d / number(x))


@tf.custom_gradient
def mean_bias(x: tf.Tensor, b: tf.Tensor) -> Any:
    return x + b, lambda d: (d, tf.reduce_mean(d, 0))


@pytest.mark.parametrize(
    "layer",
    [lambda x, k, b: mean_product(x, k) + b, lambda x, k, b: mean_bias(x @ k, b)],
    ids=["mean_product", "mean_bias"],
)
def test_a_weights_gradient_that_is_a_mean_mixes_examples_and_is_refused(layer: Callable[..., tf.Tensor]) -> None:
    (mixture,) = item_of(by(layer)).mixtures
    assert __file__ in mixture
    with pytest.raises(NotEquivalentError):
        assert_equivalent(step_of(by(layer)), BATCHES, replicas=3, batch_statistics="replica")


def test_a_variable_that_the_function_reads_is_given_a_sum() -> None:
    @tf.custom_gradient
    def layer(x: tf.Tensor) -> Any:
        def back(d: tf.Tensor, variables: list[tf.Variable]) -> Any:
            (read,) = variables
            return d @ tf.transpose(read), [tf.transpose(x) @ d]

        return x @ kernel, back

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.reduce_sum(layer(x), 1) - y) ** 2)
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))

    kernel = tf.Variable(tf.ones([4, 3], tf.float64))
    assert_equivalent(step, BATCHES, replicas=3, batch_statistics="replica")


def in_a_loop(back: Backward) -> Loss:
    def loss(x: tf.Tensor, y: tf.Tensor, trained: list[tf.Variable]) -> tf.Tensor:
        kernel = tf.convert_to_tensor(trained[0])

        def turn(i: tf.Tensor, h: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return i + 1, passing(back)(tf.tanh(h @ kernel[:3] + trained[1]))

        _, hidden = tf.while_loop(lambda i, h: i < 3, turn, (0, x[:, :3]))
        return tf.reduce_mean((tf.reduce_sum(hidden, 1) - y) ** 2)

    return loss


@pytest.mark.parametrize("name", ["centred", "running_sum", "in_reverse"])
def test_what_mixes_examples_in_a_loop_is_warned_of(name: str) -> None:
    item = item_of(in_a_loop(MIXING[name]))
    assert any("each example's by itself" in one for one in inexact(item))


def test_a_gradient_that_reads_something_else_in_a_loop_is_warned_of() -> None:
    def loss(x: tf.Tensor, y: tf.Tensor, trained: list[tf.Variable]) -> tf.Tensor:
        kernel, mean_of_all = tf.convert_to_tensor(trained[0]), tf.reduce_mean(x)
        rows = tf.map_fn(lambda row: passing(lambda d: d * mean_of_all)(tf.linalg.matvec(kernel, row, True)), x)
        return tf.reduce_mean((tf.reduce_sum(rows + trained[1], 1) - y) ** 2)

    assert any("each example's by itself" in one for one in inexact(item_of(loss)))


def test_what_keeps_examples_apart_in_a_loop_is_not_warned_of() -> None:
    loss_of = in_a_loop(lambda d: -0.5 * d)
    assert not any("each example's by itself" in one for one in inexact(item_of(loss_of)))
    assert_equivalent(step_of(loss_of), BATCHES, replicas=2, batch_statistics="replica")


@tf.RegisterGradient("CentredForTests")
def _centred(op: tf.Operation, d: tf.Tensor) -> tf.Tensor:
    return d - tf.reduce_mean(d, 0)


@tf.RegisterGradient("HalfForTests")
def _half(op: tf.Operation, d: tf.Tensor) -> tf.Tensor:
    return 0.5 * d


def overridden(gradient: str) -> GraphItem:
    """A graph of TensorFlow 1 in which an op's gradient is another."""
    scope = GraphScope(tf.Graph(), CaptureOptions(batch_statistics="replica"), seed=None)
    with scope.graph.as_default(), scope.recording():
        x = v1.placeholder(tf.float64, [None, 4], name="x")
        kernel = v1.get_variable("kernel", [4, 3], tf.float64, use_resource=True)
        with scope.graph.gradient_override_map({"Identity": gradient}):
            logits = tf.identity(x @ kernel)
        v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(logits**2), name="train")
    return scope.item(CaptureOptions(batch_statistics="replica"))


def test_an_ops_other_gradient_that_mixes_examples_is_refused() -> None:
    (mixture,) = overridden("CentredForTests").mixtures
    assert "'gradients/Identity_grad/sub" in mixture
    assert not overridden("HalfForTests").mixtures
