"""Rows of several tables that are gathered together: each step that of one device on the whole batch."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import StrategyBuilder
from tests.support.cluster_pool import SHAPES, THREE_WORKERS, TWO_WORKERS, UNEVEN_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.fit_oracle import OPTIMIZERS, compare, compiled, fitted
from tests.support.oracle import Batch, Parts, Training, compare_function, settings

OWN_SIZES = [(3, 2, 4), (4, 1, 2), (0, 3, 1), (2, 0, 2), (1, 0, 0)]
"""For each step the rows of each worker; some of them have none."""

ROWS = AllReduce(sparse_as_dense=False)
SHAPE_OF = {"none": (9, 0), "wide": (11, 5), "deep": (7, 2, 3), "bias": (9,), "once": (13, 2)}

TOGETHER = SHAPE_OF.keys() - {"none"}
"""Whose rows are gathered together: those of a table without columns need not be."""

on_all = pytest.mark.parametrize("cluster", SHAPES, ids=lambda s: s.name, indirect=True, scope="module")
on_many_workers = pytest.mark.parametrize(
    "cluster", [TWO_WORKERS, UNEVEN_WORKERS, THREE_WORKERS], ids=lambda s: s.name, indirect=True, scope="module"
)
on_two_workers = pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda s: s.name, indirect=True, scope="module")


def batches(sizes: Sequence[int]) -> list[Batch]:
    rng = np.random.default_rng(5)
    return [
        (
            rng.integers(0, 9, (size, 3)).astype(np.int32),
            rng.integers(0, 7, (size, 2)).astype(np.int64),
            rng.normal(size=size),
        )
        for size in sizes
    ]


def tables(seed: int, reduction: str = "mean") -> Training:
    """Ids of two types, some of them more than once, and distinct ones; rows of no, one and two axes."""
    rng = np.random.default_rng(seed)
    values = {name: tf.Variable(rng.normal(size=shape), name=name) for name, shape in SHAPE_OF.items()}
    squares = tf.Variable(np.ones(SHAPE_OF["once"]), name="squares", trainable=False)
    joined = tf.Variable(rng.normal(size=(5, 6)), name="joined")

    def step(ids: tf.Tensor, others: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        trained = [*values.values(), joined]
        with tf.GradientTape() as tape:
            wide = tf.reduce_sum(tf.gather(values["wide"], ids), axis=1)
            none = tf.reduce_sum(tf.gather(values["none"], ids[:, 1]), axis=1)
            deep = tf.reshape(tf.reduce_sum(tf.gather(values["deep"], others), axis=1), [-1, 6])
            distinct, positions = tf.unique(others[:, 1])
            once = tf.gather(tf.gather(values["once"], distinct), positions)
            bias = tf.gather(values["bias"], ids[:, 0]) + tf.reduce_sum(once, axis=1)
            losses = weights * tf.tanh(tf.reduce_sum((wide @ joined) * deep, axis=1) + bias + none)
            loss = tf.reduce_mean(losses) if reduction == "mean" else tf.reduce_sum(losses)
        gradients = dict(zip([*SHAPE_OF, "joined"], tape.gradient(loss, trained), strict=True))
        for name in ("none", "wide", "deep", "bias"):
            rows = gradients[name]
            values[name].scatter_sub(tf.IndexedSlices(0.1 * rows.values, rows.indices))
        rows = gradients["once"]
        squares.scatter_add(tf.IndexedSlices(rows.values**2, rows.indices))
        scaled = rows.values * tf.math.rsqrt(tf.gather(squares, rows.indices))
        values["once"].scatter_sub(tf.IndexedSlices(0.1 * scaled, rows.indices))
        joined.assign_sub(0.1 * gradients["joined"])
        return loss

    return Training(step, lambda: {**values, "squares": squares, "joined": joined})


def gathered(folder: Path) -> list[set[str]]:
    """Of which variables rows were gathered together, event by event."""
    planned = "\n".join(path.read_text() for path in sorted(folder.rglob("*-plan-communication.txt")))
    events = re.findall(r"event GatherRows\[.*?\] sparse gradients of (.*)", planned)
    return [set(names.split(", ")) for names in events if names != "none"]


def train(
    folder: str,
    builder: StrategyBuilder = ROWS,
    own_sizes: Sequence[Sequence[int]] | None = None,
    reduction: str = "mean",
    tolerance: float = 1e-9,
    **options: Any,
) -> list[set[str]]:
    own = Path(folder) / str(os.getpid())
    sizes = (8, 5, 6, 7) if own_sizes is None else [sum(step) for step in own_sizes]
    parts = None if own_sizes is None else Parts(own_sizes)
    given = {"strategy_builder": builder, **options}
    with settings(dump_dir=own):
        compare_function(
            lambda seed: tables(seed, reduction), batches(sizes), parts=parts, tolerance=tolerance, autodist=given
        )
    return gathered(own)


@on_all
def test_tables_are_those_of_one_device(cluster: Cluster, tmp_path: Path) -> None:
    assert same(cluster.run(train, folder=str(tmp_path))) == [TOGETHER]


@on_many_workers
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_workers_may_have_other_numbers_of_rows_and_none(cluster: Cluster, reduction: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"reduction": reduction, "loss_reduction": reduction, "fetch_reduction": reduction}
    given["own_sizes"] = [step[: cluster.shape.num_workers] for step in OWN_SIZES]
    assert same(cluster.run(train, folder=str(tmp_path), **given)) == [TOGETHER]


@on_two_workers
def test_a_bucket_holds_no_more_rows_than_it_says(cluster: Cluster, tmp_path: Path) -> None:
    """Of 4 examples a worker: 4 rows of 1 number, 12 of 5 and 8 of 6, each with its index; of `once` nobody knows."""
    found = same(cluster.run(train, folder=str(tmp_path), builder=AllReduce(sparse_as_dense=False, bytes_per_pack=700)))
    assert found == [{"bias", "once"}, {"wide"}, {"deep"}]


@on_many_workers
def test_rows_in_half_precision_are_near(cluster: Cluster, tmp_path: Path) -> None:
    builder = AllReduce(sparse_as_dense=False, compressor="HorovodCompressor")
    assert same(cluster.run(train, folder=str(tmp_path), builder=builder, tolerance=1e-2)) == [TOGETHER]


@on_two_workers
def test_rows_are_given_once_where_that_is_asked_for(cluster: Cluster, tmp_path: Path) -> None:
    assert same(cluster.run(train, folder=str(tmp_path), sum_duplicates=True)) == [TOGETHER]


def fit(folder: str, optimizer: str) -> list[set[str]]:
    rng = np.random.default_rng(1)
    ids, labels = rng.integers(0, 20, (48, 3)), rng.integers(0, 4, 48)

    def model() -> keras.Model:
        given = keras.Input([3], dtype="int64")
        rows = [keras.layers.Embedding(20, 2 + column)(given[:, column]) for column in range(3)]
        return keras.Model(given, keras.layers.Dense(4)(keras.layers.Concatenate()(rows)))

    own = Path(folder) / str(os.getpid())
    with settings(dump_dir=own):
        compare(
            lambda: fitted(compiled(OPTIMIZERS[optimizer](), model), ids, labels, batch_size=8), strategy_builder=ROWS
        )
    return gathered(own)


@on_two_workers
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_fit_of_several_embeddings(cluster: Cluster, optimizer: str, tmp_path: Path) -> None:
    (together,) = same(cluster.run(fit, folder=str(tmp_path), optimizer=optimizer))
    assert len(together) == 3
