"""Gradients that are compressed while they travel: steps equal a model of them in numpy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

from autodist_py import AutoDist
from autodist_py.strategy_builders.all_reduce import AllReduce
from autodist_py.strategy_builders.base import StrategyBuilder
from autodist_py.strategy_builders.parameter_server import PS, PSLoadBalancing
from autodist_py.strategy_builders.partitioned import PartitionedAR, PartitionedPS, RandomAxisPartitionAR
from tests.support.cluster_pool import TWO_WORKERS, UNEVEN_WORKERS, Cluster
from tests.support.cluster_pool import same_on_all_workers as same
from tests.support.compressed import SHAPES, batches, by_model, make, train
from tests.support.compressor_models import MODELS

HALVES = ("float16", "bfloat16")


@pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("builder", [AllReduce(sparse_as_dense=False), PSLoadBalancing()])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["HorovodCompressor", "HorovodCompressorEF"])
def test_half_precision_is_that_of_numpy(
    cluster: Cluster, kind: str, dtype: str, builder: AllReduce | PSLoadBalancing, width: int
) -> None:
    builder = replace(builder, compressor=f"{kind}(dtype='{dtype}')")
    same(cluster.run(train, builder=builder, dtype=dtype, width=width))


@pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
@pytest.mark.parametrize("builder", [AllReduce(sparse_as_dense=False), PSLoadBalancing()])
def test_a_plug_in_that_says_bfloat16_sends_that_and_its_rows_too(
    cluster: Cluster, builder: AllReduce | PSLoadBalancing
) -> None:
    builder = replace(builder, compressor="examples.plugin.brief:Brief")
    same(cluster.run(train, builder=builder, dtype="bfloat16", width=3))


@pytest.mark.parametrize(
    "cluster", [TWO_WORKERS, UNEVEN_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)
@pytest.mark.parametrize("compressor", MODELS)
def test_steps_are_those_of_the_model(cluster: Cluster, compressor: str) -> None:
    """Over 4 steps: what is kept is kept. What travels is each worker's, with RING as with AUTO."""
    spec = "RING" if cluster.shape is UNEVEN_WORKERS else "AUTO"
    builder = AllReduce(1 if "Int8" in compressor else 128, spec, compressor)
    same(cluster.run(by_model, builder=builder, compressor=compressor, steps=4, replicas=cluster.shape.replicas))


@pytest.mark.parametrize(
    "cluster", [TWO_WORKERS, UNEVEN_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)
@pytest.mark.parametrize("compressor", [text for text in MODELS if "PowerSGD" not in text])
def test_steps_on_servers_are_those_of_the_model(cluster: Cluster, compressor: str) -> None:
    builder = PSLoadBalancing(compressor=compressor)
    same(cluster.run(by_model, builder=builder, compressor=compressor, steps=4, replicas=cluster.shape.replicas))


@pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
@pytest.mark.parametrize("compressor", ["HorovodCompressorEF", "TopKCompressor(ratio=0.1)"])
@pytest.mark.parametrize("builder", [PartitionedAR, RandomAxisPartitionAR, PartitionedPS])
def test_parts_of_gradients_are_compressed_each_by_itself(
    cluster: Cluster, builder: type[PartitionedAR], compressor: str
) -> None:
    cut = builder(compressor=compressor, min_shard_bytes=1)
    cluster.run(keeps_all, builder=cut, compressor=compressor)


def keeps_all(builder: StrategyBuilder, compressor: str) -> None:
    """What has been applied, and what workers hold, is all of the gradients."""
    autodist, weights, step = make(builder)
    data = batches(3)
    with autodist:
        for batch in data:
            step(**batch)
        held = {variable.name: variable.numpy() for variable in autodist.compressor_state.variables}
        for name in SHAPES:
            wanted = sum(batch[f"of_{name}"].mean(axis=0) for batch in data)
            missing = sum(np.abs(value.sum(axis=0)).sum() for key, value in held.items() if key.startswith(name))
            assert sum(key.startswith(name) for key in held) == 2, "one for each of two parts"
            assert 0 < np.abs(weights[name].numpy() + wanted).sum() <= missing * 1.01 + 1e-2 * ("Horovod" in compressor)
        autodist.sync()


def twice(builder: StrategyBuilder) -> None:
    """Two gradients of one variable in a step: each has a memory of its own."""
    with AutoDist(strategy_builder=builder) as autodist:
        weight = tf.Variable(np.zeros(8), name="weight")

        @autodist.function
        def step(x: tf.Tensor, y: tf.Tensor) -> None:
            gradients = []
            for one in (x, y):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.linalg.matvec(one, weight))
                gradients.append(tape.gradient(loss, weight))
            for gradient in gradients:
                weight.assign_sub(gradient)

        rng = np.random.default_rng(4)
        data = [(rng.normal(size=(4, 8)), 100 * rng.normal(size=(4, 8))) for _ in range(5)]
        for x, y in data:
            step(x, y)
        held = [variable.numpy().sum(axis=0) for variable in autodist.compressor_state.variables]
        assert len(held) == 2
        wanted = sum(x.mean(axis=0) + y.mean(axis=0) for x, y in data)
        np.testing.assert_allclose(weight.numpy(), sum(held) - wanted, rtol=1e-9, atol=1e-9)
        autodist.sync()


@pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
@pytest.mark.parametrize("builder", [AllReduce, PS])
def test_two_gradients_of_one_variable_are_kept_apart(cluster: Cluster, builder: type[AllReduce]) -> None:
    cluster.run(twice, builder=builder(compressor="TopKCompressor(ratio=0.25)"))


def train_apart(compressor: str) -> None:
    """Workers take steps by themselves: what has been applied, and what each still holds, is all of the gradients."""
    autodist, weights, step = make(PS(sync=False, compressor=compressor))
    with autodist:
        steps = 3 + autodist.rank
        for batch in batches(steps):
            step(**batch)
        autodist.sync()
        held = {variable.name: variable.numpy() for variable in autodist.compressor_state.variables}
        for name, shape in SHAPES.items():
            gradients = [batch[f"of_{name}"] for batch in batches(4)]
            wanted = sum(one[:4].mean(axis=0) for one in gradients[:3]) + sum(one[4:].mean(axis=0) for one in gradients)
            (missing,) = [value.sum(axis=0).reshape(shape) for key, value in held.items() if key.startswith(name)]
            assert np.abs(missing).max() > 0
            np.testing.assert_allclose(weights[name].numpy(), missing - wanted, rtol=1e-9, atol=1e-9)
        autodist.sync()


@pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
@pytest.mark.parametrize("compressor", ["HorovodCompressorEF", "TopKCompressor(ratio=0.1)"])
def test_workers_that_step_by_themselves_lose_nothing_by_feedback(cluster: Cluster, compressor: str) -> None:
    cluster.run(train_apart, compressor=compressor)


KEEPING = [
    "HorovodCompressorEF",
    "PowerSGDCompressor(rank=1)",
    "TopKCompressor(momentum=0.5, ratio=0.05)",
    "Int8Compressor",
]


def resumed(compressor: str, folder: str) -> list[float]:
    """How far from a run's end others are that take it up again in the middle: with state, without, anew with state."""
    autodist, weights, step = make(AllReduce(compressor=compressor, chunk_size=1))
    data = batches(4)
    with autodist:
        checkpoint = tf.train.Checkpoint(weights=weights, state=autodist.compressor_state)
        bare = tf.train.Checkpoint(weights=weights)
        for batch in data[:2]:
            step(**batch)
        path = f"{folder}/{autodist.rank}"
        checkpoint.write(path)  # Each worker its own: it asks the others for what they keep.
        for batch in data[2:]:
            step(**batch)
        straight = {name: weight.numpy() for name, weight in weights.items()}
        kept = {variable.name: variable.numpy() for variable in autodist.compressor_state.variables}
        assert kept
        assert all(value.shape[0] == autodist.num_workers for value in kept.values())
        gaps = []
        for one in (checkpoint, bare):
            one.read(path).expect_partial()
            for batch in data[2:]:
                step(**batch)
            gaps.append(max(float(np.abs(weights[name].numpy() - straight[name]).max()) for name in SHAPES))
            if one is checkpoint:
                for variable in autodist.compressor_state.variables:
                    np.testing.assert_array_equal(variable.numpy(), kept[variable.name])
    autodist, weights, step = make(AllReduce(compressor=compressor, chunk_size=1))
    with autodist:  # Restored before the first step, which makes the state.
        tf.train.Checkpoint(weights=weights, state=autodist.compressor_state).read(path).expect_partial()
        for batch in data[2:]:
            step(**batch)
        gaps.append(max(float(np.abs(weights[name].numpy() - straight[name]).max()) for name in SHAPES))
    return gaps


@pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
@pytest.mark.parametrize("compressor", KEEPING)
def test_what_is_kept_from_step_to_step_is_in_checkpoints(cluster: Cluster, compressor: str, tmp_path: Path) -> None:
    for with_state, without, in_another_run in cluster.run(resumed, compressor=compressor, folder=str(tmp_path)):
        assert with_state == 0.0
        assert in_another_run == 0.0
        assert without > 0.0


def digits(compressor: str, seed: int) -> float:
    """How many of the digits that it has not seen a convolutional network knows after 150 steps."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    images, labels = images[order].astype(np.float32).reshape(-1, 8, 8, 1) / 16, labels[order]
    rng = np.random.default_rng(seed + 1)
    shapes = [(3, 3, 1, 16), (3, 3, 16, 32), (8 * 8 * 32, 10)]
    scales = [0.3, 0.08, 0.02]
    weights = [
        tf.Variable(rng.normal(size=shape).astype(np.float32) * scale)
        for shape, scale in zip(shapes, scales, strict=True)
    ]

    def predicted(x: Any) -> tf.Tensor:
        for kernel in weights[:2]:
            x = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
        return tf.matmul(tf.reshape(x, [-1, 8 * 8 * 32]), weights[2])

    with AutoDist(strategy_builder=AllReduce(all_reduce_spec="RING", compressor=compressor)) as autodist:

        @autodist.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=predicted(x))
                loss = tf.reduce_mean(losses)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        for number in range(150):
            batch = slice(number * 64 % 1280, number * 64 % 1280 + 64)
            step(images[batch], labels[batch])
    return float(np.mean(np.argmax(predicted(images[1344:]), axis=1) == labels[1344:]))


@pytest.mark.parametrize("cluster", [TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module")
def test_digits_are_learnt_as_well_as_without_compression(cluster: Cluster) -> None:
    compressors = [
        "NoneCompressor",
        "HorovodCompressor",
        "HorovodCompressor(dtype='bfloat16')",
        "HorovodCompressorEF",
        "PowerSGDCompressor",
        "TopKCompressor",
        "Int8Compressor",
    ]
    accuracy = {
        compressor: np.mean([cluster.run(digits, compressor=compressor, seed=seed)[0] for seed in range(3)])
        for compressor in compressors
    }
    assert accuracy["NoneCompressor"] > 0.9
    assert min(accuracy.values()) > accuracy["NoneCompressor"] - 0.01, accuracy
