"""Scripts of several workers that go wrong: each ends, on all of them, with the cause."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes import ROOT

pytestmark = [pytest.mark.turns(3)]

SCRIPT = """
import os, sys, time
from autodist_py.distribute import MultiWorkerMirroredStrategy

import tensorflow as tf

strategy = MultiWorkerMirroredStrategy({arguments})
rank = strategy.cluster_resolver.task_id
with strategy.scope():
    v = tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.SUM)


@tf.function
def step():
    strategy.run(lambda: v.assign_add(tf.ones([2])))

"""
TWO = "nodes: [{address: 127.0.0.1, chief: true}, {address: 127.0.0.2}]"


def printed(
    folder: Path, body: str, *, script: str = SCRIPT, arguments: str = "", spec: str = TWO, **environment: str
) -> str:
    """What all workers print."""
    (folder / "train.py").write_text(script.format(arguments=arguments) + body)
    (folder / "spec.yaml").write_text(spec)
    command = [sys.executable, "-m", "autodist_py", "run", "--spec", "spec.yaml", "--all-output", "train.py"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("AUTODIST_")}
    own |= {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"} | environment
    run = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=150, check=False)
    return f"{run.stdout}{run.stderr}\nexit {run.returncode}"


def test_a_script_that_ends_before_the_others_ends_the_run(tmp_path: Path) -> None:
    text = printed(tmp_path, "for _ in range([20, 10][rank]):\n    step()\n")

    assert "worker 1 (127.0.0.2) ended its script at step 10: worker 0 went on to step 11" in text
    assert "exit 0" not in text


def test_a_script_that_reduces_less_often_than_the_others_ends_the_run(tmp_path: Path) -> None:
    text = printed(tmp_path, "for _ in range([4, 3][rank]):\n    strategy.reduce('SUM', tf.constant(1.0), axis=None)\n")

    assert "worker 1 (127.0.0.2) ended its script at step 3: worker 0 went on to step 4" in text
    assert "exit 0" not in text


def test_what_a_merge_call_closes_over_is_refused_beside_a_workers_values(tmp_path: Path) -> None:
    body = """
@tf.function
def closing():
    def replica_step():
        own = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        other = own * 2.0
        merge = lambda strategy, value: strategy.experimental_local_results(value)[0] + other
        return tf.distribute.get_replica_context().merge_call(merge, (own,))

    return strategy.run(replica_step)

closing()
"""
    spec = "nodes: [{address: 127.0.0.1, chief: true, cpus: [0, 1]}, {address: 127.0.0.2, cpus: [0, 1]}]"
    text = printed(tmp_path, body, spec=spec)

    assert "that it does not receive. Give it the value" in text


def test_the_tower_api_is_that_of_one_machine(tmp_path: Path) -> None:
    body = """
from autodist_py.distribute import towers
step()
with strategy.scope():
    towers.get_distribution_strategy()
"""
    text = printed(tmp_path, body)

    assert "the tower API is that of the devices of one machine; received" in text
    assert "exit 0" not in text


def test_a_strategy_may_be_made_in_the_scope_of_another(tmp_path: Path) -> None:
    body = """
with strategy.scope():
    other = MultiWorkerMirroredStrategy()
with other.scope():
    w = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
for _ in range(3):
    tf.function(lambda: other.run(lambda: w.assign_add(1.0)))()
    step()
print("both", w.numpy(), v.numpy().tolist())
"""
    assert printed(tmp_path, body).count("both 7.0 [7.0, 8.0]") == 2


SERVED = """
import os, sys, time
from autodist_py import AutoDist
from autodist_py.distribute import AutoDistStrategy

import tensorflow as tf

autodist = AutoDist({arguments})
rank, strategy = autodist.rank, AutoDistStrategy(autodist)
with strategy.scope():
    v = tf.Variable([1.0, 2.0])
    optimizer = tf.keras.optimizers.SGD(0.5, momentum=0.5)
    optimizer.build([v])


@tf.function
def step(ok):
    def replica_step(ok):
        with tf.control_dependencies([tf.debugging.Assert(ok, ["a bad batch"])]):
            optimizer.apply_gradients([(tf.identity(v), v)])

    strategy.run(replica_step, (ok,))

"""


def test_a_step_that_failed_half_way_ends_the_exchanges(tmp_path: Path) -> None:
    body = """
step(tf.constant(True))
try:
    step(tf.constant(rank == 0))
except tf.errors.InvalidArgumentError:
    print("goes on", flush=True)
step(tf.constant(True))
"""
    text = printed(tmp_path, body, script=SERVED, arguments="strategy_builder='PS()'")

    assert "goes on" in text
    assert "A step before failed half-way" in text
    assert "exit 0" not in text


def test_every_worker_reads_in_one_function_what_the_step_before_has_made_and_saves(tmp_path: Path) -> None:
    """Also the worker that serves, whose program writes nothing itself. A checkpoint of its own each worker writes."""
    body = """
import tempfile

@tf.function
def two_steps():
    step(True)
    between = v.read_value() + 0.0
    step(True)
    return between, v.read_value() + 0.0

step(tf.constant(True))
print("read", [one.numpy().tolist() for _ in range(2) for one in two_steps()])
tf.train.Checkpoint(v=v).write(tempfile.mkdtemp() + "/checkpoint")
step(tf.constant(True))
print("went on")
autodist.close()
"""
    text = printed(tmp_path, body, script=SERVED, arguments="strategy_builder='PS()'")

    v, momentum, shown = np.array([1.0, 2.0]), np.zeros(2), []
    for _ in range(5):
        momentum = 0.5 * momentum - 0.5 * (v + v)
        v = v + momentum
        shown.append(v.tolist())
    assert text.count(f"read {shown[1:]}") == 2
    assert text.count("went on") == 2


def test_variables_on_servers_are_seen_by_every_worker_between_steps(tmp_path: Path) -> None:
    """Also an optimizer's state, which only its server has; and what a script writes itself."""
    body = """
for _ in range(2):
    step(tf.constant(True))
print("seen", v.numpy().tolist(), [one.numpy().tolist() for one in optimizer.variables[2:]])
v.assign([8.0, 8.0])
step(tf.constant(True))
print("then", v.numpy().tolist())
autodist.close()
print("closed", v.numpy().tolist())
"""
    text = printed(tmp_path, body, script=SERVED, arguments="strategy_builder='PS()'")

    v, momentum, shown = np.array([1.0, 2.0]), np.zeros(2), []
    for written in (None, None, 8.0):
        v = v if written is None else np.full(2, written)
        momentum = 0.5 * momentum - 0.5 * (v + v)  # What both replicas have is added up.
        v = v + momentum
        shown.append((v.tolist(), momentum.tolist()))
    assert text.count(f"seen {shown[1][0]} [{shown[1][1]}]") == 2
    assert text.count(f"then {shown[2][0]}") == text.count(f"closed {shown[2][0]}") == 2


def test_one_worker_is_enough(tmp_path: Path) -> None:
    spec = "nodes: [{address: 127.0.0.1, cpus: [0, 1]}]"
    body = "step()\nprint('alone', strategy.num_replicas_in_sync, v.numpy().tolist())\n"

    assert "alone 2 [3.0, 4.0]" in printed(tmp_path, body, spec=spec)


def test_a_worker_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    body = """
for number in range(10_000):
    step()
    if (rank, number) == (1, 7):
        os.kill(os.getpid(), 9)
"""
    text = printed(tmp_path, body)

    assert "worker 1 (127.0.0.2) ended" in text
    assert "killed by SIGKILL" in text
    assert "exit 0" not in text


def test_a_script_whose_graph_differs_between_workers_is_refused(tmp_path: Path) -> None:
    body = "tf.function(lambda: strategy.run(lambda: v.assign_add(tf.ones([2]) * (rank + 1.0))))()\n"

    assert "the script must build the same graph on every worker, but worker 1 builds another" in printed(
        tmp_path, body
    )


TRAINING = """
@tf.function
def train():
    def replica_step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * v)
        gradient = tf.distribute.get_replica_context().all_reduce("SUM", tape.gradient(loss, v))
        strategy.extended.update(v, lambda v, gradient: v.assign_sub(gradient), args=(gradient,))

    strategy.run(replica_step)

train()
"""


@pytest.mark.parametrize(
    ("arguments", "spec", "environment", "expected"),
    [
        (
            "",
            "nodes: [{address: 127.0.0.1, chief: true, cpus: [0, 1]}, {address: 127.0.0.2}]",
            {},
            "has as many devices as the others; the resource spec has nodes of 1, 2",
        ),
        (
            "",
            TWO,
            {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'},
            "a run's workers are given in one way",
        ),
        ("object()", TWO, {}, "cluster_resolver is one of tf.distribute.cluster_resolver, or None. Received: <object"),
        (
            "communication_options=tf.distribute.experimental.CommunicationOptions(implementation='NCCL')",
            TWO,
            {},
            "all_reduce_spec='NCCL' needs NCCL, which runs on GPUs only",
        ),
        ("strategy_builder='PS'", TWO, {}, "which servers and shards have but once"),
        (
            "strategy_builder=\"AllReduce(compressor='HorovodCompressorEF')\"",
            TWO,
            {},
            "the compressor of Variable remembers what it has left out",
        ),
    ],
    ids=["devices", "TF_CONFIG", "cluster_resolver", "communication_options", "servers", "compressor"],
)
def test_what_it_cannot_be_is_refused_by_name(
    tmp_path: Path, arguments: str, spec: str, environment: dict[str, str], expected: str
) -> None:
    assert expected in printed(tmp_path, TRAINING, arguments=arguments, spec=spec, **environment)


def test_replicas_draw_numbers_of_their_own_by_a_seed_if_asked_to(tmp_path: Path) -> None:
    body = """
drawn = tf.function(lambda: strategy.run(lambda: tf.random.stateless_uniform([], [1, 2])))()
print("drawn", *(float(each) for each in strategy.experimental_local_results(drawn)))
"""
    spec = "nodes: [{address: 127.0.0.1, chief: true, cpus: [0, 1]}, {address: 127.0.0.2, cpus: [0, 1]}]"
    for arguments, expected in (("decorrelate=True", 4), ("", 1)):
        text = printed(tmp_path, body, spec=spec, arguments=arguments)
        numbers = [number for line in text.splitlines() if "drawn" in line for number in line.split("drawn")[1].split()]
        assert len(numbers) == 4 and len(set(numbers)) == expected, text
