"""TF1's ExponentialMovingAverage of weights and of the loss, tied to the update by control dependencies."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, diabetes, rng
from tests.corpus.header import Header, Seen

HEADER = Header("TF1", "graph session", tolerance=1e-5, sizes=(8, 5, 7, 4))  # `losses` are float32.
v1 = tf.compat.v1


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    initial = rng(35)
    with tf.Graph().as_default(), autodist.scope():
        x, y = v1.placeholder(tf.float64, [None, 10]), v1.placeholder(tf.float64, [None, 1])
        hidden = v1.get_variable("hidden", initializer=0.5 * initial.normal(size=(10, 5)))
        out = v1.get_variable("out", initializer=0.5 * initial.normal(size=(5, 1)))
        bias = v1.get_variable("bias", initializer=np.zeros(1))
        loss = v1.losses.huber_loss(y, tf.tanh(x @ hidden) @ out + bias, delta=0.8)
        steps = v1.train.get_or_create_global_step()
        optimizer = v1.train.RMSPropOptimizer(0.02, momentum=0.5)
        apply_op = optimizer.minimize(loss, global_step=steps)
        averages = v1.train.ExponentialMovingAverage(0.9, num_updates=steps)
        loss_average = v1.train.ExponentialMovingAverage(0.8, zero_debias=True, name="loss_average")
        with tf.control_dependencies([apply_op]):
            train_op = averages.apply(v1.trainable_variables())
        with tf.control_dependencies([loss]):
            followed = loss_average.apply([loss])
        slow = averages.average(hidden)
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for one, other in batches(header.sizes, *diabetes()):
                value, _, _ = session.run([loss, train_op, followed], {x: one, y: other})
                yield Seen([value, session.run(slow)], (session,))
