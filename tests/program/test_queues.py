"""A queue that one program of a session fills is the one that another takes elements from."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist

v1 = tf.compat.v1
ROWS = np.random.default_rng(3).normal(size=(24, 4))
QUEUES: dict[str, Callable[[], Any]] = {
    "FIFOQueue": lambda: tf.queue.FIFOQueue(100, [tf.float64], [[4]]),
    "PaddingFIFOQueue": lambda: tf.queue.PaddingFIFOQueue(100, [tf.float64], [[4]]),
    "named": lambda: tf.queue.FIFOQueue(100, [tf.float64], [[4]], shared_name="rows of test_queues"),
}


def trained(make_queue: Callable[[], Any], autodist: AutoDist | None) -> np.ndarray:
    """The weights after three steps on one device, or on the replica of `autodist`."""
    with tf.Graph().as_default() as graph, autodist.scope() if autodist else graph.as_default():
        queue = make_queue()
        rows = v1.placeholder(tf.float64, [None, 4])
        fill = queue.enqueue_many([rows])
        kernel = v1.get_variable("kernel", initializer=np.ones((4, 1)), use_resource=True)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean((queue.dequeue_many(8) @ kernel) ** 2))
        with autodist.create_distributed_session() if autodist else v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(fill, {rows: ROWS})
            for _ in range(3):
                session.run(train)
            weights: np.ndarray = session.run(kernel)
            return weights


@pytest.mark.parametrize("kind", QUEUES)
def test_what_is_put_into_a_queue_is_taken_out_by_the_step(kind: str) -> None:
    expected = trained(QUEUES[kind], None)
    with AutoDist() as autodist:
        np.testing.assert_allclose(trained(QUEUES[kind], autodist), expected, rtol=1e-12)
