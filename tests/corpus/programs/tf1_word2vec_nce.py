"""word2vec of TF1 tutorials: skip-grams, noise-contrastive estimation, a decaying rate, normalized embeddings."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tests.corpus.data import batches, rng, sentences
from tests.corpus.header import Header, Seen

HEADER = Header("TF1", "graph session")
WORDS, WIDTH, NEGATIVES = 24, 6, 5
v1 = tf.compat.v1


def skip_grams() -> tuple[np.ndarray, np.ndarray]:
    """Pairs of a word and one of its neighbours."""
    lines = sentences(40, 8, WORDS)
    centre = np.concatenate([lines[:, 1:].ravel(), lines[:, :-1].ravel()])
    around = np.concatenate([lines[:, :-1].ravel(), lines[:, 1:].ravel()])
    known = (centre > 1) & (around > 1)
    return centre[known], around[known][:, None]


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    initial = rng(1)
    with tf.Graph().as_default(), autodist.scope():
        words = v1.placeholder(tf.int64, [None])
        labels = v1.placeholder(tf.int64, [None, 1])
        sampled = v1.placeholder(tf.int64, [NEGATIVES])
        steps = v1.train.get_or_create_global_step()
        embeddings = v1.get_variable("embeddings", initializer=initial.uniform(-1, 1, (WORDS, WIDTH)))
        weights = v1.get_variable("nce_weights", initializer=initial.normal(size=(WORDS, WIDTH)) / WIDTH**0.5)
        biases = v1.get_variable("nce_biases", initializer=np.zeros(WORDS))
        chances = tf.ones([NEGATIVES], tf.float64) * NEGATIVES / WORDS
        loss = tf.reduce_mean(
            tf.nn.nce_loss(
                weights,
                biases,
                labels,
                tf.nn.embedding_lookup(embeddings, words),
                num_sampled=NEGATIVES,
                num_classes=WORDS,
                sampled_values=(sampled, tf.ones_like(labels, tf.float64) * NEGATIVES / WORDS, chances),
            )
        )
        rate = tf.cast(v1.train.exponential_decay(1.0, steps, 2, 0.9), tf.float64)
        train_op = v1.train.GradientDescentOptimizer(rate).minimize(loss, global_step=steps)
        similarity = tf.linalg.matmul(*[tf.nn.l2_normalize(embeddings.read_value(), 1)] * 2, transpose_b=True)
        initializer = v1.global_variables_initializer()
        with autodist.create_distributed_session() as session:
            session.run(initializer)
            for number, (one, other) in enumerate(batches(header.sizes, *skip_grams())):
                drawn = rng(number).permutation(WORDS)[:NEGATIVES]
                value, _ = session.run([loss, train_op], {words: one, labels: other, sampled: drawn})
                yield Seen([value, session.run(similarity)], (session,))
