"""Large gradients that are computed and reduced in pieces: each step that of one device on the whole batch."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py.strategy_builders.all_reduce import AllReduce
from tests.support.cluster_pool import (
    THREE_WORKERS,
    TWO_WORKERS,
    UNEVEN_WORKERS,
    Cluster,
)
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.fit_oracle import OPTIMIZERS, X, Y, compare, compiled, fitted, in_half_precision
from tests.support.oracle import Training, compare_function
from tests.support.products_oracle import OWN_SIZES, PIECES, attentive, sequences, train, travelled

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


def fit(folder: str) -> list[str]:
    def trained() -> dict[str, Any]:
        return fitted(compiled(OPTIMIZERS["adamw"](), attentive), *sequences(), batch_size=8)

    return travelled(folder, lambda: compare(trained, strategy_builder=PIECES), PIECES)[1]


@on_two_workers
def test_fit_of_layers_of_any_rank(cluster: Cluster, tmp_path: Path) -> None:
    assert len(same(cluster.run(fit, folder=str(tmp_path)))) == 5


def half_precision(folder: str) -> list[str]:
    def trained() -> dict[str, Any]:
        model = in_half_precision(keras)
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", jit_compile=False)
        return fitted(model, X.astype("float32"), Y, batch_size=8)

    return travelled(folder, lambda: compare(trained, strategy_builder=PIECES, tolerance=2e-3), PIECES)[1]


@on_two_workers
def test_mixed_precision_with_a_loss_scale(cluster: Cluster, tmp_path: Path) -> None:
    assert same(cluster.run(half_precision, folder=str(tmp_path)))


# -- Of a size that no worker gathers ---------------------------------------------------------------------------------

WIDE = tuple((rows,) for rows in np.random.default_rng(7).normal(size=(3, 8, 600)))
"""Three batches."""


def large(seed: int) -> Training:
    """A step whose gradients are larger than what is gathered: one in pieces, one larger than a buffer, a small one."""
    random = np.random.default_rng(seed)
    kernel, other, bias = (tf.Variable(random.normal(size=shape)) for shape in ([600, 500], [500, 600], [600]))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(x @ kernel / 25) @ tf.tanh(other) + bias) ** 2)
        variables = [kernel, other, bias]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return Training(step, lambda: {"kernel": kernel, "other": other, "bias": bias})


def train_large(folder: str, spec: str) -> list[str]:
    builder = AllReduce(all_reduce_spec=spec, factors=False)
    return travelled(folder, lambda: compare_function(large, WIDE, autodist={"strategy_builder": builder}), builder)[1]


@on_many_workers
@pytest.mark.parametrize("spec", ["AUTO", "RING"])
def test_large_gradients_go_by_rings(cluster: Cluster, spec: str, tmp_path: Path) -> None:
    (name,) = same(cluster.run(train_large, spec=spec, folder=str(tmp_path)))
    assert name.startswith("Variable")
