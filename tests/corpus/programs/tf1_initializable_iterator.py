"""TF1's dataset API: an initializable iterator over shuffled digits, started anew for each epoch."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import digits, rng
from tests.corpus.header import Header, Seen

HEADER = Header("TF1", "graph session", tolerance=1e-5, sizes=(8, 8, 5))  # `losses` are float32.
v1 = tf.compat.v1


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    images, labels = (array[: sum(header.sizes)] for array in digits())
    initial = rng(33)
    with tf.Graph().as_default(), autodist.scope():
        v1.set_random_seed(4)  # Else every AutoDist on several workers draws one, and shuffles by it.
        rows = v1.data.Dataset.from_tensor_slices((images.reshape(-1, 64), labels))
        data = rows.shuffle(30, seed=3, reshuffle_each_iteration=False).batch(header.sizes[0]).prefetch(1)
        iterator = v1.data.make_initializable_iterator(data)
        x, y = iterator.get_next()
        with v1.variable_scope("model", initializer=v1.constant_initializer(0.01)):
            kernel = v1.get_variable("kernel", initializer=0.1 * initial.normal(size=(64, 10)))
            bias = v1.get_variable("bias", [10], tf.float64)
        logits = v1.nn.xw_plus_b(x, kernel, bias)
        loss = v1.losses.sparse_softmax_cross_entropy(y, logits)
        steps = v1.train.get_or_create_global_step()
        rate = tf.cast(v1.train.piecewise_constant(steps, [2, 4], [0.5, 0.2, 0.1]), tf.float64)
        train_op = v1.train.MomentumOptimizer(rate, 0.9, use_nesterov=True).minimize(loss, global_step=steps)
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(2):
                session.run(iterator.initializer)
                losses = []
                while True:
                    try:
                        losses.append(session.run([loss, train_op])[0])
                    except tf.errors.OutOfRangeError:
                        break
                yield Seen(np.array(losses), (session,))
