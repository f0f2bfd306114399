"""Gradients whose factors are gathered: each step that of one device on the whole batch."""

from pathlib import Path
from typing import Any

import keras
import pytest
import tf_keras

from autodist_py.strategy_builders.all_reduce import AllReduce
from tests.support.cluster_pool import SHAPES, THREE_WORKERS, TWO_WORKERS, UNEVEN_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.fit_oracle import OPTIMIZERS, X, Y, compare, compiled, fitted, in_half_precision
from tests.support.products_oracle import FACTORS, OWN_SIZES, attentive, sequences, train, travelled

on_all = pytest.mark.parametrize("cluster", SHAPES, ids=lambda s: s.name, indirect=True, scope="module")
on_many_workers = pytest.mark.parametrize(
    "cluster", [TWO_WORKERS, UNEVEN_WORKERS, THREE_WORKERS], ids=lambda s: s.name, indirect=True, scope="module"
)
on_two_workers = pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda s: s.name, indirect=True, scope="module")


@on_all
@pytest.mark.parametrize("door", ["hand-written", "keras-3", "graph"])
def test_dense_layers_are_those_of_one_device(cluster: Cluster, door: str, tmp_path: Path) -> None:
    names = same(cluster.run(train, door=door, folder=str(tmp_path), optimizer="adam", clip=True))
    assert len(names) == (4 if door == "keras-3" else 3)


@on_many_workers
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_workers_may_have_other_numbers_of_rows_and_none(cluster: Cluster, reduction: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"reduction": reduction, "loss_reduction": reduction, "fetch_reduction": reduction}
    given["own_sizes"] = [step[: cluster.shape.num_workers] for step in OWN_SIZES]
    assert len(same(cluster.run(train, door="hand-written", folder=str(tmp_path), **given))) == 3


@on_two_workers
@pytest.mark.parametrize("spec", ["AUTO", "RING"])
def test_single_precision_and_tables_beside(cluster: Cluster, spec: str, tmp_path: Path) -> None:
    builder = AllReduce(all_reduce_spec=spec, factors=True)
    given: dict[str, Any] = {"dtype": "float32", "model": "both", "folder": str(tmp_path), "builder": builder}
    assert same(cluster.run(train, door="hand-written", **given)) == ["bias", "kernel", "out"]


# -- `fit`, and layers of packages ------------------------------------------------------------------------------------


def fit(optimizer: str, batch_size: int, folder: str) -> list[str]:
    data = sequences()

    def trained() -> dict[str, Any]:
        return fitted(compiled(OPTIMIZERS[optimizer](), attentive), *data, batch_size=batch_size)

    return travelled(folder, lambda: compare(trained, strategy_builder=FACTORS))[1]


@pytest.mark.parametrize("cluster", [TWO_WORKERS, UNEVEN_WORKERS], ids=lambda s: s.name, indirect=True, scope="module")
@pytest.mark.parametrize(("optimizer", "batch_size"), [("adamw", 8), ("accumulated", 1)])
def test_fit_of_layers_that_share_factors(cluster: Cluster, optimizer: str, batch_size: int, tmp_path: Path) -> None:
    names = same(cluster.run(fit, optimizer=optimizer, batch_size=batch_size, folder=str(tmp_path)))
    assert len(names) == 7, names


def half_precision(library: str, folder: str) -> list[str]:
    module = {"keras": keras, "tf_keras": tf_keras}[library]

    def trained() -> dict[str, Any]:
        model = in_half_precision(module)
        model.compile(module.optimizers.SGD(0.1), "sparse_categorical_crossentropy", jit_compile=False)
        return fitted(model, X.astype("float32"), Y, batch_size=8)

    return travelled(folder, lambda: compare(trained, strategy_builder=FACTORS, tolerance=2e-3))[1]


@on_two_workers
@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_mixed_precision_with_a_loss_scale(cluster: Cluster, library: str, tmp_path: Path) -> None:
    assert same(cluster.run(half_precision, library=library, folder=str(tmp_path)))
