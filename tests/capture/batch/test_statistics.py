"""What capture finds out about values: what each is for the whole batch, and what is combined to make it so."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist, CaptureError
from autodist_py.capture.assemble import CaptureOptions, table_initializers
from autodist_py.capture.doors.graph import GraphScope, Signature
from autodist_py.capture.inexact import inexact
from autodist_py.proto.graph_item import GraphItem
from autodist_py.testing import assert_equivalent
from tests.support.unseen import turned

X, Y = np.ones([4, 3]), np.ones(4)
FACTOR = np.arange(3.0)


def captured(step: Callable[..., Any]) -> GraphItem:
    with AutoDist(batch_statistics="replica") as autodist:
        return autodist.function(step).captured(X, Y).item


ROWS = {
    "element by element": lambda x, y: tf.tanh(x) * FACTOR + 1.0,
    "with a column": lambda x, y: x * y[:, tf.newaxis],
    "a sum over features": lambda x, y: tf.reduce_sum(x, axis=1),
    "a product with weights": lambda x, y: x @ np.ones([3, 2]),
    "columns": lambda x, y: x[:, 1:],
    "columns, counted from the end": lambda x, y: x[..., :-1],
    "beside each other": lambda x, y: tf.concat([x, y[:, tf.newaxis]], axis=1),
    "whole rows of a reshape": lambda x, y: tf.reshape(x, [-1, 1, 3]),
    "three rows of each": lambda x, y: tf.reshape(x, [-1]),
    "a size that is computed": lambda x, y: tf.reshape(x, tf.stack([-1, tf.shape(x)[tf.rank(x) - 1]])),
    "classes": lambda x, y: tf.argmax(x, axis=1),
    "one hot": lambda x, y: tf.one_hot(tf.cast(y, tf.int32), 3),
    "rows of a table": lambda x, y: tf.gather(FACTOR, tf.cast(y, tf.int32)),
    "softmax": lambda x, y: tf.nn.softmax(x),
    "ones like": lambda x, y: tf.ones_like(x),
    "of a shape": lambda x, y: tf.zeros([tf.shape(x)[0], 2]),
    "an einsum that keeps them": lambda x, y: tf.einsum("bi,ij->bj", x, np.ones([3, 2])),
    "a transposed convolution": lambda x, y: tf.nn.conv2d_transpose(
        tf.reshape(x, [-1, 1, 3, 1]), np.ones([2, 2, 2, 1]), tf.stack([tf.shape(x)[0], 2, 6, 2]), 2
    ),
    "folded and unfolded": lambda x, y: tf.reshape(tf.reshape(tf.tile(x, [1, 2]), [-1, 2]) * 2.0, [-1, 3, 2]),
    "a tensordot": lambda x, y: tf.tensordot(tf.reshape(x, [-1, 3, 1]), np.ones([1, 2]), 1),
    "a tensor product": lambda x, y: tf.tensordot(tf.stack([x, x], axis=1), np.ones([3, 2]), 1),
    "a gather along an axis": lambda x, y: keras.ops.take_along_axis(x, tf.zeros_like(x, tf.int32), axis=1),
    "diagonals": lambda x, y: tf.linalg.diag_part(tf.linalg.band_part(x[:, :, tf.newaxis] * x[:, tf.newaxis], -1, 0)),
    "columns turned round": lambda x, y: tf.reverse(x, [1]),
    "a size among others": lambda x, y: tf.zeros(tf.gather(tf.shape(x), [0, 1])),
    "a histogram of each": lambda x, y: tf.math.bincount(tf.cast(x, tf.int32), minlength=4, maxlength=4, axis=-1),
    "with a mean of all": lambda x, y: x - tf.reduce_mean(x, axis=0),
}
SUM = {
    "a sum": lambda x, y: tf.reduce_sum(x),
    "a sum over rows": lambda x, y: tf.reduce_sum(x, axis=0),
    "the number of rows": lambda x, y: tf.shape(x)[0],
    "the number of elements": lambda x, y: tf.size(x),
    "the number of rows, gathered": lambda x, y: tf.gather(tf.shape(x), 0),
    "the larger number": lambda x, y: tf.maximum(tf.size(x), tf.shape(y)[0]),
    "a covariance": lambda x, y: tf.matmul(x, x, transpose_a=True),
    "an einsum that sums": lambda x, y: tf.einsum("bi,b->i", x, y),
    "a sum times a factor": lambda x, y: 2.0 * tf.reduce_sum(x, 0) * FACTOR,
    "a sum by a constant": lambda x, y: tf.reduce_sum(x) / 8.0,
    "a half square": lambda x, y: tf.nn.l2_loss(x),
    "a complex sum": lambda x, y: tf.complex(tf.reduce_sum(x), tf.reduce_sum(y)),
    "a sum, broadcast": lambda x, y: tf.broadcast_to(tf.reduce_sum(x), [2, 3]),
    "a mean times the number of rows": lambda x, y: tf.reduce_mean(x) * tf.cast(tf.shape(x)[0], tf.float64),
}
MEAN = {
    "a mean": lambda x, y: tf.reduce_mean(x),
    "a mean over rows": lambda x, y: tf.reduce_mean(x, axis=0),
    "a mean plus a constant": lambda x, y: tf.reduce_mean(x) + 1.0,
    "a sum by the number of rows": lambda x, y: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float64),
    "a mean of sums": lambda x, y: tf.reduce_mean(tf.reduce_sum(x, axis=1)),
    "a sum over features of a mean": lambda x, y: tf.reduce_sum(tf.reduce_mean(x, axis=0)),
    "a real part of a mean": lambda x, y: tf.math.real(tf.math.conj(tf.complex(tf.reduce_mean(x), FACTOR[0]))),
    "a mean of complex numbers": lambda x, y: tf.reduce_mean(tf.complex(y, y)),
    "a complex mean by a constant": lambda x, y: tf.reduce_mean(tf.complex(y, y)) / tf.constant(2j, tf.complex128),
    "a stack of means": lambda x, y: tf.stack([tf.reduce_mean(x), tf.reduce_mean(y)]),
}
COMPUTED_OF_ALL = {
    "a diagonal over rows": lambda x, y: tf.reduce_sum(tf.linalg.diag_part(x)),
    "rows and columns turned round": lambda x, y: tf.reverse(x, [0, 1]),
    "the larger of a number and a constant": lambda x, y: tf.maximum(tf.shape(y)[0], 3),
    "a root of a mean": lambda x, y: tf.sqrt(tf.reduce_mean(x)),
    "a largest value": lambda x, y: tf.reduce_max(x),
    "a sum plus a constant": lambda x, y: tf.reduce_sum(x) + 1.0,
    "a product of means": lambda x, y: tf.reduce_mean(x) * tf.reduce_mean(y),
    "a ratio of sums": lambda x, y: tf.reduce_sum(x) / tf.reduce_sum(y),
    "a sorted batch": lambda x, y: tf.sort(y),
    "the last row": lambda x, y: x[-1],
    "rows turned round": lambda x, y: x[::-1],
    "a sum over rows so far": lambda x, y: tf.cumsum(x, axis=0),
    "an integer mean": lambda x, y: tf.reduce_mean(tf.cast(x, tf.int32)),
    "a branch": lambda x, y: tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: -x),
    "rows of rows": lambda x, y: tf.matmul(x, x, transpose_b=True),
    "a pair of rows": lambda x, y: tf.reshape(x, [-1, 6]),
    "folded, and unfolded over two": lambda x, y: tf.reshape(tf.reshape(tf.tile(x, [1, 2]), [-1, 2]), [-1, 4]),
}
CASES = [
    pytest.param(step, reduction, id=name)
    for cases, reduction in ((ROWS, "rows"), (SUM, "sum"), (MEAN, "mean"), (COMPUTED_OF_ALL, "same"))
    for name, step in cases.items()
]


@pytest.mark.parametrize(("step", "reduction"), CASES)
def test_a_value_is_known_for_the_whole_batch(step: Callable[..., Any], reduction: str) -> None:
    (output,) = captured(step).outputs
    assert output.reduction == reduction


def test_what_is_drawn_is_the_first_replicas() -> None:
    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.random.stateless_normal([], [1, 2]), tf.reduce_sum(x)

    assert_equivalent(step, [(X[:rows],) for rows in (4, 3, 2)], batch_statistics="replica")


@pytest.mark.parametrize("index", [0, 1], ids=["the loss", "a term of a largest value"])
def test_a_result_that_is_not_seen_is_warned_of(index: int) -> None:
    weight = tf.Variable(np.ones(3))

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            z = tf.linalg.matvec(x, weight)
            largest = turned(tf.reduce_max(tf.sin(z)))
            loss = tf.reduce_mean(turned(z)) + largest * largest
        weight.assign_sub(tape.gradient(loss, weight))
        return [loss, largest][index]

    warnings = [one for one in inexact(captured(step)) if "it is not seen what the results 'Identity:0' are" in one]
    assert len(warnings) == index


def test_the_terms_of_a_sum_that_is_not_seen_count_in_results_as_in_the_loss() -> None:
    weight = tf.Variable(np.ones(3))

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = turned(tf.reduce_sum(tf.linalg.matvec(x, weight) ** 2))
            total = loss + tf.reduce_sum(weight**2)
        weight.assign_sub(0.01 * tape.gradient(total, weight))
        return [loss, total]

    assert_equivalent(step, [(X[:rows],) for rows in (4, 3, 2)], loss_reduction="sum", batch_statistics="replica")


@pytest.fixture
def control_flow_v1() -> Iterator[None]:
    tf.compat.v1.disable_control_flow_v2()
    yield
    tf.compat.v1.enable_control_flow_v2()


def test_what_would_be_combined_in_a_branch_of_tensorflow_1_is_refused(control_flow_v1: None) -> None:
    # A collective that is not run in one step would take all that wait for it with it.
    with AutoDist(batch_statistics="replica") as autodist, tf.Graph().as_default(), autodist.scope():
        x = tf.compat.v1.placeholder(tf.float64, [None, 3], "x")
        weight = tf.compat.v1.get_variable("weight", [3], tf.float64)
        loss = tf.reduce_mean(tf.linalg.matvec(x, weight))
        tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        often = tf.compat.v1.placeholder(tf.bool, [], "often")
        drawn = tf.compat.v1.get_variable("drawn", [], tf.float64, trainable=False)
        written = tf.cond(often, lambda: drawn.assign(tf.random.normal([], dtype=tf.float64)), drawn.read_value)
        with autodist.create_distributed_session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            with pytest.raises(CaptureError, match="inside a branch or loop of TensorFlow 1's control flow"):
                session.run([written, "train"], {x: X, often: True})


def _constant(value: float) -> tf.Tensor:
    return tf.constant(value, tf.float64)


@pytest.mark.parametrize(
    ("start", "turn", "reduction"),
    [
        (lambda x: [tf.reduce_sum(x)], lambda x, v: [v * 2.0], "sum"),
        (lambda x: [tf.reduce_sum(x)], lambda x, v: [_constant(0.0)], "sum"),
        (lambda x: [tf.reduce_sum(x)], lambda x, v: [_constant(5.0)], "same"),
        (lambda x: [tf.reduce_sum(x), _constant(5.0)], lambda x, v, other: [other, other], "same"),
        (lambda x: [_constant(0.0), _constant(0.0)], lambda x, v, other: [other, tf.reduce_sum(x)], "sum"),
        (lambda x: [_constant(0.0), _constant(5.0)], lambda x, v, other: [other, tf.reduce_sum(x)], "same"),
    ],
    ids=["times 2", "0", "5", "5 of another", "0, then a sum of another", "5, then a sum, of another"],
)
def test_what_goes_round_a_loop_of_tensorflow_1_is_a_sum_only_if_it_is_after_each_turn(
    start: Callable[..., Any], turn: Callable[..., Any], reduction: str, control_flow_v1: None
) -> None:
    """What is no sum after each turn is computed again, by a loop that is given what is combined."""
    with tf.Graph().as_default() as graph:
        scope = GraphScope(graph, CaptureOptions(batch_statistics="replica"), seed=None)
        with scope.recording():
            x = tf.compat.v1.placeholder(tf.float64, [None, 3], "x")
            value = tf.while_loop(lambda i, *_: i < 3, lambda i, *v: (i + 1, *turn(x, *v)), (0, *start(x)))[1]
    item = scope.cut(Signature((x.name,), (value.name,), ()), CaptureOptions(batch_statistics="replica"))
    assert [output.reduction for output in item.outputs] == [reduction]


@pytest.mark.parametrize(
    ("step", "combined"),
    [
        (lambda x, y: tf.reduce_mean(x), []),
        (lambda x, y: tf.sqrt(tf.reduce_mean(x)), ["mean"]),
        (lambda x, y: tf.reduce_sum(x) / tf.reduce_sum(y), ["sum", "sum"]),
        (lambda x, y: tf.reduce_max(x), ["rows"]),
        (lambda x, y: [tf.sqrt(tf.reduce_sum(x)), tf.reduce_sum(x) ** 2.0], ["sum", "sum"]),
    ],
    ids=["nothing", "a mean", "two sums", "rows", "each op's own sum"],
)
def test_what_is_combined_is_as_late_as_it_can_be(step: Callable[..., Any], combined: list[str]) -> None:
    assert [statistic.reduction for statistic in captured(step).statistics] == combined


def test_in_a_loss_only_what_no_weight_reaches_is_combined() -> None:
    weight = tf.Variable(np.ones(3))

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            errors = tf.square(tf.linalg.matvec(x, weight) - y)
            loss = tf.reduce_sum(errors * y) / tf.reduce_sum(y) + tf.sqrt(tf.reduce_sum(y)) * tf.reduce_mean(errors)
        weight.assign_sub(tape.gradient(loss, weight))

    item = captured(step)
    assert sorted(statistic.reduction for statistic in item.statistics) == ["share", "sum"]
    assert item.gradients[0].reduction == "mean"
    assert not item.local_ops


def _encoded(x: tf.Tensor) -> tf.Tensor:
    """Which of four numbers stand in each row, as Keras's layers encode them."""
    classes = tf.cast(x, tf.int32)
    return tf.cast(tf.math.bincount(classes, minlength=4, maxlength=4, axis=-1, binary_output=True), tf.float64)


PLAIN = {
    "a softmax and its cross-entropy": lambda x, y, w: tf.nn.softmax_cross_entropy_with_logits(x, w * x),
    "numbers encoded as several": lambda x, y, w: tf.reduce_sum(_encoded(x)[:, :3] * w, axis=1) - y,
    "turned round": lambda x, y, w: tf.reverse(x * w, [-1])[:, 0],
    "folded": lambda x, y, w: tf.reshape(tf.reshape(x, [-1]) * 2.0, [-1, 3]) * w,
}


@pytest.mark.parametrize("losses", PLAIN.values(), ids=PLAIN)
def test_of_what_is_exact_nothing_is_said(losses: Callable[..., Any]) -> None:
    weight = tf.Variable(np.ones(3))

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(x, y, weight))
        weight.assign_sub(tape.gradient(loss, weight))

    item = captured(step)
    assert item.gradients[0].reduction == "mean"
    assert not list(inexact(item))


def test_of_ops_that_mix_examples_only_those_are_named_that_anything_comes_of() -> None:
    weight = tf.Variable(np.ones(3))

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            clipped = tf.minimum(tf.maximum(tf.reduce_max(x * weight, name="unused"), 2.0), 2.0)
            loss = tf.reduce_mean(x * weight) * clipped + turned(tf.reduce_mean(x * weight), "used")
        weight.assign_sub(tape.gradient(loss, weight))

    item = captured(step)
    assert "used" in item.local_ops and "unused" not in item.local_ops
    assert not item.mixtures


def test_a_table_that_was_made_eagerly_has_no_initializer_to_run() -> None:
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)
    with tf.Graph().as_default() as graph:
        graph.add_to_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS, None)
        tf.no_op(name="fill")
        graph.add_to_collection(tf.compat.v1.GraphKeys.TABLE_INITIALIZERS, graph.get_operation_by_name("fill"))
    assert table_initializers(graph) == ("fill",)
    assert captured(lambda x, y: table.lookup(tf.cast(y, tf.int32))).outputs[0].reduction == "rows"


@pytest.mark.parametrize(
    ("power", "named"),
    [(tf.square, []), (lambda value: tf.while_loop(lambda v: tf.norm(v) < 9, lambda v: v * v, [value])[0], ["While"])],
    ids=["followed", "not"],
)
def test_an_op_that_may_mix_a_regularizer_into_a_sum_is_named(power: Callable[..., Any], named: list[str]) -> None:
    weight = tf.Variable(2.0 * np.ones(3))

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            used = power(weight)
            loss = tf.reduce_sum(tf.square(tf.linalg.matvec(x, used) - y)) + tf.nn.l2_loss(used)
        weight.assign_sub(tape.gradient(loss, weight))

    item = captured(step)
    assert item.gradients[0].reduction == "sum"
    ops = {node.name: node.op for node in tf.compat.v1.GraphDef.FromString(item.graph_def).node}
    assert [ops[op].removeprefix("Stateless") for op in item.inseparable_ops] == named
    warnings = " ".join(inexact(item))
    assert all(f"'{op}' pass gradients on linearly" in warnings for op in item.inseparable_ops)


def test_a_long_chain_of_linear_ops_is_followed() -> None:
    weight = tf.Variable(np.ones(3))

    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            value = weight * 1.0
            for _ in range(1500):
                value = value * 0.999
            loss = tf.reduce_sum(x * value) + tf.nn.l2_loss(value)
        weight.assign_sub(tape.gradient(loss, weight))

    assert "of_no_example" in str(captured(step).graph_def)


def masked(x: tf.Tensor, y: tf.Tensor, bound: Callable[[tf.Tensor], tf.Tensor], weight: tf.Variable) -> tf.Tensor:
    return tf.reduce_sum((x @ weight)[:, 0] ** 2 * y) / bound(tf.reduce_sum(y))


BOUNDS = {
    "an epsilon": lambda number: number + 0.5,
    "at least one": lambda number: tf.maximum(number, 1.0),
    "a root": tf.sqrt,
}


@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS.keys())
def test_a_sum_by_a_number_of_the_whole_batch_is_a_mean_beside_a_mean_and_a_sum_by_itself(
    bound: Callable[[tf.Tensor], tf.Tensor],
) -> None:
    def step_of(beside: Callable[[tf.Tensor], tf.Tensor]) -> Callable[..., Any]:
        weight = tf.Variable(np.ones([3, 1]), name="weight")

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = masked(x, y, bound, weight) + beside(x @ weight)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

        return step

    rng = np.random.default_rng(2)
    batches = [(rng.normal(size=(size, 3)), rng.integers(0, 3, size) * 1.0) for size in (6, 5, 4)]
    for beside, reduction, combined in (
        (lambda value: tf.reduce_mean(value**2), "mean", ["part", "sum"]),
        (lambda value: tf.reduce_sum(value**2), "sum", ["sum"]),
    ):
        step = step_of(beside)
        item = captured(step)
        assert [one.reduction for one in item.gradients] == [reduction]
        assert sorted({one.reduction for one in item.statistics}) == combined
        assert not item.mixtures and not list(inexact(item))
        assert_equivalent(step, batches, replicas=3, batch_statistics="replica")


def test_a_number_that_a_loss_reads_otherwise_too_is_left_as_it_is() -> None:
    weight = tf.Variable(np.ones([3, 1]), name="weight")

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            number = tf.maximum(tf.reduce_sum(y), 1.0)
            loss = tf.reduce_sum(x @ weight) / number + tf.reduce_mean(x @ weight) * tf.math.log(number)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    (mixture,) = captured(step).mixtures
    assert "adds a sum over examples to what is a mean" in mixture


def doubled_if_positive(value: tf.Tensor) -> tf.Tensor:
    return tf.cond(tf.reduce_sum(value) > 0.0, lambda: value * 2.0, lambda: value - 1.0)


@pytest.mark.parametrize("pair", [tf.add, tf.maximum, lambda a, b: tf.where(a > 0.0, a, b)])
def test_rows_of_the_whole_batch_are_not_paired_with_those_of_a_replicas_own(pair: Callable[..., tf.Tensor]) -> None:
    """The branch that only the result reads would be computed again for all rows, beside the other."""

    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            shown, learnt = doubled_if_positive(tf.tanh(x * w)), doubled_if_positive(tf.tanh(x * w))
            loss = tf.reduce_mean(learnt)
        w.assign_sub(tape.gradient(loss, w))
        return pair(shown, learnt)

    w = tf.Variable(np.ones(3))
    (mixture,) = captured(step).mixtures
    assert re.search(r"pairs rows of the whole batch \('[^']+'\) with a replica's own", mixture)
    assert "('cond_1/Identity', which a loss reads): return both" in mixture
