"""`OneDeviceStrategy`, by which a program of `tf.distribute` changes only its import."""

import tensorflow as tf

from autodist_py.distribute import OneDeviceStrategy


def test_it_is_tensorflows_own_and_trains() -> None:
    strategy = OneDeviceStrategy("/cpu:0")
    with strategy.scope():
        v = tf.Variable([1.0, 2.0])

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(lambda: v.assign_add(x)), axis=None)

    assert isinstance(strategy, tf.distribute.Strategy)
    assert step(tf.constant([1.0, 1.0])).numpy().tolist() == v.numpy().tolist() == [2.0, 3.0]
