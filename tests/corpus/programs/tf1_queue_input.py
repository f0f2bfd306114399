"""TF1's queues: fed examples are put into a FIFO queue, and taken out of it in batches by the training op."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import diabetes, rng
from tests.corpus.header import STRATEGIES, Header, Refusal, Seen

REASON = Refusal("writes a table or queue from a replica's own examples|takes elements out of a queue")
HEADER = Header("TF1", "graph session", tolerance=1e-5, sizes=(8, 8, 8), refused=dict.fromkeys(STRATEGIES, REASON))
v1 = tf.compat.v1


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    x_data, y_data = (array[: sum(header.sizes)] for array in diabetes())
    initial = rng(39)
    with tf.Graph().as_default(), autodist.scope():
        queue = tf.queue.FIFOQueue(100, [tf.float64, tf.float64], [[10], [1]])
        rows, targets = v1.placeholder(tf.float64, [None, 10]), v1.placeholder(tf.float64, [None, 1])
        fill = queue.enqueue_many([rows, targets])
        x, y = queue.dequeue_many(header.sizes[0])
        kernel = v1.get_variable("kernel", initializer=0.1 * initial.normal(size=(10, 1)))
        bias = v1.get_variable("bias", initializer=np.zeros(1))
        loss = v1.losses.mean_squared_error(y, x @ kernel + bias)
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            session.run(fill, {rows: x_data, targets: y_data})
            for _ in header.sizes:
                yield Seen(session.run([loss, train_op]), (session,))
