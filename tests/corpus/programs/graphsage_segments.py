"""GraphSAGE with segment sums over all edges of a known graph; node embeddings are trained, edges are a constant."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng
from tests.corpus.header import Header, Seen

HEADER = Header("graph networks", "step function", sizes=(8, 5, 7))
NODES, EDGES, WIDTH = 20, 50, 5


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    drawn = rng(18)
    sources, targets = (
        tf.constant(drawn.integers(0, NODES, EDGES)),
        tf.constant(np.sort(drawn.integers(0, NODES, EDGES))),
    )
    pairs = drawn.integers(0, NODES, (30, 2))
    linked = (drawn.uniform(size=30) < 0.5).astype("float64")
    table = tf.Variable(0.5 * drawn.normal(size=(NODES, WIDTH)), name="table")
    own = tf.Variable(0.5 * drawn.normal(size=(WIDTH, WIDTH)), name="own")
    others = tf.Variable(0.5 * drawn.normal(size=(WIDTH, WIDTH)), name="others")
    weights = [table, own, others]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(weights)

    def states() -> tf.Tensor:
        messages = tf.gather(table, sources)
        degrees = tf.math.unsorted_segment_sum(tf.ones([EDGES], tf.float64), targets, NODES)
        mean = tf.math.unsorted_segment_sum(messages, targets, NODES) / tf.maximum(degrees, 1.0)[:, None]
        return tf.nn.l2_normalize(tf.tanh(table @ own + mean @ others), axis=1)

    @autodist.function
    def step(nodes: tf.Tensor, labels: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            ends = tf.gather(states(), nodes)
            scores = 3.0 * tf.reduce_sum(ends[:, 0] * ends[:, 1], axis=1)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=scores))
        optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss, "scores": scores}

    for batch in batches(header.sizes, pairs, linked):
        yield Seen(step(*batch), (weights, optimizer))
