"""A value of no example may be as long as the batch, and a size tell how long that is: neither is a replica's own."""

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.testing import assert_equivalent

REPLICAS = 2
Program = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""A loss of rows of 5 numbers, and of sequences of such, the time before the examples."""


def total(value: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.tanh(value))


def column(*numbers: float) -> tf.Tensor:
    return tf.constant(numbers, tf.float64)[:, None]


def length(h: tf.Tensor) -> tf.Tensor:
    """How many rows there are, as a vector of one number."""
    return tf.cast(tf.shape(h)[:1], tf.float64)


SQUARE = np.eye(4) + 1.0
FIXED: dict[str, tuple[int, Program]] = {
    "a weight for each of two": (2, lambda h, z: tf.reduce_sum(h[:, 0] ** 3 * tf.constant([1.0, 2.0], tf.float64))),
    "a weight for each of four": (4, lambda h, z: total(h * column(1.0, 2.0, 3.0, 4.0))),
    "weights of a sequence": (2, lambda h, z: total(z * column(1.0, 2.0))),
    "a choice": (2, lambda h, z: total(tf.where(column(1.0, -1.0) > 0.0, z, z**2))),
    "a product": (4, lambda h, z: total(tf.constant(SQUARE) @ h)),
    "a labelled product": (4, lambda h, z: total(tf.einsum("kn,nd->kd", tf.constant(SQUARE), h))),
    "columns beside": (4, lambda h, z: total(tf.concat([h, tf.ones([4, 5], tf.float64)], 1))),
    "columns of a sequence": (4, lambda h, z: total(tf.concat([z, tf.ones([6, 4, 1], tf.float64)], 2))),
    "a stack": (4, lambda h, z: total(tf.stack([h, tf.ones([4, 5], tf.float64)], 1))),
    "a sum": (4, lambda h, z: total(tf.add_n([h, tf.ones([4, 5], tf.float64)]))),
    "a call": (2, lambda h, z: total(tf.function(lambda h: h[:, 0] * tf.constant([1.0, 2.0], tf.float64))(h))),
    "a matrix as large": (5, lambda h, z: total(h * tf.constant(np.arange(25.0).reshape(5, 5)))),
    "other targets": (
        2,
        lambda h, z: tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(tf.constant(np.eye(5)[:2]), h)),
    ),
}
"""Programs of a batch of a fixed size."""


def paired_in_turns(h: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    turn = lambda i, a: (i + 1, a + tf.einsum("id,jd->", h, h))  # noqa: E731
    return tf.while_loop(lambda i, a: i < 2, turn, [0, tf.zeros([], tf.float64)])[1] * 1e-2


def counted_in_turns(h: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    """The size of a matrix of all pairs is that of the whole batch, also within a loop."""
    pairs = h @ tf.transpose(h)
    numbers = tf.shape(pairs)[0]
    turn = lambda i, g: (i + 1, tf.tanh(g) + tf.cast(tf.range(numbers), tf.float64))  # noqa: E731
    return total(tf.while_loop(lambda i, g: i < 3, turn, [0, tf.reduce_sum(h, 1)])[1] * 0.1) + total(pairs)


SIZED: dict[str, Program] = {
    "all pairs, added up": lambda h, z: tf.einsum("id,jd->", h, h) * 1e-2,
    "pairs of a sequence": lambda h, z: tf.reduce_sum(tf.einsum("tnd,tmd->t", z, z)) * 1e-2,
    "pairs in a loop": paired_in_turns,
    "divided by their number": lambda h, z: tf.reduce_sum(tf.reduce_mean(z**2 / length(h), 0)),
    "rows divided by their number": lambda h, z: total(h / length(h)),
    "divided in a loop": lambda h, z: total(
        tf.while_loop(lambda i, z: i < 2, lambda i, z: (i + 1, z / length(h) * 3.0), [0, z])[1]
    ),
    "divided in a call": lambda h, z: total(tf.function(lambda z, n: z / n)(z, length(h))),
    "a mean of columns": lambda h, z: total(h * tf.reduce_mean(tf.transpose(h), 1)),
    "a mean of a sequence": lambda h, z: tf.reduce_sum(tf.reduce_mean(z, 1) ** 2),
    "counted in a loop": counted_in_turns,
}


def check(program: Program, sizes: tuple[int, ...], *, normalizes: bool) -> None:
    rng = np.random.default_rng(1)
    weight = tf.Variable(rng.normal(size=(4, 5)) * 0.5)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h, z = x[:, 0] @ weight, tf.transpose(x @ weight, [1, 0, 2])
            if normalizes:
                mean, variance = tf.nn.moments(h, [0])
                h = (h - mean) / tf.sqrt(variance + 1e-2)
            loss = program(h, z)
        weight.assign_sub(0.01 * tape.gradient(loss, weight))
        return loss

    assert_equivalent(step, [(rng.normal(size=(size, 6, 4)),) for size in sizes], replicas=REPLICAS, tolerance=1e-9)


@pytest.mark.parametrize("normalizes", [False, True], ids=["alone", "beside batch normalization"])
@pytest.mark.parametrize("name", FIXED)
def test_what_spans_the_batch_is_not_paired_with_a_part_of_it(name: str, *, normalizes: bool) -> None:
    size, program = FIXED[name]
    check(program, (size,) * 3, normalizes=normalizes)


@pytest.mark.parametrize("normalizes", [False, True], ids=["alone", "beside batch normalization"])
@pytest.mark.parametrize("name", SIZED)
def test_sizes_and_pairs_are_of_the_whole_batch(name: str, *, normalizes: bool) -> None:
    check(SIZED[name], (7, 5, 2, 1), normalizes=normalizes)
