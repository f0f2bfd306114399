"""What is known of a captured program."""

import numpy as np
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.kernel.ir.dataflow import gradient_types


def test_the_types_of_gradients_are_those_of_back_propagation():
    weight = tf.Variable(np.ones(3), dtype=tf.float64)

    def step(x, y):
        x = tf.map_fn(lambda row: row * tf.reduce_max(row), x)  # A loop, which has a list of types.
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.linalg.matvec(x, tf.cast(weight, tf.float32)) - y))
        weight.assign_sub(tape.gradient(loss, weight))
        return tf.cast(loss, tf.float16)

    with AutoDist() as autodist:
        item = autodist.function(step).captured(np.ones([4, 3], np.float32), np.ones(4, np.float32)).item
    assert gradient_types(item) == {"float32", "float64"}
