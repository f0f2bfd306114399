"""Knowledge-graph embeddings (TransE) in TF1: triples and corrupted ones, a margin loss, tables kept at length one."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tests.corpus.data import batches, rng
from tests.corpus.header import Header, Seen

HEADER = Header("graph networks", "graph session", sizes=(9, 6, 7))
ENTITIES, RELATIONS, WIDTH = 12, 4, 5
v1 = tf.compat.v1


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    drawn = rng(19)
    heads, tails, corrupted = (drawn.integers(0, ENTITIES, 40) for _ in range(3))
    relations = drawn.integers(0, RELATIONS, 40)
    with tf.Graph().as_default(), autodist.scope():
        head, tail, corrupt, relation = (v1.placeholder(tf.int64, [None]) for _ in range(4))
        entities = v1.get_variable("entities", initializer=drawn.normal(size=(ENTITIES, WIDTH)))
        kinds = v1.get_variable("kinds", initializer=drawn.normal(size=(RELATIONS, WIDTH)))
        unit = tf.nn.l2_normalize(entities, axis=1)

        def energy(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
            moved = tf.gather(unit, one) + tf.gather(kinds, relation) - tf.gather(unit, other)
            return tf.reduce_sum(tf.abs(moved), axis=1)

        margins = tf.nn.relu(1.0 + energy(head, tail) - energy(head, corrupt))
        loss = tf.reduce_sum(margins)
        train_op = v1.train.GradientDescentOptimizer(0.02).minimize(loss)
        violated = tf.math.count_nonzero(margins)
        with autodist.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for batch in batches(header.sizes, heads, tails, corrupted, relations):
                fed = dict(zip((head, tail, corrupt, relation), batch, strict=True))
                yield Seen(session.run([loss, violated, margins, train_op], fed), (session,))
