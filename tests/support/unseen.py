"""An op of which autodist_py has no rule, for tests of what it says of such ops."""

import tensorflow as tf


def unseen(value: tf.Tensor) -> tf.Tensor:
    """`value` as it is, by an op that is not known: one device and replicas compute the same with it."""
    return tf.reshape(tf.batch_to_space(tf.reshape(value, [1, -1, 1]), [1], [[0, 0]]), tf.shape(value))


def turned(value: tf.Tensor, name: str = "while") -> tf.Tensor:
    """Four times `value`, by a loop that is not followed, as an op in it is not known."""
    return tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, unseen(v) * 2.0), (0, value), name=name)[1]
