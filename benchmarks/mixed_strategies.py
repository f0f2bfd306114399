"""What a step costs that combines some variables by collectives and others on servers, beside those of one kind alone.

Blocks of steps of all strategies are interleaved in one run of two or three workers; printed are the medians of the
time of a step on the chief, and ratios to the slower one of AllReduce (RING) and PSLoadBalancing.

Usage: python benchmarks/mixed_strategies.py [--workers N] [--width UNITS] [--rounds N]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.config.resource_spec import local_resource_spec
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.mixed import PerVariable
from autodist_py.strategy_builders.parameter_server import PSLoadBalancing
from autodist_py.strategy_builders.partitioned import PartitionedPS, ShardedOptimizer

RING, SERVERS = AllReduce(all_reduce_spec="RING"), PSLoadBalancing()
STRATEGIES: dict[str, StrategyBuilder] = {
    "ring": RING,
    "servers": SERVERS,
    "mixed": PerVariable({"even_*": RING}, default=SERVERS),
    "shards": PartitionedPS(min_shard_bytes=1 << 14),
    "sharded optimizer": ShardedOptimizer(),
}
LIMIT = 1.15
"""How much longer a mixed step may take than the slower one of the two kinds."""
LAYERS, BATCH, BLOCK = 6, 64, 10


def network(width: int) -> Callable[[Any, Any], tf.Tensor]:
    """A step of gradient descent with momentum through `LAYERS` dense layers."""
    rng = np.random.default_rng(1)
    names = [f"{'even' if index % 2 == 0 else 'odd'}_{index}" for index in range(LAYERS)]
    scale = np.float32(width**-0.5)
    weights = [tf.Variable(rng.normal(size=(width, width)).astype(np.float32) * scale, name=name) for name in names]
    momenta = [tf.Variable(tf.zeros_like(weight), trainable=False) for weight in weights]

    def step(x: Any, y: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = x
            for weight in weights:
                value = tf.tanh(value @ weight)
            loss = tf.reduce_mean(tf.square(value - y))
        for weight, momentum, gradient in zip(weights, momenta, tape.gradient(loss, weights), strict=True):
            momentum.assign(0.9 * momentum + gradient)
            weight.assign_sub(0.01 * momentum)
        return loss

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    resources = local_resource_spec(options.workers)
    objects = {name: AutoDist(resources, builder) for name, builder in STRATEGIES.items()}
    rng = np.random.default_rng(2)
    x, y = (rng.normal(size=(BATCH, options.width)).astype(np.float32) for _ in range(2))
    steps = {name: autodist.function(network(options.width)) for name, autodist in objects.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds + 1):
        for name, step in steps.items():
            step(x, y)
            start = time.perf_counter()
            for _ in range(BLOCK):
                step(x, y)
            seconds[name].append((time.perf_counter() - start) / BLOCK)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}  # The first ones compile.
    is_chief = objects["ring"].is_chief
    for autodist in objects.values():
        autodist.close()
    slower = max(medians["ring"], medians["servers"])
    if is_chief:
        for name, median in medians.items():
            print(f"{name}: {1e3 * median:.2f} ms a step, {median / slower:.2f} x")
    return int(medians["mixed"] > LIMIT * slower) if is_chief else 0


if __name__ == "__main__":
    sys.exit(main())
