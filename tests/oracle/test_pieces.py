"""Large gradients that are computed and reduced in pieces: each step that of one device on the whole batch."""

from pathlib import Path
from typing import Any

import keras
import pytest

from autodist_py.strategy_builders.all_reduce import AllReduce
from tests.support.cluster_pool import (
    THREE_WORKERS,
    TWO_WORKERS,
    UNEVEN_WORKERS,
    Cluster,
)
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.fit_oracle import X, Y, compare, fitted, in_half_precision
from tests.support.products_oracle import OWN_SIZES, PIECES, train, travelled

on_many_workers = pytest.mark.parametrize(
    "cluster", [TWO_WORKERS, UNEVEN_WORKERS, THREE_WORKERS], ids=lambda s: s.name, indirect=True, scope="module"
)
on_two_workers = pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda s: s.name, indirect=True, scope="module")


@on_many_workers
@pytest.mark.parametrize("door", ["hand-written", "keras-3", "graph"])
def test_dense_layers_are_those_of_one_device(cluster: Cluster, door: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"door": door, "folder": str(tmp_path), "builder": PIECES}
    assert len(same(cluster.run(train, optimizer="adam", clip=True, **given))) == 2


@on_many_workers
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_workers_may_have_other_numbers_of_rows_and_none(cluster: Cluster, reduction: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"reduction": reduction, "loss_reduction": reduction, "fetch_reduction": reduction}
    given["own_sizes"] = [step[: cluster.shape.num_workers] for step in OWN_SIZES]
    given |= {"folder": str(tmp_path), "builder": PIECES}
    assert len(same(cluster.run(train, door="hand-written", **given))) == 2


@on_two_workers
@pytest.mark.parametrize("spec", ["AUTO", "RING"])
def test_single_precision_and_tables_beside(cluster: Cluster, spec: str, tmp_path: Path) -> None:
    builder = AllReduce(all_reduce_spec=spec, factors=False, bytes_per_pack=16)
    given: dict[str, Any] = {"dtype": "float32", "model": "both", "folder": str(tmp_path), "builder": builder}
    assert same(cluster.run(train, door="hand-written", **given)) == ["kernel"]


def half_precision(folder: str) -> list[str]:
    def trained() -> dict[str, Any]:
        model = in_half_precision(keras)
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", jit_compile=False)
        return fitted(model, X.astype("float32"), Y, batch_size=8)

    return travelled(folder, lambda: compare(trained, strategy_builder=PIECES, tolerance=2e-3), PIECES)[1]


@on_two_workers
def test_mixed_precision_with_a_loss_scale(cluster: Cluster, tmp_path: Path) -> None:
    assert same(cluster.run(half_precision, folder=str(tmp_path)))
