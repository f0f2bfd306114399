"""Losses that go through loops, branches and lists: what keeps examples apart is followed, and the rest is told of.

One module, though long: all of it is losses of one small model.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py.capture.inexact import inexact
from autodist_py.proto.graph_item import GraphItem
from autodist_py.testing import assert_equivalent
from tests.support.capture_steps import capture
from tests.support.unseen import unseen

RNG = np.random.default_rng(7)
STEPS, WIDTH = 5, 3
KERNEL = RNG.normal(size=(WIDTH, WIDTH))


def of_size(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences, and how long each is."""
    return RNG.normal(size=(size, STEPS, WIDTH)), RNG.integers(1, STEPS + 1, size=size)


BATCHES = [of_size(size) for size in (6, 5, 7)]

Loss = Callable[[tf.Tensor, tf.Tensor, tf.Variable], tf.Tensor]
"""Of sequences, their lengths, and a weight."""


def step_of(loss_of: Loss) -> Callable[..., Any]:
    weight = tf.Variable(KERNEL, name="weight")

    def step(x: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(x, lengths, weight)
        weight.assign_sub(0.05 * tape.gradient(loss, weight))
        return loss

    return step


def item_of(loss_of: Loss) -> GraphItem:
    return capture(step_of(loss_of), *map(tf.constant, BATCHES[0])).item


def cell(row: tf.Tensor, state: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    return tf.tanh(row @ w + state)


def time_major(x: tf.Tensor) -> tf.Tensor:
    return tf.transpose(x, [1, 0, 2])


def scanned(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """The states after each time, time-major."""
    return tf.scan(lambda state, row: cell(row, state, w), time_major(x), tf.zeros_like(x[:, 0]))


def by_lists(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """As a recurrent layer goes: it reads a list of rows, fills another, and keeps a state after a sequence ends."""
    rows = tf.TensorArray(tf.float64, size=tf.shape(x)[1]).unstack(time_major(x))
    states = tf.TensorArray(tf.float64, size=tf.shape(x)[1])

    def turn(time: tf.Tensor, state: tf.Tensor, states: tf.TensorArray) -> tuple[Any, ...]:
        is_in = tf.cast(time, lengths.dtype) < lengths
        state = tf.where(is_in[:, None], cell(rows.read(time), state, w), state)
        return time + 1, state, states.write(time, state)

    _, last, states = tf.while_loop(
        lambda time, *_: time < tf.shape(x)[1], turn, (0, tf.zeros([tf.shape(x)[0], WIDTH], tf.float64), states)
    )
    return tf.reduce_mean(tf.transpose(states.stack(), [1, 0, 2]) ** 2) + tf.reduce_mean(tf.cos(last))


def by_columns(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A loop that takes each time's rows out of the batch."""
    turn = lambda time, state: (time + 1, cell(x[:, time], state, w))  # noqa: E731
    return tf.reduce_sum(tf.while_loop(lambda time, _: time < STEPS, turn, (0, x[:, 0]))[1] ** 2)


def summed(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A loop that adds a sum over examples in each turn."""
    turn = lambda time, total: (time + 1, total + tf.reduce_sum(cell(x[:, time], x[:, 0], w)))  # noqa: E731
    return tf.while_loop(lambda time, _: time < STEPS, turn, (0, tf.zeros([], tf.float64)))[1]


def listed_means(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A list of means over the examples, one for each time."""
    means = tf.TensorArray(tf.float64, size=STEPS)
    turn = lambda time, means: (time + 1, means.write(time, tf.reduce_mean(x[:, time] @ w)))  # noqa: E731
    return tf.reduce_sum(tf.while_loop(lambda time, _: time < STEPS, turn, (0, means))[1].stack())


def of_loops(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A loop within a loop, and a branch in it."""

    def inner(state: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, tf.tanh(v @ w)), (0, state))[1]

    def turn(time: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return time + 1, tf.cond(time < 2, lambda: inner(state), lambda: cell(x[:, time], state, w))

    return tf.reduce_mean(tf.while_loop(lambda time, _: time < STEPS, turn, (0, x[:, 0]))[1])


def unrolled(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A list that is filled and read without a loop."""
    states = tf.TensorArray(tf.float64, size=STEPS, clear_after_read=False)
    for time in range(STEPS):
        states = states.write(time, cell(x[:, time], states.read(time - 1) if time else x[:, 0], w))
    return tf.reduce_mean(states.stack() ** 2)


def backwards(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(scanned(tf.reverse(x, [1]), w) * tf.reverse(scanned(x, w), [0]))


def drops(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A branch by a number that all replicas have, as it is combined."""
    return tf.reduce_mean(tf.cond(tf.reduce_sum(x) > tf.reduce_sum(w), lambda: x @ w, lambda: tf.sin(x @ w)))


def mapped(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A function of each example, which has a loop of its own, as long as the example."""

    def of_one(example: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        rows, length = example
        turn = lambda time, state: (time + 1, tf.tanh(tf.linalg.matvec(w, rows[time] + state)))  # noqa: E731
        state = tf.zeros([WIDTH], tf.float64)
        return tf.reduce_sum(tf.while_loop(lambda time, _: time < tf.cast(length, tf.int32), turn, (0, state))[1])

    return tf.map_fn(of_one, (x, lengths), fn_output_signature=tf.float64)


def added_up(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A loop that takes each example out of the batch, and adds up."""
    number = tf.shape(x)[0]
    turn = lambda i, total: (i + 1, total + tf.reduce_sum((x[i] @ w)[: lengths[i]] * tf.gather(x, i)[0]))  # noqa: E731
    return tf.while_loop(lambda i, _: i < number, turn, (0, tf.zeros([], tf.float64)))[1]


def vectorized(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A function of each example, which reads a weight."""

    def of_one(example: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        rows, length = example
        return tf.reduce_sum(tf.tanh(rows @ w) ** 2) / tf.cast(length, tf.float64)

    return tf.vectorized_map(of_one, (tf.sin(x @ w), lengths))


def ranged(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A loop over the places in the batch, which autograph makes."""
    total = tf.constant(0.0, tf.float64)
    for i in tf.range(tf.shape(x)[0]):
        length = tf.cast(lengths[i], tf.int32)
        total += tf.reduce_sum(tf.tanh(x[i, :length] @ w)) / tf.cast(length, tf.float64)
    return total / tf.cast(tf.shape(x)[0], tf.float64)


def random_field(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """The negative log likelihood of a linear chain, by the forward algorithm."""
    tags = tf.argmax(x, axis=2)
    scores = x @ w
    mask = tf.sequence_mask(lengths, STEPS, dtype=tf.float64)
    of_tags = tf.reduce_sum(tf.gather(scores, tags, batch_dims=2) * mask, axis=1)
    pairs = tf.gather_nd(w, tf.stack([tags[:, :-1], tags[:, 1:]], axis=-1))
    of_pairs = tf.reduce_sum(pairs * mask[:, 1:], axis=1)

    def turn(alpha: tf.Tensor, given: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        score, is_in = given
        return tf.where(is_in[:, None] > 0.0, tf.reduce_logsumexp(alpha[:, :, None] + w, axis=1) + score, alpha)

    alphas = tf.scan(turn, (time_major(scores)[1:], tf.transpose(mask)[1:]), scores[:, 0])
    return tf.reduce_mean(tf.reduce_logsumexp(alphas[-1], axis=1) - of_tags - of_pairs)


SEEN: dict[str, tuple[str, Loss]] = {
    "a scan over time": ("mean", lambda x, lengths, w: tf.reduce_mean(scanned(x, w)[-1] ** 2)),
    "all states of a scan": ("sum", lambda x, lengths, w: tf.reduce_sum(tf.transpose(scanned(x, w), [1, 0, 2]) ** 2)),
    "lists, with a mask": ("mean", by_lists),
    "rows by columns": ("sum", by_columns),
    "a sum in each turn": ("sum", summed),
    "a list of means": ("mean", listed_means),
    "loops in loops": ("mean", of_loops),
    "a list without a loop": ("mean", unrolled),
    "backwards in time": ("mean", backwards),
    "a branch": ("mean", drops),
    "a mean over map_fn": ("mean", lambda x, lengths, w: tf.reduce_mean(mapped(x, lengths, w))),
    "map_fn beside rows": ("sum", lambda x, lengths, w: tf.reduce_sum(mapped(x, lengths, w) * x[:, 0, 0])),
    "a sum, an example a turn": ("sum", added_up),
    "a loop over places": ("mean", ranged),
    "a conditional random field": ("mean", random_field),
    "a mean over vectorized_map": ("mean", lambda x, lengths, w: tf.reduce_mean(vectorized(x, lengths, w))),
    "vectorized_map beside rows": ("sum", lambda x, lengths, w: tf.reduce_sum(vectorized(x, lengths, w) * x[:, 0, 0])),
}


@pytest.mark.parametrize(("reduction", "loss_of"), SEEN.values(), ids=SEEN.keys())
@pytest.mark.parametrize("replicas", [2, 3])
def test_what_loops_keep_apart_is_followed_and_equal_to_one_device(
    reduction: str, loss_of: Loss, replicas: int
) -> None:
    item = item_of(loss_of)
    assert [one.reduction for one in item.gradients] == [reduction]
    assert not list(inexact(item))
    assert_equivalent(step_of(loss_of), BATCHES, replicas=replicas, batch_statistics="replica")


def over_examples(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """Each example's state is computed from that of the example before."""
    return tf.reduce_mean(tf.scan(lambda state, row: tf.tanh(state + row @ w), x, tf.zeros_like(x[0])))


def pairs_in_a_list(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    rows = tf.TensorArray(tf.float64, size=STEPS).unstack(time_major(x))
    turn = lambda time, total: (time + 1, total + rows.read(time)[:1] @ w)  # noqa: E731
    zero = tf.zeros_like(x[:, 0])
    return tf.reduce_mean(tf.while_loop(lambda time, _: time < STEPS, turn, (0, zero))[1])


def reversed_rows(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """Each example beside the one that stands as far from the batch's end."""
    rows = tf.TensorArray(tf.float64, size=STEPS).unstack(tf.reverse(time_major(x), [1]))
    turn = lambda time, state: (time + 1, cell(rows.read(time), state, w))  # noqa: E731
    return tf.reduce_mean(tf.while_loop(lambda time, _: time < STEPS, turn, (0, x[:, 0]))[1])


def elements_of_examples(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """The first element of a list of examples."""
    rows = tf.TensorArray(tf.float64, size=tf.shape(x)[0]).unstack(x)
    turn = lambda time, total: (time + 1, total + tf.reduce_sum(rows.read(0) @ w))  # noqa: E731
    return tf.while_loop(lambda time, _: time < 2, turn, (0, tf.zeros([], tf.float64)))[1]


def centred_in_turns(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    turn = lambda time, state: (time + 1, tf.tanh((state - tf.reduce_mean(state, axis=0)) @ w))  # noqa: E731
    return tf.reduce_mean(tf.while_loop(lambda time, _: time < 2, turn, (0, x[:, 0]))[1] ** 2)


def as_long_as_the_longest(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    turn = lambda time, state: (time + 1, cell(x[:, time], state, w))  # noqa: E731
    longest = tf.cast(tf.reduce_max(lengths), tf.int32)
    return tf.reduce_mean(tf.while_loop(lambda time, _: time < longest, turn, (0, x[:, 0]))[1])


def until_it_is_large(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A loop that ends by what the replica's own examples are."""
    is_small = lambda state: tf.reduce_sum(state**2) < 90.0  # noqa: E731
    return tf.reduce_mean(tf.while_loop(is_small, lambda state: (2.0 * state,), (x[:, 0] @ w,))[0])


def squared_sums(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    turn = lambda time, total: (time + 1, total * total + tf.reduce_sum(x[:, time] @ w))  # noqa: E731
    return tf.while_loop(lambda time, _: time < 2, turn, (0, tf.zeros([], tf.float64)))[1]


def begun_with_five(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    turn = lambda time, total: (time + 1, total + tf.reduce_sum(x[:, time] @ w))  # noqa: E731
    return tf.while_loop(lambda time, _: time < 2, turn, (0, 5.0 * tf.reduce_sum(w)))[1]


def chosen_twice(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """Rows that were chosen by different masks stand beside each other."""

    def turn(time: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        one, other = (tf.boolean_mask(x[:, time] @ w, lengths > least) for least in (1, 3))
        return time + 1, total + tf.reduce_sum(one[: tf.shape(other)[0]] * other)

    return tf.while_loop(lambda time, _: time < 2, turn, (0, tf.zeros([], tf.float64)))[1]


def unlike_branches(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """By what each replica's own examples are, and the weight."""
    return tf.reduce_mean(tf.cond(tf.reduce_sum(x @ w) > 0.0, lambda: x @ w, lambda: tf.sin(x @ w)))


def some_elements_alike(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A list of which the first element is no example's."""
    rows = tf.TensorArray(tf.float64, size=STEPS, infer_shape=False, element_shape=[None, WIDTH]).write(0, w)
    turn = lambda time, rows: (time + 1, rows.write(time, x[:, time] @ w))  # noqa: E731
    rows = tf.while_loop(lambda time, _: time < STEPS, turn, (1, rows))[1]
    return tf.reduce_sum(rows.concat())


def over_places(of_one: Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor], last: int = 0) -> Loss:
    """A function of the batch and of each place in it, but for the last ones."""

    def loss(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        number = tf.shape(x)[0] - last if last else tf.shape(x)[0]
        turn = lambda i, total: (i + 1, total + tf.reduce_sum(of_one(x, i, w)))  # noqa: E731
        return tf.while_loop(lambda i, _: i < number, turn, (0, tf.zeros([], tf.float64)))[1]

    return loss


def half_of_a_list(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """As many elements as there are examples, of a list in which each has five."""
    rows = tf.TensorArray(tf.float64, size=STEPS * tf.shape(x)[0]).unstack(tf.reshape(x, [-1, WIDTH]))
    number = tf.shape(lengths)[0]
    turn = lambda i, total: (i + 1, total + tf.reduce_sum(w * rows.read(i)))  # noqa: E731
    return tf.while_loop(lambda i, _: i < number, turn, (0, tf.zeros([], tf.float64)))[1]


def turned_round_by_places(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """A list that is filled from its end, beside rows."""
    number = tf.shape(x)[0]
    found = tf.TensorArray(tf.float64, size=number)
    turn = lambda i, found: (i + 1, found.write(number - 1 - i, x[i] @ w))  # noqa: E731
    return tf.reduce_sum(tf.while_loop(lambda i, _: i < number, turn, (0, found))[1].stack() * x)


def written_between(x: tf.Tensor, lengths: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """Each turn adds to what the next one reads."""

    def of_one(rows: tf.Tensor) -> tf.Tensor:
        found = tf.reduce_sum((rows @ w) ** 2)
        MEMORY.assign_add(0.01 * found)
        return found * MEMORY

    return tf.reduce_mean(tf.map_fn(of_one, x))


MEMORY = tf.Variable(0.0, dtype=tf.float64, trainable=False)


def rolled_by_its_turn(x: tf.Tensor, lengths: tf.Tensor, w: tf.Variable) -> tf.Tensor:
    rolled = tf.map_fn(lambda i: tf.roll(x[:, 0] @ w, i, 0), tf.range(2), fn_output_signature=x.dtype)
    return tf.reduce_mean(tf.reduce_prod(rolled, 0))


TOLD: dict[str, Loss] = {
    "the example after": over_places(lambda x, i, w: x[i] @ w * x[i + 1], last=1),
    "the first example in each turn": over_places(lambda x, i, w: x[i] @ w * x[0]),
    "a mean in each turn": over_places(lambda x, i, w: x[i] @ w * tf.reduce_mean(x)),
    "what its place says": over_places(lambda x, i, w: x[i] @ w * tf.cast(i, x.dtype)),
    "all but the last": over_places(lambda x, i, w: x[i] @ w, last=1),
    "drawn by its place": over_places(
        lambda x, i, w: x[i] @ w * tf.random.stateless_uniform([], tf.stack([i, 1]), dtype=tf.float64)
    ),
    "rolled by its turn": rolled_by_its_turn,
    "half of a list": half_of_a_list,
    "filled from its end": turned_round_by_places,
    "written between": written_between,
    "beside a mean of all": lambda x, lengths, w: tf.reduce_mean(
        tf.vectorized_map(lambda row: tf.reduce_sum(row @ w) * tf.reduce_mean(x), x)
    ),
    "beside all others": lambda x, lengths, w: tf.reduce_mean(
        tf.vectorized_map(lambda row: tf.reduce_sum(tf.tensordot(row @ w, x, [[0, 1], [1, 2]]) ** 2), x)
    ),
    "a scan over examples": over_examples,
    "another example's row in a list": pairs_in_a_list,
    "a list of rows, reversed": reversed_rows,
    "an element of a list of examples": elements_of_examples,
    "centred in each turn": centred_in_turns,
    "as long as the longest": as_long_as_the_longest,
    "until it is large": until_it_is_large,
    "squares of sums": squared_sums,
    "a sum that begins with another number": begun_with_five,
    "chosen by two masks": chosen_twice,
    "a branch by the examples": unlike_branches,
    "a list with rows and others": some_elements_alike,
    "an op that is not known": lambda x, lengths, w: tf.reduce_mean(scanned(unseen(x), w)),
}


@pytest.mark.parametrize("loss_of", TOLD.values(), ids=TOLD.keys())
def test_what_a_loop_may_mix_is_told_of(loss_of: Loss) -> None:
    assert list(inexact(item_of(loss_of)))


def test_numbers_that_are_drawn_for_each_example_are_its_own() -> None:
    def of_one(rows: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        turned = tf.cond(tf.random.uniform([]) < 0.5, lambda: tf.nn.dropout(rows, 0.5), lambda: -rows)
        noisy = tf.map_fn(lambda row: row + tf.random.normal([WIDTH], dtype=tf.float64), turned)
        return tf.reduce_sum(tf.nn.dropout(noisy, 0.5) @ w)

    item = item_of(lambda x, lengths, w: tf.reduce_mean(tf.map_fn(lambda rows: of_one(rows, w), x)))
    assert [one.reduction for one in item.gradients] == ["mean"]
    assert not list(inexact(item))


class Peephole(keras.layers.Layer):
    """A recurrent cell that Keras does not know."""

    state_size = output_size = WIDTH

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=[WIDTH, WIDTH], initializer="orthogonal")
        self.peep = self.add_weight(shape=[WIDTH], initializer="ones")

    def call(self, row: Any, states: Any) -> Any:
        state = keras.ops.tanh(keras.ops.matmul(row, self.kernel) + states[0] * self.peep)
        return state, [state]


@pytest.mark.parametrize("masks", [False, True], ids=["", "masked"])
def test_a_recurrent_layer_with_a_cell_of_the_users_is_followed(masks: bool) -> None:
    keras.utils.set_random_seed(4)
    cells = [Peephole(dtype="float64") for _ in range(2)]
    layers = [keras.layers.RNN(cell, return_sequences=cell is cells[0], dtype="float64") for cell in cells]
    masking = [keras.layers.Masking(0.0, dtype="float64")] * masks
    model = keras.Sequential([*masking, *layers, keras.layers.Dense(1, dtype="float64")])
    model.build([None, STEPS, WIDTH])
    weights = [weight.value for weight in model.trainable_variables]

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True)[:, 0] - y) ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    batches = [(x * (np.arange(STEPS) < 3)[:, None], x[:, 0, 0]) for x, _ in BATCHES]
    item = capture(step, *map(tf.constant, batches[0])).item
    assert {one.reduction for one in item.gradients} == {"mean"}
    assert not list(inexact(item))
    assert_equivalent(step, batches, replicas=2, batch_statistics="replica")
