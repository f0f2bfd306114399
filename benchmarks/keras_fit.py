"""What `fit` costs in `scope()`, beside plain Keras, with one worker and one device.

Epochs of both are interleaved; printed are the medians of the time of a step, and the ratio.

Usage: python benchmarks/keras_fit.py [--rounds N] [--steps-per-execution K] [--hidden UNITS]
"""

import argparse
import statistics
import sys
import time

import keras
import numpy as np

from autodist_py import AutoDist

STEPS = 100
BATCH = 64
LIMIT, LIMIT_SECONDS = 1.05, 0.5e-3
"""Of the issue: a step may take this factor, or this much more, of what plain Keras takes; the larger."""


def compiled_model(hidden: int, steps_per_execution: int) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input([64]),
            keras.layers.Dense(hidden, activation="relu"),
            keras.layers.Dense(hidden, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
        steps_per_execution=steps_per_execution,
    )
    return model


def seconds_per_step(model: keras.Model, x: np.ndarray, y: np.ndarray) -> float:
    start = time.perf_counter()
    model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
    return (time.perf_counter() - start) / STEPS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps-per-execution", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(STEPS * BATCH, 64)).astype(np.float32), rng.integers(0, 10, STEPS * BATCH)
    plain = compiled_model(options.hidden, options.steps_per_execution)
    with AutoDist() as autodist:
        with autodist.scope():
            ours = compiled_model(options.hidden, options.steps_per_execution)
        seconds: dict[str, list[float]] = {"plain": [], "ours": []}
        for _ in range(options.rounds + 1):
            seconds["plain"].append(seconds_per_step(plain, x, y))
            seconds["ours"].append(seconds_per_step(ours, x, y))
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}  # The first ones trace.
    limit = max(LIMIT * medians["plain"], medians["plain"] + LIMIT_SECONDS)
    print(
        f"plain {1e3 * medians['plain']:.3f} ms a step, in scope {1e3 * medians['ours']:.3f} ms: "
        f"{medians['ours'] / medians['plain']:.2f} x (limit {1e3 * limit:.3f} ms)"
    )
    return 0 if medians["ours"] <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
