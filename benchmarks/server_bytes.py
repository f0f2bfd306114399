"""What variables on parameter servers send over the wire in a step, beside what they must.

    python benchmarks/server_bytes.py [embedding | shards | dense | balanced | one-link | links]

Two workers on this machine, so that all they send each other goes through the loopback device, whose counter is read.
`embedding`: a table of 200,000 rows of 64 float32, 3,200 indices of it per worker and step, SGD. `shards`: the same, in
halves on both workers, of whose indices there are four of each. `dense`: 40 MB of float32 on one server; `balanced`: on
both workers. `one-link` and `links` are of three workers: what the chief's own connections carry where it serves all,
and where all serve alike. Exits with 1 where it is more than is allowed.
"""

import os
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.parameter_server import PS, PSLoadBalancing
from autodist_py.strategy_builders.partitioned import PartitionedPS

SPEC = "nodes: [{address: 127.0.0.1, chief: true}, {address: 127.0.0.2}"
_SENT_AND_RECEIVED = 120
"""Where Linux's `struct tcp_info` has two numbers of 64 bits: the bytes that the other side has, and those from it."""
ROWS, WIDTH, IDS = 200_000, 64, 3_200
LAYERS, SIDE = 9, 1_054
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


def own_bytes() -> int:
    """What the TCP connections of this process have carried, both ways."""
    total = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # It is closed by now, or not of TCP.
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(descriptor))
        with suppress(OSError), connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += sum(struct.unpack_from("QQ", info, _SENT_AND_RECEIVED))
    return total


def bytes_per_step(step: Callable[[], object], count: Callable[[], int] = loopback_bytes) -> float:
    """The median over steps, which all workers take together; the counter is read while all of them pause."""
    counts = [_after_half_a_pause(step, count) for _ in range(STEPS + 1)]
    return float(np.median(np.diff(counts)))


def _after_half_a_pause(step: Callable[[], object], count: Callable[[], int]) -> int:
    time.sleep(PAUSE / 2)
    counted = count()
    time.sleep(PAUSE / 2)
    step()
    return counted


def embedding() -> Sent:
    """A table of which few rows are used: 1.3 times the rows that travel, and 100 kB, are allowed."""

    def travelling(ids: list[np.ndarray]) -> int:
        return len(np.unique(ids[1]))

    return _rows_of(PS(), 1, travelling)


def shards() -> Sent:
    """As `embedding`, of a table in a shard on each worker, and each index four times: rows travel once."""

    def travelling(ids: list[np.ndarray]) -> int:
        return len(np.unique(ids[0][ids[0] >= ROWS // 2])) + len(np.unique(ids[1][ids[1] < ROWS // 2]))

    return _rows_of(PartitionedPS(), 4, travelling)


def _rows_of(builder: StrategyBuilder, times: int, travelling: Callable[[list[np.ndarray]], int]) -> Sent:
    """What is sent for a table, each index of a worker `times`.

    Args:
        builder: where the table is.
        times: how often each index is drawn at once.
        travelling: of the indices of each worker, how many rows of their own are elsewhere.
    """
    with AutoDist(strategy_builder=builder) as autodist:
        table = tf.Variable(tf.zeros([ROWS, WIDTH]))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([table])

        @autodist.function
        def train(ids: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, ids) - 1.0))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])
            return loss

        drawn = np.random.default_rng(0).integers(0, ROWS, IDS // times * autodist.num_workers)
        ids = np.repeat(drawn, times)
        train(ids)
        rows = 2 * travelling(np.split(ids, autodist.num_workers)) * WIDTH * 4  # Read, and in the gradient.
        return Sent(bytes_per_step(lambda: train(ids)), rows, 1.3 * rows + 100e3)


def dense(builder: StrategyBuilder, count: Callable[[], int] = loopback_bytes, share: float = 1.0) -> Sent:
    """Layers that are sent and brought whole, by every worker but the one that serves them: 5% more are allowed.

    Args:
        builder: who serves which.
        count: what is looked at.
        share: of what one worker, which serves nothing, exchanges with servers.
    """
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
        closed_form = share * 2 * LAYERS * SIDE * SIDE * 4
        return Sent(bytes_per_step(lambda: train(x), count), closed_form, 1.05 * closed_form)


CASES: dict[str, Callable[[], Sent]] = {
    "embedding": embedding,
    "shards": shards,
    "dense": lambda: dense(PS()),
    "balanced": lambda: dense(PSLoadBalancing()),
    "one-link": lambda: dense(PS(), own_bytes, share=2),
    "links": lambda: dense(PSLoadBalancing(), own_bytes, share=2 / 3 + 2 / 3),  # Serving the others, and as a worker.
}
ON_THREE = frozenset({"one-link", "links"})


def measured(name: str) -> Sent:
    """The case of that name, on a cluster that has been joined."""
    return CASES[name]()


def main() -> int:
    names = sys.argv[1:] or sorted(CASES.keys() - ON_THREE)
    os.environ.setdefault("AUTODIST_RESOURCE_SPEC", str(_spec(is_of_three=bool(ON_THREE.intersection(names)))))
    results = {name: measured(name) for name in names}
    for name, sent in results.items():
        verdict = "allowed" if sent.measured <= sent.allowed else "too much"
        print(f"{name}: {sent.measured / 1e6:.3f} MB a step, {sent.allowed / 1e6:.3f} MB are allowed, {verdict}")
    return 0 if all(sent.measured <= sent.allowed for sent in results.values()) else 1


def _spec(*, is_of_three: bool) -> Path:
    path = Path(tempfile.mkdtemp()) / "resources.yaml"
    path.write_text(SPEC + (", {address: 127.0.0.3}]" if is_of_three else "]"))
    return path


if __name__ == "__main__":
    sys.exit(main())
