"""A spectral forecaster: learnt filters in the frequency domain of noisy waves, with the mean spectrum shown."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tests.corpus.data import batches, rng, series
from tests.corpus.header import Header, Seen

HEADER = Header("flows and physics", "step function", sizes=(7, 5, 6))
LENGTH = 16


def train(autodist: Any, header: Header) -> Iterator[Seen]:
    waves = series(30, LENGTH + 1)
    initial = rng(45)
    gain, turn, out = (
        tf.Variable(0.3 * initial.normal(size=shape), name=name)
        for name, shape in {"gain": (LENGTH // 2 + 1,), "turn": (LENGTH // 2 + 1,), "out": (LENGTH, 1)}.items()
    )
    weights = [gain, turn, out]
    optimizer = keras.optimizers.Adam(0.02)
    optimizer.build(weights)

    @autodist.function
    def step(past: tf.Tensor, future: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            spectrum = tf.signal.rfft(past)
            filtered = tf.signal.irfft(spectrum * tf.complex(1.0 + gain, tf.convert_to_tensor(turn)), [LENGTH])
            loss = tf.reduce_mean(tf.square(tf.matmul(filtered, out) - future))
        optimizer.apply(tape.gradient(loss, weights), weights)
        return {
            "loss": loss,
            "power": tf.reduce_mean(tf.abs(spectrum), axis=0),
            "spectrum": spectrum,
        }

    for batch in batches(header.sizes, waves[:, :LENGTH], waves[:, LENGTH:]):
        yield Seen(step(*batch), (weights, optimizer))
