"""Wide and deep, as TF1 has it: hashed crosses trained by FTRL, embeddings and layers by Adagrad, one global step."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, ratings, rng
from tests.corpus.header import Header, Seen

HEADER = Header("recommenders", "graph session", sizes=(9, 6, 7))
USERS, ITEMS, CROSSES, WIDTH = 11, 9, 17, 4
v1 = tf.compat.v1


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    initial = rng(8)
    user_data, item_data, rating = ratings(40)
    with tf.Graph().as_default(), autodist.scope():
        user, item = (v1.placeholder(tf.int64, [None]) for _ in range(2))
        clicked = v1.placeholder(tf.float64, [None])
        with v1.variable_scope("wide"):
            crossed = v1.get_variable("crossed", initializer=np.zeros(CROSSES))
            bias = v1.get_variable("bias", initializer=np.zeros(()))
        with v1.variable_scope("deep"):
            users = v1.get_variable("users", initializer=initial.normal(size=(USERS, WIDTH)))
            items = v1.get_variable("items", initializer=initial.normal(size=(ITEMS, WIDTH)))
            hidden = v1.get_variable("hidden", initializer=initial.normal(size=(2 * WIDTH, 5)))
            out = v1.get_variable("out", initializer=initial.normal(size=(5, 1)))
        wide = tf.gather(crossed, (user * 31 + item) % CROSSES) + bias
        deep = tf.concat([tf.nn.embedding_lookup(users, user), tf.nn.embedding_lookup(items, item)], axis=1)
        logits = wide + tf.squeeze(tf.nn.relu(deep @ hidden) @ out, axis=1)
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=clicked, logits=logits))
        steps = v1.train.get_or_create_global_step()
        optimizers = {
            "wide": v1.train.FtrlOptimizer(0.1, l1_regularization_strength=0.001),
            "deep": v1.train.AdagradOptimizer(0.05),
        }
        updates = [
            optimizer.minimize(loss, var_list=v1.trainable_variables(scope)) for scope, optimizer in optimizers.items()
        ]
        with tf.control_dependencies(updates):
            train_op = steps.assign_add(1).op
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for one, other, value in batches(header.sizes, user_data, item_data, (rating > 0).astype("float64")):
                results = session.run([loss, logits, train_op], {user: one, item: other, clicked: value})
                yield Seen(results, (session,))
