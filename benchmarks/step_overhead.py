"""What a compiled step costs beside the plain tf.function, with one worker and one device.

    python benchmarks/step_overhead.py [--rounds N]

Both run in this process, in turns, on the same inputs. Exits with 1 where a step costs over 1.05 times the plain one,
and over 0.2 ms more.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from autodist_py import AutoDist

ALLOWED_RATIO = 1.05
ALLOWED_SECONDS = 0.2e-3
STEPS_PER_ROUND = 20

Step = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


class Result(NamedTuple):
    """Median seconds a step."""

    plain: float
    compiled: float

    @property
    def is_allowed(self) -> bool:
        return self.compiled <= max(ALLOWED_RATIO * self.plain, self.plain + ALLOWED_SECONDS)


def training_step(features: int, hidden: int, classes: int) -> Step:
    """One step of a two-layer network under momentum."""
    rng = np.random.default_rng(0)
    weights = [
        tf.Variable(rng.normal(scale=0.1, size=shape).astype(np.float32))
        for shape in ((features, hidden), (hidden,), (hidden, classes), (classes,))
    ]
    velocities = [tf.Variable(tf.zeros_like(weight), trainable=False) for weight in weights]

    def step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = tf.nn.relu(inputs @ weights[0] + weights[1]) @ weights[2] + weights[3]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        for weight, velocity, gradient in zip(weights, velocities, tape.gradient(loss, weights), strict=True):
            velocity.assign(0.9 * velocity + gradient)
            weight.assign_sub(0.01 * velocity)
        return loss

    return step


def compare(features: int, hidden: int, classes: int, batch_size: int, rounds: int) -> Result:
    rng = np.random.default_rng(1)
    inputs = tf.constant(rng.normal(size=(batch_size, features)).astype(np.float32))
    labels = tf.constant(rng.integers(0, classes, batch_size))
    with AutoDist() as autodist:
        specs = [tf.TensorSpec([None, features]), tf.TensorSpec([None], tf.int64)]
        plain = tf.function(training_step(features, hidden, classes), input_signature=specs)
        compiled = autodist.function(training_step(features, hidden, classes))
        for step in (plain, compiled):
            seconds_per_step(step, inputs, labels)
        times = [
            (seconds_per_step(plain, inputs, labels), seconds_per_step(compiled, inputs, labels)) for _ in range(rounds)
        ]
    return Result(*np.median(times, axis=0))


def seconds_per_step(step: Step, inputs: tf.Tensor, labels: tf.Tensor) -> float:
    started = time.perf_counter()
    for _ in range(STEPS_PER_ROUND):
        loss = step(inputs, labels)
    loss.numpy()
    return (time.perf_counter() - started) / STEPS_PER_ROUND


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    results = {
        "tiny (4 features, 2 classes, batch 8)": compare(4, 8, 2, 8, rounds),
        "digits (64 features, 10 classes, batch 64)": compare(64, 128, 10, 64, rounds),
    }
    for name, result in results.items():
        verdict = "allowed" if result.is_allowed else "too slow"
        print(
            f"{name}: plain {1e3 * result.plain:.3f} ms, compiled {1e3 * result.compiled:.3f} ms, "
            f"ratio {result.compiled / result.plain:.3f}, {verdict}"
        )
    return 0 if all(result.is_allowed for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
