"""What ends a run whose variables live on servers, and what cannot be served."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.proto.errors import ClusterError, StrategyError
from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.parameter_server import PS, PSLoadBalancing
from tests.cluster_pool import THREE_WORKERS, CaseFailedError, Cluster
from tests.fit_oracle import X, Y, compiled
from tests.served import Spread

on_three = pytest.mark.parametrize(
    "cluster", [THREE_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)

BUILDERS = {
    "worker": PS(),
    "server": Spread((1,)),
    "asynchronous": PS(sync=False),
    "stale": PS(staleness=1),
}


def descending(autodist: AutoDist) -> Any:
    """A step that trains one variable."""
    weights = tf.Variable(np.zeros(2))

    @autodist.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights)
        weights.assign_sub(tape.gradient(loss, weights))

    return step


def killed(builder: StrategyBuilder, victim: int, folder: str) -> None:
    """Trains until a worker kills itself; the others note when they were told."""
    with AutoDist(strategy_builder=builder) as autodist:
        step = descending(autodist)
        clock = Path(folder, f"worker-{autodist.rank}")
        for number in range(100_000):
            if number == 5 and autodist.rank == victim:
                clock.write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                step()
            except Exception:
                clock.write_text(str(time.monotonic()))
                raise


@on_three
@pytest.mark.parametrize("builder", BUILDERS.values(), ids=BUILDERS)
def test_a_killed_worker_or_server_ends_the_run_with_its_cause(
    cluster: Cluster, builder: StrategyBuilder, tmp_path: Path
) -> None:
    with pytest.raises(CaseFailedError, match=r"worker 1 \(127.0.0.2\) ended .*: killed by SIGKILL"):
        cluster.run(killed, builder=builder, victim=1, folder=str(tmp_path))
    at = {path.name: float(path.read_text()) for path in tmp_path.iterdir()}
    assert at.keys() == {"worker-0", "worker-1", "worker-2"}
    assert max(at.values()) - at["worker-1"] < 10.0


def thrown_away() -> dict[str, int]:
    """Programs come and go; what they had running goes with them."""
    counts: dict[int, int] = {}
    for _ in range(3):
        with AutoDist(strategy_builder=PS()) as autodist:
            step = descending(autodist)
            for _ in range(3):
                step()
        counts[len(counts)] = sum(thread.name.startswith("autodist-") for thread in threading.enumerate())
    return {"first": counts[0], "last": counts[2]}


@on_three
def test_threads_end_with_their_program(cluster: Cluster) -> None:
    for counts in cluster.run(thrown_away):
        assert counts["last"] == counts["first"]


def refused(builder: StrategyBuilder, words: str) -> None:
    with AutoDist(strategy_builder=builder) as autodist:
        with autodist.scope():
            model = compiled(keras.optimizers.Adam(0.05, gradient_accumulation_steps=2))
        with pytest.raises(StrategyError, match=words):
            model.fit(X, Y, batch_size=8, verbose=0)


@on_three
@pytest.mark.parametrize(
    ("builder", "words"),
    [
        (
            Spread((0, 1)),
            r"updates several variables in one op.*server on worker 0.*server on worker 1.*PSLoadBalancing",
        ),
        (Spread((None, 1)), r"updates several variables in one op.*\(workers\).*Give them one synchronizer"),
    ],
    ids=["two-servers", "server-and-collectives"],
)
def test_what_cannot_be_served_is_refused(cluster: Cluster, builder: StrategyBuilder, words: str) -> None:
    cluster.run(refused, builder=builder, words=words)


def clipped_by_all(builder: StrategyBuilder) -> None:
    with AutoDist(strategy_builder=builder) as autodist:
        with autodist.scope():
            model = compiled(keras.optimizers.SGD(0.05, global_clipnorm=1.0))
        with pytest.raises(StrategyError, match=r"replicas_to_aggregate.*asks a server again.*Use one server"):
            model.fit(X, Y, batch_size=8, verbose=0)


@on_three
def test_backup_workers_need_one_message_a_step(cluster: Cluster) -> None:
    cluster.run(clipped_by_all, builder=PSLoadBalancing(replicas_to_aggregate=2))


def asked_elsewhere() -> None:
    with AutoDist(strategy_builder=PS(replicas_to_aggregate=2)) as autodist:
        step = descending(autodist)
        step()
        if autodist.rank == 0:
            assert len(autodist.accepted_gradients()) % 2 == 0
        else:
            with pytest.raises(ClusterError, match=r"on a server with replicas_to_aggregate; worker \d is none"):
                autodist.accepted_gradients()
        autodist.sync()


@on_three
def test_what_was_accepted_is_known_on_the_server(cluster: Cluster) -> None:
    cluster.run(asked_elsewhere)
