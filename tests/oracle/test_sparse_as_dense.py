"""Tables whose gradients travel as dense ones: each step that of one device on the whole batch."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.partitioned import PartitionedAR
from tests.support.cluster_pool import SHAPES, THREE_WORKERS, TWO_WORKERS, UNEVEN_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.fit_oracle import compare, compiled, fitted
from tests.support.oracle import SINGLE, Parts, Values, compare_function, compare_graph, settings
from tests.support.oracle_programs import FUNCTION_FAMILIES, SIZES, batches, graph_program
from tests.support.served import InShards

OWN_SIZES = [(3, 2, 4), (4, 1, 2), (0, 3, 1), (2, 2, 2), (1, 0, 2)]
"""For each step the rows of each worker; some of them have none."""

LARGE, SMALL = (120, 7, 121, 90), (2, 120, 5)
"""Sizes of batches. The first one decides: nearly all of the table's rows are in its parts, or few."""

on_all = pytest.mark.parametrize("cluster", SHAPES, ids=lambda s: s.name, indirect=True, scope="module")
on_many_workers = pytest.mark.parametrize(
    "cluster", [TWO_WORKERS, UNEVEN_WORKERS, THREE_WORKERS], ids=lambda s: s.name, indirect=True, scope="module"
)
on_two_workers = pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda s: s.name, indirect=True, scope="module")


def how_rows_travelled(folder: Path) -> str:
    """How the rows of the programs that were dumped there have travelled to other workers."""
    planned, lowered = (
        "\n".join(path.read_text() for path in sorted(folder.rglob(f"*-{name}.txt")))
        for name in ("plan-communication", "lower-collectives")
    )
    assert planned, "no program was compiled"
    is_dense, is_rows = "ScatterNd(" in lowered, "event GatherRows[" in planned
    return {(True, False): "dense", (False, True): "rows"}.get((is_dense, is_rows), "both or none")


def dumped(folder: str, run: Callable[[], Any]) -> tuple[Any, str]:
    """What `run` returns, and how rows travelled meanwhile."""
    own = Path(folder) / str(os.getpid())
    with settings(dump_dir=own):
        return run(), how_rows_travelled(own)


def train(
    door: str,
    folder: str,
    builder: StrategyBuilder,
    *,
    sizes: Sequence[int] = SIZES,
    own_sizes: list[tuple[int, ...]] | None = None,
    dtype: str = "float64",
    reduction: str = "mean",
    **options: Any,
) -> tuple[Values, str]:
    parts = None if own_sizes is None else Parts(own_sizes)
    sizes = sizes if own_sizes is None else [sum(step) for step in own_sizes]
    data = batches("both", sizes, dtype=dtype)
    given: dict[str, Any] = {
        "parts": parts,
        "autodist": {"strategy_builder": builder, **options},
        "tolerance": SINGLE if dtype == "float32" else 1e-9,
    }
    extra: dict[str, Any] = {"clip": False, "reduction": reduction}
    if door == "graph":
        return dumped(folder, lambda: compare_graph(graph_program("both", "sgd", dtype=dtype, **extra), data, **given))
    if door == "hand-written":
        extra["dtype"] = dtype
    return dumped(folder, lambda: compare_function(FUNCTION_FAMILIES[door]("both", "sgd", **extra), data, **given))


@on_all
@pytest.mark.parametrize("door", ["hand-written", "keras-3", "graph"])
def test_a_table_of_which_all_travels_is_that_of_one_device(cluster: Cluster, door: str, tmp_path: Path) -> None:
    builder = AllReduce(sparse_as_dense=True)
    _, how = same(cluster.run(train, door=door, folder=str(tmp_path), builder=builder))
    assert how == "dense"


@on_many_workers
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_workers_may_have_other_numbers_of_rows_and_none(cluster: Cluster, reduction: str, tmp_path: Path) -> None:
    own_sizes = [step[: cluster.shape.num_workers] for step in OWN_SIZES]
    given: dict[str, Any] = {"own_sizes": own_sizes, "reduction": reduction, "loss_reduction": reduction}
    given["fetch_reduction"] = reduction
    builder = AllReduce(sparse_as_dense=True)
    _, how = same(cluster.run(train, door="hand-written", folder=str(tmp_path), builder=builder, **given))
    assert how == "dense"


@on_many_workers
@pytest.mark.parametrize("spec", ["AUTO", "RING"])
@pytest.mark.parametrize("bytes_per_pack", [0, 40])
def test_tables_travel_with_other_gradients_and_in_pieces(
    cluster: Cluster, spec: str, bytes_per_pack: int, tmp_path: Path
) -> None:
    builder = AllReduce(all_reduce_spec=spec, bytes_per_pack=bytes_per_pack, sparse_as_dense=True)
    given: dict[str, Any] = {"folder": str(tmp_path), "builder": builder, "dtype": "float32"}
    _, how = same(cluster.run(train, door="hand-written", **given))
    assert how == "dense"


@on_two_workers
@pytest.mark.parametrize("door", ["hand-written", "keras-3", "graph"])
@pytest.mark.parametrize(("sizes", "wanted"), [(LARGE, "dense"), (SMALL, "rows")])
def test_the_size_of_the_first_batch_decides(
    cluster: Cluster, door: str, sizes: tuple[int, ...], wanted: str, tmp_path: Path
) -> None:
    _, how = same(cluster.run(train, door=door, folder=str(tmp_path), builder=AllReduce(), sizes=sizes))
    assert how == wanted


@on_many_workers
@pytest.mark.parametrize(("first", "wanted"), [((100, 0, 1), "dense"), ((0, 100, 100), "rows")])
def test_the_chiefs_part_of_it_decides_for_all(
    cluster: Cluster, first: tuple[int, ...], wanted: str, tmp_path: Path
) -> None:
    own_sizes = [step[: cluster.shape.num_workers] for step in (first, *OWN_SIZES)]
    given: dict[str, Any] = {"folder": str(tmp_path), "builder": AllReduce(), "own_sizes": own_sizes}
    _, how = same(cluster.run(train, door="hand-written", **given))
    assert how == wanted


def fit(batch_size: int, folder: str) -> tuple[dict[str, Any], str]:
    rng = np.random.default_rng(8)
    ids, labels = rng.integers(0, 4, size=(70, 5)), rng.integers(0, 3, size=70)

    def network() -> keras.Model:
        return keras.Sequential([keras.layers.Embedding(4, 6), keras.layers.Flatten(), keras.layers.Dense(3)])

    def trained() -> dict[str, Any]:
        return fitted(compiled("sgd", network), ids, labels, batch_size=batch_size)

    return dumped(folder, lambda: compare(trained))


@on_two_workers
@pytest.mark.parametrize(("batch_size", "wanted"), [(32, "dense"), (1, "rows")])
def test_the_batches_of_fit_decide(cluster: Cluster, batch_size: int, wanted: str, tmp_path: Path) -> None:
    _, how = same(cluster.run(fit, batch_size=batch_size, folder=str(tmp_path)))
    assert how == wanted


@on_two_workers
def test_a_table_travels_whole_beside_parts_of_dense_gradients(cluster: Cluster, tmp_path: Path) -> None:
    builder = PartitionedAR(min_shard_bytes=1, sparse_as_dense=True)
    _, how = same(cluster.run(train, door="hand-written", folder=str(tmp_path), builder=builder))
    assert how == "dense"


@on_two_workers
@pytest.mark.parametrize("door", ["hand-written", "keras-3", "graph"])
def test_columns_travel_whole_beside_others_that_live_on_a_server(cluster: Cluster, door: str, tmp_path: Path) -> None:
    builder = InShards((None, 1), axis=1)
    _, how = same(cluster.run(train, door=door, folder=str(tmp_path), builder=builder, sizes=LARGE))
    assert how == "dense"


def held_back(compressor: str) -> None:
    """What has been applied to a table, and what workers hold, is all of its gradients."""
    builder = AllReduce(sparse_as_dense=True, compressor=compressor)
    with AutoDist(strategy_builder=builder) as autodist:
        table = tf.Variable(np.zeros([6, 4]), name="table")

        @autodist.function
        def step(ids: tf.Tensor, upstream: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.reduce_sum(tf.gather(table, ids) * upstream, axis=1))
            rows = tape.gradient(loss, table)
            table.scatter_sub(tf.IndexedSlices(rows.values, rows.indices))

        rng = np.random.default_rng(3)
        wanted = np.zeros([6, 4])
        for size in (8, 5, 1, 6):
            ids, upstream = rng.integers(0, 5, size=size), rng.normal(size=(size, 4))
            step(ids, upstream)
            np.subtract.at(wanted, ids, upstream / size)
        (held,) = [variable.numpy().sum(axis=0).reshape(6, 4) for variable in autodist.compressor_state.variables]
        assert np.abs(held).max() > 0
        np.testing.assert_allclose(table.numpy(), wanted + held, rtol=1e-2 if "Horovod" in compressor else 1e-9)
        assert not table.numpy()[5].any()
        autodist.sync()


@on_two_workers
@pytest.mark.parametrize("compressor", ["TopKCompressor(ratio=0.2)", "HorovodCompressorEF"])
def test_any_compressor_codes_what_travels_as_dense(cluster: Cluster, compressor: str) -> None:
    cluster.run(held_back, compressor=compressor)
