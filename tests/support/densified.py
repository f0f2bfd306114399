"""Steps on one table whose gradient may travel as a dense one, and where it does."""

from bisect import bisect_left

import numpy as np
import tensorflow as tf

from autodist_py.kernel.events import GatherRows
from autodist_py.kernel.pipeline import compile
from autodist_py.kernel.program import Options
from autodist_py.program.executor import Executor
from autodist_py.proto.strategy import Strategy, VariableStrategy
from autodist_py.proto.synchronizers import AllReduceSynchronizer
from tests.support import capture_steps, kernel_programs

ROWS = 6
WIDTH = 8
FOR_ALL_ROWS = 100
"""So many examples of one id each that a worker's half has nearly all rows."""


def scaled(table, rows, rate):
    table.scatter_sub(tf.IndexedSlices(rate * rows.values, rows.indices))


def stepping(update, ids_shape=(), *, dtype=tf.float64, dense=True, width=WIDTH):
    """A step on one table, and a dense variable."""
    rng = np.random.default_rng(1)
    table = tf.Variable(tf.cast(rng.normal(size=(ROWS, width)), dtype), name="table")
    scale = tf.Variable(tf.cast(rng.normal(size=width), dtype), name="scale")

    def step(ids, rate):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.gather(table, ids) * scale) ** 2)
        rows, of_scale = tape.gradient(loss, [table, scale])
        update(table, rows, rate)
        if dense:
            scale.assign_sub(rate * of_scale)
        return loss

    found = capture_steps.capture(step, tf.zeros([1, *ids_shape], tf.int64), tf.constant(0.1, dtype))
    return found, step, {"table": table, "scale": scale}


def strategy_of(item, **parameters):
    synchronizer = AllReduceSynchronizer(**parameters)
    return Strategy(
        tuple(VariableStrategy(one.name, synchronizer) for one in item.trainable_variables), ("127.0.0.1:CPU:0",)
    )


def travels_dense(item, where=(1, 1), *, examples=FOR_ALL_ROWS, worker=0, batch="global", **parameters):
    topology = kernel_programs.topology(*where, worker=worker)
    events = kernel_programs.gradient_events(
        item, topology, strategy_of(item, **parameters), examples=examples, batch=batch
    )
    (of_table,) = [event for event in events if "table" in event.what]
    return not isinstance(of_table, GatherRows)


def least_examples(item, where, **parameters):
    counts = range(1, 1000)
    return counts[bisect_left(counts, x=True, key=lambda one: travels_dense(item, where, examples=one, **parameters))]


def executed(step, found, variables, replicas, **parameters):
    """The compiled step on so many replicas of this process."""
    copies = {
        (name, position): tf.Variable(variable) for name, variable in variables.items() for position in range(replicas)
    }
    strategy = strategy_of(found.item, sparse_as_dense=True, **parameters)
    return Executor(
        compile(found.item, strategy, kernel_programs.topology(replicas), Options()), copies, found.state
    ), copies
