"""A step whose gradients come one after the other, and strategies that lay them into buckets."""

import numpy as np
import tensorflow as tf

from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer
from tests.support import capture_steps


def three_layers(side):
    weights = [tf.Variable(np.eye(side), name=f"w{index}") for index in range(3)]

    def step(x):
        with tf.GradientTape() as tape:
            value = x
            for weight in weights:
                value = tf.tanh(value @ weight)
            loss = tf.reduce_mean(value)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    return capture_steps.capture(step, tf.ones([2, side], tf.float64)).item


def in_packs(item, bytes_per_pack, *, spec="RING"):
    synchronizer = AllReduceSynchronizer(spec, bytes_per_pack=bytes_per_pack)
    return Strategy(
        tuple(VariableStrategy(one.name, synchronizer) for one in item.trainable_variables), ("127.0.0.1:CPU:0",)
    )
