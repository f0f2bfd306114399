"""A script for `autodist plan`, whose resource spec is nowhere."""

SCRIPT = """
import sys
import numpy as np, tensorflow as tf
from autodist_py import AutoDist

autodist = AutoDist("/no/such/file.yaml", strategy_builder="AllReduce")
weight = tf.Variable(np.zeros([3, 2]), name="weight")

@autodist.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(x @ weight)
    weight.assign_sub(0.1 * tape.gradient(loss, weight))
    return loss

if "--idle" not in sys.argv:
    step(np.ones([6, 3]))
    print("not reached")
"""
