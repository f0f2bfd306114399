"""AutoDist objects that were closed leave nothing behind."""

import gc
from typing import NamedTuple

import psutil
import pytest

from autodist_py import AutoDist
from tests.cluster_pool import TWO_REPLICAS, TWO_WORKERS, Cluster
from tests.oracle_programs import batches, graph_program, hand_written


class Usage(NamedTuple):
    """What this process holds."""

    threads: int
    open_files: int
    memory: int


def usage() -> Usage:
    gc.collect()
    process = psutil.Process()
    return Usage(process.num_threads(), process.num_fds(), process.memory_info().rss)


def make_and_close(door: str, count: int, settled: int) -> tuple[Usage, Usage]:
    """What is held after the `settled`-th of `count` AutoDist objects, and after the last."""
    for number in range(1, count + 1):
        {"function": one_function, "graph": one_graph}[door]()
        if number == settled:
            before = usage()
    return before, usage()


def one_function() -> None:
    with AutoDist() as autodist:
        step = autodist.function(hand_written("both", "adam")(1).step)
        step(*batches("both")[0])


def one_graph() -> None:
    import tensorflow as tf

    with AutoDist() as autodist:
        with tf.Graph().as_default(), autodist.scope():
            training = graph_program("both", "adam")()
            initialize = tf.compat.v1.global_variables_initializer()
        session = autodist.create_distributed_session()
        session.run(initialize)
        session.run(training.train, dict(zip(training.feeds, batches("both")[0], strict=True)))


@pytest.mark.parametrize(
    ("cluster", "door"),
    [
        pytest.param(TWO_REPLICAS, "function", id="1-worker-2-replicas-function"),
        pytest.param(TWO_REPLICAS, "graph", id="1-worker-2-replicas-graph"),
        pytest.param(TWO_WORKERS, "function", id="2-workers-function", marks=pytest.mark.slow),
        pytest.param(TWO_WORKERS, "graph", id="2-workers-graph", marks=pytest.mark.slow),
    ],
    indirect=["cluster"],
    scope="module",
)
def test_fifty_autodist_objects_hold_no_more_than_five(cluster: Cluster, door: str):
    for rank, (before, after) in enumerate(cluster.run(make_and_close, door=door, count=50, settled=5, timeout=240)):
        for name, early, late in zip(Usage._fields, before, after, strict=True):
            assert late <= 1.05 * early, f"worker {rank}: {name} grew from {early} to {late}"
