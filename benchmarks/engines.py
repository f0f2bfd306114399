"""What it costs to reduce gradients of different sizes by RING and by Horovod, between workers on this machine.

Blocks of steps that do little else are interleaved in one run, so both engines meet the same machine; printed are the
medians of the time of a step on the chief. Each worker's process is kept to one core, by turns, and has one thread for
the inside of an op. With one of the engines alone, RING is free of what Horovod's own thread takes.

Usage: python -m benchmarks.engines [--workers N] [--rounds N] [--engines RING HOROVOD]
"""

import argparse
import os
import statistics
import sys
import time

# Before TensorFlow counts the cores: pools of more threads than cores take twice as long.
os.sched_setaffinity(0, {int(os.environ.get("AUTODIST_RANK", "0")) % (os.cpu_count() or 1)})

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from autodist_py import AutoDist  # noqa: E402
from autodist_py.config.resource_spec import local_resource_spec  # noqa: E402
from autodist_py.strategy_builders.all_reduce import AllReduce  # noqa: E402
from benchmarks.collectives import descending  # noqa: E402

SIZES = {"4 KB": 4_000, "64 KB": 64_000, "1 MB": 1_000_000, "8 MB": 8_000_000, "40 MB": 40_000_000}
ENGINES = {
    "RING": AllReduce(all_reduce_spec="RING"),
    "HOROVOD": AllReduce(all_reduce_spec="HOROVOD"),
}
BLOCK = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=list(ENGINES))
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    resources = local_resource_spec(options.workers)
    objects = {name: AutoDist(resources, ENGINES[name]) for name in options.engines}
    steps = {
        (size, name): each.function(descending(1, count // 4))
        for size, count in SIZES.items()
        for name, each in objects.items()
    }
    x = np.ones(2 * options.workers, np.float32)
    seconds: dict[tuple[str, str], list[float]] = {case: [] for case in steps}
    for _ in range(options.rounds + 1):
        for case, step in steps.items():
            step(x)
            start = time.perf_counter()
            for _ in range(BLOCK):
                step(x)
            seconds[case].append((time.perf_counter() - start) / BLOCK)
    medians = {case: statistics.median(times[1:]) for case, times in seconds.items()}  # The first ones compile.
    is_chief = next(iter(objects.values())).is_chief
    for each in objects.values():
        each.close()
    for (size, name), median in medians.items() if is_chief else ():
        print(f"{size} by {name}: {1e3 * median:.2f} ms a step, {median / medians[size, options.engines[0]]:.2f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
