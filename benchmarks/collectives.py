"""What it costs to reduce gradients by collectives in buffers of different sizes, and in many small tensors.

Blocks of steps that do little else are interleaved in one run; printed are the medians of the time of a step on the
chief. Each worker's process is kept to one core, by turns, and has one thread for the inside of an op. Exits with 1
where many tensors take more than `LIMIT` times as long as one of the same bytes.

Usage: python benchmarks/collectives.py [--workers N] [--megabytes N] [--tensors N] [--rounds N]
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# Before TensorFlow counts the cores: pools of more threads than cores take twice as long.
os.sched_setaffinity(0, {int(os.environ.get("AUTODIST_RANK", "0")) % (os.cpu_count() or 1)})

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from autodist_py import AutoDist  # noqa: E402
from autodist_py.config.resource_spec import local_resource_spec  # noqa: E402
from autodist_py.strategy_builders.all_reduce import AllReduce  # noqa: E402

LIMIT = 1.1
WHOLE = 2**31 - 1
"""As many bytes as a strategy can ask for."""
PACKS = {"0.5 MiB": 1 << 19, "1 MiB": 1 << 20, "2 MiB": 2 << 20, "4 MiB": 4 << 20, "8 MiB": 8 << 20, "whole": WHOLE}
BLOCK = 4


def descending(tensors: int, elements: int) -> Callable[[Any], tf.Tensor]:
    """A step whose gradient is the mean of what it is given, in all elements of so many variables."""
    weights = [tf.Variable(tf.zeros([elements // tensors])) for _ in range(tensors)]

    def step(x: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x) * tf.add_n([tf.reduce_sum(weight) for weight in weights])
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--tensors", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    elements = int(options.megabytes * 1e6) // 4
    cases = {f"one tensor, buffers of {name}": (1, size) for name, size in PACKS.items()}
    cases |= {"one tensor": (1, 0), f"{options.tensors} tensors": (options.tensors, 0)}
    resources = local_resource_spec(options.workers)
    objects = {
        name: AutoDist(resources, AllReduce(all_reduce_spec="RING", bytes_per_pack=size))
        for name, (_, size) in cases.items()
    }
    steps = {name: each.function(descending(cases[name][0], elements)) for name, each in objects.items()}
    x = np.ones(2 * options.workers, np.float32)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.rounds + 1):
        for name, step in steps.items():
            step(x)
            start = time.perf_counter()
            for _ in range(BLOCK):
                step(x)
            seconds[name].append((time.perf_counter() - start) / BLOCK)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}  # The first ones compile.
    is_chief = objects["one tensor"].is_chief
    for each in objects.values():
        each.close()
    if not is_chief:
        return 0
    one, many = medians["one tensor"], medians[f"{options.tensors} tensors"]
    for name, median in medians.items():
        print(f"{name}: {1e3 * median:.1f} ms a step, {median / one:.2f} x")
    return int(many > LIMIT * one)


if __name__ == "__main__":
    sys.exit(main())
