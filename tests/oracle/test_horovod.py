"""Training by Horovod, named by the strategy or chosen by AUTO, is as one device does."""

import logging
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.cluster import horovod
from autodist_py.kernel.collectives import horovod_adapter
from autodist_py.proto.resource_spec import ResourceSpec
from autodist_py.strategy_builders.all_reduce import AllReduce
from tests.support import compressed
from tests.support.by_horovod import ON_BOTH, ON_TWO, descending, is_installed
from tests.support.cluster_pool import Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.oracle import Batch, Training, compare_function, compare_graph
from tests.support.oracle_programs import batches, graph_program, hand_written

pytestmark = pytest.mark.own_cluster

# -- Named by the strategy ---------------------------------------------------------------------------------------------


def horovods_rank() -> tuple[int, int]:
    """Of this process, as Horovod numbers it, and how many there are."""
    from horovod.tensorflow import mpi_ops

    return mpi_ops.rank(), mpi_ops.size()


def train(optimizer: str, **builder: Any) -> dict[str, np.ndarray]:
    strategy = AllReduce(all_reduce_spec="HOROVOD", **builder)
    model = hand_written("both", optimizer)
    values = compare_function(model, batches("both"), autodist={"strategy_builder": strategy})
    with AutoDist() as autodist:
        assert horovods_rank() == (autodist.rank, 2), "it runs by another engine"
    return values


@is_installed
@ON_BOTH
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("builder", [{}, {"chunk_size": 1}, {"bytes_per_pack": 64}], ids=["group", "each", "packs"])
def test_it_trains_as_one_device_does(cluster: Cluster, optimizer: str, builder: dict[str, int]) -> None:
    same(cluster.run(train, optimizer=optimizer, **builder))


def train_in_session() -> dict[str, np.ndarray]:
    strategy = AllReduce(all_reduce_spec="HOROVOD")
    return compare_graph(graph_program("both", "adam"), batches("both"), autodist={"strategy_builder": strategy})


@is_installed
@ON_TWO
def test_a_session_trains_by_it_as_one_device_does(cluster: Cluster) -> None:
    same(cluster.run(train_in_session))


@is_installed
@ON_TWO
@pytest.mark.parametrize("width", [3, 4])
def test_half_precision_is_that_of_numpy(cluster: Cluster, width: int) -> None:
    builder = AllReduce(all_reduce_spec="HOROVOD", compressor="HorovodCompressor", sparse_as_dense=False)
    same(cluster.run(compressed.train, builder=builder, dtype="float16", width=width))


@is_installed
@ON_TWO
@pytest.mark.parametrize("compressor", ["HorovodCompressorEF", "PowerSGDCompressor(rank=2)"])
def test_steps_with_a_compressor_are_those_of_its_model(cluster: Cluster, compressor: str) -> None:
    builder = AllReduce(all_reduce_spec="HOROVOD", compressor=compressor)
    same(cluster.run(compressed.by_model, builder=builder, compressor=compressor, steps=3, replicas=(1, 1)))


def by_both_engines() -> list[np.ndarray]:
    """Weights after steps by Horovod and by AUTO, taken in turns, in one process."""
    objects = [AutoDist(strategy_builder=AllReduce(all_reduce_spec=spec)) for spec in ("HOROVOD", "AUTO")]
    trained = [descending(each) for each in objects]
    x = np.random.default_rng(3).normal(size=(6, 3))
    for _ in range(4):
        for step, _ in trained:
            step(x)
    for each in objects:
        each.close()
    return [weights.numpy() for _, weights in trained]


@is_installed
@ON_TWO
def test_programs_of_both_engines_take_turns_in_one_process(cluster: Cluster) -> None:
    for horovods, rings in cluster.run(by_both_engines):
        np.testing.assert_allclose(horovods, rings, rtol=1e-12)
        assert not np.allclose(horovods, 1.0)


def warned_of_a_timeline(folder: Path) -> list[str]:
    """What is said of programs, where there is to be a timeline."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("autodist_py.program.build")
    log.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AUTODIST_TIMELINE", str(folder / "trace.json"))
            for spec in ("HOROVOD", "RING"):
                with AutoDist(strategy_builder=AllReduce(all_reduce_spec=spec)) as autodist:
                    step, _ = descending(autodist)
                    step(np.ones([4, 3]))
    finally:
        log.removeHandler(handler)
    return said


@is_installed
@ON_TWO
def test_that_a_timeline_is_without_it_is_said(cluster: Cluster, tmp_path: Path) -> None:
    of_chief, of_other = cluster.run(warned_of_a_timeline, folder=tmp_path)
    assert [message.partition(": ")[2] for message in of_chief] == [
        "TensorFlow's profiler does not see Horovod's all-reduces, so the timeline is without them; RING's are there, "
        "with all_reduce_spec RING"
    ]
    assert of_other == []


# -- Chosen by AUTO ----------------------------------------------------------------------------------------------------


def large(seed: int) -> Training:
    """A step that trains as many bytes as AUTO uses Horovod for within one host, by gradients that are no products."""
    random = np.random.default_rng(seed)
    weights, bias = (tf.Variable(random.normal(size=shape)) for shape in ([1000, 1000], [1000]))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ tf.tanh(weights) + tf.tanh(bias)) ** 2)
        for variable, gradient in zip((weights, bias), tape.gradient(loss, [weights, bias]), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return Training(step, lambda: {"weights": weights, "bias": bias})


WIDE = tuple((rows,) for rows in np.random.default_rng(7).normal(size=(2, 8, 1000)))
"""Two batches for it."""


def small(seed: int) -> Training:
    """A step that trains few bytes."""
    return hand_written("dense", "sgd")(seed)


def train_by_auto(
    build: Callable[[int], Training] = large,
    data: Sequence[Batch] = WIDE,
    patch: Callable[[pytest.MonkeyPatch, int], None] | None = None,
) -> tuple[list[int], dict[str, Any]]:
    """How many numbers are in each all-reduce by Horovod of steps with AUTO, and the trained values.

    Args:
        build: makes what is trained.
        data: the steps' batches.
        patch: changes what a worker, by its rank, finds of Horovod.
    """
    carried: list[int] = []
    by_horovod = horovod_adapter.all_reduce

    def noted(value: tf.Tensor, name: str) -> tf.Tensor:
        carried.append(value.shape.num_elements())
        return by_horovod(value, name)

    with AutoDist() as autodist, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(horovod_adapter, "all_reduce", noted)
        if patch is not None:
            patch(monkeypatch, autodist.rank)
        return carried, compare_function(build, data)


@is_installed
@ON_BOTH
def test_auto_trains_many_bytes_by_horovod_within_one_host_as_one_device_does(cluster: Cluster) -> None:
    results = cluster.run(train_by_auto)
    for carried, _ in results:
        assert sum(carried) == 1_001_000
    same([values for _, values in results])


@is_installed
@ON_TWO
def test_auto_trains_few_bytes_by_a_ring(cluster: Cluster) -> None:
    assert [carried for carried, _ in cluster.run(train_by_auto, build=small, data=batches("dense"))] == [[], []]


def missing_on_1(patch: pytest.MonkeyPatch, rank: int) -> None:
    if rank == 1:
        patch.setitem(sys.modules, "horovod", None)


def started_by_the_script_on_1(patch: pytest.MonkeyPatch, rank: int) -> None:
    if rank == 1:
        library = horovod_adapter.library()
        patch.setattr(library, "is_initialized", lambda: True)
        patch.setattr(library, "rank", lambda: 0)
        patch.setattr(library, "size", lambda: 1)


def without_a_name_on_0(patch: pytest.MonkeyPatch, rank: int) -> None:
    if rank == 0:
        patch.setattr(horovod_adapter.library(), "is_initialized", lambda: False)
        patch.setattr(socket, "gethostname", lambda: "pluto.invalid")


@is_installed
@ON_TWO
@pytest.mark.parametrize("patch", [missing_on_1, started_by_the_script_on_1, without_a_name_on_0])
def test_auto_does_without_where_one_worker_cannot_start_it(cluster: Cluster, patch: Callable[..., None]) -> None:
    results = cluster.run(train_by_auto, patch=patch)
    assert [carried for carried, _ in results] == [[], []]
    same([values for _, values in results])


def asked_for_auto() -> int:
    """How often workers ask each other whether they can start it, for one program."""
    asked: list[str] = []
    obstacle = horovod.obstacle

    def noted(cluster: Any, resources: ResourceSpec, key: Callable[[str], str]) -> Any:
        asked.append(key("asked"))
        return obstacle(cluster, resources, key)

    carried, _ = train_by_auto(patch=lambda patch, _: patch.setattr(horovod, "obstacle", noted))
    assert carried, "it runs by another engine"
    return len(asked)


@is_installed
@ON_TWO
def test_workers_ask_once_whether_it_can_start(cluster: Cluster) -> None:
    assert cluster.run(asked_for_auto) == [1, 1]
