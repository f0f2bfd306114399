"""What variables on parameter servers send over the wire in a step, beside what they must.

    python benchmarks/server_bytes.py [embedding | dense | balanced]

Two workers on this machine, so that all they send each other goes through the loopback device, whose counter is read.
`embedding`: a table of 200,000 rows of 64 float32, 3,200 indices of it per worker and step, SGD. `dense`: 40 MB of
float32 on one server; `balanced`: on both workers. Exits with 1 where it is more than is allowed.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.parameter_server import PS, PSLoadBalancing

SPEC = """
nodes:
  - {address: 127.0.0.1, chief: true}
  - {address: 127.0.0.2}
"""
ROWS, WIDTH, IDS = 200_000, 64, 3_200
LAYERS, SIDE = 10, 1_000
STEPS = 9
PAUSE = 0.3


class Sent(NamedTuple):
    """Bytes a step: measured, what must travel, and the most that is allowed."""

    measured: float
    least: float
    allowed: float


def loopback_bytes() -> int:
    """What the loopback device of this machine has carried."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise RuntimeError("this machine has no loopback device")


def bytes_per_step(step: Callable[[], object]) -> float:
    """The median over steps, which all workers take together; the counter is read while all of them pause."""
    counts = [_after_half_a_pause(step) for _ in range(STEPS + 1)]
    return float(np.median(np.diff(counts)))


def _after_half_a_pause(step: Callable[[], object]) -> int:
    time.sleep(PAUSE / 2)
    count = loopback_bytes()
    time.sleep(PAUSE / 2)
    step()
    return count


def embedding() -> Sent:
    """A table of which few rows are used: 1.3 times the rows that travel, and 100 kB, are allowed."""
    with AutoDist(strategy_builder=PS()) as autodist:
        table = tf.Variable(tf.zeros([ROWS, WIDTH]))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([table])

        @autodist.function
        def train(ids: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, ids) - 1.0))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
            return loss

        ids = np.random.default_rng(0).integers(0, ROWS, IDS * autodist.num_workers)
        train(ids)
        distinct = len(np.unique(ids[IDS:]))
        rows = 2 * distinct * WIDTH * 4  # Read, and in the gradient.
        return Sent(bytes_per_step(lambda: train(ids)), rows, 1.3 * rows + 100e3)


def dense(builder: StrategyBuilder) -> Sent:
    """Layers that are sent and brought whole, by every worker but the one that serves them: 5% more are allowed."""
    with AutoDist(strategy_builder=builder) as autodist:
        layers = [tf.Variable(tf.zeros([SIDE, SIDE]), name=f"layer_{number}") for number in range(LAYERS)]

        @autodist.function
        def train(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_mean(tf.matmul(x, layer)) for layer in layers])
            for layer, gradient in zip(layers, tape.gradient(loss, layers), strict=True):
                layer.assign_sub(0.1 * gradient)
            return loss

        x = np.ones([4, SIDE], np.float32)
        train(x)
        closed_form = 2 * LAYERS * SIDE * SIDE * 4 * (autodist.num_workers - 1)
        return Sent(bytes_per_step(lambda: train(x)), closed_form, 1.05 * closed_form)


CASES: dict[str, Callable[[], Sent]] = {
    "embedding": embedding,
    "dense": lambda: dense(PS()),
    "balanced": lambda: dense(PSLoadBalancing()),
}


def measured(name: str) -> Sent:
    """The case of that name, on a cluster that has been joined."""
    return CASES[name]()


def main() -> int:
    os.environ.setdefault("AUTODIST_RESOURCE_SPEC", str(_spec()))
    results = {name: measured(name) for name in sys.argv[1:] or CASES}
    for name, sent in results.items():
        verdict = "allowed" if sent.measured <= sent.allowed else "too much"
        print(f"{name}: {sent.measured / 1e6:.3f} MB a step, {sent.allowed / 1e6:.3f} MB are allowed, {verdict}")
    return 0 if all(sent.measured <= sent.allowed for sent in results.values()) else 1


def _spec() -> Path:
    path = Path(tempfile.mkdtemp()) / "resources.yaml"
    path.write_text(SPEC)
    return path


if __name__ == "__main__":
    sys.exit(main())
