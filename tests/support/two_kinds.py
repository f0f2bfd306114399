"""Steps that all workers take together, of both halves, beside steps that each takes by itself."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.strategy_builders.parameter_server import PS
from tests.support.served import descending

LAST_TOGETHER = 12
"""More than the steps in which workers compare what they are given."""


def two_steps(together: AutoDist) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step of all workers, of a table on a server and a matrix that is reduced, and one that each takes by itself."""
    table, matrix = tf.Variable(np.ones((9, 2)), name="table"), tf.Variable(np.ones((2, 3)), name="matrix")

    @together.function
    def mixed(rows: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.gather(table, rows) @ matrix))
        of_table, of_matrix = tape.gradient(loss, [table, matrix])
        table.scatter_sub(tf.IndexedSlices(0.01 * of_table.values, of_table.indices))
        matrix.assign_sub(0.01 * of_matrix)

    own, _ = descending(AutoDist(strategy_builder=PS(sync=False)))
    return lambda: mixed(np.arange(6)), own
