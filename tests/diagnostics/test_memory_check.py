"""A step whose tensors of the whole batch no memory holds is refused before it begins."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist, tf_adapter
from autodist_py.diagnostics import memory_check
from autodist_py.diagnostics.memory_check import MemoryCheck
from autodist_py.kernel.analysis.whole_batch_sizes import whole_tensors
from autodist_py.kernel.pipeline import CompiledProgram, compile
from autodist_py.kernel.program import Options
from autodist_py.kernel.topology import Replica, Topology
from autodist_py.proto.errors import CaptureError
from tests.support import kernel_programs
from tests.support.cluster_pool import TWO_REPLICAS, TWO_WORKERS, Cluster

pytestmark = pytest.mark.turns(1)

on_both = pytest.mark.parametrize(
    "cluster", [TWO_REPLICAS, TWO_WORKERS], ids=lambda shape: shape.name, indirect=True, scope="module"
)
on_two_replicas = pytest.mark.parametrize("cluster", [TWO_REPLICAS], ids=["1-worker-2-replicas"], indirect=True)

MEMORY = 3000
"""Scores of 27 examples are 2916 bytes, those of 28 are 3136."""


def two_towers(start: np.ndarray) -> tuple[Callable[..., tf.Tensor], list[tf.Variable]]:
    """Each query is to find its own document among those of the batch."""
    weights = [tf.Variable(start), tf.Variable(2.0 * start)]

    def step(queries: tf.Tensor, documents: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            one, other = tf.tanh(queries @ weights[0]), tf.tanh(documents @ weights[1])
            scores = tf.linalg.matmul(one, other, transpose_b=True, name="scores")
            labels = tf.range(tf.shape(scores)[0])
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return step, weights


def batch_of(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 3)).astype(np.float32), rng.normal(size=(rows, 3)).astype(np.float32)


def refused(step: Callable[..., Any], rows: int) -> str:
    with pytest.raises(CaptureError) as caught:
        step(*batch_of(rows))
    return str(caught.value)


def large_and_small() -> tuple[list[str], list[np.ndarray], list[np.ndarray]]:
    """What is said of large batches, the weights after the first, and those after small ones, beside one device's."""
    start = np.random.default_rng(5).normal(size=(3, 2)).astype(np.float32)
    (single, expected), (compiled, weights) = two_towers(start), two_towers(start)
    with AutoDist() as autodist, pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_check, "memory_of", lambda device: MEMORY)
        step = autodist.function(compiled)
        messages = [refused(step, 28)]
        untouched = [weight.numpy() for weight in weights]
        for seed, rows in enumerate((7, 27, 1, 27)):
            step(*batch_of(rows, seed))
            single(*batch_of(rows, seed))
        messages.append(refused(step, 40))
        step(*batch_of(5))
        single(*batch_of(5))
    return messages, untouched, [weight.numpy() - one.numpy() for weight, one in zip(weights, expected, strict=True)]


@on_both
def test_a_batch_of_too_many_pairs_is_refused_and_a_smaller_one_trains(cluster: Cluster) -> None:
    start = np.random.default_rng(5).normal(size=(3, 2)).astype(np.float32)
    for messages, untouched, differences in cluster.run(large_and_small):
        for message, shape, size in zip(messages, ("[28, 28]", "[40, 40]"), ("3.1 kB", "6.4 kB"), strict=True):
            assert "MatMul 'scores' (" in message
            assert 'scores = tf.linalg.matmul(one, other, transpose_b=True, name="scores")) is computed' in message
            assert f"it has the shape {shape} of float32, which is {size}, and the machine has 3.0 kB" in message
            assert message.endswith('AutoDist(batch_statistics="replica")')
        np.testing.assert_array_equal(untouched[0], start)
        np.testing.assert_array_equal(untouched[1], 2.0 * start)
        np.testing.assert_allclose(differences, 0.0, atol=1e-6)


def more_than_the_machine_has() -> tuple[str, np.ndarray]:
    weight = tf.Variable([[1.0]])

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            z = x @ weight
            loss = tf.reduce_mean(tf.nn.log_softmax(z @ tf.transpose(z)))
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    with AutoDist() as autodist, pytest.raises(CaptureError) as caught:
        autodist.function(step)(np.ones([20_000_000, 1], np.float32))
    return str(caught.value), weight.numpy()


@on_two_replicas
def test_pairs_of_millions_are_refused_by_the_machines_own_memory(cluster: Cluster) -> None:
    ((message, weight),) = cluster.run(more_than_the_machine_has, timeout=60)
    assert "has the shape [20000000, 20000000] of float32, which is 1.6 PB, and the machine has " in message
    assert weight == 1.0


def sizes_that_are_looked_at() -> tuple[list[Any], list[str]]:
    """For steps of several sizes what is asked; and what is said where two replicas have too much together."""
    start = np.ones([3, 2], np.float32)
    asked: list[Any] = []
    said = logging.getLogger(memory_check.__name__)

    def noting(item: Any, given: dict[str, Any], **options: Any) -> Any:
        asked.append(sorted(given.values()))
        return whole_tensors(item, given, **options)

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    with AutoDist() as autodist, pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_check, "memory_of", lambda device: MEMORY)
        patch.setattr(memory_check, "whole_tensors", noting)
        said.addHandler(handler)
        step = autodist.function(two_towers(start)[0])
        for rows in (6, 6, 2, 20, 8, 20, 21):
            step(*batch_of(rows))
        weight = tf.Variable(start)

        @autodist.function
        def mixes_nothing(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ weight) ** 2)
            weight.assign_sub(0.1 * tape.gradient(loss, weight))
            return loss

        mixes_nothing(batch_of(1000)[0])
        said.removeHandler(handler)
    return asked, lines


@on_two_replicas
def test_only_batches_that_are_larger_are_looked_at_and_only_of_steps_that_gather(cluster: Cluster) -> None:
    """Scores of 20 examples are 1600 bytes, of which the process has two."""
    ((asked, lines),) = cluster.run(sizes_that_are_looked_at)
    assert asked == [[[rows, 3], [rows, 3]] for rows in (6, 20, 21)]
    (line,) = lines
    assert "which is 1.6 kB. 2 replicas of this process share the memory, and the machine has 3.0 kB" in line


def runs_without_training() -> list[str]:
    """What is said of an evaluation, whose replicas pair their own rows with all, and of a run of a session."""
    weight = tf.Variable(np.ones([3, 2], np.float32))
    messages = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_check, "memory_of", lambda device: MEMORY)
        with AutoDist() as autodist:

            def evaluated(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
                return tf.reduce_mean(tf.nn.log_softmax((x @ weight) @ tf.transpose(y @ weight)))

            step = autodist.function(evaluated)
            step(*batch_of(20))
            messages.append(refused(step, 40))
        with tf.Graph().as_default(), AutoDist() as autodist, autodist.scope():
            x = tf.compat.v1.placeholder(tf.float32, [None, 3])
            z = x @ tf.compat.v1.get_variable("w", [3, 2])
            loss = tf.reduce_mean(tf.nn.log_softmax(tf.linalg.matmul(z, z, transpose_b=True, name="pairs")))
            train = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss)
            session = autodist.create_distributed_session()
            session.run(train, {x: batch_of(27)[0]})
            with pytest.raises(CaptureError) as caught:
                session.run(train, {x: batch_of(28)[0]})
            messages.append(str(caught.value))
    return messages


@on_two_replicas
def test_evaluations_and_runs_of_sessions_are_refused_too(cluster: Cluster) -> None:
    ((evaluation, session),) = cluster.run(runs_without_training)
    assert "MatMul" in evaluation and "has the shape [20, 40]" in evaluation
    assert "MatMul 'pairs' (" in session and "has the shape [28, 28]" in session


def program_of_pairs() -> CompiledProgram:
    with AutoDist() as autodist:
        item = autodist.function(two_towers(np.ones([3, 2], np.float32))[0]).captured(*batch_of(4)).item
    where = kernel_programs.topology(2)
    return compile(item, kernel_programs.all_reduce(item), where, Options())


def test_gpus_do_not_share_their_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    gpus = tuple(Replica(index, 0, f"/device:GPU:{index}") for index in range(2))
    program = replace(program_of_pairs(), topology=Topology(0, gpus))
    check = MemoryCheck(program, "step", batch="global", line_of=lambda op: "")
    monkeypatch.setattr(tf_adapter, "memory_limit", {"/device:GPU:0": 5000, "/device:GPU:1": MEMORY}.get)
    check.before(1, [tf.constant(one) for one in batch_of(27)])
    assert not caplog.records
    with pytest.raises(CaptureError, match=r"MatMul 'scores' is computed .*, and the GPU has 3\.0 kB of memory"):
        check.before(2, [tf.constant(one) for one in batch_of(28)])


def test_a_device_whose_memory_is_not_known_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "memory_of", lambda device: None)
    check = MemoryCheck(program_of_pairs(), "step", batch="global", line_of=lambda op: "")
    check.before(1, [tf.constant(one) for one in batch_of(300)])


def test_a_limit_below_the_machines_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "memory_limit", lambda: None)
    whole = memory_check.memory_of("/device:CPU:1")
    assert whole is not None and whole > 1 << 28
    monkeypatch.setattr(memory_check, "memory_limit", lambda: 1 << 20)
    assert memory_check.memory_of("/device:CPU:0") == 1 << 20


def test_tensorflow_says_how_much_memory_a_device_has() -> None:
    assert tf_adapter.memory_limit("/device:CPU:0")
    assert tf_adapter.memory_limit("/device:GPU:77") is None
