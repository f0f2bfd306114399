"""A queue that one program of a session fills is the one that another reads, and it ends with the session."""

import threading
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


@pytest.mark.parametrize("kind", QUEUES)
def test_another_session_finds_nothing_of_an_earlier_one_in_a_queue(kind: str) -> None:
    """As in TensorFlow, whatever the queue's name: rows that were left would be trained on."""
    for _ in range(2):
        with AutoDist() as autodist, tf.Graph().as_default():
            with autodist.scope():
                queue = QUEUES[kind]()
                fill, size = queue.enqueue_many([tf.constant(ROWS)]), queue.size()
            for _ in range(2):
                with autodist.create_distributed_session() as session:
                    assert session.run(size) == 0
                    session.run(fill)
                    assert session.run(size) == len(ROWS)


def test_queues_of_one_name_in_two_sessions_are_two() -> None:
    opened = []
    with AutoDist() as first, AutoDist() as second:
        for autodist in (first, second):
            with tf.Graph().as_default(), autodist.scope():
                queue = QUEUES["named"]()
                fill, size = queue.enqueue_many([tf.constant(ROWS)]), queue.size()
                opened.append((autodist.create_distributed_session(), fill, size))
        (one, fill, size), (other, _, other_size) = opened
        one.run(fill)
        assert (one.run(size), other.run(other_size)) == (len(ROWS), 0)
        one.close()
        other.close()


def test_who_waits_at_a_queue_is_told_that_its_session_is_closed() -> None:
    ended = threading.Event()
    with AutoDist() as autodist, tf.Graph().as_default():
        with autodist.scope():
            row = QUEUES["FIFOQueue"]().dequeue()
        session = autodist.create_distributed_session()

        def wait() -> None:
            with pytest.raises(tf.errors.OutOfRangeError, match="closed"):
                session.run(row)
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        assert not ended.wait(2)
        session.close()
        assert ended.wait(20)
