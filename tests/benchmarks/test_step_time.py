"""What `benchmarks/step_time.py` measures is the same training by all systems, and its figures are what they say."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping

import numpy as np
import pytest
import tensorflow as tf

from autodist_py import AutoDist
from autodist_py.capture.assemble import CaptureOptions
from autodist_py.cluster.ports import HeldPort
from benchmarks.step_table import Blocks, Cell, disagreements
from benchmarks.step_time import compared
from benchmarks.systems import SYSTEMS, missing
from benchmarks.training_process import TORCH
from benchmarks.workloads import WORKLOADS, zipf
from tests.support.capture_steps import capture_with
from tests.support.processes import ROOT

ALONE, PEERS = "one device", frozenset({"slow peer", "fast peer"})
why_without_torch = missing(TORCH)


def cell(wire_rate: float | None, seconds: Mapping[str, tuple[float, ...]]) -> Cell:
    systems = {name: Blocks(each, (2e6,) * len(each)) for name, each in seconds.items()}
    return Cell("mlp", 2, "none", systems, ALONE, PEERS, wire_rate, (0.0, 0.0))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_step_under_all_reduce_with_one_worker_is_the_plain_step(name):
    workload = WORKLOADS[name]
    batches = [tuple(map(tf.constant, workload.part(batch, 1))) for batch in workload.batches(2)[:3]]
    plain, trained = workload.model(), workload.model()
    with AutoDist(strategy_builder="AllReduce", seed=1) as autodist:
        step = autodist.function(trained.step)
        losses = [float(step(*batch)) for batch in batches]
    np.testing.assert_allclose(losses, [float(tf.function(plain.step)(*batch)) for batch in batches], rtol=1e-5)
    for own, wanted in zip(trained.variables, plain.variables, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-4, atol=1e-6)


def first_losses(system: str, workload: str) -> list[float]:
    """Those of one worker, in a process of its own."""
    held = HeldPort()
    held.release()
    port = str(held.number)
    command = [sys.executable, "-m", "benchmarks.training_process", system, workload, "0", port, "127.0.0.1"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(command, cwd=ROOT, env=environment, input="", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(why_without_torch is not None, reason=str(why_without_torch))
@pytest.mark.parametrize("workload", sorted(SYSTEMS[TORCH].workloads))
def test_the_models_of_torch_are_those_of_tensorflow(workload):
    assert first_losses(TORCH, workload) == pytest.approx(first_losses(ALONE, workload), rel=1e-4)


@pytest.mark.parametrize("name", sorted(WORKLOADS.keys() - {"resnet"}))
def test_replicas_exchange_no_examples_of_a_workload_that_mixes_none(name):
    workload = WORKLOADS[name]
    batch = map(tf.constant, workload.batches(1)[0])
    item = capture_with(CaptureOptions(num_replicas=2), workload.model().step, *batch).item
    assert {one.reduction for one in item.statistics} <= {"count", "same"}  # They take no message.


def test_models_and_batches_are_the_same_each_time():
    workload = WORKLOADS["tlm"]
    for one, other in zip(workload.model().variables, workload.model().variables, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(workload.batches(2)[0][0], workload.batches(2)[0][0])


def test_workers_have_the_whole_batch_between_them():
    workload = WORKLOADS["emb"]
    ids, labels = workload.batches(2)[0]
    for whole, *parts in zip((ids, labels), *(workload.part((ids, labels), rank) for rank in range(2)), strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_zipf_ids_are_as_frequent_as_their_rank_says():
    ids = zipf(np.random.default_rng(0), 1000, [200_000])
    counts = np.bincount(ids, minlength=1000)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.1)
    assert ids.max() < 1000


def test_a_ratio_is_to_the_peer_that_was_best_in_the_same_round():
    measured = cell(None, {"ours": (1.0, 4.0, 3.0), "slow peer": (4.0, 1.0, 2.0), "fast peer": (2.0, 2.0, 2.0)})
    assert measured.ratio_to_best_peer("ours") == 1.5  # Of 0.5, 4 and 1.5.


def test_without_a_peer_there_is_no_ratio():
    assert cell(None, {"ours": (1.0,)}).ratio_to_best_peer("ours") is None


def test_the_bound_is_a_lone_cores_work_or_the_wires():
    seconds = {"ours": (9.0,), ALONE: (1.0,)}
    assert cell(None, seconds).bound("ours") == 1.0
    assert cell(1e6, seconds).bound("ours") == 2.0
    assert cell(1e9, seconds).bound("ours") == 1.0


def test_a_row_has_what_was_measured_and_what_follows():
    measured = cell(1e6, {"ours": (3.0,), "fast peer": (4.0,), ALONE: (1.0,)})
    assert measured.rows()[0] == "| mlp | 2 | none | ours | 3000.0 | 2.00 | 2000.0 | 1.50 | 0.75 |"


def test_systems_that_train_otherwise_are_named_with_the_step():
    losses = {"one": [1.0, 0.5], "near": [1.0, 0.50004], "far": [1.0, 0.6], "broken": [float("nan"), 0.5]}
    assert disagreements(losses, reference="one") == [
        "far: the loss of step 1 is 0.6, that of one 0.5",
        "broken: the loss of step 0 is nan, that of one 1",
    ]


def test_a_ratio_to_before_is_of_the_same_round():
    measured = cell(None, {"ours": (1.0, 4.0, 3.0), "ours, before": (2.0, 2.0, 3.0)})
    assert measured.ratio("ours", "ours, before") == 1.0  # Of 0.5, 2 and 1.
    assert compared(measured) == ["mlp, 2 hosts, none, ours: 1.000 of the time before"]
