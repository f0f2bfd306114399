"""Matrix factorization in TF1: biases, a sum of squares over the batch, L2 of all factors, and plain SGD."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, ratings, rng
from tests.corpus.header import Header, Seen

HEADER = Header("recommenders", "graph session", sizes=(9, 6, 7, 4))
USERS, ITEMS, WIDTH = 11, 9, 3
v1 = tf.compat.v1


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    initial = rng(10)
    with tf.Graph().as_default(), autodist.scope():
        user, item = (v1.placeholder(tf.int64, [None]) for _ in range(2))
        rating = v1.placeholder(tf.float64, [None])
        tables = {
            name: v1.get_variable(name, initializer=0.5 * initial.normal(size=shape))
            for name, shape in {
                "users": (USERS, WIDTH),
                "items": (ITEMS, WIDTH),
                "user_bias": (USERS,),
                "item_bias": (ITEMS,),
            }.items()
        }
        offset = v1.get_variable("offset", initializer=np.zeros(()))
        products = tf.reduce_sum(tf.gather(tables["users"], user) * tf.gather(tables["items"], item), axis=1)
        predicted = products + tf.gather(tables["user_bias"], user) + tf.gather(tables["item_bias"], item) + offset
        error = tf.nn.l2_loss(predicted - rating)
        cost = error + 0.02 * (tf.nn.l2_loss(tables["users"]) + tf.nn.l2_loss(tables["items"]))
        rate = v1.placeholder_with_default(np.float64(0.02), [])
        train_op = v1.train.GradientDescentOptimizer(rate).minimize(cost)
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for number, batch in enumerate(batches(header.sizes, *ratings(40))):
                fed = dict(zip((user, item, rating), batch, strict=True))
                results = session.run([cost, error, predicted, train_op], {**fed, rate: 0.03 / (number + 1)})
                yield Seen(results, (session,))
