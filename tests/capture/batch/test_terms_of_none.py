"""A term of a loss that depends on no example counts once, whatever loop, branch or list it shares with examples."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py.testing import assert_equivalent

BATCHES = [(np.random.default_rng(size).normal(size=(size, 3)),) for size in (6, 5, 1, 2, 7)]


def total(x: tf.Tensor, k: tf.Variable) -> tf.Tensor:
    return tf.reduce_sum(tf.tanh(x @ k))


def in_branches(x: tf.Tensor, k: tf.Variable, *, of_examples: Any, of_none: Any) -> Any:
    return tf.cond(
        k[0, 0] < 9.0, lambda: (of_examples(x, k), of_none(k)), lambda: (0.0 * of_examples(x, k), of_none(-k))
    )


def in_turns(x: tf.Tensor, k: tf.Variable) -> tf.Tensor:
    zero = tf.zeros([], tf.float64)
    turn = lambda i, a, b: (i + 1, a + total(x, k), b + tf.nn.l2_loss(k))  # noqa: E731
    return tf.add_n(tf.while_loop(lambda i, *_: i < 3, turn, [0, zero, zero])[1:])


def scanned(x: tf.Tensor, k: tf.Variable) -> tf.Tensor:
    a, s = tf.scan(lambda both, i: (tf.tanh(both[0] @ k), tf.tanh(both[1] @ both[0])), tf.range(3), (k @ k, x))
    return tf.reduce_sum(s) + tf.reduce_sum(a**2)


def mapped(x: tf.Tensor, k: tf.Variable) -> tf.Tensor:
    both = tf.map_fn(
        lambda i: (total(x * i, k), tf.reduce_sum(k**2) * i),
        tf.range(3.0, dtype=tf.float64),
        fn_output_signature=(tf.float64, tf.float64),
    )
    return tf.reduce_sum(both[0]) + tf.reduce_sum(both[1])


def of_two(x: tf.Tensor, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """The one is paired with examples, and the other with none."""
    return total(x, a) + tf.nn.l2_loss(b)


def turned_weights(x: tf.Tensor, k: tf.Variable) -> tf.Tensor:
    _, a, b = tf.while_loop(lambda i, *_: i < 2, lambda i, a, b: (i + 1, tf.tanh(a), tf.sin(b)), [0, k + 0.0, k * 2.0])
    return of_two(x, a, b)


def listed_weights(x: tf.Tensor, k: tf.Variable) -> tf.Tensor:
    array = tf.TensorArray(tf.float64, 2, clear_after_read=False).unstack(tf.stack([tf.tanh(k), tf.sin(k)]))
    of_examples = tf.cond(k[0, 0] < 9.0, lambda: total(x, array.read(0)), lambda: tf.zeros([], tf.float64))
    return of_examples + tf.nn.l2_loss(array.read(1))


def mapped_weights(x: tf.Tensor, k: tf.Variable) -> tf.Tensor:
    a = tf.map_fn(tf.tanh, k)
    return of_two(x, a, a)


def scanned_weights(x: tf.Tensor, k: tf.Variable) -> tf.Tensor:
    a = tf.scan(lambda a, _: tf.tanh(a @ k), tf.range(2), k + 0.0)
    return of_two(x, a[1], a[0])


BOTH: dict[str, Callable[[tf.Tensor, tf.Variable], tf.Tensor]] = {
    "sums of a branch": lambda x, k: tf.add_n(in_branches(x, k, of_examples=total, of_none=tf.nn.l2_loss)),
    "what a branch computes": lambda x, k: tf.add_n(
        [tf.reduce_sum(one**2) for one in in_branches(x, k, of_examples=tf.matmul, of_none=lambda k: tf.tanh(k @ k))]
    ),
    "one sum of a branch": lambda x, k: total(x, k) + in_branches(x, k, of_examples=total, of_none=tf.nn.l2_loss)[1],
    "sums of a loop": in_turns,
    "what a scan computes": scanned,
    "sums of a map": mapped,
    "weights of a branch": lambda x, k: of_two(
        x, *tf.cond(k[0, 0] < 9.0, lambda: (tf.tanh(k @ k), tf.sin(k)), lambda: (k + 0.0, k + 0.0))
    ),
    "weights of a loop": turned_weights,
    "a list of weights": listed_weights,
    "a map of weights": mapped_weights,
    "a scan of weights": scanned_weights,
}
"""Sums over examples, and terms that depend on none, through one loop or branch."""


@pytest.mark.parametrize("name", BOTH)
def test_a_term_of_no_example_counts_once_behind_a_loop_or_branch(name: str) -> None:
    kernel = tf.Variable(np.random.default_rng(5).normal(size=(3, 3)) * 0.3)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = BOTH[name](x, kernel)
        kernel.assign_sub(0.01 * tape.gradient(loss, kernel))
        return loss

    assert_equivalent(step, BATCHES, replicas=3, batch_statistics="global", tolerance=1e-9)
